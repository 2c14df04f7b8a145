"""Deterministic mode: a request's logits are the same bits alone and in any company."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.workload import PAGE, alone, make_engine, random_requests, run_all, tokens_of
from tests.fixtures import FAMILIES, build_hf
from uncast.checkpoints.load import load_model
from uncast.engine import runner as runner_module
from uncast.engine.fixed_rows import FixedRowMoE, with_fixed_rows
from uncast.engine.request import Request
from uncast.engine.runner import ModelRunner, RunnerError
from uncast.engine.tokenizer import Tokenizer
from uncast.kernels.row_tile import ROW_TILE
from uncast.models.decoder import ForwardBatch, MLADecoder
from uncast.models.layers import MoE


def differing(
    model: MLADecoder, tokenizer: Tokenizer, requests: list[Request], rng: random.Random, **options: Any
) -> int:
    """How many requests have another bit anywhere in their logits (or another text) in a crowded pool than alone."""
    crowd = make_engine(model, tokenizer, pages=14, **options)
    outputs = run_all(crowd, requests, rng=rng)
    stats = crowd.stats()
    assert stats.preemptions_total > 0 and stats.prefix_hit_tokens_total > 0
    single = make_engine(model, tokenizer, pages=14, prefix_cache=False, **options)
    wrong = 0
    for request in requests:
        name, expected = request.request_id, alone(single, request)
        same = tokens_of(outputs[name]) == tokens_of(expected)
        same &= [o.logprobs for o in outputs[name]] == [o.logprobs for o in expected]
        same &= len(crowd.logits[name]) == len(single.logits[name])
        same &= all(torch.equal(a, b) for a, b in zip(crowd.logits[name], single.logits[name], strict=False))
        wrong += not same
    return wrong


@pytest.mark.parametrize(
    ("layout", "seed", "max_step_tokens"),
    [("fp8_ds_mla", 0, 32), ("fp8_ds_mla", 1, 9), ("fp8_e4m3", 2, 50), ("bf16", 3, 17), ("fp32", 4, 32)],
)
def test_logits_in_a_crowd_equal_the_solo_runs_bit_for_bit(
    model: MLADecoder, tokenizer: Tokenizer, layout: str, seed: int, max_step_tokens: int
) -> None:
    rng = random.Random(seed)
    requests = random_requests(rng, 12, longest=48, new=14)
    options = {"deterministic": True, "kv_layout": layout, "max_step_tokens": max_step_tokens}
    assert differing(model, tokenizer, requests, rng, **options) == 0


def test_a_bit_that_depends_on_the_company_is_found(
    model: MLADecoder, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other mode, with products as those of a CPU that rounds a batch of an odd size another way."""
    honest = MLADecoder.forward_hidden

    def size_dependent(
        self: MLADecoder, batch: ForwardBatch, *, every: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits, hidden = honest(self, batch, every=every)
        return logits * (1 + 2**-20 * (len(logits) % 2)), hidden

    monkeypatch.setattr(MLADecoder, "forward_hidden", size_dependent)
    rng = random.Random(0)
    assert differing(model, tokenizer, random_requests(rng, 12, longest=48, new=14), rng, deterministic=False) > 0


def test_prefill_and_decode_leave_the_same_bytes(model: MLADecoder) -> None:
    """So pages of generated tokens are good for any later prompt, wherever its chunks are cut."""
    tokens = [i * 31 % 512 for i in range(70)]
    caches = []
    for cuts in ([70], [1] * 70, [16, 3, 40, 1, 10], [ROW_TILE] * 4 + [6]):
        runner = ModelRunner(model, num_pages=9, page_size=PAGE, deterministic=True)
        sequence = runner_module.Sequence(list(tokens))
        runner.ensure_pages(sequence, 70)
        logits = [runner.step([(sequence, count)]) for count in cuts][-1]
        caches.append((logits, runner.pool.storage[:, sequence.pages].flatten(1, 2)[:, :70].clone()))
    assert all(torch.equal(a, caches[0][0]) and torch.equal(b, caches[0][1]) for a, b in caches[1:])


def test_every_token_logits_equal_the_steps(model: MLADecoder) -> None:
    runner = ModelRunner(model, num_pages=9, page_size=PAGE, deterministic=True)
    together, stepped = (runner_module.Sequence([i * 7 % 512 for i in range(20)]) for _ in range(2))
    for sequence in (together, stepped):
        runner.ensure_pages(sequence, 20)
    rows = runner.step([(together, 20)], every_token=True)
    assert torch.equal(rows, torch.cat([runner.step([(stepped, 1)]) for _ in range(20)]))


def test_deterministic_logits_are_the_other_modes_up_to_rounding(model: MLADecoder) -> None:
    results = []
    for deterministic in (False, True):
        runner = ModelRunner(model, kv_layout="fp32", num_pages=9, page_size=PAGE, deterministic=deterministic)
        sequences = [runner_module.Sequence([i * k % 512 for i in range(20)]) for k in (3, 5)]
        for sequence in sequences:
            runner.ensure_pages(sequence, 20)
        results.append(runner.step([(sequence, 20) for sequence in sequences]))
    assert float((results[0] - results[1]).norm() / results[0].norm()) < 1e-5


def test_padding_rows_are_not_counted(model: MLADecoder) -> None:
    counts = []
    for deterministic in (False, True):
        runner = ModelRunner(model, num_pages=9, page_size=PAGE, deterministic=deterministic)
        sequence = runner_module.Sequence([1, 2, 3])
        runner.ensure_pages(sequence, 3)
        runner.step([(sequence, 3)])
        counts.append(runner.counters.tolist())
        assert runner.last_step_bytes().needed == 3 * 656 * 2
    assert counts[0] == counts[1]


def test_the_model_itself_is_left_as_it_was(model: MLADecoder) -> None:
    fixed = with_fixed_rows(model)
    assert any(isinstance(layer.mlp, FixedRowMoE) for layer in fixed.layers)
    assert not any(isinstance(layer.mlp, FixedRowMoE) for layer in model.layers)
    assert any(type(layer.mlp) is MoE for layer in model.layers) and fixed.lm_head is model.lm_head


def test_a_machine_that_cannot_keep_it_is_refused(model: MLADecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A product whose last bits depend on the row's place in the tile is found before anything is served."""
    honest = MLADecoder.forward_hidden

    def place_dependent(
        self: MLADecoder, batch: ForwardBatch, *, every: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits, hidden = honest(self, batch, every=every)
        return torch.cat([logits[:-1], logits[-1:] * (1 + 2**-20)]), hidden

    monkeypatch.setattr(MLADecoder, "forward_hidden", place_dependent)
    with pytest.raises(RunnerError, match="deterministic mode cannot be kept here: a row's bits depend on its place"):
        ModelRunner(model, num_pages=2, page_size=PAGE, deterministic=True)
    ModelRunner(model, num_pages=2, page_size=PAGE)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_is_row_independent(family: str, tmp_path: Path) -> None:
    """Rows of a mixed step, prefill chunks and decodes together, have the logits of each sequence alone."""
    build_hf(family, tmp_path, num_hidden_layers=2)
    runner = ModelRunner(load_model(tmp_path), num_pages=40, page_size=PAGE, deterministic=True)
    together, alone_ = (
        [runner_module.Sequence([(i * k) % 512 for i in range(9 + 5 * k)]) for k in (1, 3, 5, 7)] for _ in "ab"
    )
    for sequence in [*together, *alone_]:
        runner.ensure_pages(sequence, len(sequence.tokens))
    runner.step([(together[2], 30), (together[0], 13)])
    mixed = runner.step([(together[0], 1), (together[1], 24), (together[2], 4), (together[3], 44)])
    for row, sequence in zip(mixed, alone_, strict=True):
        assert torch.equal(runner.step([(sequence, len(sequence.tokens))])[0], row)
