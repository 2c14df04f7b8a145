"""`uncast bench decode`: tokens per second at a context, with a small pool, a 64x larger pool, and a pool cast beside them."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from uncast.bench.decode import PAGE_SIZE, WARM_UP_STEPS, DecodeCase, DecodeResult, bench_decode
from uncast.checkpoints.bundled import model_folder
from uncast.checkpoints.load import load_config
from uncast.cli.generate import load_with_bar
from uncast.latent.layouts import LAYOUT_NAMES

POOL_FACTOR = 64


def build_parser() -> argparse.ArgumentParser:
    """Options of the command."""
    parser = argparse.ArgumentParser(
        prog="uncast bench decode",
        description=f"Single-stream decoding with a pool of the context's size, one {POOL_FACTOR}x larger, and a pool cast.",
        epilog="example: uncast bench decode --context 1024 --csv benchmarks/results/decode-cpu.csv",
    )
    parser.add_argument("--model", default="tiny-glm", help="a Hugging Face folder or tiny-glm (default)")
    parser.add_argument("--kv-cache-dtype", default="fp8_ds_mla", choices=LAYOUT_NAMES, help="default: fp8_ds_mla")
    parser.add_argument("--attention-backend", default="torch_cpu", help="default: torch_cpu")
    parser.add_argument("--context", type=int, default=1024, help="cached tokens when timing starts (default: 1024)")
    parser.add_argument("--rounds", type=int, default=50, help="timed steps of each configuration (default: 50)")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the rows to FILE")
    return parser


def run(argv: Sequence[str]) -> int:
    """Runs the command; see `uncast bench decode --help`."""
    args = build_parser().parse_args(argv)
    if args.context < 1 or args.rounds < 1:
        raise ValueError(f"context is {args.context} and rounds {args.rounds}: both must be at least 1")
    folder = model_folder(args.model)
    config = load_config(folder)
    if args.context + args.rounds > config.max_position_embeddings:
        raise ValueError(
            f"context {args.context} and {args.rounds} rounds exceed the model's {config.max_position_embeddings}"
        )
    small = -(-(args.context + args.rounds + WARM_UP_STEPS) // PAGE_SIZE) * PAGE_SIZE
    cases = [
        DecodeCase(args.kv_cache_dtype, args.attention_backend, small),
        DecodeCase(args.kv_cache_dtype, args.attention_backend, small * POOL_FACTOR),
    ]
    if args.kv_cache_dtype.startswith("fp8"):
        cast = f"pool_cast:{args.attention_backend}"
        cases += [
            DecodeCase(args.kv_cache_dtype, cast, small),
            DecodeCase(args.kv_cache_dtype, cast, small * POOL_FACTOR),
        ]
    model = load_with_bar(folder, config.num_layers)
    results = list(bench_decode(model, folder.name, cases, context=args.context, rounds=args.rounds))
    print_table(results)
    if args.csv is not None:
        write_csv(args.csv, [result.row() for result in results])
    return 0


def print_table(results: list[DecodeResult]) -> None:
    """The results for a reader."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in (
        "backend",
        "cache",
        "pool tokens",
        "tokens/s",
        "ms/step",
        "x first",
        "read B/step",
        "written B/step",
        "needed B/step",
    ):
        table.add_column(title, justify="left" if title in ("backend", "cache") else "right")
    for r in results:
        table.add_row(
            r.attention_backend, r.kv_cache_dtype, f"{r.pool_tokens:,}", f"{r.tokens_per_s:.1f}", f"{r.ms_per_step:.2f}",
            f"{r.ratio_to_first:.2f}", f"{r.kv_bytes_read_per_step:,}", f"{r.kv_bytes_written_per_step:,}",
            f"{r.kv_bytes_needed_per_step:,}",
        )  # fmt: skip
    Console(highlight=False, width=140).print(table)


def write_csv(path: Path, rows: list[dict[str, object]]) -> None:
    """Writes rows with a header.

    Raises:
        ValueError: the file cannot be written.
    """
    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from None
