"""`uncast bench serve --url URL`: TTFT, inter-token latency and throughput of any OpenAI endpoint under load."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from uncast.cli.csv_file import check_writable, write_csv
from uncast.cli.main import UsageError, WorkError

if TYPE_CHECKING:
    from uncast.bench.serve import Endpoint, Load, LoadResult, Prompt, Server
    from uncast.bench.serve_report import Figures

HTTPX_HINT = "bench serve needs httpx: pip install 'uncast[bench]'"
TAKEN = ("stream", "stream_options", "n")
"""Fields of a body that the measurement depends on."""
MOST_WARM_UPS = 8
INPUT_LEN, OUTPUT_LEN, NUM_PROMPTS, VOCAB_SIZE = 256, 64, 64, 4096
ROWS = (
    ("time to first token", "ttft"),
    ("inter-token latency", "itl"),
    ("time per output token", "tpot"),
    ("end to end", "e2e"),
)


def build_parser() -> argparse.ArgumentParser:
    """Options of the command."""
    parser = argparse.ArgumentParser(
        prog="uncast bench serve",
        description="Load on any OpenAI endpoint (uncast, SGLang, vLLM): time to first token, inter-token latency, throughput.",
        epilog="example: uncast bench serve --url http://127.0.0.1:8000 --concurrency 1 4 16 --ignore-eos --csv serve.csv",
    )
    add = parser.add_argument
    add("--url", required=True, help="the server, such as http://127.0.0.1:8000")
    add("--model", help="a name that the server lists (default: its first)")
    add("--endpoint", choices=("completions", "chat"), default="completions", help="default: completions")
    add(
        "--no-stream", action="store_true", help="ask for whole answers: only end-to-end times and rates are known then"
    )
    add("--api-key", help="bearer token (default: the variable UNCAST_API_KEY)")
    load = parser.add_mutually_exclusive_group()
    load.add_argument(
        "--concurrency", type=int, nargs="+", metavar="N",
        help="closed loop: N requests at a time (default: 8); several numbers are measured in turn",
    )  # fmt: skip
    load.add_argument(
        "--request-rate", type=float, nargs="+", metavar="R",
        help="open loop: Poisson arrivals, R requests a second; inf sends all at once; several are measured in turn",
    )  # fmt: skip
    add("--num-prompts", type=int, metavar="N", help=f"of each load (default: {NUM_PROMPTS}, or all of --prompts)")
    add(
        "--input-len", type=int, metavar="N",
        help=f"tokens of random prompts (default: {INPUT_LEN}); exact for completions, about so many for chat",
    )  # fmt: skip
    add("--output-len", type=int, default=OUTPUT_LEN, metavar="N", help=f"max_tokens (default: {OUTPUT_LEN})")
    add(
        "--prompts", type=Path, metavar="FILE", help="a prompt a line, or .jsonl with strings, prompt, text or messages"
    )
    add(
        "--vocab-size", type=int, metavar="N",
        help=f"random token ids are below N (default: {VOCAB_SIZE}); give the model's own",
    )  # fmt: skip
    add("--temperature", type=float, default=0.0, help="default: 0")
    add(
        "--ignore-eos",
        action="store_true",
        help="every answer has --output-len tokens (vLLM, SGLang, llama.cpp, uncast)",
    )
    add("--extra-body", metavar="JSON", help="more fields of every request, such as '{\"top_p\": 0.9}'")
    add("--seed", type=int, default=0, help="of prompts and arrivals (default: 0); another one avoids the prefix cache")
    add(
        "--warmup",
        type=int,
        metavar="N",
        help="requests before each load that do not count (default: 1 to 8, the concurrency)",
    )
    add("--timeout", type=float, default=300.0, metavar="S", help="for a whole request (default: 300)")
    add("--csv", type=Path, metavar="FILE", help="write a row for each load to FILE")
    add("--plot", type=Path, metavar="FILE.png", help="draw latencies and rates (matplotlib)")
    add("--json", action="store_true", help="print one JSON object instead of tables")
    return parser


def run(argv: Sequence[str]) -> int:
    """Runs the command; see `uncast bench serve --help`. 1 if a request failed."""
    args = build_parser().parse_args(argv)
    if importlib.util.find_spec("httpx") is None:
        raise WorkError(HTTPX_HINT)
    from uncast.bench.serve import ServerError

    try:
        return _run(args)
    except ServerError as error:
        raise WorkError(str(error)) from error
    except ValueError as error:
        raise UsageError(str(error)) from error


def _run(args: argparse.Namespace) -> int:
    from uncast.bench.plot import check_matplotlib
    from uncast.bench.serve import base_url
    from uncast.bench.serve_plot import plot_loads
    from uncast.bench.serve_report import figures

    for path in (args.csv, args.plot):
        check_writable(path)
    if args.csv is not None and args.plot is not None and args.csv.resolve() == args.plot.resolve():
        raise ValueError(f"csv and plot are both {str(args.csv)!r}: give two files")
    if args.plot is not None:
        check_matplotlib()
    loads, url, api_key = _loads(args), base_url(args.url), args.api_key or os.environ.get("UNCAST_API_KEY") or None
    endpoint = _endpoint(args, url, api_key)
    server = _server(endpoint, args.model)
    endpoint = replace(endpoint, model=server.model)
    results: list[LoadResult] = []
    found: list[Figures] = []
    source = Source(args, endpoint)
    if not args.json:
        how = "" if endpoint.stream else ", not streamed"
        print(f"{endpoint.model} on {server.owner} at {url}, {args.endpoint}{how}: {source.what}")
    try:
        for index, load in enumerate(loads):
            result = _measure(endpoint, source.prompts(index), load, args)
            results.append(result)
            found.append(figures(result))
            if not args.json:
                _print(found[-1], result)
    finally:  # an interrupt, or a server that is gone by the next load, takes nothing of the loads before
        facts = {"url": url, "server": server.owner, "model": endpoint.model, "endpoint": args.endpoint}
        if args.json and found:
            print(json.dumps({**facts, "loads": [one.json() for one in found]}, ensure_ascii=False))
        if args.csv is not None and found:
            write_csv(args.csv, [{**facts, **one.row()} for one in found])
        if args.plot is not None and any(result.complete for result in results):
            plot_loads(results, args.plot, title=f"{endpoint.model} on {server.owner}: {source.what}")
    return 0 if all(result.good for result in results) else 1


def _loads(args: argparse.Namespace) -> list[Load]:
    from uncast.bench.serve import Closed, Open

    if args.request_rate is not None:
        return [Open(rate) for rate in args.request_rate]
    return [Closed(count) for count in args.concurrency or [8]]


def _endpoint(args: argparse.Namespace, url: str, api_key: str | None) -> Endpoint:
    """Without a model's name yet."""
    from uncast.bench.serve import Endpoint

    if not 0 <= args.temperature < math.inf:
        raise ValueError(f"temperature is {args.temperature}: a number of at least 0 is needed")
    extra = {"temperature": args.temperature} | ({"ignore_eos": True} if args.ignore_eos else {})
    return Endpoint(
        url, "", chat=args.endpoint == "chat", stream=not args.no_stream, api_key=api_key, timeout_s=args.timeout,
        extra=extra | _extra_body(args.extra_body),
    )  # fmt: skip


def _server(endpoint: Endpoint, model: str | None) -> Server:
    """Who answers; a server that does not list its models needs the name of one."""
    from uncast.bench.serve import Server, ServerError, discover

    try:
        found = discover(endpoint.url, endpoint.api_key, timeout_s=min(30.0, endpoint.timeout_s))
    except ServerError:
        if model is None:
            raise
        found = Server(model, "an unknown server")
    return replace(found, model=model or found.model)


def _extra_body(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        fields = json.loads(text, parse_constant=int)  # NaN and Infinity are no JSON
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise ValueError(f"extra_body is {text!r:.200}: a JSON object is needed")
    if taken := [name for name in TAKEN if name in fields]:
        raise ValueError(f"extra_body has {taken[0]}: this command sets it, and counts by it")
    return fields


class Source:
    """The prompts of each load.

    Attributes:
        what: in words.
    """

    def __init__(self, args: argparse.Namespace, endpoint: Endpoint) -> None:
        """Raises `ValueError` for options that contradict each other, and for a file that holds no prompts."""
        from uncast.bench.serve_prompts import file_prompts

        numbers = (("num_prompts", 1), ("input_len", 1), ("output_len", 1), ("vocab_size", 1), ("warmup", 0))
        for name, least in numbers:
            value = getattr(args, name)
            if value is not None and value < least:
                raise ValueError(f"{name} is {value}: at least {least} is needed")
        if args.input_len is not None and args.prompts is not None:
            raise ValueError("input_len is of random prompts: give it or --prompts, not both")
        if args.vocab_size is not None and (args.prompts is not None or endpoint.chat):
            raise ValueError("vocab_size is of random token ids: they are for --endpoint completions without --prompts")
        self._args, self._endpoint, self._words = args, endpoint, 0
        self._file = None if args.prompts is None else file_prompts(args.prompts, args.output_len, chat=endpoint.chat)
        self._count = args.num_prompts or (NUM_PROMPTS if self._file is None else len(self._file))
        self._length = args.input_len or INPUT_LEN
        about = f"{'about ' if endpoint.chat else ''}{self._length} random tokens" if self._file is None else "a file"
        self.what = (
            f"{self._count} prompts of {about}, {'' if args.ignore_eos else 'up to '}{args.output_len} new tokens"
        )

    def prompts(self, index: int) -> list[Prompt]:
        """Of the load at a place; random ones are never the same, those of a file repeat."""
        from uncast.bench import serve_prompts as make

        args, seed = self._args, 1000 * self._args.seed + index
        if self._file is not None:
            return [self._file[place % len(self._file)] for place in range(self._count)]
        if not self._endpoint.chat:
            size = args.vocab_size or VOCAB_SIZE
            return make.token_prompts(self._count, self._length, args.output_len, vocab_size=size, seed=seed)
        self._words = self._words or make.words_for(self._endpoint, self._length)
        return make.word_prompts(self._count, self._words, args.output_len, seed=seed)


def _measure(endpoint: Endpoint, prompts: list[Prompt], load: Load, args: argparse.Namespace) -> LoadResult:
    """With a bar on stderr where that is a terminal."""
    from uncast.bench.serve import Closed, measure
    from uncast.bench.serve_prompts import warm_up_of

    places = load.concurrency if isinstance(load, Closed) else MOST_WARM_UPS
    warm_up = warm_up_of(prompts, min(MOST_WARM_UPS, places) if args.warmup is None else args.warmup)
    console = Console(file=sys.stderr)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total} requests"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(str(load), total=len(prompts))
        return measure(
            endpoint, prompts, load, warm_up=warm_up, seed=args.seed,
            progress=lambda done: bar.update(task, completed=done),
        )  # fmt: skip


def _print(found: Figures, result: LoadResult) -> None:
    """The figures of a load for a reader."""
    print(
        f"\n{found.load}: {found.complete} of {found.requests + found.not_sent} requests complete in {found.seconds:.2f} s, "
        f"{found.requests_per_s:.2f} requests/s, {found.output_tokens_per_s:.1f} output tokens/s"
    )
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("ms", "mean", "p50", "p90", "p99"):
        table.add_column(title, justify="left" if title == "ms" else "right")
    for title, name in ROWS:
        part = getattr(found, name)
        cells = ["-" if math.isnan(v) else f"{v:.2f}" for v in (part.mean, part.p50, part.p90, part.p99)]
        table.add_row(title, *cells)
    Console(highlight=False, width=120).print(table)
    of_prompt = "" if found.prompt_tokens is None else f" after {found.prompt_tokens:,} of prompt"
    print(f"tokens: {found.output_tokens:,} new{of_prompt}, counted by {found.tokens_from}")
    for note in found.notes():
        print(f"note: {note}")
    for kind, count in found.failures.items():
        detail = next(answer.detail for answer in result.answers if answer.failure == kind)
        print(f"failed: {count} x {kind}" + (f" ({detail})" if detail else ""))
    if found.not_sent:
        print(f"not sent: {found.not_sent}, after too many failures in a row")
