"""`uncast bench text`: bits per byte of a text for each layout of the latent cache."""

from __future__ import annotations

import argparse
import codecs
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from uncast.bench.environment import device_name, versions
from uncast.bench.text import bits_per_byte
from uncast.checkpoints.bundled import BUNDLED, model_folder
from uncast.checkpoints.load import load_config
from uncast.cli.csv_file import check_writable, write_csv
from uncast.cli.generate import load_with_bar
from uncast.engine.runner import ModelRunner
from uncast.engine.tokenizer import Tokenizer
from uncast.latent.layouts import LAYOUT_NAMES

MAX_BYTES = 16 << 20
PIECE = 1 << 20
HELD_OUT = BUNDLED["tiny-glm"] / "heldout.txt"


def build_parser() -> argparse.ArgumentParser:
    """Options of the command."""
    parser = argparse.ArgumentParser(
        prog="uncast bench text",
        description="Bits per byte of a text under a model, for each layout of the latent cache.",
        epilog="example: uncast bench text --layouts bf16 fp8_ds_mla fp8_e4m3",
    )
    parser.add_argument("--model", default="tiny-glm", help="a Hugging Face folder or tiny-glm (default)")
    parser.add_argument("--file", type=Path, default=HELD_OUT, help="UTF-8 text (default: tiny-glm's held-out text)")
    parser.add_argument("--layouts", nargs="+", default=["bf16", "fp8_ds_mla", "fp8_e4m3"], choices=LAYOUT_NAMES)
    parser.add_argument("--context", type=int, default=1024, help="tokens of a window (default: 1024)")
    parser.add_argument(
        "--max-bytes",
        type=int,
        default=MAX_BYTES,
        metavar="N",
        help=f"read no more than the first N bytes of the text (default: {MAX_BYTES >> 20} MiB)",
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the rows to FILE")
    return parser


def run(argv: Sequence[str]) -> int:
    """Runs the command; see `uncast bench text --help`."""
    args = build_parser().parse_args(argv)
    check_writable(args.csv)
    text = read_text(args.file, args.max_bytes)
    folder = model_folder(args.model)
    config, tokenizer = load_config(folder), Tokenizer(folder)
    if not 16 <= args.context <= config.max_position_embeddings:
        raise ValueError(f"context is {args.context}: allowed are 16 to {config.max_position_embeddings}")
    model = load_with_bar(folder, config)
    rows: list[dict[str, object]] = []
    table = Table("cache", "bits per byte", box=None, padding=(0, 2, 0, 0))
    for layout in args.layouts:
        runner = ModelRunner(model, kv_layout=layout, num_pages=-(-args.context // 64))
        bits = bits_per_byte(runner, tokenizer, text, context=args.context)
        table.add_row(layout, f"{bits:.4f}")
        rows.append(
            {
                "model": folder.name,
                "kv_cache_dtype": layout,
                "bits_per_byte": round(bits, 5),
                "bytes": len(text.encode()),
                "context": args.context,
                "device": device_name(),
                "versions": versions(),
            }
        )
    Console(highlight=False).print(table)
    if args.csv is not None:
        write_csv(args.csv, rows)
    return 0


def read_text(path: Path, max_bytes: int) -> str:
    """The first `max_bytes` bytes of a UTF-8 file, without a character that the limit cuts; no byte beyond is read.

    Raises:
        ValueError: the file cannot be read, holds no text there, or is not UTF-8.
    """
    if max_bytes < 1:
        raise ValueError(f"--max-bytes is {max_bytes}: it must be at least 1")
    try:
        with path.open("rb") as file:
            raw = b""
            while len(raw) < max_bytes and (piece := file.read(min(PIECE, max_bytes - len(raw)))):
                raw += piece
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:  # a NUL in the name
        raise ValueError(f"cannot read {str(path)!r}: {error}") from None
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(raw, final=len(raw) < max_bytes)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: byte {error.start} is wrong") from None
    if not text:
        raise ValueError(
            f"{path} is empty" if not raw else f"the first {max_bytes} bytes of {path} hold no whole character"
        )
    return text
