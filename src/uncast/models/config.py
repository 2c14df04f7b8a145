"""`ModelConfig`: everything the decoder needs, read from a Hugging Face `config.json`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from uncast.models.fields import ConfigError, Fields
from uncast.models.indexer_config import IndexerConfig
from uncast.models.rope import RopeConfig

__all__ = ["SUPPORTED", "ConfigError", "IndexerConfig", "MoEConfig", "ModelConfig"]

SUPPORTED = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "kimi_k2", "minicpm3")
_MLP_KINDS = {"dense": "dense", "sparse": "sparse", "moe": "sparse"}
_DENSE = ("minicpm3",)
_SOFTMAX_ROUTED = ("deepseek_v2",)
_ROUTERS = {"greedy": "softmax", "group_limited_greedy": "softmax", "noaux_tc": "sigmoid"}
"""`topk_method` and the scoring each is defined for."""
_MAX_LAYERS, _MAX_EXPERTS, _MAX_SCALE = 10_000, 100_000, 1e6


@dataclass(frozen=True)
class MoEConfig:
    """Routed experts of one model.

    Attributes:
        scoring: "sigmoid" (a correction bias chooses, the unbiased score weighs) or "softmax" (no bias).
        num_groups, top_groups: experts are chosen from the best `top_groups` of `num_groups` groups; 1 and 1 is no choice.
        normalize: weights are divided by their sum before `scale`.
    """

    num_experts: int
    top_k: int
    num_shared: int
    intermediate_size: int
    scoring: str
    num_groups: int
    top_groups: int
    normalize: bool
    scale: float


@dataclass(frozen=True)
class ModelConfig:
    """Shapes in the field's names; see `from_hf`.

    Attributes:
        latent_norm_eps: epsilon of `q_a_layernorm` and `kv_a_layernorm`. vLLM, SGLang and llama.cpp use `rms_norm_eps`;
            transformers uses 1e-6 whatever the config says.
        mlp_kinds: "dense" or "sparse" for each layer.
        max_position_embeddings: tokens of context; with longrope at most its original length (see `RopeConfig`).
        stop_token_ids: ids that end generation.
        embed_scale, residual_scale, logit_scale: MiniCPM's factors on the embedding, on each residual branch
            (scale_depth / sqrt(layers)) and on the hidden state before the LM head (dim_model_base / hidden_size).
        indexer: of sparse attention; None attends to every token.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    mlp_kinds: tuple[str, ...]
    moe: MoEConfig | None
    rms_norm_eps: float
    latent_norm_eps: float
    rope: RopeConfig
    sm_scale: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    stop_token_ids: tuple[int, ...]
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    indexer: IndexerConfig | None = None

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], *, latent_norm_eps: float | None = None) -> ModelConfig:
        """Reads the fields of a `config.json`, as transformers 5 writes them or as the models' own repositories did before.

        Args:
            raw: the parsed file.
            latent_norm_eps: overrides the epsilon of the q_a/kv_a norms (1e-6 for parity with transformers).

        Raises:
            ConfigError: unknown architecture, a missing field, or a value outside what the decoder supports.
        """
        reader = Fields(raw, "config.json")
        model_type = reader.text("model_type")
        if model_type not in SUPPORTED:
            raise ConfigError(f"model_type {model_type!r} is not supported: use one of {', '.join(SUPPORTED)}")
        reader.require("hidden_act", "silu")
        for name in ("attention_bias", "mlp_bias"):
            reader.require(name, False)
        num_layers = reader.integer("num_hidden_layers", high=_MAX_LAYERS)
        nope, rope_dim = reader.integer("qk_nope_head_dim"), reader.integer("qk_rope_head_dim")
        kinds = _mlp_kinds(reader, model_type, num_layers)
        if rope_dim % 2:
            raise reader.fault("qk_rope_head_dim", "an even number is needed")
        rope = RopeConfig.from_hf(raw, rope_dim, interleaved=_interleaved(reader, model_type))
        eps, scales = reader.number("rms_norm_eps", high=1.0), _scales(reader) if model_type == "minicpm3" else {}
        vocab_size = reader.integer("vocab_size")
        return cls(
            model_type=model_type,
            vocab_size=vocab_size,
            hidden_size=reader.integer("hidden_size"),
            num_layers=num_layers,
            num_heads=reader.integer("num_attention_heads"),
            q_lora_rank=reader.integer("q_lora_rank") if "q_lora_rank" in reader else None,
            kv_lora_rank=reader.integer("kv_lora_rank"),
            qk_nope_head_dim=nope,
            qk_rope_head_dim=rope_dim,
            v_head_dim=_v_head_dim(reader, model_type),
            intermediate_size=reader.integer("intermediate_size"),
            mlp_kinds=kinds,
            moe=_moe(reader, model_type) if "sparse" in kinds else None,
            rms_norm_eps=eps,
            latent_norm_eps=eps if latent_norm_eps is None else latent_norm_eps,
            rope=rope,
            sm_scale=(nope + rope_dim) ** -0.5 * rope.softmax_factor,
            tie_word_embeddings=reader.boolean("tie_word_embeddings", model_type == "minicpm3"),
            max_position_embeddings=min(reader.integer("max_position_embeddings"), rope.max_position or 2**31 - 1),
            stop_token_ids=reader.integers("eos_token_id", low=0, high=vocab_size - 1),
            indexer=IndexerConfig.from_hf(reader, model_type, num_layers, rope_dim),
            **scales,
        )


def _interleaved(reader: Fields, model_type: str) -> bool:
    return reader.boolean("rope_interleave", model_type != "minicpm3")


def _v_head_dim(reader: Fields, model_type: str) -> int:
    """MiniCPM3's own config leaves it out: hidden_size / heads."""
    if model_type == "minicpm3" and "v_head_dim" not in reader:
        return reader.integer("hidden_size") // reader.integer("num_attention_heads")
    return reader.integer("v_head_dim")


def _scales(reader: Fields) -> dict[str, float]:
    return {
        "embed_scale": reader.number("scale_emb", high=_MAX_SCALE),
        "residual_scale": reader.number("scale_depth", high=_MAX_SCALE)
        / math.sqrt(reader.integer("num_hidden_layers")),
        "logit_scale": reader.integer("dim_model_base") / reader.integer("hidden_size"),
    }


def _mlp_kinds(reader: Fields, model_type: str, num_layers: int) -> tuple[str, ...]:
    # Read, and so checked, even where the list decides.
    every = reader.integer("moe_layer_freq", 1)
    first = reader.integer("first_k_dense_replace", low=0) if "first_k_dense_replace" in reader else None
    if "mlp_layer_types" in reader:
        return tuple(_MLP_KINDS[kind] for kind in reader.choices("mlp_layer_types", num_layers, tuple(_MLP_KINDS)))
    if model_type in _DENSE:
        return ("dense",) * num_layers
    if first is None:
        raise ConfigError("config.json has no first_k_dense_replace")
    return tuple("dense" if layer < first or layer % every else "sparse" for layer in range(num_layers))


def _moe(reader: Fields, model_type: str) -> MoEConfig:
    scoring, grouped = _router(reader, model_type)
    normalize = reader.boolean("norm_topk_prob", scoring == "sigmoid")
    if scoring == "softmax" and normalize:
        raise ConfigError(
            "config.json has norm_topk_prob = True with softmax routing: only False is supported, as transformers ignores "
            "it there and DeepSeek's own code then drops routed_scaling_factor"
        )
    groups, top_groups = (max(1, reader.integer(name, 1, low=0)) for name in ("n_group", "topk_group"))
    moe = MoEConfig(
        num_experts=reader.integer("n_routed_experts", high=_MAX_EXPERTS),
        top_k=reader.integer("num_experts_per_tok"),
        num_shared=reader.integer("n_shared_experts", 0, low=0),
        intermediate_size=reader.integer("moe_intermediate_size"),
        scoring=scoring,
        num_groups=groups if grouped else 1,
        top_groups=top_groups if grouped else 1,
        normalize=normalize,
        scale=reader.number("routed_scaling_factor", 1.0, high=_MAX_SCALE),
    )
    _check_moe(moe)
    return moe


def _router(reader: Fields, model_type: str) -> tuple[str, bool]:
    """Scoring, and whether groups limit the choice."""
    softmax = model_type in _SOFTMAX_ROUTED
    method = reader.text("topk_method", "greedy" if softmax else "noaux_tc")
    if method not in _ROUTERS:
        raise ConfigError(f"config.json has topk_method = {method!r}: {', '.join(_ROUTERS)} are supported")
    scoring = reader.text("scoring_func", _ROUTERS[method])
    if scoring != _ROUTERS[method] or (scoring == "softmax") != softmax:
        raise ConfigError(
            f"config.json has topk_method {method!r} with scoring_func {scoring!r}, which {model_type} does not have: "
            f"{'softmax with greedy or group_limited_greedy' if softmax else 'sigmoid with noaux_tc'} is supported"
        )
    return scoring, method != "greedy"


def _check_moe(moe: MoEConfig) -> None:
    if moe.top_k > moe.num_experts:
        raise ConfigError(f"config.json chooses {moe.top_k} of {moe.num_experts} experts")
    size = moe.num_experts // moe.num_groups
    if moe.num_experts % moe.num_groups or not 1 <= moe.top_groups <= moe.num_groups:
        raise ConfigError(
            f"config.json has n_group {moe.num_groups} and topk_group {moe.top_groups} for {moe.num_experts} experts"
        )
    if moe.num_groups > 1 and (size < 2 or moe.top_k > size * moe.top_groups):
        raise ConfigError(
            f"config.json chooses {moe.top_k} experts from {moe.top_groups} groups of {size}: at least 2 a group, and as many "
            "as are chosen, are needed"
        )
