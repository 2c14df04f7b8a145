"""Regenerates README's tables from the recorded results: `python -m uncast.bench.readme [README.md]`.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`; NAME is a function of this module.
"""

from __future__ import annotations

import argparse
import csv
import math
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

ACCURATE_PEERS = ("flashinfer fa2 bf16", "flashinfer fa3 bf16", "flashinfer fa3 fp8", "flashmla bf16")
"""Contenders of `uncast bench attention` whose error is that of BF16 arithmetic."""

RESULTS = Path("benchmarks/results")
_BLOCK = re.compile(r"(<!-- table: ([a-z0-9_]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def read(name: str, folder: Path = RESULTS) -> list[dict[str, str]]:
    """Rows of a recorded CSV.

    Raises:
        FileNotFoundError: it was never recorded.
    """
    with (folder / name).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; columns after the first are right-aligned."""
    lines = ["| " + " | ".join(head) + " |", "|---" + "|---:" * (len(head) - 1) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def decode_cpu() -> str:
    """Single-stream decoding against the pool's size."""
    head = (
        "backend",
        "pool tokens",
        "tokens/s",
        "cache bytes read / step",
        "copies written / step",
        "bytes needed / step",
    )
    rows = [
        (
            f"`{r['attention_backend']}`",
            f"{int(r['pool_tokens']):,}",
            r["tokens_per_s"],
            f"{int(r['kv_bytes_read_per_step']):,}",
            f"{int(r['kv_bytes_written_per_step']):,}",
            f"{int(r['kv_bytes_needed_per_step']):,}",
        )
        for r in read("decode-cpu.csv")
    ]
    return markdown(head, rows)


def text_cpu() -> str:
    """Bits per byte of the held-out text for each layout."""
    rows = [(f"`{r['kv_cache_dtype']}`", f"{float(r['bits_per_byte']):.4f}") for r in read("text-cpu.csv")]
    return markdown(("latent cache", "bits per byte"), rows)


def attention_h200() -> str:
    """Native kernels beside the fastest peer of BF16 accuracy, and FlashMLA's FP8 mode, which is not of that accuracy."""
    rows = read("attention-h200.csv")
    lines, ratios, scaled, slow = [], [], [], []
    for shape in dict.fromkeys((r["batch"], r["context"], r["heads"]) for r in rows):
        by_name = {r["backend"]: r for r in rows if (r["batch"], r["context"], r["heads"]) == shape}
        native, other = by_name["native"], by_name["native fp8_ds_mla"]
        peers = [
            by_name[name] for name in ACCURATE_PEERS if name in by_name and not math.isnan(float(by_name[name]["us"]))
        ]
        peer, lossy = min(peers, key=lambda r: float(r["us"])), by_name["flashmla fp8 (lossy q)"]
        ratios.append(float(native["us"]) / float(peer["us"]))
        scaled.append(float(other["us"]) / float(peer["us"]))
        slow.append(float(by_name["flashinfer fa3 fp8"]["us"]) / float(native["us"]))
        lines.append(
            (
                ", ".join(f"{int(value):,}" for value in shape),
                f"{float(native['us']):.1f} ({_share(native)})",
                f"{float(other['us']):.1f} ({_share(other)})",
                f"{float(peer['us']):.1f} ({peer['backend']})",
                f"{ratios[-1]:.2f}",
                f"{float(lossy['us']):.1f} (error {float(lossy['error']):.0e})",
            )
        )
    worst = max(float(r["error"]) for r in rows if r["backend"].startswith("native"))
    mean, scaled_mean = (math.exp(sum(map(math.log, values)) / len(values)) for values in (ratios, scaled))
    head = (
        "batch, context, heads",
        "native `fp8_e4m3`",
        "native `fp8_ds_mla`",
        "fastest BF16-accurate peer",
        "ratio",
        "FlashMLA FP8",
    )
    return markdown(head, lines) + (
        "\nMicroseconds (share of the floor); these peers read a BF16 cache, twice the bytes. Ratio = native "
        f"`fp8_e4m3` / peer, geometric mean {mean:.2f}; `fp8_ds_mla` / peer {scaled_mean:.2f}, above 1 in "
        f"{sum(r > 1 for r in scaled)} rows of {len(scaled)}. FlashInfer's own FP8 path takes {min(slow):.1f} to "
        f"{max(slow):.1f} times native `fp8_e4m3`'s time. Largest native error {worst:.1e}. "
        f"{rows[0]['gpu']}, {rows[0]['versions']}.\n"
    )


def _share(row: dict[str, str]) -> str:
    return f"{100 * float(row['floor_us']) / float(row['us']):.0f} %"


def founding_h200() -> str:
    """The founding step at full size."""
    rows = [
        (r["what"], r["ms_per_step"], f"{int(r['bytes_per_step']) / 1e9:.2f} GB") for r in read("founding-h200.csv")
    ]
    return markdown(("78 layers, 64 heads, 4,096 live tokens, pool of 495,552", "ms a step", "cache bytes moved"), rows)


TABLES: dict[str, Callable[[], str]] = {
    "attention_h200": attention_h200,
    "decode_cpu": decode_cpu,
    "founding_h200": founding_h200,
    "text_cpu": text_cpu,
}


def render(text: str) -> str:
    """`text` with every marked table replaced.

    Raises:
        KeyError: a marker names no table.
    """
    return _BLOCK.sub(lambda match: match[1] + TABLES[match[2]]() + match[3], text)


def main(argv: Sequence[str]) -> int:
    """Rewrites the files named on the command line (default README.md) in place."""
    parser = argparse.ArgumentParser(
        prog="python -m uncast.bench.readme", description="Rewrites README's tables from benchmarks/results."
    )
    parser.add_argument("files", nargs="*", type=Path, default=[Path("README.md")])
    try:
        for path in parser.parse_args(argv).files:
            path.write_text(render(path.read_text(encoding="utf-8")), encoding="utf-8")
    except KeyError as error:
        parser.error(f"table {error.args[0]!r} is not known: allowed are {', '.join(TABLES)}")
    except OSError as error:
        parser.error(f"cannot use {error.filename}: {error.strerror} (run it in the project's root)")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
