"""`ModelConfig`: everything the decoder needs, read from a Hugging Face `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from uncast.models.rope import RopeConfig

SUPPORTED = ("glm4_moe_lite",)
_MLP_KINDS = {"dense": "dense", "sparse": "sparse", "moe": "sparse"}


class ConfigError(ValueError):
    """A model configuration that is incomplete, inconsistent or not supported; one sentence."""


@dataclass(frozen=True)
class MoEConfig:
    """Routed experts of one model.

    Attributes:
        scoring: "sigmoid" (a correction bias chooses, the unbiased score weighs) or "softmax".
        num_groups, top_groups: experts are chosen from the best `top_groups` of `num_groups` groups.
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
        stop_token_ids: ids that end generation.
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

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], *, latent_norm_eps: float | None = None) -> ModelConfig:
        """Reads the fields of a `config.json`.

        Args:
            raw: the parsed file.
            latent_norm_eps: overrides the epsilon of the q_a/kv_a norms (1e-6 for parity with transformers).

        Raises:
            ConfigError: unknown architecture, a missing field, or a value outside what the decoder supports.
        """
        reader = _Reader(raw)
        model_type = reader.text("model_type")
        if model_type not in SUPPORTED:
            raise ConfigError(f"model_type {model_type!r} is not supported: use one of {', '.join(SUPPORTED)}")
        reader.require("hidden_act", "silu")
        reader.require("attention_bias", False)
        num_layers = reader.integer("num_hidden_layers")
        nope, rope_dim = reader.integer("qk_nope_head_dim"), reader.integer("qk_rope_head_dim")
        kinds = _mlp_kinds(reader, num_layers)
        rope = RopeConfig.from_hf(raw, rope_dim, interleaved=bool(raw.get("rope_interleave", True)))
        eps = reader.number("rms_norm_eps")
        return cls(
            model_type=model_type,
            vocab_size=reader.integer("vocab_size"),
            hidden_size=reader.integer("hidden_size"),
            num_layers=num_layers,
            num_heads=reader.integer("num_attention_heads"),
            q_lora_rank=reader.integer("q_lora_rank") if raw.get("q_lora_rank") is not None else None,
            kv_lora_rank=reader.integer("kv_lora_rank"),
            qk_nope_head_dim=nope,
            qk_rope_head_dim=rope_dim,
            v_head_dim=reader.integer("v_head_dim"),
            intermediate_size=reader.integer("intermediate_size"),
            mlp_kinds=kinds,
            moe=_moe(reader) if "sparse" in kinds else None,
            rms_norm_eps=eps,
            latent_norm_eps=eps if latent_norm_eps is None else latent_norm_eps,
            rope=rope,
            sm_scale=(nope + rope_dim) ** -0.5 * rope.softmax_factor,
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            max_position_embeddings=reader.integer("max_position_embeddings"),
            stop_token_ids=_token_ids(raw.get("eos_token_id")),
        )


class _Reader:
    """Typed access to a parsed config, with one-sentence errors."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw

    def _get(self, name: str) -> Any:
        if self.raw.get(name) is None:
            raise ConfigError(f"config.json has no {name}")
        return self.raw[name]

    def integer(self, name: str) -> int:
        value = self._get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"config.json has {name} = {value!r}: a positive integer is needed")
        return value

    def number(self, name: str) -> float:
        value = self._get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ConfigError(f"config.json has {name} = {value!r}: a positive number is needed")
        return float(value)

    def text(self, name: str) -> str:
        value = self._get(name)
        if not isinstance(value, str):
            raise ConfigError(f"config.json has {name} = {value!r}: a string is needed")
        return value

    def require(self, name: str, allowed: object) -> None:
        value = self.raw.get(name, allowed)
        if value != allowed:
            raise ConfigError(f"config.json has {name} = {value!r}: only {allowed!r} is supported")


def _mlp_kinds(reader: _Reader, num_layers: int) -> tuple[str, ...]:
    listed = reader.raw.get("mlp_layer_types")
    if listed is not None:
        if len(listed) < num_layers or any(kind not in _MLP_KINDS for kind in listed):
            raise ConfigError(f"config.json has mlp_layer_types {listed!r}: {num_layers} of dense or sparse are needed")
        return tuple(_MLP_KINDS[kind] for kind in listed[:num_layers])
    first = reader.raw.get("first_k_dense_replace", 1)
    return tuple("dense" if layer < first else "sparse" for layer in range(num_layers))


def _moe(reader: _Reader) -> MoEConfig:
    raw = reader.raw
    moe = MoEConfig(
        num_experts=reader.integer("n_routed_experts"),
        top_k=reader.integer("num_experts_per_tok"),
        num_shared=reader.integer("n_shared_experts") if raw.get("n_shared_experts") else 0,
        intermediate_size=reader.integer("moe_intermediate_size"),
        scoring="sigmoid",
        num_groups=raw.get("n_group") or 1,
        top_groups=raw.get("topk_group") or 1,
        normalize=bool(raw.get("norm_topk_prob", True)),
        scale=float(raw.get("routed_scaling_factor", 1.0)),
    )
    if moe.top_k > moe.num_experts:
        raise ConfigError(f"config.json chooses {moe.top_k} of {moe.num_experts} experts")
    if moe.num_experts % moe.num_groups or not 1 <= moe.top_groups <= moe.num_groups:
        raise ConfigError(
            f"config.json has n_group {moe.num_groups} and topk_group {moe.top_groups} for {moe.num_experts} experts"
        )
    return moe


def _token_ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) for token in ids):
        raise ConfigError(f"config.json has eos_token_id = {value!r}: an integer or a list of them is needed")
    return tuple(ids)
