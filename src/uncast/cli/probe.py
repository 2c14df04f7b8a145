"""`uncast probe`: what each attention backend claims, run on this machine against the float64 oracle."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console

from uncast.attention import ProblemError, registry
from uncast.attention.registry import UnknownBackend
from uncast.attention.verified import cache_path
from uncast.cache_folder import keep_kernels
from uncast.cli.main import UsageError
from uncast.cli.probe_tables import claims_lines, failures_table, progress, rows_table
from uncast.latent.layouts import LAYOUT_NAMES, LayoutError, row_layout
from uncast.verify.probe_claims import REFUSED_LAYOUTS, refused_layouts, would_probe
from uncast.verify.probe_crew import claims_here
from uncast.verify.probe_grid import DTYPES, MODES, Filters
from uncast.verify.probe_run import MAX_JOBS, Report, device_here, run_probe

DEFAULT_SECONDS = {"cpu": 60.0, "cuda": 180.0}
"""On a GPU the first case of a kernel may compile it."""
NOT_OF_CLAIMS = ("heads", "page_size", "dtype", "mode", "quick", "fresh", "timeout", "jobs")
REGISTER_HINT = "NAME=MODULE:CLASS, as in mine=my_package.attention:MyBackend"


def build_parser() -> argparse.ArgumentParser:
    """Options of the command."""
    parser = argparse.ArgumentParser(
        prog="uncast probe",
        description="Run what each backend claims on this machine, on small poisoned inputs against the float64 oracle. "
        "Crashes, hangs and wrong numbers become rows. What is verified is kept, so that strict plans run in later processes.",
        epilog="example: uncast probe --quick",
    )
    add = parser.add_argument
    add("--backend", action="append", metavar="NAME", help="only this backend; may be repeated")
    add(
        "--layout",
        action="append",
        metavar="NAME",
        help=f"only this layout ({', '.join(LAYOUT_NAMES)}); may be repeated",
    )
    add("--heads", action="append", type=_count, metavar="N", help="this number of heads (1-128); may be repeated")
    add("--page-size", action="append", type=_count, metavar="N", help="this page size (1-128); may be repeated")
    add("--dtype", action="append", choices=DTYPES, help="only this dtype of queries; may be repeated")
    add("--mode", action="append", choices=MODES, help="only this mode; may be repeated")
    add("--quick", action="store_true", help="16 heads, pages of 64 and common dtypes only, unless given")
    add("--fresh", action="store_true", help="run again what is verified already")
    add("--timeout", type=_seconds, metavar="S", help="seconds per case (60, on a GPU 180)")
    add("--jobs", type=_jobs, metavar="N", help="workers side by side (one a core, at most 16)")
    add("--register", action="append", type=_registration, metavar="NAME=PATH", help=f"add a backend: {REGISTER_HINT}")
    add("--claims", action="store_true", help="print what backends claim and promise for all GPUs; runs nothing")
    add("--json", action="store_true", help="print JSON instead of tables")
    return parser


def run(argv: Sequence[str]) -> int:
    """Runs the command; see `uncast probe --help`. Rows that failed are results: the exit code is 0 all the same."""
    args = build_parser().parse_args(argv)
    for name, path in args.register or ():
        try:
            registry.register(name, path)
            registry.backend_class(name)
        except ValueError as error:  # UnknownBackend is one, too
            raise UsageError(f"--register {name}={path}: {error}") from error
    filters = _usage(lambda: _filters(args))
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    if args.claims:
        rows = claims_here(filters)
        if args.json:
            print(json.dumps({"claims": rows}, indent=1))
        else:
            print("\n".join(claims_lines(rows)))
        return 0
    device, arch = device_here()
    if device == "cuda":
        keep_kernels()
    seconds = args.timeout or DEFAULT_SECONDS[device]
    with progress(sys.stderr) as on_row:
        report = _usage(
            lambda: run_probe(
                filters, device=device, arch=arch, seconds=seconds, fresh=args.fresh, jobs=args.jobs, on_row=on_row
            )
        )
    for row in refused_layouts(filters):
        report.refusals["all", row["kv_layout"], row["reason"]] = 0
    for note in report.notes:
        print(f"uncast: {note}", file=sys.stderr)
    later = would_probe() if device == "cpu" else []
    if args.json:
        print(json.dumps(as_json(report, device, later), indent=1))
    else:
        _print(console, report, device, later)
    return 0


def as_json(report: Report, device: str, later: list[dict[str, Any]]) -> dict[str, Any]:
    """The report for programs; docs/probe.md describes the fields."""
    return {
        "machine": report.machine,
        "counts": _counts(report),
        "rows": report.rows,
        "refused": _refused(report),
        "would_probe_on_a_gpu": later,
        "notes": report.notes,
        "cached_rows": report.cached,
        "seconds": report.seconds,
        "cache": str(cache_path(device)),
    }


def _counts(report: Report) -> dict[str, int]:
    return {status: sum(row["status"] == status for row in report.rows) for status in ("verified", "failed", "skipped")}


def _refused(report: Report) -> list[dict[str, Any]]:
    """Refusals by backend and reason, with the layouts and the number of keys that they hold for."""
    merged: dict[tuple[str, str], dict[str, Any]] = {}
    for (backend, kv_layout, reason), count in report.refusals.items():
        entry = merged.setdefault((backend, reason), {"backend": backend, "reason": reason, "layouts": [], "keys": 0})
        entry["layouts"].append(kv_layout)
        entry["keys"] += count
    return list(merged.values())


def _print(console: Console, report: Report, device: str, later: list[dict[str, Any]]) -> None:
    console.print(f"{report.machine['device']}, torch {report.machine['torch']}, triton {report.machine['triton']}")
    if report.rows:
        console.print(rows_table(report.rows))
    failures = [row for row in report.rows if row["status"] != "verified"]
    if failures:
        console.print(failures_table(failures))
    counts = ", ".join(f"{number} {status}" for status, number in _counts(report).items())
    console.print(f"{counts}; {report.cached} of them from {cache_path(device)}" if report.cached else counts)
    for entry in _refused(report):
        if ":" not in entry["backend"]:  # a cast in front of a backend is refused where the backend is
            line = f"refused: {entry['backend']} for {', '.join(entry['layouts'])}: {entry['reason']}"
            console.print(line, markup=False, soft_wrap=True)
    if later:
        console.print("There is no GPU here. On one, the probe would also run:")
        for entry in later:
            if ":" in entry["backend"]:
                continue
            package = f"{entry['package']} {entry['installed']}".strip()
            console.print(f"  {entry['backend']}: {', '.join(entry['layouts'])} ({package})", markup=False)
        console.print("  gather_cast:NAME and pool_cast:NAME in front of each that reads bf16", markup=False)


def _filters(args: argparse.Namespace) -> Filters:
    for name in args.backend or ():
        if name not in registry.names():
            raise UsageError(f"unknown attention backend {name!r}: use one of {registry.choices()}")
    if args.claims:
        for name in NOT_OF_CLAIMS:
            if getattr(args, name):
                raise UsageError(f"--claims runs nothing and covers all shapes: leave out --{name.replace('_', '-')}")
    layouts = [_layout(name, args.claims) for name in args.layout] if args.layout else None
    return Filters(
        backends=_tuple(args.backend), layouts=_tuple(layouts), heads=_tuple(args.heads),
        page_sizes=_tuple(args.page_size), dtypes=_tuple(args.dtype), modes=_tuple(args.mode), quick=args.quick,
    )  # fmt: skip


def _layout(name: str, claims: bool) -> str:
    """The layout's own name (of `auto`, too); the claims know also those that every backend refuses."""
    return name if claims and name in REFUSED_LAYOUTS else row_layout(name).name


def _tuple(values: list[Any] | None) -> tuple[Any, ...] | None:
    return None if values is None else tuple(dict.fromkeys(values))


def _usage(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except (ProblemError, LayoutError, UnknownBackend) as error:
        raise UsageError(str(error)) from error


def _count(text: str, limit: int = 128) -> int:
    if not text.strip().isdecimal() or not 1 <= int(text) <= limit:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {limit}")
    return int(text)


def _jobs(text: str) -> int:
    return _count(text, MAX_JOBS)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 86_400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0 and up to 86400")
    return value


def _registration(text: str) -> tuple[str, str]:
    name, _, path = text.partition("=")
    module, _, attribute = path.partition(":")
    if not (name and module and attribute):
        raise argparse.ArgumentTypeError(f"{text!r} is not {REGISTER_HINT}")
    return name, path
