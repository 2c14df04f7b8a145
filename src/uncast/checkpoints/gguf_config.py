"""A GGUF file's metadata as the fields of a Hugging Face `config.json`, for `ModelConfig.from_hf` to check.

Architectures: `glm-dsa` (GLM-5 and on), `deepseek32` (V3.2), `deepseek2` (V2, V3, R1, GLM-4.7-Flash, Kimi K2). `block_count`
includes multi-token prediction layers. `yarn_log_multiplier` is 0.1 * mscale_all_dim, which these models' mscale equals.
Without `attention.indexer.types` a glm-dsa file is GLM-5 (every layer has an indexer) below a context of 2^20 tokens, and
GLM-5.2 (layers 0, 1 and every fourth from 2 on) from there, as in llama.cpp.
"""

from __future__ import annotations

from typing import Any

from uncast.checkpoints.files import CheckpointError, DamagedCheckpoint
from uncast.checkpoints.gguf_file import GgufFile

ARCHITECTURES = ("deepseek2", "deepseek32", "glm-dsa")
GLM_52_CONTEXT = 1 << 20
_SOFTMAX, _SIGMOID = 1, 2
_END_TOKENS = ("eos_token_id", "eot_token_id", "eom_token_id")


def hf_config(file: GgufFile) -> dict[str, Any]:
    """The fields.

    Raises:
        CheckpointError: another architecture. DamagedCheckpoint: a field is missing.
    """
    arch = file.value("general.architecture")
    if arch not in ARCHITECTURES:
        raise CheckpointError(f"{file.path} is of architecture {arch!r}: {', '.join(ARCHITECTURES)} are supported")
    fields = _Metadata(file, arch)
    layers = fields.need("block_count") - fields.get("nextn_predict_layers", 0)
    rope = fields.need("rope.dimension_count")
    sigmoid = fields.get("expert_gating_func", _SOFTMAX if arch == "deepseek2" else _SIGMOID) == _SIGMOID
    groups = fields.get("expert_group_count", 1)
    config = {
        "model_type": _model_type(arch, sigmoid),
        "hidden_act": "silu",
        "vocab_size": _rows(file, "token_embd.weight"),
        "hidden_size": fields.need("embedding_length"),
        "num_hidden_layers": layers,
        "intermediate_size": fields.need("feed_forward_length"),
        "num_attention_heads": fields.need("attention.head_count"),
        "q_lora_rank": fields.get("attention.q_lora_rank"),
        "kv_lora_rank": fields.need("attention.kv_lora_rank"),
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": fields.first("attention.key_length_mla", "attention.key_length") - rope,
        "v_head_dim": fields.first("attention.value_length_mla", "attention.value_length"),
        "rms_norm_eps": fields.need("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": fields.need("context_length"),
        "rope_parameters": _rope(fields),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "first_k_dense_replace": fields.get("leading_dense_block_count", 0),
        "n_routed_experts": fields.need("expert_count"),
        "num_experts_per_tok": fields.need("expert_used_count"),
        "n_shared_experts": fields.get("expert_shared_count", 0),
        "moe_intermediate_size": fields.need("expert_feed_forward_length"),
        "routed_scaling_factor": fields.get("expert_weights_scale", 1.0) or 1.0,
        "norm_topk_prob": fields.get("expert_weights_norm", sigmoid),
        "n_group": groups,
        "topk_group": fields.get("expert_group_used_count", 1),
        "eos_token_id": [t for name in _END_TOKENS if (t := file.value(f"tokenizer.ggml.{name}")) is not None],
    }
    if not sigmoid:
        config["topk_method"] = "group_limited_greedy" if groups > 1 else "greedy"
    if arch != "deepseek2":
        config |= _indexer(fields, arch, layers)
    return config


class _Metadata:
    """Fields of one architecture."""

    def __init__(self, file: GgufFile, arch: str) -> None:
        self.file, self.arch = file, arch

    def get(self, name: str, default: Any = None) -> Any:
        value = self.file.value(f"{self.arch}.{name}")
        return default if value is None else value

    def need(self, name: str) -> Any:
        return self.first(name)

    def first(self, *names: str) -> Any:
        """The first of several fields that is there."""
        for name in names:
            if (value := self.get(name)) is not None:
                return value
        raise DamagedCheckpoint(f"{self.file.path} has no metadata field {self.arch}.{names[-1]}")


def _model_type(arch: str, sigmoid: bool) -> str:
    if arch == "deepseek2":
        return "deepseek_v3" if sigmoid else "deepseek_v2"
    return {"deepseek32": "deepseek_v32", "glm-dsa": "glm_moe_dsa"}[arch]


def _rows(file: GgufFile, name: str) -> int:
    if name not in file.tensors:
        raise DamagedCheckpoint(f"{file.path} has no tensor {name}")
    return file.tensors[name].shape[0]


def _rope(fields: _Metadata) -> dict[str, Any]:
    theta, kind = fields.need("rope.freq_base"), fields.get("rope.scaling.type", "none")
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if kind != "yarn":
        raise CheckpointError(
            f"{fields.file.path} has {fields.arch}.rope.scaling.type {kind!r}: none and yarn are supported"
        )
    mscale = fields.get("rope.scaling.yarn_log_multiplier", 0.0) / 0.1
    return {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": fields.need("rope.scaling.factor"),
        "original_max_position_embeddings": fields.need("rope.scaling.original_context_length"),
        "mscale": mscale,
        "mscale_all_dim": mscale,
        "beta_fast": fields.get("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": fields.get("rope.scaling.yarn_beta_slow", 1.0),
    }


def _indexer(fields: _Metadata, arch: str, layers: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "index_n_heads": fields.need("attention.indexer.head_count"),
        "index_head_dim": fields.need("attention.indexer.key_length"),
        "index_topk": fields.need("attention.indexer.top_k"),
    }
    kinds = fields.get("attention.indexer.types")
    if kinds is not None:
        found["indexer_types"] = ["full" if kind in (True, "full") else "shared" for kind in kinds][:layers]
    elif arch == "glm-dsa" and fields.need("context_length") >= GLM_52_CONTEXT:
        found |= {"index_topk_freq": 4, "index_skip_topk_offset": 3}
    return found
