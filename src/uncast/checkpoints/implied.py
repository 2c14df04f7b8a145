"""The tensors that a configuration implies: what `inspect` counts where a folder has no weights."""

from __future__ import annotations

from collections.abc import Iterator

from uncast.checkpoints.inventory import Tensor, place
from uncast.checkpoints.quantization import Quantization
from uncast.models.config import IndexerConfig, ModelConfig

_PLAIN = ("embedding", "LM head", "router", "norms", "MTP")
"""Parts that FP8 and NVFP4 checkpoints of MLA models leave in 16 bits, whatever their settings list."""


def implied_tensors(config: ModelConfig, declared: Quantization) -> list[Tensor]:
    """Names, dtypes and shapes in Hugging Face's spelling; without multi-token prediction layers.

    Args:
        declared: how linear layers that it does not exclude are stored; the others count as BF16.
    """
    tensors = [Tensor("model.embed_tokens.weight", "BF16", (config.vocab_size, config.hidden_size))]
    tensors.append(Tensor("model.norm.weight", "BF16", (config.hidden_size,)))
    if not config.tie_word_embeddings:
        tensors.append(Tensor("lm_head.weight", "BF16", (config.vocab_size, config.hidden_size)))
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        linear = dict(_attention(config, prefix))
        if config.indexer is not None and index in config.indexer.full_layers:
            linear.update(_indexer(config, config.indexer, prefix))
            norm = f"{prefix}self_attn.indexer.k_norm."
            tensors += [Tensor(norm + part, "BF16", (config.indexer.head_dim,)) for part in ("weight", "bias")]
        linear.update(_mlp(config, index, prefix))
        for name, shape in linear.items():
            tensors.extend(_stored(name, shape, config.num_layers, declared))
        if config.mlp_kinds[index] == "sparse" and config.moe is not None and config.moe.scoring == "sigmoid":
            bias = f"{prefix}mlp.gate.e_score_correction_bias"
            tensors.append(Tensor(bias, "F32", (config.moe.num_experts,)))
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors.append(Tensor(f"{prefix}{name}.weight", "BF16", (config.hidden_size,)))
        tensors.append(Tensor(f"{prefix}self_attn.kv_a_layernorm.weight", "BF16", (config.kv_lora_rank,)))
        if config.q_lora_rank is not None:
            tensors.append(Tensor(f"{prefix}self_attn.q_a_layernorm.weight", "BF16", (config.q_lora_rank,)))
    return tensors


def _attention(c: ModelConfig, prefix: str) -> Iterator[tuple[str, tuple[int, int]]]:
    at, rows = prefix + "self_attn.", c.num_heads * (c.qk_nope_head_dim + c.qk_rope_head_dim)
    if c.q_lora_rank is None:
        yield at + "q_proj", (rows, c.hidden_size)
    else:
        yield at + "q_a_proj", (c.q_lora_rank, c.hidden_size)
        yield at + "q_b_proj", (rows, c.q_lora_rank)
    yield at + "kv_a_proj_with_mqa", (c.kv_lora_rank + c.qk_rope_head_dim, c.hidden_size)
    yield at + "kv_b_proj", (c.num_heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank)
    yield at + "o_proj", (c.hidden_size, c.num_heads * c.v_head_dim)


def _indexer(c: ModelConfig, indexer: IndexerConfig, prefix: str) -> Iterator[tuple[str, tuple[int, int]]]:
    at = prefix + "self_attn.indexer."
    yield at + "wq_b", (indexer.num_heads * indexer.head_dim, c.q_lora_rank or c.hidden_size)
    yield at + "wk", (indexer.head_dim, c.hidden_size)
    yield at + "weights_proj", (indexer.num_heads, c.hidden_size)


def _mlp(c: ModelConfig, index: int, prefix: str) -> Iterator[tuple[str, tuple[int, int]]]:
    if c.mlp_kinds[index] == "dense":
        yield from _gated(prefix + "mlp.", c.hidden_size, c.intermediate_size)
        return
    assert c.moe is not None
    yield prefix + "mlp.gate", (c.moe.num_experts, c.hidden_size)
    for expert in range(c.moe.num_experts):
        yield from _gated(f"{prefix}mlp.experts.{expert}.", c.hidden_size, c.moe.intermediate_size)
    if c.moe.num_shared:
        width = c.moe.num_shared * c.moe.intermediate_size
        yield from _gated(prefix + "mlp.shared_experts.", c.hidden_size, width)


def _gated(prefix: str, hidden: int, width: int) -> Iterator[tuple[str, tuple[int, int]]]:
    yield prefix + "gate_proj", (width, hidden)
    yield prefix + "up_proj", (width, hidden)
    yield prefix + "down_proj", (hidden, width)


def _stored(name: str, shape: tuple[int, int], num_layers: int, declared: Quantization) -> list[Tensor]:
    rows, columns = shape
    part = place(name, num_layers)[1]
    if part not in _PLAIN and not name.endswith("weights_proj") and not declared.excludes(name):
        if declared.kind == "fp8":
            blocks = (-(-rows // declared.block[0]), -(-columns // declared.block[1]))
            return [
                Tensor(name + ".weight", "F8_E4M3", shape), Tensor(name + ".weight_scale_inv", "F32", blocks),
            ]  # fmt: skip
        if declared.kind == "nvfp4":
            return [
                Tensor(name + ".weight", "U8", (rows, columns // 2)),
                Tensor(name + ".weight_scale", "F8_E4M3", (rows, columns // 16)),
                Tensor(name + ".weight_scale_2", "F32", ()),
                Tensor(name + ".input_scale", "F32", ()),
            ]
    return [Tensor(name + ".weight", "BF16", shape)]
