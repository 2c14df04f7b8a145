"""The report on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from uncast.doctor.hosts import HOST_KINDS
from uncast.doctor.report import Finding, Range, Report
from uncast.doctor.words import count, percent, size, time

_COLOURS = {"measured": "green", "joined": "green", "inferred": "yellow", "unknown": "red"}


def print_report(report: Report, console: Console) -> None:
    """Everything a reader needs on one screen; the rest is in `--json` and `--html`."""
    _head(report, console)
    _budget(report, console)
    _attention(report, console)
    if not report.findings:
        console.print(
            f"\n[bold green]Nothing found:[/] no movement of this {report.judged} step is known to be needless "
            "(half a percent of the step or more)."
        )
    for number, finding in enumerate(report.findings, 1):
        _finding(number, finding, console)
    movements = [f for f in report.findings if f.kind not in HOST_KINDS]
    if report.predicted_step_us is not None and len(movements) > 1:
        console.print(
            f"\n[bold]With all of these movements gone[/] a step would take {predicted(report.predicted_step_us)} instead of "
            f"{time(report.step_us)}."
        )
    _notes(report, console)


def _head(report: Report, console: Console) -> None:
    rank = f", rank {report.rank}" if report.rank is not None else ""
    console.print(f"[bold]{escape(report.trace)}[/]{rank}{', ' + escape(report.gpu) if report.gpu else ''}")
    for phase in report.phases:
        mark = "[bold]" if phase.phase == report.judged else "[dim]"
        console.print(
            f"{mark}{phase.phase}[/]: {phase.steps} step{'s' * (phase.steps != 1)}, {time(phase.step_us)} each, GPU busy "
            f"{time(phase.gpu_busy_us)}, {count(phase.kernels_per_step)} kernels"
        )
    live = f"{report.live_tokens:,} ({report.live_tokens_source})" if report.live_tokens is not None else "unknown"
    layers = str(report.layers) if report.layers else "unknown"
    console.print(f"steps by {escape(report.steps_found_by)}; layers {layers}; live tokens {escape(live)}")
    if report.graphs is not None:
        g = report.graphs
        joined = (
            f"{g.joined:,} of {g.replayed:,} kernels joined with {escape(g.capture)}" if g.capture else "not joined"
        )
        console.print(f"graph replays: {joined}")


def _budget(report: Report, console: Console) -> None:
    table = Table("where a step goes", "time", "share", "", box=None, padding=(0, 2, 0, 0), header_style="bold")
    for part in report.budget:
        bar = "█" * max(0, min(40, round(40 * part.share_of_step)))
        table.add_row(part.part, time(part.us_per_step), percent(part.share_of_step), bar)
    console.print()
    console.print(table)


def _attention(report: Report, console: Console) -> None:
    for line in report.attention:
        floor = (
            f"{line.times_floor:.1f}x its floor of {time(line.floor_us_per_step)}"
            if line.times_floor and (line.floor_us_per_step)
            else "floor unknown"
        )
        console.print(
            f"[dim]attention[/] {escape(line.kernel[:60])}: {count(line.calls_per_step)} a step, {time(line.us_per_step)}, "
            f"{floor} [dim]({escape(line.note)})[/]"
        )


def _finding(number: int, f: Finding, console: Console) -> None:
    colour = _COLOURS.get(f.confidence, "red")
    console.print(f"\n[bold red]{number}. {f.title}[/] [dim]{f.kind}[/] [{colour}]{f.confidence}[/]")
    console.print(f"   {escape(f.evidence)}")
    if f.source:
        console.print(f"   from [cyan]{escape(f.source)}[/] [dim](the line where the function begins)[/]")
    if f.kind not in HOST_KINDS:
        needed = size(f.bytes_needed_per_step) if f.bytes_needed_per_step is not None else "unknown"
        console.print(f"   bytes needed a step: {needed} [dim]({escape(f.needed_source)})[/]")
    console.print(f"   without it a step takes [bold]{predicted(f.predicted_step_us)}[/]")
    console.print(f"   {escape(f.advice)}")
    for link in f.links:
        console.print(f"   [blue]{link}[/]")


def predicted(r: Range) -> str:
    return time(r.low) if time(r.low) == time(r.high) else f"{time(r.low)} to {time(r.high)}"


def _notes(report: Report, console: Console) -> None:
    skipped = [f"{n:,} {reason}" for reason, n in report.skipped.items()]
    for note in [*report.notes, *(["skipped: " + ", ".join(skipped)] if skipped else [])]:
        console.print(f"\n[yellow]note[/] {escape(note)}", highlight=False)


def print_ranks(reports: Sequence[Report], console: Console) -> None:
    """One line a rank."""
    table = Table("rank", "trace", "step", "GPU busy", "findings", "dearest", box=None, padding=(0, 2, 0, 0))
    for r in reports:
        first = f"{r.findings[0].title}, {percent(r.findings[0].share_of_step)}" if r.findings else "none"
        rank = str(r.rank) if r.rank is not None else "?"
        table.add_row(rank, escape(r.trace), time(r.step_us), time(r.gpu_busy_us), str(len(r.findings)), first)
    console.print(table)
