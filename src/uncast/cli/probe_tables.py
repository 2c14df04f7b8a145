"""Tables and the progress bar of `uncast probe`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from uncast.verify.probe_claims import ranges

OnRow = Callable[[dict[str, Any], int, int], None]


@contextmanager
def progress(stream: TextIO) -> Iterator[OnRow | None]:
    """A progress bar on a terminal; nothing elsewhere."""
    if not stream.isatty():
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=stream), transient=True) as bar:
        task = bar.add_task("asking backends", total=None)

        def on_row(row: dict[str, Any], done: int, total: int) -> None:
            bar.update(task, description=escape(f"{row['backend']} {row['kv_layout']}"), completed=done, total=total)

        yield on_row


def rows_table(rows: list[dict[str, Any]]) -> Table:
    """One line per backend, layout and dtype of queries."""
    table = Table(title="Probed on this machine")
    for name in ("backend", "layout", "queries", "heads", "pages", "modes"):
        table.add_column(name)
    for name in ("verified", "failed", "row error", "error"):
        table.add_column(name, justify="right")
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["backend"], row["kv_layout"], row["q_data_type"]), []).append(row)
    for group, members in groups.items():
        good = sum(row["status"] == "verified" for row in members)
        bad = len(members) - good
        table.add_row(
            *map(escape, group), ranges(sorted({row["num_heads"] for row in members})),
            ranges(sorted({row["page_size"] for row in members})), ", ".join(dict.fromkeys(row["mode"] for row in members)),
            str(good), f"[red]{bad}[/red]" if bad else "0", _worst(members, "row_error"), _worst(members, "tensor_error"),
        )  # fmt: skip
    return table


def failures_table(rows: list[dict[str, Any]]) -> Table:
    """Every row that is not verified, with its reason."""
    table = Table(title="Not verified")
    for name in ("backend", "layout", "queries", "heads", "page", "mode", "status", "reason"):
        table.add_column(name, overflow="fold")
    for row in rows:
        names = ("backend", "kv_layout", "q_data_type", "num_heads", "page_size", "mode", "status", "reason")
        table.add_row(*(escape(str(row[name])) for name in names))
    return table


def claims_table(rows: list[dict[str, Any]]) -> Table:
    """The documented matrix with what is refused; of casts in front of backends, only what is claimed."""
    table = Table(title="Claims of the backends, by layout")
    names = "backend,layout,chips and queries,heads (causal extend),pages,LSE,graph,package,notes"
    for name in names.split(","):
        table.add_column(name, overflow="fold")
    for row in rows:
        package = f"{row['package']} {row['installed']}".strip()
        if row["status"] == "refused" and ":" in row["backend"]:
            continue
        if row["status"] == "refused":
            lines = ["-", "-", "-", "-", "-", package or "-", f"refused: {row['reason']}"]
        else:
            chips = "; ".join(f"{' '.join(chips)}: {dtypes}" for dtypes, chips in _by_dtypes(row["gpus"]))
            extend = "" if row["heads_causal_extend"] == row["heads"] else f" ({row['heads_causal_extend'] or 'none'})"
            notes = [f"reads {row['reads']}", f"head dims {', '.join(row['head_dims'])}"]
            notes += ["rounds queries to FP8"] if row["lossy_q"] else []
            notes += ["one q_len a batch"] if row["uniform_q_len"] else []
            lines = [
                chips, row["heads"] + extend, ranges(row["page_sizes"]), "/".join(row["lse_bases"]),
                "yes" if row["cuda_graph"] else "no", package, "; ".join(notes),
            ]  # fmt: skip
        table.add_row(*map(escape, (row["backend"], row["kv_layout"], *lines)))
    return table


def _by_dtypes(gpus: dict[str, list[str]]) -> list[tuple[str, list[str]]]:
    short = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    grouped: dict[str, list[str]] = {}
    for chip, dtypes in gpus.items():
        grouped.setdefault(" ".join(short[dtype] for dtype in dtypes), []).append(chip)
    return list(grouped.items())


def _worst(rows: list[dict[str, Any]], name: str) -> str:
    errors = [row[name] for row in rows if row[name] is not None]
    return f"{max(errors):.1e}" if errors else "-"
