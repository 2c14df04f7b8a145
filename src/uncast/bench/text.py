"""Bits per byte of a text under a model: what a cache layout costs in the unit that compares across tokenizers."""

from __future__ import annotations

import math

import torch

from uncast.engine.runner import ModelRunner, Sequence
from uncast.engine.tokenizer import Tokenizer

CHUNK = 256


def bits_per_byte(runner: ModelRunner, tokenizer: Tokenizer, text: str, *, context: int) -> float:
    """-log2 p(text) / bytes, over windows of `context` tokens that each start from the tokenizer's own prefix.

    Every token is predicted from rows that were written to the cache and read back in the runner's layout.

    Raises:
        ValueError: an empty text, logits that are not finite, or a tokenizer that adds no prefix token to condition on.
    """
    ids = tokenizer.encode(text, add_special_tokens=False)
    prefix = tokenizer.encode("")
    if not ids:
        raise ValueError("bits per byte needs a text, and this one has no tokens")
    if not prefix:
        raise ValueError(
            "bits per byte needs a tokenizer that begins a text with a special token, and the model's does not"
        )
    nats, size = 0.0, context - len(prefix)
    for start in range(0, len(ids), size):
        window = ids[start : start + size]
        sequence = Sequence([*prefix, *window])
        runner.ensure_pages(sequence, len(sequence.tokens))
        try:
            nats += _window_nats(runner, sequence, len(prefix))
        finally:
            runner.free(sequence)
    if not math.isfinite(nats):
        raise ValueError(
            f"the model's log-probabilities are not finite with {runner.pool.layout.name}: no bits per byte"
        )
    return nats / math.log(2) / len(text.encode("utf-8"))


def _window_nats(runner: ModelRunner, sequence: Sequence, first: int) -> float:
    nats = 0.0
    while sequence.cached < len(sequence.tokens):
        begin = sequence.cached
        count = min(CHUNK, len(sequence.tokens) - begin)
        log_p = runner.step([(sequence, count)], every_token=True).double().log_softmax(-1)
        rows = [i for i in range(count) if first <= begin + i + 1 < len(sequence.tokens)]
        targets = torch.tensor([sequence.tokens[begin + i + 1] for i in rows], dtype=torch.int64, device=log_p.device)
        nats -= float(log_p[torch.tensor(rows, dtype=torch.int64, device=log_p.device), targets].sum())
    return nats
