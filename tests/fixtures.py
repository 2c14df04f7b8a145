"""Tiny random checkpoints of each model family, written by transformers' own classes (true head dims, 4 layers)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch


def yarn(theta: float, factor: float, mscale: float, beta_fast: float = 32, beta_slow: float = 1) -> dict[str, Any]:
    """Yarn's parameters as transformers 5 writes them."""
    return {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": factor,
        "mscale": mscale,
        "mscale_all_dim": mscale,
        "original_max_position_embeddings": 4096,
        "beta_fast": beta_fast,
        "beta_slow": beta_slow,
    }


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
DEEPSEEK: dict[str, Any] = {
    **COMMON,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "first_k_dense_replace": 1,
    "rope_parameters": yarn(10000.0, 40.0, 1.0),
    "max_position_embeddings": 163840,
}
INDEXER: dict[str, Any] = {"index_topk": 16, "index_n_heads": 32, "index_head_dim": 128}
"""Fewer than 16 heads make whole scores exactly 0, and the choice among them depends on the kernel."""
GLM_DSA: dict[str, Any] = {
    **COMMON,
    **INDEXER,
    "model_type": "glm_moe_dsa",
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "first_k_dense_replace": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
V2 = {**DEEPSEEK, "model_type": "deepseek_v2", "n_shared_experts": 2, "rope_parameters": yarn(10000.0, 40.0, 0.707)}
V3 = {**DEEPSEEK, "model_type": "deepseek_v3", "n_group": 4, "topk_group": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "glm4_moe_lite": {
        **COMMON,
        "model_type": "glm4_moe_lite",
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    "deepseek_v2": {
        **V2,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 16.0,
    },
    "deepseek_v2_lite": {**V2, "q_lora_rank": None, "topk_method": "greedy", "routed_scaling_factor": 1.0},
    "deepseek_v3": V3,
    "kimi_k2": {
        **V3,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.827,
        "rope_parameters": yarn(50000.0, 32.0, 1.0, 1.0, 1.0),
        "max_position_embeddings": 131072,
    },
    "minicpm3": {
        "model_type": "minicpm3",
        "vocab_size": 512,
        "num_hidden_layers": 4,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 128,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "dim_model_base": 64,
    },
    "glm_moe_dsa": GLM_DSA,
    "glm_moe_dsa_52": {
        **GLM_DSA,
        "index_topk_freq": 2,
        "index_skip_topk_offset": 3,
        "head_dim": 192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 8e6},
    },
    "deepseek_v32": {**V3, "model_type": "deepseek_v32", **INDEXER},
}
UNREGISTERED = ("kimi_k2",)
"""Families that transformers has no name for: built as a `deepseek_v3`, `model_type` rewritten in config.json."""


def build_hf(
    family: str, folder: Path, *, seed: int = 0, max_shard_size: str = "5GB", sharpen: float = 1.0, **overrides: Any
) -> Any:
    """A random model of `family`, saved to `folder` by transformers; returns the model (float32, eval).

    `sharpen` multiplies attention and router weights: at 1 attention is nearly uniform, and an error in its scale hardly shows.
    """
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
            elif "self_attn" in name or "mlp.gate.weight" in name:
                tensor.mul_(sharpen)
    model.eval().save_pretrained(folder, max_shard_size=max_shard_size)
    if family in UNREGISTERED:
        path = folder / "config.json"
        written = json.loads(path.read_text())
        path.write_text(json.dumps({**written, "model_type": family}))
    return model
