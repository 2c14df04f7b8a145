"""Forward steps over a pool, for model tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from uncast.attention import MLAPagedAttention
from uncast.latent.pool import PagedPool
from uncast.models.decoder import ForwardBatch, MLADecoder

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
    model: MLADecoder, pool: PagedPool, chunks: list[Chunk], *, backend: str = "torch_cpu"
) -> list[torch.Tensor]:
    """Logits of every token of each chunk, computed in one step."""
    config, lengths = model.config, [len(chunk.ids) for chunk in chunks]
    attention = MLAPagedAttention(backend)
    attention.plan(
        torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32),
        block_tables=pool.block_table([chunk.pages for chunk in chunks]),
        seq_lens=torch.tensor([chunk.end for chunk in chunks], dtype=torch.int32),
        num_heads=config.num_heads,
        head_dim_ckv=config.kv_lora_rank,
        head_dim_kpe=config.qk_rope_head_dim,
        page_size=pool.page_size,
        sm_scale=config.sm_scale,
        q_data_type=model.dtype,
        kv_layout=pool.layout.name,
    )
    logits = model.forward(
        ForwardBatch(
            token_ids=torch.cat([chunk.ids for chunk in chunks]),
            positions=torch.cat([torch.arange(chunk.start, chunk.end) for chunk in chunks]),
            slot_mapping=torch.cat([pool.slots(chunk.pages, chunk.start, chunk.end) for chunk in chunks]),
            attention=attention,
            cache=pool.storage,
            counters=None,
            logit_rows=torch.arange(sum(lengths)),
        )
    )
    return list(logits.split(lengths))


def step(model: MLADecoder, pool: PagedPool, pages: list[int], ids: torch.Tensor, *, start: int) -> torch.Tensor:
    """Logits of every token of `ids`, one request alone."""
    return ragged_step(model, pool, [Chunk(pages, ids, start)])[0]


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).norm() / expected.norm())
