"""`uncast bench attention`: native kernels beside every installed peer, one run, with errors and floors."""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from uncast.bench.attention import REFERENCE_SHAPES, AttentionResult, Shape, bench_attention
from uncast.bench.contenders import installed
from uncast.bench.plot import check_matplotlib, plot_attention
from uncast.cache_folder import keep_kernels
from uncast.cli.csv_file import check_writable, write_csv


def build_parser() -> argparse.ArgumentParser:
    """Options of the command."""
    parser = argparse.ArgumentParser(
        prog="uncast bench attention",
        description="Decode attention on this GPU: microseconds, error against float64 and share of the floor.",
        epilog="example: uncast bench attention --shape 32,8192,16 --shape 1,131072,64 --csv attention.csv",
    )
    parser.add_argument(
        "--shape", action="append", type=_shape, metavar="B,N,H", help="batch, context, heads; may be repeated"
    )
    parser.add_argument(
        "--only", action="append", metavar="TEXT", help="contenders whose name contains TEXT; may be repeated"
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the rows to FILE")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="draw time over floor of every contender (matplotlib)"
    )
    parser.add_argument(
        "--from-csv", type=Path, metavar="FILE", help="show or draw a recorded run instead of measuring"
    )
    return parser


def run(argv: Sequence[str]) -> int:
    """Runs the command; see `uncast bench attention --help`."""
    args = build_parser().parse_args(argv)
    for path in (args.csv, args.plot):
        check_writable(path)
    if args.plot is not None:
        if args.plot.suffix.lower() != ".png":
            raise ValueError(f"plot is {str(args.plot)!r}: its name must end in .png")
        check_matplotlib()
    if args.from_csv:
        results = read_results(args.from_csv, args.shape, args.only)
    else:
        results = measure(args.shape or list(REFERENCE_SHAPES), args.only)
    if args.csv is not None:
        write_csv(args.csv, [result.row() for result in results])
    if args.plot is not None:
        plot_attention(results, args.plot)
    return 0


def measure(shapes: list[Shape], only: list[str] | None) -> list[AttentionResult]:
    """Runs the benchmark and prints each row as it comes.

    Raises:
        ValueError: no GPU, or no contender is left.
    """
    if not torch.cuda.is_available():
        raise ValueError("bench attention needs a CUDA GPU and this machine has none: --from-csv shows a recorded run")
    contenders = {name: entry for name, entry in installed().items() if not only or any(text in name for text in only)}
    if not contenders:
        raise ValueError(f"no installed contender matches {only}: {', '.join(installed())}")
    keep_kernels()
    console, results = Console(highlight=False, width=120), []
    for result in bench_attention(shapes, contenders, report=lambda line: print(f"refused: {line}", file=sys.stderr)):
        results.append(result)
        console.print(_line(result))
    console.print(_table(results))
    return results


def read_results(path: Path, shapes: list[Shape] | None = None, only: list[str] | None = None) -> list[AttentionResult]:
    """Rows of a recorded run, of `shapes` and of contenders whose name contains one of `only`; prints their table.

    Raises:
        ValueError: the file cannot be read, is not such a CSV or holds no such rows.
    """
    try:
        with path.open(encoding="utf-8") as file:
            results = [_parse(row) for row in csv.DictReader(file)]
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except (KeyError, TypeError, ValueError, csv.Error):
        raise ValueError(f"{str(path)!r} is not a CSV of uncast bench attention") from None
    if not results:
        raise ValueError(f"{str(path)!r} holds no results")
    names = dict.fromkeys(r.backend for r in results)
    results = [r for r in results if not only or any(text in r.backend for text in only)]
    if not results:
        raise ValueError(f"no contender in {str(path)!r} matches {only}: {', '.join(names)}")
    known = dict.fromkeys(f"{r.batch},{r.context},{r.heads}" for r in results)
    results = [r for r in results if not shapes or Shape(r.batch, r.context, r.heads) in shapes]
    if not results:
        raise ValueError(f"{str(path)!r} holds none of these shapes, it has {' '.join(known)}")
    Console(highlight=False, width=120).print(_table(results))
    return results


def _parse(row: dict[str, Any]) -> AttentionResult:
    if float(row["us"]) <= 0:
        raise ValueError("a time is positive, or NaN where the backend refused")
    return AttentionResult(
        int(row["batch"]), int(row["context"]), int(row["heads"]), row["layout"], row["backend"],
        float(row["us"]), float(row["error"]), float(row["floor_us"]), row["gpu"], row["versions"],
    )  # fmt: skip


def _shape(text: str) -> Shape:
    parts = text.split(",")
    if len(parts) != 3 or not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not B,N,H: three positive integers, as in 32,8192,64")
    if int(parts[2]) > 128:
        raise argparse.ArgumentTypeError(f"{text!r} has {parts[2]} heads: at most 128")
    return Shape(*(int(part) for part in parts))


def _line(r: AttentionResult) -> str:
    share = f"{100 * r.floor_us / r.us:5.1f} %" if r.us == r.us else "    -  "
    return f"{r.batch:4d} {r.context:7d} {r.heads:4d}  {r.backend:24s} {r.us:9.2f} us  {share} of floor  error {r.error:.2e}"


def _table(results: list[AttentionResult]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("batch", "context", "heads", "backend", "us", "floor us", "% of floor", "error"):
        table.add_column(title, justify="left" if title == "backend" else "right")
    for r in results:
        table.add_row(
            str(r.batch), str(r.context), str(r.heads), r.backend, f"{r.us:.1f}", f"{r.floor_us:.1f}",
            f"{100 * r.floor_us / r.us:.0f}", f"{r.error:.1e}",
        )  # fmt: skip
    return table
