"""The picture of one or more measured loads (needs matplotlib: `pip install 'uncast[plot]'`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from uncast.bench.plot import check_matplotlib
from uncast.bench.serve import LoadResult
from uncast.bench.serve_report import figures


def plot_loads(results: Sequence[LoadResult], path: Path, *, title: str) -> None:
    """A PNG file: how many answers had their first token, and how many gaps between chunks ended, within a time; tokens per
    second of each load.

    Raises:
        ValueError: matplotlib is missing, nothing was answered, or the file cannot be written.
    """
    check_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if not any(result.complete for result in results):
        raise ValueError("there is nothing to plot: no request was answered")
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    first, between, rates = figure.subplots(1, 3)
    for result in results:
        done = result.complete
        _shares(first, [a.ttft_s for a in done if a.ttft_s is not None], str(result.load))
        _shares(between, [gap for a in done for gap in a.itl_s], str(result.load))
    for axes, name in ((first, "time to first token"), (between, "inter-token latency (between chunks)")):
        axes.set_title(name)
        axes.set_xlabel("ms")
        axes.set_ylabel("share within")
        axes.set_ylim(0, 1)
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize=8)
    found = [figures(result) for result in results]
    rates.bar([f.load.replace(" ", "\n") for f in found], [f.output_tokens_per_s for f in found])
    rates.set_title("output tokens per second")
    figure.suptitle(title.replace("$", r"\$"))  # a model's name is no formula
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from None


def _shares(axes: Any, seconds: Sequence[float], label: str) -> None:
    if seconds:
        ordered = sorted(1e3 * value for value in seconds)
        shares = [(index + 1) / len(ordered) for index in range(len(ordered))]
        axes.step([0, *ordered], [0, *shares], where="post", label=label)
