"""How far a backend may be from the float64 oracle: one rule for the probe, the tests and the documents.

The default is the design's: 1e-2 of a (query row, head), `MAX_TENSOR_ERROR` of the whole. Every output in BF16 spends most of
the latter. One rounding to BF16 changes a number by at most u = `BF16_UNIT` of it, and over many numbers, whose logarithms have
uniform fractions, by r = `BF16_RMS` of their norm:

    r^2 = (u^2 / 3) * integral of x^-3 dx from 1 to 2 / ln 2 = u^2 / (8 ln 2)

A kernel says what else it rounds (`Backend.bf16_probabilities`, `bf16_partials`). Roundings are independent, so their squares
add up; where e is the error of the whole, and n the number of (query row, head) that carry the norm of the output,

    e^2 <= max(MAX_TENSOR_ERROR^2, r^2 + p^2) + s * r^2
    p^2 = r^2 + (u^2 - r^2) / sqrt(n)          probabilities: their mean square, plus the scatter of a mean over n
    n   = (sum of w)^2 / sum of w^2            w = |out|^2 of a row that sees two rows of the cache or more: of one, P is 1
    s   = share of w of rows that see more than `UNSPLIT_ROWS`: their partial results are rounded once more

The scatter is that of single probabilities, since a peaked softmax has only one in a row; at n = 1 it ends in u. Values are
taken to be nearly orthogonal, as random ones are: what rows have in common makes all of this smaller.
`tests/verify/rounding_model.py` computes three kernels' arithmetic in float64: over 120,000 random batches nothing came above
these bounds, and each kernel within 5 % of them (docs/probe.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from uncast.attention import Backend, Problem
from uncast.attention.contents import visible_rows

MAX_ROW_ERROR = 1e-2
"""Allowed relative error of one (query row, head)."""
MAX_TENSOR_ERROR = 2.5e-3
"""Allowed relative error of the whole output."""
BF16_UNIT = 2.0**-8
"""The largest relative error of a rounding to BF16, whose significands have 8 bits."""
BF16_RMS = BF16_UNIT / math.sqrt(8 * math.log(2))
"""The relative error of many roundings to BF16, 1.66e-3."""
UNSPLIT_ROWS = 32
"""No kernel here splits a context of so many rows or fewer: FlashInfer's planned ones cut pieces of 32 rows or more
(`MLAPlan` in its scheduler.cuh, 0.7.2)."""
BF16_PARTIALS_ERROR = math.hypot(MAX_TENSOR_ERROR, BF16_RMS)
"""Allowed of the whole where partial results are rounded, too: 3.0e-3."""
BF16_P_ERROR = math.hypot(BF16_UNIT, BF16_RMS)
"""Allowed of the whole where one rounded probability is all that counts: 4.2e-3."""
LARGE_OUTPUT = math.ceil(((BF16_UNIT**2 - BF16_RMS**2) / (MAX_TENSOR_ERROR**2 - 2 * BF16_RMS**2)) ** 2)
"""A large output has so many (query row, head) of like norm or more: rounded probabilities alone keep MAX_TENSOR_ERROR there.
281."""
LOSSY_ROW_ERROR, LOSSY_TENSOR_ERROR = 0.2, 0.05
"""The same for a backend that rounds queries to FP8 and says so: 1.5 times what FlashMLA's showed on an H200 over 22 rows of
the grid (0.13 of a row, 0.033 of the whole)."""
MAX_LSE_ERROR, LOSSY_LSE_ERROR = 5e-3, 0.4
"""Allowed difference of the LSE. Lossy: 1.5 times what rounding the queries alone makes in float64 over that grid (0.27)."""


@dataclass(frozen=True)
class Accuracy:
    """What a backend promises over one layout.

    Attributes:
        probabilities, partials: whether it rounds them to BF16.
        lossy: whether it rounds queries to FP8; then neither of them counts.
    """

    probabilities: bool = False
    partials: bool = False
    lossy: bool = False

    @classmethod
    def of(cls, traits: Backend | type[Backend], kv_layout: str) -> Accuracy:
        """By a backend's traits; `kv_layout` is a name of `LAYOUT_NAMES`."""
        return cls(kv_layout in traits.bf16_probabilities, kv_layout in traits.bf16_partials, traits.lossy)

    @property
    def row_error(self) -> float:
        return LOSSY_ROW_ERROR if self.lossy else MAX_ROW_ERROR

    @property
    def lse_error(self) -> float:
        return LOSSY_LSE_ERROR if self.lossy else MAX_LSE_ERROR

    @property
    def large_error(self) -> float:
        """Allowed of the whole of a large output."""
        return LOSSY_TENSOR_ERROR if self.lossy else BF16_PARTIALS_ERROR if self.partials else MAX_TENSOR_ERROR

    @property
    def any_error(self) -> float:
        """Allowed of the whole of any output."""
        if self.lossy or not self.probabilities:
            return self.large_error
        return math.hypot(BF16_P_ERROR, BF16_RMS) if self.partials else BF16_P_ERROR

    def tensor_error(self, expected: torch.Tensor, visible: torch.Tensor, alike: torch.Tensor | None = None) -> float:
        """Allowed relative error of the whole.

        Args:
            expected: the oracle's output [rows, heads, head_dim_ckv].
            visible: int64 [rows], how many rows of the cache each query row attends to.
            alike: bool [rows], query rows whose probabilities are made to be rounded alike (`verify.bf16_contexts`).
        """
        weights = expected.double().square().sum(-1)
        total = float(weights.sum())
        if self.lossy or not (self.probabilities or self.partials) or total == 0:
            return self.large_error
        visible = visible.to(weights.device)
        split = float(weights[visible > UNSPLIT_ROWS].sum()) / total if self.partials else 0.0
        unlike = visible > 1
        worst = 0.0
        if alike is not None:
            alike = alike.to(weights.device)
            worst, unlike = float(weights[alike].sum()) / total, unlike & ~alike
        rounded = weights[unlike] if self.probabilities else weights[:0]
        sums, squares = float(rounded.sum()), float(rounded.square().sum())
        mean = 0.0
        if sums > 0:
            mean = sums / total * (BF16_RMS**2 + (BF16_UNIT**2 - BF16_RMS**2) * math.sqrt(squares) / sums)
        mean += worst * BF16_UNIT**2 if self.probabilities else 0.0
        return math.sqrt(max(MAX_TENSOR_ERROR**2, BF16_RMS**2 + mean) + split * BF16_RMS**2)


def rows_attended(problem: Problem) -> torch.Tensor:
    """int64 [qo_indptr[-1]] on the host: how many rows of the cache each query row attends to, at most. Reads lengths."""
    spec = problem.spec
    visible = visible_rows(problem.qo_indptr.tolist(), problem.kv_len_arr.tolist(), spec.causal)
    return visible.clamp_max(spec.topk) if spec.topk else visible


def allowed_errors(traits: Backend | type[Backend], problem: Problem, expected: torch.Tensor) -> tuple[float, float]:
    """Allowed relative error of a (query row, head) and of the whole for this backend, batch and oracle's output."""
    accuracy, attended = Accuracy.of(traits, problem.spec.layout.name), rows_attended(problem)
    return accuracy.row_error, accuracy.tensor_error(expected[: attended.shape[0]], attended)
