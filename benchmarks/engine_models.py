"""What the benchmarks of SGLang and vLLM share: layer shapes of published models, random weights, the columns of the table."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable
from typing import Any

COLUMNS = (
    "engine", "engine_version", "attention_backend", "kv_cache_dtype", "model", "batch", "context", "ms_per_token",
    "max_logit_diff", "gpu", "versions", "gpu_ms_per_token", "note",
)  # fmt: skip
FORCED_TOKEN = 17
LOGIT_STEP = 8
"""The decode step, counted per batch size, whose logits are kept."""
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "glm": (
        "GLM-4.7-Flash",
        {
            "architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite", "hidden_size": 2048,
            "num_attention_heads": 20, "num_key_value_heads": 20, "q_lora_rank": 768, "kv_lora_rank": 512,
            "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "intermediate_size": 10240,
            "moe_intermediate_size": 1536, "n_routed_experts": 64, "num_experts_per_tok": 4, "n_shared_experts": 1,
            "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
            "routed_scaling_factor": 1.8, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "vocab_size": 154880,
            "max_position_embeddings": 202752, "rope_theta": 1e6, "rms_norm_eps": 1e-5, "moe_layer_freq": 1,
        },
    ),
    "v2lite": (
        "DeepSeek-V2-Lite",
        {
            "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 2048,
            "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None, "kv_lora_rank": 512,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "intermediate_size": 10944,
            "moe_intermediate_size": 1408, "n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2,
            "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": False,
            "routed_scaling_factor": 1.0, "topk_method": "greedy", "scoring_func": "softmax", "vocab_size": 102400,
            "max_position_embeddings": 163840, "rope_theta": 10000, "rms_norm_eps": 1e-6, "moe_layer_freq": 1,
            "rope_scaling": {
                "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707,
                "original_max_position_embeddings": 4096,
            },
        },
    ),
}  # fmt: skip
"""Layer shapes of published models, for `config.json`."""


def weight_std(name: str, fan_in: int) -> float:
    """Standard deviation of a random matrix by its name, so that logits tell how well attention was computed.

    Queries are three times as large as what else reads a normalised row: the scores of attention deviate by about 2. (The
    loaders' own dummy weights, 1e-3, make attention uniform.) The embedding is 1 and each layer adds about 0.3 of attention and
    of its MLP. Routed experts add a tenth of that: where a rounding picks another expert, that would otherwise be most of the
    difference (with weights of 0.03 throughout, 0.14 to 0.25 between two backends with a BF16 cache).
    """
    if "embed_tokens" in name:
        return 1.0
    if "o_proj" in name:
        return 1 / math.sqrt(fan_in)
    if "down_proj" in name:
        return 0.25 / math.sqrt(fan_in)
    if "w2_weight" in name:
        return 0.025 / math.sqrt(fan_in)
    return 0.09 if "q_b_proj" in name or name.endswith("q_proj.weight") else 0.03


def draw_weights(model: Any, *_: Any, **__: Any) -> None:
    """Matrices uniform with `weight_std`, seeded by name; norms 1, biases 0; scales stay as they are."""
    import torch

    for name, param in model.state_dict().items():
        if not torch.is_floating_point(param) or "scale" in name.rsplit(".", 1)[-1]:
            continue
        if param.dim() < 2:
            param.data.fill_(1.0 if "norm" in name else 0.0)
            continue
        width = weight_std(name, param.shape[-1]) * math.sqrt(3)
        generator = torch.Generator(param.device).manual_seed(zlib.crc32(name.encode()))
        param.data.uniform_(-width, width, generator=generator)


def replace(owner: Any, name: str, value: Any) -> None:
    """Sets an attribute that an engine reads.

    Raises:
        AttributeError: `owner` has none of this name, so nothing would read it (the engine would draw weights of its own).
    """
    if not hasattr(owner, name):
        raise AttributeError(f"{owner!r} has no {name}: this version of the engine draws its weights elsewhere")
    setattr(owner, name, value)


def busy_ms(spans: Iterable[tuple[float, float]]) -> float:
    """Milliseconds covered by the union of spans (start, end) in microseconds."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total / 1e3


def kernel_ms(profile: Any, steps: int) -> float:
    """Milliseconds a step in which any kernel or copy ran, of a finished `torch.profiler.profile` over `steps` steps."""
    on_gpu = (e for e in profile.events() if e.device_type.name == "CUDA" and not e.is_user_annotation)
    return busy_ms((e.time_range.start, e.time_range.end) for e in on_gpu) / steps


def model_config(model: str, layers: int) -> dict[str, Any]:
    """A `config.json` of `MODELS[model]`'s shapes with this many layers."""
    return MODELS[model][1] | {
        "torch_dtype": "bfloat16", "num_hidden_layers": layers, "hidden_act": "silu", "attention_bias": False,
        "tie_word_embeddings": False, "num_nextn_predict_layers": 0, "bos_token_id": 0, "eos_token_id": 1,
        "pad_token_id": 1, "mlp_layer_types": ["dense"] + ["sparse"] * (layers - 1),
    }  # fmt: skip


def model_name(model: str, layers: int) -> str:
    """The name in the table."""
    return f"{MODELS[model][0]} shapes, {layers} layers, random weights"


def prompts(model: str, batch: int, tokens: int) -> list[list[int]]:
    """Random token ids, the same in every run."""
    import torch

    generator = torch.Generator().manual_seed(batch)
    ids: list[list[int]] = torch.randint(
        2, MODELS[model][1]["vocab_size"], (batch, tokens), generator=generator
    ).tolist()
    return ids
