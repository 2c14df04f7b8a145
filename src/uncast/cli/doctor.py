"""`uncast doctor TRACE`: name the bytes that a decode step moves without need, in a profile of any server. Needs no torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from uncast.cli.main import UsageError
from uncast.doctor import live
from uncast.doctor.compare import compare, print_comparison
from uncast.doctor.diagnose import Diagnosis, Options, diagnose
from uncast.doctor.engines import inspect_all
from uncast.doctor.engines_print import print_engines
from uncast.doctor.engines_rules import KV_DTYPES, Setting, read_model
from uncast.doctor.errors import EngineError, LiveError, TraceError
from uncast.doctor.metrics import live_tokens
from uncast.doctor.page import write_page
from uncast.doctor.phases import PHASES
from uncast.doctor.report import Refused, Report, to_json
from uncast.doctor.terminal import print_ranks, print_report

if TYPE_CHECKING:
    from collections.abc import Iterator

BAR_BYTES = 8 << 20
MAX_TOKENS = 10**12


def build_parser() -> argparse.ArgumentParser:
    """Options of the command."""
    parser = argparse.ArgumentParser(
        prog="uncast doctor",
        description="Say where a decode step's time goes in a PyTorch profiler trace of an LLM server, which data movement is "
        "not needed, how sure that is, and what the step would take without it. Needs neither torch nor a GPU.",
        epilog="example: uncast doctor trace.json.gz --capture capture.json.gz --html report.html",
    )
    add = parser.add_argument
    add("trace", nargs="*", type=Path, help="a trace (json or json.gz), a folder of one per rank, or two to compare")
    add("--capture", type=Path, metavar="FILE", help="trace of the graph's capture pass, or a folder of them")
    add("--live-tokens", type=int, metavar="N", help="cache rows in use (default: from the trace's step labels)")
    add("--metrics-url", metavar="URL", help="read the live tokens from a server's /metrics")
    add("--phase", choices=PHASES, help="steps to judge (default: decode where there are any)")
    add("--peak-gbps", type=float, metavar="X", help="the GPU's memory bandwidth in GB/s (default: from its name)")
    add("--json", action="store_true", help="print the report as JSON")
    add("--html", type=Path, metavar="FILE", help="write one self-contained page")
    add("--url", help="profile a running SGLang, vLLM or uncast server for a few steps")
    add("--steps", type=int, default=8, help="with --url: decode steps to profile (default: 8)")
    add("--profile-dir", type=Path, metavar="DIR", help="with --url: the folder where the server writes its traces")
    add("--api-key", help="with --url: the server's key")
    add("--no-load", action="store_true", help="with --url: send no request; the server has its own traffic")
    add("--no-stacks", action="store_true", help="with --url: no Python stacks; they name functions and slow the host")
    add(
        "--engines",
        action="store_true",
        help="instead of a trace: the engines installed here, the plug-in, their pool casts",
    )
    add("--engine-path", type=Path, metavar="DIR", help="with --engines: an unpacked wheel of SGLang or vLLM instead")
    add("--model", type=Path, metavar="CONFIG", help="with --engines: say what would run for this config.json")
    add("--arch", type=int, metavar="N", help="with --model: compute capability, such as 90 for 9.0 (default: 90)")
    add("--kv-dtype", choices=KV_DTYPES, help="with --model: the KV cache's dtype (default: fp8_e4m3)")
    return parser


def run(argv: Sequence[str]) -> int:
    """Runs the command; see `uncast doctor --help`."""
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        return _run(args)
    except (TraceError, LiveError, EngineError) as error:
        raise UsageError(str(error)) from error


def _run(args: argparse.Namespace) -> int:
    if args.engines:
        return _engines(args)
    _check(args)
    options = Options(
        live_tokens=args.live_tokens, capture=args.capture, phase=args.phase, peak_gb_per_s=args.peak_gbps
    )
    if args.metrics_url is not None:
        options = replace(options, live_tokens=live_tokens(args.metrics_url), live_source=f"from {args.metrics_url}")
    traces = list(args.trace)
    if args.url is not None:
        request = live.Request(
            args.url, args.steps, args.profile_dir, args.api_key, not args.no_load, stacks=not args.no_stacks
        )
        traces = live.profile(request, lambda text: print(text, file=sys.stderr))
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 132)
    if len(traces) == 2 and args.url is None:
        return _compare(traces, options, args, console)
    return _ranks(_expand(traces), options, args, console)


def _engines(args: argparse.Namespace) -> int:
    """Exit code 1 where there is no engine to look at."""
    if args.trace or args.url is not None:
        raise UsageError("--engines takes no trace and no --url")
    if args.model is None and (args.arch is not None or args.kv_dtype is not None):
        raise UsageError("--arch and --kv-dtype say for what --model would run: give a model's config.json, too")
    if args.arch is not None and not 50 <= args.arch <= 200:
        raise UsageError(f"--arch is {args.arch}: a compute capability is major * 10 + minor, such as 90")
    model = read_model(args.model) if args.model is not None else None
    setting = Setting(args.arch or 90, args.kv_dtype or "fp8_e4m3") if model is not None else None
    reports = inspect_all(args.engine_path, model, setting)
    if args.json:
        sys.stdout.buffer.write(msgspec.json.encode(reports) + b"\n")
    elif not reports:
        print("neither SGLang nor vLLM is installed here: give --engine-path for an unpacked wheel", file=sys.stderr)
    else:
        print_engines(reports, model, setting, Console(highlight=False, width=None if sys.stdout.isatty() else 132))
    return 0 if reports else 1


def _check(args: argparse.Namespace) -> None:
    if args.engine_path is not None or args.model is not None or args.arch is not None or args.kv_dtype is not None:
        raise UsageError("--engine-path, --model, --arch and --kv-dtype go with --engines")
    if args.url is None and not 1 <= len(args.trace) <= 2:
        raise UsageError(f"{len(args.trace)} traces were given: one is read, two are compared (or give --url)")
    if args.url is None and (args.no_load or args.no_stacks):
        raise UsageError("--no-load and --no-stacks go with --url")
    if args.url is not None and args.trace:
        raise UsageError("give a trace or --url, not both")
    if args.live_tokens is not None and not 1 <= args.live_tokens <= MAX_TOKENS:
        raise UsageError(f"--live-tokens is {args.live_tokens}: allowed are 1 to {MAX_TOKENS:,}")
    if args.live_tokens is not None and args.metrics_url is not None:
        raise UsageError("give --live-tokens or --metrics-url, not both")
    if args.peak_gbps is not None and not 1 <= args.peak_gbps <= 1e6:
        raise UsageError(f"--peak-gbps is {args.peak_gbps}: allowed are 1 to 1,000,000 (GB/s)")
    if not 1 <= args.steps <= 1000:
        raise UsageError(f"--steps is {args.steps}: allowed are 1 to 1000")
    if args.html is not None and len(args.trace) == 2:
        raise UsageError("--html is for one trace: two are compared on the terminal or with --json")
    if args.html is not None and not args.html.parent.is_dir():
        raise UsageError(f"{args.html} cannot be written: {args.html.parent} is not a folder")


def _expand(traces: Sequence[Path]) -> list[Path]:
    """Files; a folder stands for the traces in it (capture passes left out)."""
    out: list[Path] = []
    for path in traces:
        if not path.is_dir():
            out.append(path)
            continue
        files = sorted(
            p for p in path.iterdir() if p.name.endswith((".json", ".json.gz")) and ".capture." not in p.name
        )
        if not files:
            raise TraceError(f"{path} holds no traces: a folder of ranks has .json or .json.gz files")
        out += files
    return out


def _ranks(traces: Sequence[Path], options: Options, args: argparse.Namespace, console: Console) -> int:
    """Exit code 1 where files of a folder were refused and others were not."""
    if args.html is not None:
        _keep_apart(args.html, [*traces, *([options.capture] if options.capture else [])])
    slowest: Diagnosis | None = None
    entries: list[Report | Refused] = []
    for path in traces:
        try:
            diagnosis = _read(path, options, args.json)
        except TraceError as error:
            if len(traces) == 1:
                raise
            print(f"uncast: {error}", file=sys.stderr)
            entries.append(Refused(trace=str(path), error=str(error)))
            continue
        entries.append(diagnosis.report)
        if slowest is None or diagnosis.report.step_us > slowest.report.step_us:
            slowest = diagnosis
    if slowest is None:
        raise TraceError("none of these files is a trace with GPU kernels")
    reports = [e for e in entries if isinstance(e, Report)]
    if args.html is not None:
        _keep_apart(args.html, [Path(r.graphs.capture) for r in reports if r.graphs and r.graphs.capture])
        write_page(slowest, args.html)
    if args.json:
        sys.stdout.buffer.write(to_json(entries[0] if len(traces) == 1 else entries) + b"\n")
    else:
        _print(slowest, reports, len(traces), args.html, console)
    return 0 if len(reports) == len(traces) else 1


def _print(slowest: Diagnosis, reports: Sequence[Report], files: int, page: Path | None, console: Console) -> None:
    refused = files - len(reports)
    if len(reports) > 1:
        print_ranks(reports, console)
    if refused:
        console.print(f"{refused} of {files} files {'were' if refused > 1 else 'was'} refused")
    if len(reports) > 1:
        console.print("\nThe slowest rank:")
    print_report(slowest.report, console)
    if page is not None:
        console.print(f"\nwrote {page}")


def _keep_apart(page: Path, traces: Sequence[Path]) -> None:
    """Refuses to write the page over a trace, also through a link."""
    for path in traces:
        files = list(path.iterdir()) if path.is_dir() else [path]
        if page.exists() and any(f.exists() and f.samefile(page) for f in files):
            raise UsageError(f"{page} is a trace that is read: --html needs another file")


def _compare(traces: Sequence[Path], options: Options, args: argparse.Namespace, console: Console) -> int:
    files = [_expand([path]) for path in traces]
    for path, found in zip(traces, files, strict=True):
        if len(found) > 1:
            raise UsageError(
                f"{path} is a folder of {len(found)} traces: two traces are compared, so give one of its files"
            )
    a, b = (_read(found[0], options, args.json) for found in files)
    result = compare(a, b)
    if args.json:
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    else:
        print_comparison(result, console)
    return 0


def _read(path: Path, options: Options, quiet: bool) -> Diagnosis:
    with _bar(path, quiet) as progress:
        return diagnose(path, options, progress)


@contextmanager
def _bar(path: Path, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr, for long files on a terminal."""
    console = Console(file=sys.stderr)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    shown = console.is_terminal and not quiet and path.is_file() and path.stat().st_size > BAR_BYTES
    with Progress(*columns, console=console, transient=True, disable=not shown) as bar:
        task = bar.add_task(f"reading {path.name}", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
