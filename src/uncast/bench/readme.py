"""Regenerates README's tables from the recorded results: `python -m uncast.bench.readme [README.md]`.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`; NAME is a function of this module.
"""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

RESULTS = Path("benchmarks/results")
_BLOCK = re.compile(r"(<!-- table: ([a-z_]+) -->\n).*?(<!-- end -->)", re.DOTALL)


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


TABLES: dict[str, Callable[[], str]] = {"decode_cpu": decode_cpu, "text_cpu": text_cpu}


def render(text: str) -> str:
    """`text` with every marked table replaced.

    Raises:
        KeyError: a marker names no table.
    """
    return _BLOCK.sub(lambda match: match[1] + TABLES[match[2]]() + match[3], text)


def main(argv: Sequence[str]) -> int:
    """Rewrites the files named on the command line (default README.md) in place."""
    for name in argv or ["README.md"]:
        path = Path(name)
        path.write_text(render(path.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
