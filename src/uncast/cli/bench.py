"""`uncast bench WHAT`: measurements, as a table and as CSV."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from uncast.cli.main import UsageError, WorkError

BENCHES = {
    "attention": ("uncast.cli.bench_attention", "decode attention on a GPU, beside every installed peer"),
    "founding": (
        "uncast.cli.bench_founding",
        "the founding step: 78 layers over a large FP8 pool, native and with a pool cast",
    ),
    "decode": ("uncast.cli.bench_decode", "single-stream decoding against the size of the KV pool"),
    "serve": ("uncast.cli.bench_serve", "any OpenAI endpoint under load: latencies, throughput, percentiles"),
    "text": ("uncast.cli.bench_text", "bits per byte of a text, for each layout of the latent cache"),
}
EXAMPLES = """examples:
  uncast bench decode --context 1024                                on a CPU, with the bundled model
  uncast bench text --layouts bf16 fp8_ds_mla fp8_e4m3              on a CPU, with the bundled text
  uncast bench serve --url http://127.0.0.1:8000 --concurrency 1 8  with uncast serve, SGLang or vLLM at that address
  uncast bench attention --shape 32,8192,16 --csv attention.csv     on a GPU
  uncast bench founding --csv founding.csv                          on a GPU

uncast bench WHAT --help lists the options of one."""


def run(argv: Sequence[str]) -> int:
    """Runs one of `BENCHES`; see `uncast bench --help`."""
    parser = argparse.ArgumentParser(
        prog="uncast bench", formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Measure; each prints a table and takes --csv FILE.", epilog=EXAMPLES,
    )  # fmt: skip
    benches = parser.add_subparsers(dest="bench", metavar="WHAT")
    for name, (_, help_text) in BENCHES.items():
        benches.add_parser(name, help=help_text, add_help=False)
    known, rest = parser.parse_known_args(argv)
    if known.bench is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        code: int = importlib.import_module(BENCHES[known.bench][0]).run(rest)
    except (UsageError, WorkError):
        raise
    except ValueError as error:
        raise UsageError(str(error)) from error
    except _failures() as error:
        raise UsageError(str(error).partition("\n")[0]) from error
    return code


def _failures() -> tuple[type[Exception], ...]:
    """What a measurement can die of by its input rather than by a mistake of ours; imported only where one died."""
    import torch

    from uncast.engine.runner import RunnerError
    from uncast.latent.pool import PoolError

    return RunnerError, PoolError, torch.OutOfMemoryError
