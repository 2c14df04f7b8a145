"""Plots of recorded results (needs matplotlib: `pip install 'uncast[plot]'`)."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from uncast.bench.attention import AttentionResult


def check_matplotlib() -> None:
    """Raises `ValueError` if matplotlib is missing, which is better known before a measurement than after it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install 'uncast[plot]'")


def plot_attention(results: Sequence[AttentionResult], path: Path) -> None:
    """Bars of time over each layout's own floor, a group per shape, to a PNG file.

    Raises:
        ValueError: matplotlib is missing, nothing was measured, or the file cannot be written.
    """
    check_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    measured = [r for r in results if not math.isnan(r.us)]
    if not measured:
        raise ValueError("there is nothing to plot: no contender ran")
    shapes = list(dict.fromkeys((r.batch, r.context, r.heads) for r in measured))
    backends = list(dict.fromkeys(r.backend for r in measured))
    figure = Figure(figsize=(max(8, 1.5 * len(shapes)), 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes, width = figure.add_subplot(), 0.85 / len(backends)
    for index, backend in enumerate(backends):
        rows = [r for r in measured if r.backend == backend]
        places = [shapes.index((r.batch, r.context, r.heads)) + (index - (len(backends) - 1) / 2) * width for r in rows]
        axes.bar(places, [r.us for r in rows], width, label=backend)
    for place, shape in enumerate(shapes):
        floor = min(r.floor_us for r in measured if (r.batch, r.context, r.heads) == shape)
        axes.hlines(
            floor,
            place - 0.45,
            place + 0.45,
            colors="black",
            linestyles="dashed",
            label="_" if place else "floor (FP8)",
        )
    axes.set_yscale("log")
    axes.set_xticks(range(len(shapes)), [f"B={b}\n{n:,}\nH={h}" for b, n, h in shapes])
    axes.set_ylabel("microseconds (log)")
    axes.set_title(f"MLA decode attention, {measured[0].gpu}")
    axes.legend(fontsize=8)
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from None
