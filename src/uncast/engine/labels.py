"""Names of steps in profiles."""

from __future__ import annotations

from collections.abc import Sequence


def step_label(lengths: Sequence[tuple[int, int]]) -> str:
    """A step's name in a profile, in the form that SGLang's servers write and `uncast doctor` reads.

    Args:
        lengths: (cached rows after the step, tokens of the step) of each sequence.
    """
    batch, rows, tokens = len(lengths), sum(rows for rows, _ in lengths), sum(count for _, count in lengths)
    if tokens == batch:
        return f"step[DECODE bs={batch} g_sk={rows}]"
    phase = "MIXED" if any(count == 1 for _, count in lengths) else "EXTEND"
    return f"step[{phase} bs={batch} toks={tokens} g_sk={rows}]"
