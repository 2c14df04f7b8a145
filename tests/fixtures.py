"""Tiny random checkpoints of each model family, written by transformers' own classes (true head dims, 4 layers)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "q_lora_rank": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "glm4_moe_lite": {
        **COMMON,
        "model_type": "glm4_moe_lite",
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
}


def build_hf(family: str, folder: Path, *, seed: int = 0, **overrides: Any) -> Any:
    """A random model of `family`, saved to `folder` by transformers; returns the model (float32, eval)."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    params = {**FAMILIES[family], **overrides}
    config = AutoConfig.for_model(params.pop("model_type"), **params)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "e_score_correction_bias" in name:
                tensor.normal_(0, 0.05)
            elif "norm" in name:
                tensor.uniform_(0.5, 1.5)
    model.eval().save_pretrained(folder)
    return model
