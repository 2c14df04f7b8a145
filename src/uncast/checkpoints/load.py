"""A Hugging Face folder to an `MLADecoder`, layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from uncast.checkpoints.files import CheckpointError, read_json
from uncast.checkpoints.generation import read_generation_config
from uncast.checkpoints.source import SafetensorsSource
from uncast.models.config import ConfigError, ModelConfig
from uncast.models.decoder import Layer, MLADecoder, MLAWeights
from uncast.models.indexer import IndexerWeights
from uncast.models.layers import MLP, MoE

Progress = Callable[[int, int], None]
"""Called with (layers loaded, layers in all)."""


def load_config(folder: Path, *, latent_norm_eps: float | None = None) -> ModelConfig:
    """The model configuration of a folder; its end tokens are those of config.json and of generation_config.json.

    Raises:
        CheckpointError: in one sentence that names the folder.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder with a model in it")
    try:
        config = ModelConfig.from_hf(read_json(folder / "config.json"), latent_norm_eps=latent_norm_eps)
    except ConfigError as error:
        raise CheckpointError(f"{folder}: {error}") from None
    more = read_generation_config(folder, config.vocab_size).stop_token_ids
    return replace(config, stop_token_ids=tuple(dict.fromkeys((*config.stop_token_ids, *more))))


def load_model(
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    latent_norm_eps: float | None = None,
    progress: Progress | None = None,
) -> MLADecoder:
    """Loads a checkpoint folder (`config.json` and safetensors).

    Args:
        dtype: of the weights in memory; FP8 blocks are multiplied out.
        latent_norm_eps: see `ModelConfig.from_hf`.

    Raises:
        CheckpointError: in one sentence that names the file or tensor.
    """
    config = load_config(folder, latent_norm_eps=latent_norm_eps)
    loader = _Loader(config, SafetensorsSource(folder, read_json(folder / "config.json")), dtype, device)
    embed = loader.get("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
    layers = []
    for index in range(config.num_layers):
        layers.append(loader.layer(index))
        if progress is not None:
            progress(index + 1, config.num_layers)
    final_norm = loader.get("model.norm.weight", config.hidden_size)
    lm_head = (
        embed if config.tie_word_embeddings else loader.get("lm_head.weight", config.vocab_size, config.hidden_size)
    )
    return MLADecoder(config, embed, layers, final_norm, lm_head)


class _Loader:
    def __init__(
        self, config: ModelConfig, source: SafetensorsSource, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.config, self.source, self.dtype, self.device = config, source, dtype, device

    def get(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.source.get(name, shape, dtype or self.dtype).to(self.device)

    def layer(self, index: int) -> Layer:
        config, prefix = self.config, f"model.layers.{index}."
        mlp = self.mlp(prefix + "mlp.", config.intermediate_size) if config.mlp_kinds[index] == "dense" else None
        return Layer(
            input_norm=self.get(prefix + "input_layernorm.weight", config.hidden_size),
            attention=self.attention(prefix + "self_attn.", index),
            post_norm=self.get(prefix + "post_attention_layernorm.weight", config.hidden_size),
            mlp=mlp if mlp is not None else self.moe(prefix + "mlp."),
        )

    def attention(self, prefix: str, index: int) -> MLAWeights:
        c, hidden = self.config, self.config.hidden_size
        query_rows = c.num_heads * (c.qk_nope_head_dim + c.qk_rope_head_dim)
        q_a = q_a_norm = None
        if c.q_lora_rank is None:
            q_b = self.get(prefix + "q_proj.weight", query_rows, hidden)
        else:
            q_a = self.get(prefix + "q_a_proj.weight", c.q_lora_rank, hidden)
            q_a_norm = self.get(prefix + "q_a_layernorm.weight", c.q_lora_rank)
            q_b = self.get(prefix + "q_b_proj.weight", query_rows, c.q_lora_rank)
        per_head = c.qk_nope_head_dim + c.v_head_dim
        kv_b = self.get(prefix + "kv_b_proj.weight", c.num_heads * per_head, c.kv_lora_rank)
        kv_b = kv_b.view(c.num_heads, per_head, c.kv_lora_rank)
        k_scale = self.source.scalar(prefix + "k_proj.k_scale")
        return MLAWeights(
            q_a=q_a,
            q_a_norm=q_a_norm,
            q_b=q_b,
            kv_a=self.get(prefix + "kv_a_proj_with_mqa.weight", c.kv_lora_rank + c.qk_rope_head_dim, hidden),
            kv_a_norm=self.get(prefix + "kv_a_layernorm.weight", c.kv_lora_rank),
            w_uk=kv_b[:, : c.qk_nope_head_dim].contiguous(),
            w_uv=kv_b[:, c.qk_nope_head_dim :].contiguous(),
            o=self.get(prefix + "o_proj.weight", hidden, c.num_heads * c.v_head_dim),
            ckv_scale=k_scale,
            kpe_scale=k_scale,
            indexer=self.indexer(prefix + "indexer.", index),
        )

    def indexer(self, prefix: str, index: int) -> IndexerWeights | None:
        """Of a full layer; the head weights stay in float32."""
        c, rank = self.config.indexer, self.config.q_lora_rank
        if c is None or index not in c.full_layers:
            return None
        assert rank is not None
        head_weights = self.get(
            prefix + "weights_proj.weight", c.num_heads, self.config.hidden_size, dtype=torch.float32
        )
        return IndexerWeights(
            q_b=self.get(prefix + "wq_b.weight", c.num_heads * c.head_dim, rank),
            k=self.get(prefix + "wk.weight", c.head_dim, self.config.hidden_size),
            k_norm=self.get(prefix + "k_norm.weight", c.head_dim),
            k_norm_bias=self.get(prefix + "k_norm.bias", c.head_dim),
            weights=head_weights,
            layer=c.full_layers.index(index),
        )

    def mlp(self, prefix: str, intermediate: int) -> MLP:
        hidden = self.config.hidden_size
        gate = self.get(prefix + "gate_proj.weight", intermediate, hidden)
        up = self.get(prefix + "up_proj.weight", intermediate, hidden)
        return MLP(torch.cat([gate, up]), self.get(prefix + "down_proj.weight", hidden, intermediate))

    def moe(self, prefix: str) -> MoE:
        moe, hidden = self.config.moe, self.config.hidden_size
        assert moe is not None
        bias_name = prefix + "gate.e_score_correction_bias"
        shared = moe.num_shared * moe.intermediate_size
        return MoE(
            config=moe,
            router=self.get(prefix + "gate.weight", moe.num_experts, hidden, dtype=torch.float32),
            bias=self.get(bias_name, moe.num_experts, dtype=torch.float32) if moe.scoring == "sigmoid" else None,
            experts=[self.mlp(f"{prefix}experts.{e}.", moe.intermediate_size) for e in range(moe.num_experts)],
            shared=self.mlp(prefix + "shared_experts.", shared) if shared else None,
        )
