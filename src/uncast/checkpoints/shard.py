"""A loaded layer to one rank's part of it."""

from __future__ import annotations

from dataclasses import replace

import torch

from uncast.models.config import ModelConfig
from uncast.models.decoder import Layer, MLAWeights
from uncast.models.layers import MLP, MoE
from uncast.models.parallel import Parallel, ShardedMLP, shard_mlp, shard_moe
from uncast.quant.slices import take_columns, take_rows


def shard_layer(layer: Layer, config: ModelConfig, parallel: Parallel, dtype: torch.dtype) -> Layer:
    """This rank's heads and intermediate channels of a whole layer, as copies; of a mixture's routed experts the layer holds
    this rank's only, and keeps them."""
    attention = _heads(layer.attention, config, parallel.range_of(config.num_heads), dtype)
    if isinstance(layer.mlp, MoE):
        mine = parallel.range_of(layer.mlp.config.num_experts)
        return replace(layer, attention=attention, mlp=shard_moe(layer.mlp, mine, parallel, dtype))
    assert isinstance(layer.mlp, MLP)
    return replace(layer, attention=attention, mlp=ShardedMLP(shard_mlp(layer.mlp, parallel, dtype), parallel))


def _heads(whole: MLAWeights, config: ModelConfig, heads: range, dtype: torch.dtype) -> MLAWeights:
    query, value = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    return replace(
        whole,
        q_b=take_rows(whole.q_b, heads.start * query, heads.stop * query, dtype),
        w_uk=whole.w_uk[heads.start : heads.stop].clone(),
        w_uv=whole.w_uv[heads.start : heads.stop].clone(),
        o=take_columns(whole.o, heads.start * value, heads.stop * value, dtype),
    )
