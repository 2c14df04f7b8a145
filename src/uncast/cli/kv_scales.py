"""The option `--kv-scales` of the commands that run a model."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from uncast.checkpoints.bundled import BUNDLED
from uncast.checkpoints.kv_scales import LAYOUT, read_kv_scales
from uncast.models.config import ModelConfig

HELP = (
    f"scales of layout {LAYOUT}, which it implies: a file of `uncast kv-error --write-scales` (default: the checkpoint's own, "
    "else 1)"
)


def model_name(model: str, folder: Path) -> str:
    """What a model is called: as it was asked for if it is bundled, else as its folder."""
    return model if model in BUNDLED else folder.resolve().name


def take_kv_scales(args: argparse.Namespace, folder: Path, config: ModelConfig) -> list[tuple[float, float]] | None:
    """The scales of `args.kv_scales`; None without a file. With one, `args.kv_cache_dtype` is no longer "auto".

    What is worth knowing is said on stderr, by the first of several processes.

    Raises:
        ValueError: the cache has another layout than the one with scales outside its rows, or the file is not for this model.
    """
    if args.kv_scales is None:
        return None
    if args.kv_cache_dtype not in ("auto", LAYOUT):
        raise ValueError(
            f"kv_scales are for --kv-cache-dtype {LAYOUT}, and the cache's layout is {args.kv_cache_dtype}"
        )
    notes: list[str] = []
    scales = read_kv_scales(args.kv_scales, config, model_name(args.model, folder), notes.append)
    if args.kv_cache_dtype == "auto":
        args.kv_cache_dtype = LAYOUT
        notes.insert(0, f"--kv-scales makes the cache's layout {LAYOUT}")
    if os.environ.get("RANK", "") in ("", "0"):
        for sentence in notes:
            print(f"uncast: note: {sentence}", file=sys.stderr)
    return scales
