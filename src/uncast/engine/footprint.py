"""What serving a checkpoint takes: bytes per token of each cache layout, what fits beside the weights, a decode step's floor.

    cache bytes per token  = layers * row_bytes + layers with an indexer * index row bytes
    tokens that fit        = (memory - weights as stored) / cache bytes per token
    a decode step's floor  = (weights that its tokens touch + cache rows that attention reads) / bandwidth

Of routed experts a step of b tokens touches E * (1 - (1 - k/E)^b) on average where routing is even, k at b = 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from uncast.checkpoints.inventory import Module
from uncast.latent.layouts import LAYOUT_NAMES, LayoutError, row_layout
from uncast.models.config import ModelConfig

INDEX_TILE = 128
"""Channels of an index key that share one fp32 scale: vLLM's and SGLang's FP8 index cache, 132 bytes at 128 channels."""


@dataclass(frozen=True)
class SparseShape:
    """DeepSeek sparse attention of a model.

    Attributes:
        heads, head_dim: of the indexer.
        topk: rows that a query attends to at most.
        full_layers: layers with an indexer and an index cache of their own; the others use the last full layer's choice.
    """

    heads: int
    head_dim: int
    topk: int
    full_layers: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of one token in one FP8 index cache."""
        return self.head_dim + 4 * -(-self.head_dim // INDEX_TILE)


@dataclass(frozen=True)
class Workload:
    """Decoding requests: how many, and how many rows each has."""

    batch: int
    context: int


@dataclass(frozen=True)
class CacheCost:
    """One layout.

    Attributes:
        row_bytes: per token and layer, without the index cache.
        token_bytes: per token over all layers, index cache included.
        read_bytes: of one decode step of the workload.
    """

    layout: str
    row_bytes: int
    token_bytes: int
    read_bytes: int

    def tokens_in(self, room: float) -> int:
        """Tokens that fit into `room` bytes."""
        return max(0, int(room // self.token_bytes))


@dataclass(frozen=True)
class WeightCost:
    """Bytes of the weights as stored.

    Attributes:
        total: all of them; mtp: of it, layers for multi-token prediction, which need not be loaded.
        touched: what one decode step of the workload reads.
        experts_touched: routed experts of one layer that it reads on average, 0 for a dense model.
    """

    total: int
    mtp: int
    touched: int
    experts_touched: float

    @property
    def resident(self) -> int:
        """Bytes in memory without multi-token prediction."""
        return self.total - self.mtp


def cache_costs(config: ModelConfig, sparse: SparseShape | None, load: Workload) -> list[CacheCost]:
    """Every layout that this model's rows fit."""
    index_row = 0 if sparse is None else sparse.row_bytes * len(sparse.full_layers)
    rows = load.context if sparse is None else min(load.context, sparse.topk)
    costs = []
    for name in LAYOUT_NAMES:
        try:
            row = row_layout(name, config.kv_lora_rank, config.qk_rope_head_dim).row_bytes
        except LayoutError:
            continue
        latent = row * config.num_layers
        read = load.batch * (rows * latent + load.context * index_row)
        costs.append(CacheCost(name, row, latent + index_row, read))
    return costs


def weight_cost(modules: Iterable[Module], config: ModelConfig, load: Workload) -> WeightCost:
    """Sums over modules; an embedding that is not the LM head as well counts one row a token."""
    touched_experts, share = 0.0, 0.0
    if config.moe is not None:
        share = 1.0 - (1.0 - config.moe.top_k / config.moe.num_experts) ** load.batch
        touched_experts = share * config.moe.num_experts
    total = mtp = 0
    touched, head = 0.0, False
    embedding: Module | None = None
    for module in modules:
        total += module.nbytes
        if module.part == "MTP":
            mtp += module.nbytes
        elif module.part == "embedding":
            embedding = module
        else:
            head = head or module.part == "LM head"
            touched += module.nbytes * (share if module.part == "experts" else 1.0)
    if embedding is not None:
        rows = load.batch * embedding.nbytes // config.vocab_size
        touched += rows if head else embedding.nbytes + rows
    return WeightCost(total, mtp, round(touched), touched_experts)
