"""The plot of `uncast kv-error` (needs matplotlib: `pip install 'uncast[plot]'`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from uncast.bench.kv_error import ContenderError
from uncast.bench.plot import check_matplotlib

_LEAST = 1e-12
"""Drawn for 0 on a log axis."""


def plot_kv_error(results: Sequence[ContenderError], model: str, path: Path) -> None:
    """Attention error and KL by layer, a colour per layout, to a PNG file.

    Raises:
        ValueError: matplotlib is missing, or the file cannot be written.
    """
    check_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    with_kl = any(layer.kl is not None for result in results for layer in result.layers)
    left, *right = figure.subplots(1, 2 if with_kl else 1, squeeze=False)[0]
    for index, result in enumerate(results):
        colour, layers = f"C{index}", range(len(result.layers))
        label = f"{result.contender.name}, KL {result.kl:.1e}"
        left.plot(layers, [layer.attention_error for layer in result.layers], "o-", color=colour, label=label)
        left.plot(layers, [layer.attention_error_stack for layer in result.layers], "--", color=colour)
        for axes in right:
            axes.plot(
                layers, [max(_LEAST, layer.kl or 0.0) for layer in result.layers], "o-", color=colour, label=label
            )
    left.set_ylabel("relative error of attention (dashed: all layers stored so)")
    for axes in right:
        axes.set_ylabel("KL of the next token with this layer stored so, nats")
    for axes in (left, *right):
        axes.set_xlabel("layer")
        axes.set_yscale("log")
        axes.grid(True, which="major", alpha=0.3)
        axes.legend(fontsize=8)
    figure.suptitle(f"{model}: error of cache layouts against BF16")
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from None
