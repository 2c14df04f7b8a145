"""The file of `uncast kv-error --write-scales`: one scale per layer and part for the cache layout `fp8_e4m3`.

    {"format": "uncast-kv-scales/1", "model_type": "glm4_moe_lite", "layers": [{"ckv_scale": 0.03125, "kpe_scale": 0.5}, ...]}

A stored number stands for itself times its scale. A checkpoint's own `k_scale` is one number for both parts of a layer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from uncast.checkpoints.files import CheckpointError, read_json
from uncast.models.config import ModelConfig
from uncast.models.decoder import MLADecoder
from uncast.models.fields import Fields

FORMAT = "uncast-kv-scales/1"
LAYOUT = "fp8_e4m3"
"""The one layout whose scales lie outside its rows."""


def write_kv_scales(path: Path, config: ModelConfig, scales: Sequence[tuple[float, float]]) -> None:
    """Writes (ckv_scale, kpe_scale) of every layer.

    Raises:
        CheckpointError: the file cannot be written.
    """
    layers = [{"ckv_scale": ckv, "kpe_scale": kpe} for ckv, kpe in scales]
    text = json.dumps({"format": FORMAT, "model_type": config.model_type, "layers": layers}, indent=1)
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"cannot write {str(path)!r}: {error.strerror or error}") from None


def read_kv_scales(path: Path, config: ModelConfig) -> list[tuple[float, float]]:
    """(ckv_scale, kpe_scale) of every layer.

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
    scales = []
    for index, layer in enumerate(layers):
        one = Fields(layer, f"{path}, layer {index},", CheckpointError)
        scales.append((one.number("ckv_scale"), one.number("kpe_scale")))
    return scales


def apply_kv_scales(model: MLADecoder, scales: Sequence[tuple[float, float]]) -> None:
    """Makes these the scales of the model's layers, in place of the checkpoint's own."""
    for layer, (ckv, kpe) in zip(model.layers, scales, strict=True):
        layer.attention.ckv_scale, layer.attention.kpe_scale = ckv, kpe
