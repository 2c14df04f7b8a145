"""What serving a checkpoint takes: bytes per token of each cache layout, what fits beside the weights, a decode step's floor.

    cache bytes per token  = layers * row_bytes + layers with an indexer * bytes of an index key
    tokens that fit        = (memory - weights as stored) / cache bytes per token
    a decode step's floor  = (weights that its tokens touch + cache rows that attention reads) / bandwidth

Of routed experts a step of b tokens touches E * (1 - (1 - k/E)^b) on average where routing is even, k at b = 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from uncast.checkpoints.inventory import Module
from uncast.latent.index_keys import matching_layout
from uncast.latent.layouts import LAYOUT_NAMES, LayoutError, row_layout
from uncast.models.config import ModelConfig


@dataclass(frozen=True)
class Workload:
    """Decoding requests: how many, and how many rows each has."""

    batch: int
    context: int


@dataclass(frozen=True)
class CacheCost:
    """One layout.

    Attributes:
        row_bytes: per token and layer, without index keys.
        key_bytes: of the index keys of one token over all layers; 0 without an indexer.
        token_bytes: per token over all layers, index keys included.
        read_bytes: of one decode step of the workload.
    """

    layout: str
    row_bytes: int
    key_bytes: int
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


def cache_costs(config: ModelConfig, load: Workload) -> list[CacheCost]:
    """Every layout that this model's rows fit, with the index keys that go with it."""
    indexer = config.indexer
    rows = load.context if indexer is None else min(load.context, indexer.topk)
    costs = []
    for name in LAYOUT_NAMES:
        try:
            layout = row_layout(name, config.kv_lora_rank, config.qk_rope_head_dim)
        except LayoutError:
            continue
        keys = 0
        if indexer is not None:
            keys = matching_layout(layout, indexer.head_dim).row_bytes * len(indexer.full_layers)
        latent = layout.row_bytes * config.num_layers
        read = load.batch * (rows * latent + load.context * keys)
        costs.append(CacheCost(name, layout.row_bytes, keys, latent + keys, read))
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
