"""Cache bytes of a step: what its sequences need, and what was read and written for them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import torch

from uncast.attention import AttentionPlan
from uncast.backends.lightning_indexer import keys_read
from uncast.latent.index_keys import matching_layout
from uncast.latent.layouts import RowLayout, row_layout
from uncast.latent.pool import PagedPool
from uncast.models.config import ModelConfig


@dataclass(frozen=True)
class StepBytes:
    """Cache bytes of one step over all layers.

    Attributes:
        needed: what attention must read once for each sequence: its rows or, of sparse attention, those that its queries can
            select, and the index keys to select by.
        read, written: what the backend read of the cache and of copies, and wrote of copies.
        pool_cast: what casting the whole pool to BF16 once per layer would have read and written; 0 if it is not FP8.
    """

    needed: int
    read: int
    written: int
    pool_cast: int


@dataclass
class DraftPasses:
    """Passes of the MTP layer: the plan of each, counting its lengths, and rows that they needed."""

    plans: list[AttentionPlan] = field(default_factory=list)
    rows: int = 0

    def add(self, other: DraftPasses) -> None:
        """Counts these, too."""
        self.plans += other.plans
        self.rows += other.rows


def token_bytes(config: ModelConfig, layout: RowLayout, *, drafts: bool = False) -> int:
    """Bytes that one token takes of a pool of `layout`, over all layers (with `drafts` the MTP layer, too): its rows and, with
    an indexer, its keys."""
    rows = layout.row_bytes * (config.num_layers + drafts)
    if config.indexer is None:
        return rows
    return rows + matching_layout(layout, config.indexer.head_dim).row_bytes * len(config.indexer.full_layers)


def step_bytes(
    config: ModelConfig,
    pool: PagedPool,
    plans: Seq[AttentionPlan],
    chunks: Seq[tuple[int, int]],
    drafts: DraftPasses | None = None,
) -> StepBytes:
    """Of a step of these plans whose sequences had (cached, count): cached rows after it, the last `count` of them new."""
    drafts = DraftPasses() if drafts is None else drafts
    layers, layout = config.num_layers, pool.layout
    sparse = any(plan.problem.spec.topk for plan in plans)
    bf16 = row_layout("bf16", layout.kv_lora_rank, layout.qk_rope_head_dim).row_bytes
    rows = pool.num_pages * pool.page_size
    return StepBytes(
        needed=sum(_needed(config, pool, cached, count, sparse) for cached, count in chunks)
        + drafts.rows * layout.row_bytes,
        read=sum(plan.bytes_read * layers + _key_bytes_read(config, pool, plan) for plan in plans)
        + sum(plan.bytes_read for plan in drafts.plans),
        written=sum(plan.bytes_written for plan in plans) * layers + sum(plan.bytes_written for plan in drafts.plans),
        pool_cast=pool.num_layers * rows * (layout.row_bytes + bf16) if layout.is_fp8 else 0,
    )


def lengths_of_passes(kv_lens: Seq[int], slots: Seq[Seq[int]]) -> list[list[int]]:
    """Sequence lengths of each pass of a draft chain: one more wherever a pass after the first writes a row (slot >= 0)."""
    passes = [list(kv_lens)]
    for places in slots[1:]:
        passes.append([length + (slot >= 0) for length, slot in zip(passes[-1], places, strict=True)])
    return passes


def counted_at(plan: AttentionPlan, ends: Seq[int], kv_lens: Seq[int]) -> AttentionPlan:
    """The plan with these lengths for its byte counts, on the host; unchanged if it copies the cache, as its bytes then depend
    on page numbers, which are on the device."""
    if plan.copy_layout is not None:
        return plan
    starts, lengths = torch.tensor(ends, dtype=torch.int32), torch.tensor(kv_lens, dtype=torch.int32)
    return plan.counting(replace(plan.problem, qo_indptr=starts, kv_len_arr=lengths))


def _needed(config: ModelConfig, pool: PagedPool, cached: int, count: int, sparse: bool) -> int:
    row_bytes = pool.layout.row_bytes * config.num_layers
    if not sparse or config.indexer is None or pool.index_layout is None:
        return cached * row_bytes
    topk = config.indexer.topk
    selected = sum(min(topk, position + 1) for position in range(cached - count, cached))
    keys = cached if cached > topk else 0  # of at most topk tokens all are taken, without a look at their keys
    return min(cached, selected) * row_bytes + keys * pool.index_layout.row_bytes * len(config.indexer.full_layers)


def _key_bytes_read(config: ModelConfig, pool: PagedPool, plan: AttentionPlan) -> int:
    if config.indexer is None or pool.index_layout is None or not plan.problem.spec.topk:
        return 0
    per_key = pool.index_layout.row_bytes * len(config.indexer.full_layers)
    return keys_read(plan.counted, config.indexer.num_heads) * per_key
