"""What rounding to BF16 costs attention: the arithmetic of three kernels in float64, on random batches.

    .venv/bin/python -m tests.verify.rounding_model SEED BATCHES

draws batches as `test_random_plans` does (more of them of a few rows only, or of long ones only) and prints for each kernel
how many errors are above MAX_TENSOR_ERROR, the largest, and the largest share of what `uncast.verify.accuracy` allows.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from uncast.verify.accuracy import MAX_TENSOR_ERROR, Accuracy

PIECE_ROWS, LAZY_BITS = 32, 6.0


def bf16(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float32).to(torch.bfloat16).double()


def whole(scores: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """P rounded; as `flashmla`. scores [rows, tokens] (-inf: not seen; every row sees one), values [tokens, channels].

    Returns out [rows, channels], not rounded, and LSE [rows, 1], base e; both float64."""
    top = scores.amax(-1, keepdim=True)
    seen = top.isfinite()
    top = top.masked_fill(~seen, 0.0)
    p = (scores - top).exp()
    total = p.sum(-1, keepdim=True)
    return bf16(p) @ values / total.clamp_min(1e-300), (top + total.log()).masked_fill(~seen, -math.inf)


def pieces(scores: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """P and the results of pieces of `PIECE_ROWS` tokens rounded; as `flashinfer_fa2` and `flashinfer_fa3` with idle SMs."""
    if scores.shape[1] <= PIECE_ROWS:
        return whole(scores, values)
    parts = zip(torch.split(scores, PIECE_ROWS, 1), torch.split(values, PIECE_ROWS), strict=True)
    outs, lses = zip(*(whole(s, v) for s, v in parts), strict=True)
    lse = torch.cat(lses, 1)
    weights = lse.softmax(-1)
    return (weights[..., None] * bf16(torch.stack(outs, 1))).sum(1), lse.logsumexp(-1, keepdim=True)


def lazy(scores: torch.Tensor, values: torch.Tensor, step: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """P rounded against a maximum that moves only when it is exceeded by 2^`LAZY_BITS`, so that no P need be exact.

    The products of `native` over a bf16 cache, were its P one BF16 (`mma_launch.p_terms`)."""
    rows = scores.shape[0]
    top, total = torch.full((rows, 1), -1e29, dtype=torch.float64), torch.zeros(rows, 1, dtype=torch.float64)
    out = torch.zeros(rows, values.shape[1], dtype=torch.float64)
    for s, v in zip(torch.split(scores, step, 1), torch.split(values, step), strict=True):
        x = s / math.log(2)
        best = x.amax(-1, keepdim=True)
        moved = torch.where(best > top + LAZY_BITS, best, top)
        keep, top = torch.exp2(top - moved), moved
        p = torch.exp2(x - top)
        total, out = total * keep + p.sum(-1, keepdim=True), out * keep + bf16(p) @ v
    return out / total, top * math.log(2) + total.log()


KERNELS = {
    "whole": (whole, Accuracy(probabilities=True)),
    "pieces": (pieces, Accuracy(probabilities=True, partials=True)),
    "lazy": (lazy, Accuracy(probabilities=True)),
}


@dataclass(frozen=True)
class Batch:
    """scores and values of each request, scores [query rows x heads, tokens]; and how many tokens each query row sees."""

    requests: list[tuple[torch.Tensor, torch.Tensor]]
    heads: int
    visible: torch.Tensor

    def expected(self) -> torch.Tensor:
        """[query rows, heads, 512] float64."""
        return torch.cat([s.softmax(-1) @ v for s, v in self.requests]).view(-1, self.heads, 512)

    def error(self, name: str, expected: torch.Tensor) -> tuple[float, float]:
        """Relative error of the whole with the output in BF16, and what is allowed."""
        attend, accuracy = KERNELS[name]
        out = bf16(torch.cat([attend(s, v)[0] for s, v in self.requests])).view_as(expected)
        return float((out - expected).norm() / expected.norm()), accuracy.tensor_error(expected, self.visible)


def draw(rng: random.Random, generator: torch.Generator) -> Batch:
    """BF16 queries on a bf16 cache; at least one query row sees a token."""
    heads = rng.choice([1, 2, 3, 5, 8, 12, 16, 20] if rng.random() < 0.93 else [37, 64, 128])
    causal, sm_scale, kind = rng.random() < 0.7, rng.choice([576**-0.5, 0.01, 0.2]), rng.random()
    mixed = [1, 2, 63, 64, 65, rng.randrange(1, 150)]
    lengths = [1, 2, 3, 4, 5] if kind < 0.35 else range(63, 151) if kind < 0.5 else mixed
    requests, visible = [], []
    for _ in range(rng.randrange(1, 5)):
        kv_len, q_len = rng.choice(lengths), rng.choice([1, 1, 1, 2, 5])
        seen = (kv_len - q_len + 1 + torch.arange(q_len)).clamp_min(0) if causal else torch.full((q_len,), kv_len)
        seen = seen[seen > 0]
        row = bf16(torch.randn(kv_len, 576, generator=generator, dtype=torch.float64))
        query = bf16(torch.randn(len(seen), heads, 576, generator=generator, dtype=torch.float64))
        scores = (query @ row.T * sm_scale).masked_fill(torch.arange(kv_len) >= seen[:, None, None], -math.inf)
        requests.append((scores.view(-1, kv_len), row[:, :512]))
        visible.append(seen)
    return Batch(requests, heads, torch.cat(visible))


def batches(seed: int, count: int) -> Iterator[Batch]:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    return (draw(rng, generator) for _ in range(count))


def main(argv: list[str]) -> int:
    torch.set_num_threads(1)  # small products: on a busy machine every barrier of threads would wait
    seed, count = (int(x) for x in argv)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in KERNELS}
    for batch in batches(seed, count):
        expected = batch.expected()
        for name, errors in found.items():
            errors.append(batch.error(name, expected))
    for name, errors in found.items():
        above = sum(error > MAX_TENSOR_ERROR for error, _ in errors)
        print(
            f"{name}: {above} of {len(errors)} above {MAX_TENSOR_ERROR:.1e}, largest {max(e for e, _ in errors):.2e}, at most "
            f"{max(e / a for e, a in errors):.3f} of what is allowed"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
