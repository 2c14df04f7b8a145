"""`uncast bench decode`: tokens per second at a context, with a small pool, a 64x larger pool, and a pool cast beside them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from uncast.attention import MLAPagedAttention
from uncast.bench.decode import PAGE_SIZE, WARM_UP_STEPS, DecodeCase, DecodeResult, bench_decode, resolve_backend
from uncast.checkpoints.bundled import model_folder
from uncast.checkpoints.load import load_config
from uncast.cli.csv_file import check_writable, write_csv
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
    if "_cast:" in args.attention_backend:
        raise ValueError(
            f"attention backend {args.attention_backend!r} casts already: give the backend to set a pool cast beside, such as "
            f"{args.attention_backend.rpartition(':')[2]}"
        )
    check_writable(args.csv)
    MLAPagedAttention(
        args.attention_backend
    )  # an unknown name, or one whose library is missing, before a model is loaded
    folder = model_folder(args.model)
    config = load_config(folder)
    steps = args.rounds + WARM_UP_STEPS
    if args.context + steps > config.max_position_embeddings:
        raise ValueError(
            f"context {args.context}, {args.rounds} rounds and {WARM_UP_STEPS} steps of warm-up exceed the model's "
            f"{config.max_position_embeddings} positions"
        )
    model = load_with_bar(folder, config)
    backend = resolve_backend(args.attention_backend, model, args.kv_cache_dtype)
    small = -(-(args.context + steps) // PAGE_SIZE) * PAGE_SIZE
    backends = [backend, f"pool_cast:{backend}"] if args.kv_cache_dtype.startswith("fp8") else [backend]
    cases = [DecodeCase(args.kv_cache_dtype, name, pool) for name in backends for pool in (small, small * POOL_FACTOR)]
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
