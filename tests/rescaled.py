"""tiny-glm rewritten so that it computes the same and stores other numbers: what tells cache layouts apart.

Rope channels of the key times 200, of the query by 200; the latent by 128, kv_b_proj times 128: but for rounding the same.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from uncast.checkpoints.bundled import BUNDLED
from uncast.numerics import e4m3

SOURCE = BUNDLED["tiny-glm"]
ROPE_CHANNELS = 16
"""Channels of the first 8 rope pairs: the fastest, whose content a prompt moves least from token to token."""


def plain_weights() -> dict[str, torch.Tensor]:
    """The bundled model's tensors in float32, FP8 blocks multiplied out."""
    stored = load_file(SOURCE / "model.safetensors")
    plain = {}
    for name, tensor in stored.items():
        if name.endswith("_scale_inv"):
            continue
        if tensor.dtype == torch.float8_e4m3fn:
            rows, columns = tensor.shape
            scale = stored[name + "_scale_inv"].float().repeat_interleave(128, 0).repeat_interleave(128, 1)
            plain[name] = e4m3.decode(tensor.view(torch.uint8)) * scale[:rows, :columns]
        else:
            plain[name] = tensor.float()
    return plain


def build_rescaled(folder: Path, *, rope: float = 200.0, latent: float = 128.0) -> Path:
    """Writes the model to `folder`; factors of 1 give tiny-glm itself in float32."""
    config = json.loads((SOURCE / "config.json").read_text())
    del config["quantization_config"]
    nope, rank, heads = config["qk_nope_head_dim"], config["kv_lora_rank"], config["num_attention_heads"]
    weights = plain_weights()
    for index in range(config["num_hidden_layers"]):
        at = f"model.layers.{index}.self_attn."
        query = weights[at + "q_b_proj.weight"].view(heads, -1, config["q_lora_rank"])
        query[:, nope : nope + ROPE_CHANNELS] /= rope
        weights[at + "kv_a_proj_with_mqa.weight"][rank : rank + ROPE_CHANNELS] *= rope
        weights[at + "kv_a_layernorm.weight"] /= latent
        weights[at + "kv_b_proj.weight"] *= latent
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SOURCE / name, folder / name)
    return folder
