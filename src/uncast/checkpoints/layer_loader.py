"""One layer of a checkpoint at a time: names and shapes of its weights, and how they are kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from uncast.checkpoints.gguf_source import GgufSource
from uncast.checkpoints.shard import shard_layer
from uncast.checkpoints.source import SafetensorsSource
from uncast.models.config import ModelConfig
from uncast.models.decoder import Layer, MLAWeights, MTPLayer
from uncast.models.indexer import IndexerWeights
from uncast.models.layers import MLP, ExpertStack, MoE
from uncast.models.parallel import Parallel
from uncast.quant.packed import DequantCache, Packed, Weight, concat_rows, empty_stack, put_expert, split_rows

Source = SafetensorsSource | GgufSource


def mtp_prefix(config: ModelConfig) -> str:
    """What the names of the first MTP layer's weights begin with."""
    return f"model.layers.{config.num_layers}."


def cache_scale_note(layers: Sequence[Layer]) -> str | None:
    """One sentence if layers have no k_scale for an FP8 cache without scales of its own; None if all have one."""
    missing = sum(layer.attention.ckv_scale is None for layer in layers)
    if not missing:
        return None
    which = "no layer" if missing == len(layers) else f"{missing} of {len(layers)} layers"
    has = "has a k_scale" if missing == len(layers) else "have no k_scale"
    return f"{which} of this checkpoint {has}: layout fp8_e4m3 uses 1.0 there"


class LayerLoader:
    """Layers of a model out of a source, one at a time."""

    def __init__(
        self,
        config: ModelConfig,
        source: Source,
        dtype: torch.dtype,
        device: torch.device,
        keep_packed: bool,
        cache_bytes: int,
        parallel: Parallel | None = None,
    ) -> None:
        self.config, self.source, self.dtype, self.device = config, source, dtype, device
        self.keep_packed, self.parallel = keep_packed, parallel
        self.cache = DequantCache(cache_bytes) if device.type == "cpu" else None
        self._not_as_declared: dict[str, None] = {}

    def get(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A dense tensor, whatever it is stored as."""
        if self.device.type == "cpu":
            return self.source.get(name, shape, dtype or self.dtype)
        # straight from the file's mapping to the GPU, without a copy of it on the host
        return self.source.fill(name, torch.empty(shape, dtype=dtype or self.dtype, device=self.device))

    def weight(self, name: str, *shape: int) -> Weight:
        """A matrix of a linear layer, packed if it is stored packed."""
        found = self.packed(name, *shape)
        return self.get(name, *shape) if found is None else found

    def packed(self, name: str, *shape: int) -> Packed | None:
        """As `weight`, but None if it is not to be packed."""
        found = self.source.packed(name, shape) if self.keep_packed else None
        if found is not None:
            return replace(found.to(self.device), cache=self.cache)
        declared = self.source.quantization
        if self.keep_packed and declared.kind == "nvfp4" and not declared.excludes(name.removesuffix(".weight")):
            self._not_as_declared[name] = None
        return None

    def notes(self, layers: Sequence[Layer]) -> Iterator[str]:
        """What a user should know of this checkpoint, a sentence each."""
        if self._not_as_declared:
            yield (
                "weights that the settings name NVFP4 but that are stored in 16 bits, "
                f"such as {next(iter(self._not_as_declared))}: {len(self._not_as_declared)}, used as stored"
            )
        if self.source.quantization.fp8_cache and (sentence := cache_scale_note(layers)) is not None:
            yield sentence

    def mine(self, count: int) -> range:
        """Which of `count` things this process has: all, or its rank's part."""
        return range(count) if self.parallel is None else self.parallel.range_of(count)

    def layer(self, index: int) -> Layer:
        """The layer, or this rank's part of it."""
        layer = self.whole(index)
        return layer if self.parallel is None else shard_layer(layer, self.config, self.parallel, self.dtype)

    def whole(self, index: int) -> Layer:
        """The layer with, of its routed experts, this process's."""
        config, prefix = self.config, f"model.layers.{index}."
        mlp = self.mlp(prefix + "mlp.", config.intermediate_size) if config.mlp_kinds[index] == "dense" else None
        return Layer(
            input_norm=self.get(prefix + "input_layernorm.weight", config.hidden_size),
            attention=self.attention(prefix + "self_attn.", index),
            post_norm=self.get(prefix + "post_attention_layernorm.weight", config.hidden_size),
            mlp=mlp if mlp is not None else self.moe(prefix + "mlp."),
        )

    def mtp(self) -> MTPLayer:
        """The first MTP layer, which is stored as one more decoder layer. Copies of embedding and LM head that some checkpoints
        keep beside it are not read: they are the model's own (DeepSeek-V3's README_WEIGHTS)."""
        config, prefix = self.config, mtp_prefix(self.config)
        kind = "sparse" if prefix + "mlp.gate.weight" in self.source else "dense"
        self.config = replace(config, num_layers=config.num_layers + 1, mlp_kinds=(*config.mlp_kinds, kind))
        hidden = config.hidden_size
        try:
            return MTPLayer(
                enorm=self.get(prefix + "enorm.weight", hidden),
                hnorm=self.get(prefix + "hnorm.weight", hidden),
                eh_proj=self.weight(prefix + "eh_proj.weight", hidden, 2 * hidden),
                layer=self.layer(config.num_layers),
                norm=self.get(prefix + "shared_head.norm.weight", hidden),
            )
        finally:
            self.config = config

    def attention(self, prefix: str, index: int) -> MLAWeights:
        c, hidden = self.config, self.config.hidden_size
        query_rows = c.num_heads * (c.qk_nope_head_dim + c.qk_rope_head_dim)
        q_a: Weight | None = None
        q_a_norm = None
        if c.q_lora_rank is None:
            q_b = self.weight(prefix + "q_proj.weight", query_rows, hidden)
        else:
            q_a = self.weight(prefix + "q_a_proj.weight", c.q_lora_rank, hidden)
            q_a_norm = self.get(prefix + "q_a_layernorm.weight", c.q_lora_rank)
            q_b = self.weight(prefix + "q_b_proj.weight", query_rows, c.q_lora_rank)
        per_head = c.qk_nope_head_dim + c.v_head_dim
        kv_b = self.get(prefix + "kv_b_proj.weight", c.num_heads * per_head, c.kv_lora_rank)
        kv_b = kv_b.view(c.num_heads, per_head, c.kv_lora_rank)
        k_scale = self.k_scale(prefix)
        q_a, kv_a, both = self.joined(
            q_a, self.weight(prefix + "kv_a_proj_with_mqa.weight", c.kv_lora_rank + c.qk_rope_head_dim, hidden)
        )
        return MLAWeights(
            q_a=q_a,
            q_a_norm=q_a_norm,
            q_b=q_b,
            kv_a=kv_a,
            kv_a_norm=self.get(prefix + "kv_a_layernorm.weight", c.kv_lora_rank),
            w_uk=kv_b[:, : c.qk_nope_head_dim].contiguous(),
            w_uv=kv_b[:, c.qk_nope_head_dim :].contiguous(),
            o=self.weight(prefix + "o_proj.weight", hidden, c.num_heads * c.v_head_dim),
            ckv_scale=k_scale,
            kpe_scale=k_scale,
            indexer=self.indexer(prefix + "indexer.", index),
            qkv_a=both,
        )

    def joined(self, q_a: Weight | None, kv_a: Weight) -> tuple[Weight | None, Weight, Weight | None]:
        """Both down-projections and, on a GPU where they are stored alike, the one matrix that both are views of: one product
        instead of two."""
        both = None if q_a is None or self.device.type == "cpu" else concat_rows(q_a, kv_a)
        if both is None or q_a is None:
            return q_a, kv_a, None
        return *split_rows(both, q_a.shape[0]), both

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
            q_b=self.weight(prefix + "wq_b.weight", c.num_heads * c.head_dim, rank),
            k=self.weight(prefix + "wk.weight", c.head_dim, self.config.hidden_size),
            k_norm=self.get(prefix + "k_norm.weight", c.head_dim),
            k_norm_bias=self.get(prefix + "k_norm.bias", c.head_dim),
            weights=head_weights,
            layer=c.full_layers.index(index),
        )

    def k_scale(self, prefix: str) -> float | None:
        """The scale of the cached row: modelopt writes it at `k_proj`, compressed-tensors at the attention itself."""
        found = self.source.scalar(prefix + "k_proj.k_scale")
        return self.source.scalar(prefix + "k_scale") if found is None else found

    def mlp(self, prefix: str, intermediate: int) -> MLP:
        hidden = self.config.hidden_size
        names = [f"{prefix}{part}_proj.weight" for part in ("gate", "up")]
        gate, up = (self.packed(name, intermediate, hidden) for name in names)
        both = None if gate is None or up is None else concat_rows(gate, up)
        if both is None:  # dense, packed in two ways, or blocks would straddle the seam
            both = torch.empty(2 * intermediate, hidden, dtype=self.dtype, device=self.device)
            for name, part in zip(names, both.chunk(2), strict=True):
                self.source.fill(name, part)
        return MLP(both, self.weight(prefix + "down_proj.weight", hidden, intermediate))

    def moe(self, prefix: str) -> MoE:
        moe, hidden = self.config.moe, self.config.hidden_size
        assert moe is not None
        bias_name = prefix + "gate.e_score_correction_bias"
        shared = moe.num_shared * moe.intermediate_size
        return MoE(
            config=moe,
            router=self.get(prefix + "gate.weight", moe.num_experts, hidden, dtype=torch.float32),
            bias=self.get(bias_name, moe.num_experts, dtype=torch.float32) if moe.scoring == "sigmoid" else None,
            experts=self.experts(prefix + "experts.", self.mine(moe.num_experts), moe.intermediate_size),
            shared=self.mlp(prefix + "shared_experts.", shared) if shared else None,
        )

    def experts(self, prefix: str, numbers: range, intermediate: int) -> list[MLP] | ExpertStack:
        """Some of a layer's, one after the other into tensors for all; a list if they are stored in different ways, or dense
        on a CPU."""

        def load(number: int) -> MLP:
            return self.mlp(f"{prefix}{number}.", intermediate)

        first = load(numbers[0])
        if isinstance(first.gate_up, torch.Tensor) and self.device.type == "cpu":
            return [first, *(load(number) for number in numbers[1:])]
        stacks = [empty_stack(w, len(numbers)) for w in (first.gate_up, first.down)]
        for place, number in enumerate(numbers):
            expert = load(number) if place else first
            if not (put_expert(stacks[0], place, expert.gate_up) and put_expert(stacks[1], place, expert.down)):
                return [load(number) for number in numbers]
        return ExpertStack(stacks[0], stacks[1])
