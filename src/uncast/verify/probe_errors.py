"""What a probe's output is off by, and the sentence where that is too much."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from uncast.attention import Problem
from uncast.attention.oracle import relative_errors
from uncast.verify.accuracy import BF16_P_ERROR, Accuracy, rows_attended
from uncast.verify.bf16_contexts import FEW_ROWS, MANY_ROWS


@dataclass(frozen=True)
class Part:
    """Errors of some query rows, (of a row and head, of the whole), and what is wrong with them."""

    errors: tuple[float, float]
    fault: str


def parts_of(
    problem: Problem, tuned: bool, out: torch.Tensor, expected: torch.Tensor, accuracy: Accuracy
) -> list[Part]:
    """Of the whole batch, of its last request if that is `tuned`, and of the last but one (`verify.bf16_contexts`)."""
    q_lens = problem.qo_indptr.diff().cpu()
    request = torch.arange(q_lens.shape[0]).repeat_interleave(q_lens)
    attended = rows_attended(problem)
    last = q_lens.shape[0] - 1
    alike = (request == last) & tuned
    parts = []
    for name, rows in (
        ("", torch.ones_like(alike)),
        (f" over {FEW_ROWS} cached rows", alike),
        (f" over {MANY_ROWS} cached rows", request == last - 1),
    ):
        if not bool(rows.any()):
            parts.append(Part((math.nan, math.nan), ""))
            continue
        here = rows.to(out.device)
        errors = relative_errors(out[here], expected[here])
        allowed = (accuracy.row_error, accuracy.tensor_error(expected[here], attended[rows], alike[rows]))
        parts.append(Part(errors, _too_far(name, errors, allowed, accuracy)))
    return parts


def _too_far(name: str, errors: tuple[float, float], allowed: tuple[float, float], accuracy: Accuracy) -> str:
    if (errors[0] <= allowed[0] and errors[1] <= allowed[1]) or (name and accuracy.lossy):
        return ""
    hint = ""
    if name and errors[0] <= allowed[0] and errors[1] <= BF16_P_ERROR:
        hint = ", as if it rounded to BF16 on the way without saying so"
    return (
        f"differs from the oracle{name}: relative error {errors[0]:.1e} of a row, {errors[1]:.1e} of the whole "
        f"(allowed: {allowed[0]:.1e}, {allowed[1]:.1e}){hint}"
    )


def broken_output(out: torch.Tensor, expected: torch.Tensor) -> str:
    """What is wrong whatever the bounds."""
    bad = int((~out.isfinite()).sum())
    if bad:
        return f"leaves NaN or infinity in {bad} of {out.numel()} output values, and the oracle's are finite"
    if bool(expected.any()) and not bool(out.any()):
        return "gives zeros only, and the oracle does not"
    return ""


def wrong_lse(lse: torch.Tensor, expected: torch.Tensor, accuracy: Accuracy) -> str:
    """What is wrong with an LSE [rows, heads]."""
    live = expected.isfinite()
    error = float((lse.double() - expected)[live].abs().max()) if bool(live.any()) else 0.0
    dead = bool((lse[~live] == -math.inf).all())
    if error <= accuracy.lse_error and dead:
        return ""
    where = f"by {error:.1e}" if dead else "where a query sees no row it is not -inf"
    return f"differs from the oracle in its LSE: {where}"
