"""The engines' report on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

from uncast.doctor.engines import FLAGS, EngineReport
from uncast.doctor.engines_rules import Model, Setting

_COLOURS = {"live": "green", "not live": "red", "not installed": "yellow", "not checked": "yellow"}


def print_engines(
    reports: Sequence[EngineReport], model: Model | None, setting: Setting | None, console: Console
) -> None:
    """One block an engine: version, plug-in, what would run, and every cast of a pool with file and line."""
    for report in reports:
        console.print(f"[bold]{report.engine} {escape(report.version)}[/] in {escape(report.package)}")
        plugin = report.plugin
        reason = f": {escape(plugin.reason)}" if plugin.reason else f", start with {FLAGS[report.engine]}"
        console.print(f"  plug-in [{_COLOURS[plugin.status]}]{plugin.status}[/]{reason}")
        for change in report.changes:
            console.print(f"  [red]interface changed[/]: {escape(change)}")
        if report.choice is not None and model is not None and setting is not None:
            _choice(report, model, setting, console)
        _casts(report, console)


def _choice(report: EngineReport, model: Model, setting: Setting, console: Console) -> None:
    choice = report.choice
    assert choice is not None
    name = model.architecture or "this model"
    where = f"{escape(name)}, compute capability {setting.arch / 10}, KV cache {setting.kv_dtype}"
    rules = f" (by the rules of {report.rules_of})" if report.rules_of else ""
    console.print(f"  {where}:")
    places = ", ".join(f"{c.file.rsplit('/', 1)[-1]}:{c.line}" for c in choice.default_casts)
    casts = f", which [red]casts the whole pool[/] at {places}" if places else ""
    console.print(f"    by itself: {choice.default}{rules}{casts}")
    if choice.uncast:
        reason = f", because {choice.reason}" if choice.reason else ", the cache read as stored"
        console.print(f"    with {FLAGS[report.engine]}: {choice.uncast}{reason}")
    else:
        console.print(f"    with {FLAGS[report.engine]}: [red]refused[/], because {choice.reason}")


def _casts(report: EngineReport, console: Console) -> None:
    pool = [c for c in report.audit.casts if c.kind == "pool"]
    rows = len(report.audit.casts) - len(pool)
    files, casts = _count(report.audit.files, "file"), _count(len(pool), "cast")
    console.print(f"  sources: {files} with a pool, {casts} of a whole pool, {rows} of gathered rows")
    for cast in pool:
        console.print(f"    {escape(cast.file)}:{cast.line}  [dim]{escape(cast.function)}[/]")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
