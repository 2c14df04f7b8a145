"""Tables and the progress bar of `uncast probe`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from uncast.verify.accuracy import LARGE_OUTPUT
from uncast.verify.bf16_contexts import FEW_ROWS, MANY_ROWS
from uncast.verify.probe_claims import ranges

OnRow = Callable[[dict[str, Any], int, int], None]
ERRORS_NOTE = (
    f"error: relative, of a whole output; a large one is of {LARGE_OUTPUT} (query row, head) or more (docs/probe.md)"
)
COLUMNS_NOTE = (
    f"relative errors: of one (query row, head); of the whole batch or its request of {MANY_ROWS} cached rows; "
    f"of its request of {FEW_ROWS}"
)


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
    table = Table(title="Probed on this machine", caption=COLUMNS_NOTE)
    for name in ("backend", "layout", "queries", "heads", "pages", "modes"):
        table.add_column(name)
    for name in ("verified", "failed", "row error", "error", f"{FEW_ROWS} rows"):
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
            str(good), f"[red]{bad}[/red]" if bad else "0", _worst(members, "row_error"),
            _worst(members, "tensor_error", "many_rows_error"), _worst(members, "few_rows_error"),
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


def claims_lines(rows: list[dict[str, Any]]) -> list[str]:
    """The documented matrix as text: a block per backend, two lines per layout that it claims, refusals by reason.

    Casts in front of a backend are one rule, not a block each.
    """
    blocks: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        blocks.setdefault(row["backend"], []).append(row)
    lines: list[str] = []
    for name, members in blocks.items():
        if ":" not in name or len(blocks) == 1:
            lines += [_block_title(name, members[0]), *(line for row in members for line in _claimed(row))]
            lines += _refusals(members)
    casts = sorted({row["backend"].partition(":")[0] for row in rows if ":" in row["backend"]})
    if casts and len(blocks) > 1:
        names = " and ".join(f"{cast}:NAME" for cast in casts)
        lines.append(f"{names}: FP8 layouts, as a BF16 copy, wherever NAME claims bf16")
    if any(row["any_output_error"] != row["large_output_error"] for row in rows):
        lines.append(ERRORS_NOTE)
    return lines


def _block_title(name: str, row: dict[str, Any]) -> str:
    if name == "all":
        return "all backends"
    notes = [f"{row['package']}: {row['installed']}"] if row["package"] else []
    notes += ["rounds queries to FP8"] if row["lossy_q"] else []
    notes += ["one q_len a batch"] if row["uniform_q_len"] else []
    notes += ["can be captured in a CUDA graph"] if row["cuda_graph"] else []
    return f"{name} ({'; '.join(notes)})" if notes else name


def _claimed(row: dict[str, Any]) -> list[str]:
    if row["status"] == "refused":
        return []
    chips = "; ".join(f"{' '.join(chips)} with {dtypes} queries" for dtypes, chips in _by_dtypes(row["gpus"]))
    extend = row["heads_causal_extend"]
    heads = row["heads"] if extend == row["heads"] else f"{row['heads']} (causal extend: {extend or 'none'})"
    lse = f"LSE base {' or '.join(row['lse_bases'])}" if row["lse_bases"] else "no LSE"
    facts = [f"heads {heads}", f"pages {_powers(row['page_sizes'])}", f"head dims {', '.join(row['head_dims'])}", lse]
    facts += [] if row["extend"] or row["causal"] else ["one query a request"]
    facts += ["sparse, too"] if row["sparse"] else []
    facts += [f"reads {row['reads']}"] if row["reads"] != "as stored" else []
    facts += ["batch_invariant"] if row["batch_invariant"] else []
    errors = f"error up to {row['large_output_error']:.1e}"
    if row["any_output_error"] != row["large_output_error"]:
        errors += f" of a large output, {row['any_output_error']:.1e} of any"
    return [f"  {row['kv_layout']}: {chips}", f"      {'; '.join(facts)}", f"      {errors}"]


def _refusals(rows: list[dict[str, Any]]) -> list[str]:
    alike: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["status"] == "refused":
            alike.setdefault(row["reason"].replace(row["kv_layout"], "it"), []).append(row)
    return [
        f"  refused: {', '.join(row['kv_layout'] for row in group)} ({group[0]['reason']})" for group in alike.values()
    ]


def _powers(numbers: list[int]) -> str:
    """Ascending powers of two as text: "1-128" where none is left out."""
    whole = len(numbers) > 2 and numbers[-1] == numbers[0] << (len(numbers) - 1)
    return f"{numbers[0]}-{numbers[-1]}" if whole else ranges(numbers)


def _by_dtypes(gpus: dict[str, list[str]]) -> list[tuple[str, list[str]]]:
    short = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    grouped: dict[str, list[str]] = {}
    for chip, dtypes in gpus.items():
        grouped.setdefault(" ".join(short[dtype] for dtype in dtypes), []).append(chip)
    return list(grouped.items())


def _worst(rows: list[dict[str, Any]], *names: str) -> str:
    errors = [row[name] for row in rows for name in names if row[name] is not None]
    return f"{max(errors):.1e}" if errors else "-"
