"""How two runs of one model are compared: logits of the same tokens, and the experts that these went to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from uncast.engine.runner import ModelRunner, Sequence
from uncast.models import layers as model_layers
from uncast.models import parallel as model_parallel
from uncast.models.config import MoEConfig
from uncast.models.fused import choose_experts, wide_linear

STEPS, GREEDY = 16, 24
"""Decode steps over given tokens, and over those that the model itself chooses."""


def ids(count: int, vocab: int, seed: int) -> list[int]:
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


Routes = list[torch.Tensor]
"""Experts [rows, top_k] of every call of a mixture, in order."""


@contextmanager
def routes(given: Routes | None = None) -> Iterator[Routes]:
    """The experts chosen by every mixture while it is open; the first calls take those that are `given`, with the weights that
    their own logits give them."""
    seen, left = list[torch.Tensor](), list(given or [])
    plain = choose_experts

    def watched(
        config: MoEConfig, x: torch.Tensor, router: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if left:
            chosen = left.pop(0).to(x.device)
            scores = wide_linear(x, router)
            weights = (scores.sigmoid() if config.scoring == "sigmoid" else scores.softmax(-1)).gather(1, chosen)
            if config.normalize:
                weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
            weights = weights * config.scale
        else:
            weights, chosen = plain(config, x, router, bias)
        if not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            seen.append(chosen.cpu())
        return weights, chosen

    for module in (model_layers, model_parallel):
        module.choose_experts = watched  # type: ignore[attr-defined]
    yield seen
    for module in (model_layers, model_parallel):
        module.choose_experts = plain  # type: ignore[attr-defined]


@dataclass
class Looked:
    """What a run is compared by: logits [rows, vocab] of a prompt's and then of decoded tokens, the experts of each call of
    a mixture, the greedy tokens after the prompt."""

    logits: torch.Tensor
    routes: Routes
    greedy: list[int] = field(default_factory=list)

    def experts(self, layers: int) -> torch.Tensor:
        """[layers, rows, top_k], each row's in ascending order."""
        by_layer = [torch.cat(self.routes[layer::layers]) for layer in range(layers)]
        return torch.stack(by_layer).sort(-1).values


def looked_at(runner: ModelRunner, tokens: int, given: Routes | None = None) -> Looked:
    """A run over a prompt of `tokens` and `STEPS` more; without given experts, the greedy tokens after the prompt, too."""
    vocab = runner.model.config.vocab_size
    sequence = Sequence(ids(tokens + STEPS, vocab, 99))
    runner.ensure_pages(sequence, tokens + max(STEPS, GREEDY))
    with routes(given) as seen:
        logits = [runner.step([(sequence, tokens)], every_token=True)]
        logits += [runner.step([(sequence, 1)]) for _ in range(STEPS)]
    found = Looked(torch.cat(logits), seen)
    if given is None:
        del sequence.tokens[tokens:]
        sequence.cached, following = tokens, int(logits[0][-1].argmax())
        while len(found.greedy) < GREEDY:
            found.greedy.append(following)
            sequence.tokens.append(following)
            following = int(runner.step([(sequence, 1)])[0].argmax())
    runner.free(sequence)
    return found


def difference(a: torch.Tensor, b: torch.Tensor) -> dict[str, float]:
    """Of b from a, both [rows, vocab]."""
    apart, scale = (a - b).abs(), a.abs().amax(-1)
    return {
        "largest_logit": float(scale.max()),
        "largest_difference": float(apart.max()),
        "largest_relative_to_row_maximum": float((apart.amax(-1) / scale).max()),
        "relative_norm": float(apart.norm() / a.norm()),
        "top1_equal": float((a.argmax(-1) == b.argmax(-1)).float().mean()),
    }


def compare(one: Looked, two: Looked, layers: int) -> dict[str, Any]:
    """All rows, and those whose tokens went to the same experts in every layer."""
    same = (one.experts(layers) == two.experts(layers)).all(-1).all(0).to(one.logits.device)
    found: dict[str, Any] = {
        "rows": len(same),
        "rows_with_other_experts": int((~same).sum()),
        "all_rows": difference(one.logits, two.logits),
    }
    if bool(same.any()):
        found["rows_with_equal_experts"] = difference(one.logits[same], two.logits[same])
    if one.greedy and two.greedy:
        pairs = zip(one.greedy, two.greedy, strict=True)
        found["greedy_tokens_equal"] = next((i for i, (a, b) in enumerate(pairs) if a != b), GREEDY)
    return found
