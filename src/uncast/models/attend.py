"""Between a layer's projections: the down-projections' parts, absorbed attention, and steps of which some requests go
un-absorbed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from uncast.attention import MLAPagedAttention
from uncast.kernels.row_tile import new_rows, whole_tile
from uncast.latent.codec import Scale
from uncast.models.config import ModelConfig
from uncast.models.unabsorbed import PrefillSplit, attend_chunks
from uncast.quant.matmul import linear

if TYPE_CHECKING:
    from uncast.models.decoder import MLAWeights


def project_down(
    weights: MLAWeights, x: torch.Tensor, q_lora_rank: int | None
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """x's down-projections: to the query latent, None without one, and to latent and key."""
    if weights.qkv_a is not None:
        both = linear(x, weights.qkv_a)
        return both[:, :q_lora_rank], both[:, q_lora_rank:]
    return None if weights.q_a is None else linear(x, weights.q_a), linear(x, weights.kv_a)


def absorbed(
    weights: MLAWeights,
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    cache: torch.Tensor,
    attention: MLAPagedAttention,
    scales: tuple[Scale, Scale],
    indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Values [n, heads, v] of queries [n, heads, nope] and [n, heads, rope] that `attention` is planned for."""
    tokens, rank = q_nope.shape[0], weights.w_uk.shape[2]
    query = torch.bmm(whole_tile(q_nope).transpose(0, 1), weights.w_uk).transpose(0, 1)[:tokens]
    latent = new_rows(query, tokens, query.shape[1], rank)
    attention.run(query, q_pe, cache, ckv_scale=scales[0], kpe_scale=scales[1], indices=indices, out=latent)
    tile = whole_tile(latent).transpose(0, 1)
    if not latent.is_cuda:
        return torch.bmm(tile, weights.w_uv.transpose(1, 2)).transpose(0, 1)[:tokens]
    values = new_rows(latent, tokens, *weights.w_uv.shape[:2])  # where the product is to lie for o
    torch.bmm(tile, weights.w_uv.transpose(1, 2), out=whole_tile(values).transpose(0, 1))
    return values


def by_chunk(
    config: ModelConfig,
    weights: MLAWeights,
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    cache: torch.Tensor,
    split: PrefillSplit,
    scales: tuple[Scale, Scale],
) -> torch.Tensor:
    """The same where some requests go un-absorbed."""
    values = q_nope.new_empty(q_nope.shape[0], config.num_heads, config.v_head_dim)
    if split.rest is not None:
        rest = split.rows
        values[rest] = absorbed(weights, q_nope[rest], q_pe[rest], cache, split.rest, scales)
    attend_chunks(
        q_nope, q_pe, cache, split, weights.w_uk, weights.w_uv, values,
        sm_scale=config.sm_scale, ckv_scale=scales[0], kpe_scale=scales[1],
    )  # fmt: skip
    return values
