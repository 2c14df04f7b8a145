"""The option `--kv-scales` of the commands that run a model."""

from __future__ import annotations

from pathlib import Path

from uncast.checkpoints.kv_scales import LAYOUT, read_kv_scales
from uncast.models.config import ModelConfig

HELP = "scales of layout fp8_e4m3, a file of `uncast kv-error --write-scales` (default: the checkpoint's own, else 1)"


def scales_of(path: Path | None, kv_cache_dtype: str, config: ModelConfig) -> list[tuple[float, float]] | None:
    """The file's scales; None without a file.

    Raises:
        ValueError: the cache has another layout than the one with scales outside its rows, or the file is not for this model.
    """
    if path is None:
        return None
    if kv_cache_dtype != LAYOUT:
        raise ValueError(f"kv_scales are for --kv-cache-dtype {LAYOUT}, and the cache's layout is {kv_cache_dtype}")
    return read_kv_scales(path, config)
