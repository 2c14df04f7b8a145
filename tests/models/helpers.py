"""Forward steps over a pool, for model tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from uncast.attention import MLAPagedAttention
from uncast.latent.index_keys import index_layout
from uncast.latent.layouts import row_layout
from uncast.latent.pool import PagedPool
from uncast.models.config import ModelConfig
from uncast.models.decoder import ForwardBatch, MLADecoder
from uncast.models.indexer import IndexCache

HF_LATENT_EPS = 1e-6
"""transformers builds q_a/kv_a norms with this epsilon whatever the config says."""


@dataclass
class Chunk:
    """Some tokens of one request: `ids` go to positions start.. of the request that owns `pages`."""

    pages: list[int]
    ids: torch.Tensor
    start: int

    @property
    def end(self) -> int:
        return self.start + self.ids.shape[0]


def ragged_step(
    model: MLADecoder, pool: PagedPool, chunks: list[Chunk], *, backend: str = "torch_cpu", sparse: bool = False
) -> list[torch.Tensor]:
    """Logits of every token of each chunk, computed in one step.

    A model with an indexer attends sparsely if a request has more tokens than it may select, as in the engine, or if `sparse`.
    """
    config, lengths, device = model.config, [len(chunk.ids) for chunk in chunks], model.device
    topk = 0 if config.indexer is None else config.indexer.topk
    if not sparse and all(chunk.end <= topk for chunk in chunks):
        topk = 0
    attention = MLAPagedAttention(backend)
    attention.plan(
        torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device),
        block_tables=pool.block_table([chunk.pages for chunk in chunks]),
        seq_lens=torch.tensor([chunk.end for chunk in chunks], dtype=torch.int32, device=device),
        num_heads=config.num_heads,
        head_dim_ckv=config.kv_lora_rank,
        head_dim_kpe=config.qk_rope_head_dim,
        page_size=pool.page_size,
        sm_scale=config.sm_scale,
        q_data_type=model.dtype,
        kv_layout=pool.layout.name,
        topk=topk,
    )
    index = None
    if pool.index_storage is not None and pool.index_layout is not None:
        index = IndexCache(pool.index_storage, pool.index_layout)
    logits = model.forward(
        ForwardBatch(
            token_ids=torch.cat([chunk.ids for chunk in chunks]).to(device),
            positions=torch.cat([torch.arange(chunk.start, chunk.end) for chunk in chunks]).to(device),
            slot_mapping=torch.cat([pool.slots(chunk.pages, chunk.start, chunk.end) for chunk in chunks]),
            attention=attention,
            cache=pool.storage,
            counters=None,
            logit_rows=torch.arange(sum(lengths), device=device),
            index=index,
        )
    )
    return list(logits.split(lengths))


def fp32_pool(config: ModelConfig, num_pages: int, page_size: int = 8, keys: str = "fp32") -> PagedPool:
    """A pool that rounds nothing (but index keys to `keys`), with an index cache if the model has an indexer."""
    layout, indexer = row_layout("fp32", config.kv_lora_rank, config.qk_rope_head_dim), config.indexer
    return PagedPool(
        layout,
        num_layers=config.num_layers,
        num_pages=num_pages,
        page_size=page_size,
        index_layout=None if indexer is None else index_layout(keys, indexer.head_dim),
        num_index_layers=0 if indexer is None else len(indexer.full_layers),
    )


def step(model: MLADecoder, pool: PagedPool, pages: list[int], ids: torch.Tensor, *, start: int) -> torch.Tensor:
    """Logits of every token of `ids`, one request alone."""
    return ragged_step(model, pool, [Chunk(pages, ids, start)])[0]


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).norm() / expected.norm())
