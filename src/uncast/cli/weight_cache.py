"""`--weight-cache-gib`, shared by commands that load a model."""

from __future__ import annotations

import argparse

from uncast.quant.packed import DEFAULT_CACHE_BYTES

_MOST_GIB = 1e6


def add_weight_cache(parser: argparse.ArgumentParser) -> None:
    """Adds the option."""
    parser.add_argument(
        "--weight-cache-gib",
        type=float,
        default=DEFAULT_CACHE_BYTES / 2**30,
        metavar="GIB",
        help="with packed weights (NVFP4, FP8) on a CPU: dequantised matrices kept at most (default: %(default)g)",
    )


def weight_cache_bytes(args: argparse.Namespace) -> int:
    """The bound in bytes.

    Raises:
        ValueError: it is negative, or no number.
    """
    gib = float(args.weight_cache_gib)
    if not 0.0 <= gib <= _MOST_GIB:
        raise ValueError(f"weight_cache_gib is {gib:g}: allowed is 0 to {_MOST_GIB:g}")
    return int(gib * 2**30)
