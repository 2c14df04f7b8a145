"""The file of `uncast kv-error --write-scales`: one scale per layer and part for the cache layout `fp8_e4m3`.

    {"format": "uncast-kv-scales/1", "model_type": "glm4_moe_lite",
     "model": {"name": "GLM-4.7-Flash", "hidden_size": 2048, "num_heads": 20, "kv_lora_rank": 512, "qk_rope_head_dim": 64},
     "layers": [{"ckv_scale": 0.03125, "kpe_scale": 0.5}, ...]}

A stored number stands for itself times its scale. A checkpoint's own `k_scale` is one number for both parts of a layer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from uncast.checkpoints.files import CheckpointError, read_json
from uncast.models.config import ModelConfig
from uncast.models.decoder import MLADecoder
from uncast.models.fields import Fields

FORMAT = "uncast-kv-scales/1"
LAYOUT = "fp8_e4m3"
"""The one layout whose scales lie outside its rows."""
SMALLEST = 2.0**-126
"""Kernels divide by a scale in float32, where a smaller one is 0 or has few bits."""
_SIZES = ("hidden_size", "num_heads", "kv_lora_rank", "qk_rope_head_dim")


def write_kv_scales(path: Path, config: ModelConfig, name: str, scales: Sequence[tuple[float, float]]) -> None:
    """Writes (ckv_scale, kpe_scale) of every layer of the model that is called `name`.

    Raises:
        CheckpointError: the file cannot be written.
    """
    layers = [{"ckv_scale": ckv, "kpe_scale": kpe} for ckv, kpe in scales]
    model = {"name": name, **{size: getattr(config, size) for size in _SIZES}}
    text = json.dumps({"format": FORMAT, "model_type": config.model_type, "model": model, "layers": layers}, indent=1)
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"cannot write {str(path)!r}: {error.strerror or error}") from None


def read_kv_scales(
    path: Path, config: ModelConfig, name: str, note: Callable[[str], None] = lambda sentence: None
) -> list[tuple[float, float]]:
    """(ckv_scale, kpe_scale) of every layer.

    Args:
        name: what the model is called here.
        note: told in a sentence if the file was written for a model of another name, or does not say for which.

    Raises:
        CheckpointError: not such a file, of another model, or with a scale that is not a positive finite number.
    """
    raw = read_json(path)
    fields = Fields(raw, str(path), CheckpointError)
    fields.require("format", FORMAT)
    if "format" not in fields:
        raise CheckpointError(f"{path} has no format: a file of `uncast kv-error --write-scales` is needed")
    model_type = fields.text("model_type")
    layers = raw.get("layers")
    if not isinstance(layers, list) or not all(isinstance(layer, dict) for layer in layers):
        raise CheckpointError(f"{path} has no list of layers")
    if model_type != config.model_type or len(layers) != config.num_layers:
        raise CheckpointError(
            f"{path} has scales for a {model_type} of {len(layers)} layers: this model is a {config.model_type} of "
            f"{config.num_layers}"
        )
    written_for = _check_model(raw.get("model"), path, config)
    scales = []
    for index, layer in enumerate(layers):
        one = Fields(layer, f"{path}, layer {index},", CheckpointError)
        scales.append((one.number("ckv_scale", low=SMALLEST), one.number("kpe_scale", low=SMALLEST)))
    if written_for is None:
        note(f"{path} does not say which model it was measured on; its type and its number of layers fit this one")
    elif written_for != name:
        note(f"the scales of {path} were measured on {written_for!r}, and this model is called {name!r}")
    return scales


def _check_model(model: object, path: Path, config: ModelConfig) -> str | None:
    """The name of the model that a file was written for; None if it does not say, as files of older versions do not.

    Raises:
        CheckpointError: that model has other sizes than this one.
    """
    if model is None:
        return None
    if not isinstance(model, dict):
        raise CheckpointError(f"{path} has a model that is not an object")
    fields = Fields(model, f"{path}, model,", CheckpointError)
    for size in _SIZES:
        theirs, ours = fields.integer(size, low=0), getattr(config, size)
        if theirs != ours:
            raise CheckpointError(f"{path} has scales for a model with {size} {theirs}: this model has {ours}")
    return fields.text("name")


def apply_kv_scales(model: MLADecoder, scales: Sequence[tuple[float, float]]) -> None:
    """Makes these the scales of the model's layers, in place of the checkpoint's own."""
    for layer, (ckv, kpe) in zip(model.layers, scales, strict=True):
        layer.attention.ckv_scale, layer.attention.kpe_scale = ckv, kpe
