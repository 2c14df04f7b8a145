"""The models of `record_distributed`: random weights of GLM-5's width, whole or one rank's part; each has its own seed."""

from __future__ import annotations

from typing import Any

import torch

from uncast.checkpoints.shard import shard_layer
from uncast.models.config import ModelConfig
from uncast.models.decoder import Layer, MLADecoder, MLAWeights
from uncast.models.layers import MLP, ExpertStack, MoE
from uncast.models.parallel import Parallel, local_config

TIMED: dict[str, Any] = {
    "model_type": "glm4_moe_lite", "vocab_size": 154880, "hidden_size": 6144, "num_attention_heads": 64, "q_lora_rank": 2048,
    "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "intermediate_size": 12288,
    "moe_intermediate_size": 2048, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072,
    "rope_parameters": {"rope_theta": 1e6}, "num_hidden_layers": 5,
}  # fmt: skip
"""GLM-5's layers: 5 of them fit on one GPU in BF16."""
COMPARED = {**TIMED, "n_routed_experts": 32, "num_hidden_layers": 4, "vocab_size": 32768}
"""The same widths with fewer experts: fits in float32."""
TINY = {
    **TIMED, "vocab_size": 512, "hidden_size": 256, "num_attention_heads": 4, "q_lora_rank": 64, "intermediate_size": 256,
    "moe_intermediate_size": 128, "n_routed_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 3,
}  # fmt: skip
"""For CPUs."""


class Maker:
    """Weights that are BF16 numbers, whatever dtype they are held in: a float32 model is the BF16 one without its rounding."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.config, self.device, self.dtype, self.seed = config, device, dtype, 0

    def weight(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        self.seed += 1
        generator = torch.Generator(self.device).manual_seed(self.seed)
        made = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
        return made.normal_(0.0, shape[-1] ** -0.5, generator=generator).to(dtype or self.dtype)

    def ones(self, width: int) -> torch.Tensor:
        return torch.ones(width, dtype=self.dtype, device=self.device)

    def layer(self, index: int, mine: range) -> Layer:
        """Whole but for the routed experts, of which it has `mine`."""
        c = self.config
        hidden, rank = c.hidden_size, c.q_lora_rank or 0
        attention = MLAWeights(
            q_a=self.weight(rank, hidden),
            q_a_norm=self.ones(rank),
            q_b=self.weight(c.num_heads * (c.qk_nope_head_dim + c.qk_rope_head_dim), rank),
            kv_a=self.weight(c.kv_lora_rank + c.qk_rope_head_dim, hidden),
            kv_a_norm=self.ones(c.kv_lora_rank),
            w_uk=self.weight(c.num_heads, c.qk_nope_head_dim, c.kv_lora_rank),
            w_uv=self.weight(c.num_heads, c.v_head_dim, c.kv_lora_rank),
            o=self.weight(hidden, c.num_heads * c.v_head_dim),
        )
        mlp = self.mlp(c.intermediate_size) if c.mlp_kinds[index] == "dense" else self.moe(mine)
        return Layer(self.ones(hidden), attention, self.ones(hidden), mlp)

    def mlp(self, width: int) -> MLP:
        return MLP(self.weight(2 * width, self.config.hidden_size), self.weight(self.config.hidden_size, width))

    def moe(self, mine: range) -> MoE:
        c, moe = self.config, self.config.moe
        assert moe is not None
        gate_up = self.weight(moe.num_experts, 2 * moe.intermediate_size, c.hidden_size)[mine.start : mine.stop].clone()
        down = self.weight(moe.num_experts, c.hidden_size, moe.intermediate_size)[mine.start : mine.stop].clone()
        router = self.weight(moe.num_experts, c.hidden_size, dtype=torch.float32)
        bias = torch.zeros(moe.num_experts, device=self.device)
        return MoE(moe, router, bias, ExpertStack(gate_up, down), self.mlp(moe.num_shared * moe.intermediate_size))


def build(config: ModelConfig, device: torch.device, dtype: torch.dtype, parallel: Parallel | None) -> MLADecoder:
    """The model, or this rank's part."""
    maker = Maker(config, device, dtype)
    experts = range(config.moe.num_experts if config.moe is not None else 0)
    mine = experts if parallel is None else parallel.range_of(len(experts))
    embed, lm_head = (maker.weight(config.vocab_size, config.hidden_size) for _ in range(2))
    made = []
    for index in range(config.num_layers):
        layer = maker.layer(index, mine)
        made.append(layer if parallel is None else shard_layer(layer, config, parallel, dtype))
    if parallel is not None:
        rows = parallel.range_of(config.vocab_size)
        lm_head, config = lm_head[rows.start : rows.stop].clone(), local_config(config, parallel)
    return MLADecoder(
        config, embed, made, maker.ones(config.hidden_size), lm_head, prefill="absorbed", parallel=parallel
    )
