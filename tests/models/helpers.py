"""One forward step of one request over a pool, for model tests."""

from __future__ import annotations

import torch

from uncast.attention import MLAPagedAttention
from uncast.latent.pool import PagedPool
from uncast.models.decoder import ForwardBatch, MLADecoder

HF_LATENT_EPS = 1e-6
"""transformers builds q_a/kv_a norms with this epsilon whatever the config says."""


def step(model: MLADecoder, pool: PagedPool, pages: list[int], ids: torch.Tensor, *, start: int) -> torch.Tensor:
    """Logits of every token of `ids`, written at positions start.. of a request that owns `pages`."""
    count, config = ids.shape[0], model.config
    attention = MLAPagedAttention("torch_cpu")
    attention.plan(
        torch.tensor([0, count], dtype=torch.int32),
        block_tables=torch.tensor([pages], dtype=torch.int32),
        seq_lens=torch.tensor([start + count], dtype=torch.int32),
        num_heads=config.num_heads,
        head_dim_ckv=config.kv_lora_rank,
        head_dim_kpe=config.qk_rope_head_dim,
        page_size=pool.page_size,
        sm_scale=config.sm_scale,
        q_data_type=model.dtype,
        kv_layout=pool.layout.name,
    )
    return model.forward(
        ForwardBatch(
            token_ids=ids,
            positions=torch.arange(start, start + count),
            slot_mapping=pool.slots(pages, start, start + count),
            attention=attention,
            cache=pool.storage,
            counters=None,
            logit_rows=torch.arange(count),
        )
    )
