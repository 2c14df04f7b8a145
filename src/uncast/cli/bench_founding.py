"""`uncast bench founding`: the founding case at full size on this GPU."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from uncast.bench.founding import HEADS, LAYERS, LIVE_TOKENS, POOL_TOKENS, founding_step
from uncast.cli.csv_file import check_writable, write_csv


def run(argv: Sequence[str]) -> int:
    """Runs the command; see `uncast bench founding --help`."""
    parser = argparse.ArgumentParser(
        prog="uncast bench founding",
        description=f"{LAYERS} layers, {HEADS} heads, {LIVE_TOKENS:,} live tokens in an FP8 pool of {POOL_TOKENS:,}.",
        epilog="example: uncast bench founding --csv founding.csv",
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the rows to FILE")
    args = parser.parse_args(argv)
    check_writable(args.csv)
    if not torch.cuda.is_available():
        raise ValueError("bench founding needs a CUDA GPU and this machine has none")
    results = founding_step()
    table = Table("what", "ms/step", "cache bytes moved", "error", box=None, padding=(0, 2, 0, 0))
    for r in results:
        table.add_row(r.what, f"{r.ms_per_step:.3f}", f"{r.bytes_per_step:,}", f"{r.error:.1e}")
    Console(highlight=False, width=120).print(table)
    if args.csv is not None:
        write_csv(args.csv, [r.row() for r in results])
    return 0
