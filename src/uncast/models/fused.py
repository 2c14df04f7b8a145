"""A decoder's small steps: one launch of ours each on a GPU, torch's operations elsewhere, of the same meaning.

A decode step is bound by launches as much as by bytes: as torch operations, norms, rope and routing were 80 launches a layer.
"""

from __future__ import annotations

import importlib.util

import torch
from torch.nn import functional as F

from uncast.kernels.row_tile import tile_linear, whole_tile
from uncast.models.config import MoEConfig
from uncast.models.rope import Rope

_HAS_TRITON = importlib.util.find_spec("triton") is not None
_DTYPES = (torch.bfloat16, torch.float16)
Angles = tuple[torch.Tensor, torch.Tensor]


def on_kernels(x: torch.Tensor) -> bool:
    """Whether our kernels take activations such as x: a GPU, Triton, 16 bits, channels of one row together."""
    return x.is_cuda and x.dtype in _DTYPES and _HAS_TRITON and x.stride(-1) == 1


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x * rsqrt(mean(x^2) + eps) * weight over the last dimension, in float32, back in x's dtype."""
    if x.dim() == 2 and on_kernels(x):
        from uncast.kernels.norm_rope import add_rms_norm

        return add_rms_norm(x, weight, eps)[0]
    wide = whole_tile(x).to(torch.float32)
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return scaled[: x.shape[0]].to(x.dtype) * weight


def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x if factor == 1.0 else x * factor


def add_norm(
    hidden: torch.Tensor, pending: torch.Tensor | None, weight: torch.Tensor, eps: float, factor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """norm(hidden + factor * pending), and that sum: all [n, hidden]; pending of None adds nothing."""
    if pending is None:
        return rms_norm(hidden, weight, eps), hidden
    if on_kernels(hidden) and on_kernels(pending):
        from uncast.kernels.norm_rope import add_rms_norm

        return add_rms_norm(pending, weight, eps, hidden, factor)
    total = hidden + scaled(pending, factor)
    return rms_norm(total, weight, eps), total


def latent_parts(
    q_row: torch.Tensor | None,
    kv_row: torch.Tensor,
    q_norm: torch.Tensor | None,
    kv_norm: torch.Tensor,
    eps: float,
    rope: Rope,
    angles: Angles | None,
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """The query latent (None without q_row), the latent and the key of rows [n, q_lora_rank] and [n, rank + rope];
    the key is rotated unless angles are None."""
    if on_kernels(kv_row):
        from uncast.kernels import norm_rope

        return norm_rope.latent_parts(q_row, kv_row, q_norm, kv_norm, eps, angles, rope.config.interleaved)
    rank = kv_norm.shape[0]
    c_q = None if q_row is None or q_norm is None else rms_norm(q_row, q_norm, eps)
    kpe = kv_row[:, rank:] if angles is None else rope.rotate(kv_row[:, rank:], angles)
    return c_q, rms_norm(kv_row[:, :rank], kv_norm, eps), kpe


def rotate(rope: Rope, x: torch.Tensor, angles: Angles) -> torch.Tensor:
    """x [n, heads, rope] rotated; x itself is overwritten on a GPU."""
    if on_kernels(x):
        from uncast.kernels import norm_rope

        return norm_rope.rotate(x, angles, rope.config.interleaved)
    return rope.rotate(x, angles)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [n, 2 * channels], gate first."""
    if on_kernels(gate_up) and gate_up.is_contiguous():
        from uncast.kernels import norm_rope

        return norm_rope.silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def wide_linear(x: torch.Tensor, weight: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    """factor * x weight^T in float32: [n, rows] of x [n, columns] and weight float32 [rows, columns]."""
    if on_kernels(x):
        from uncast.kernels import router

        if 0 < x.shape[0] <= router.MAX_LOGIT_ROWS:
            return router.router_logits(x, weight, factor)
    return scaled(tile_linear(x.to(torch.float32), weight), factor)


def choose_experts(
    config: MoEConfig, x: torch.Tensor, router: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`route` of the router's logits for x [n, hidden]."""
    logits = wide_linear(x, router)
    if not on_kernels(x):
        return route(config, logits, bias)
    from uncast.kernels.router import choose

    return choose(
        logits,
        bias,
        sigmoid=config.scoring == "sigmoid",
        groups=config.num_groups,
        top_groups=config.top_groups,
        top_k=config.top_k,
        normalize=config.normalize,
        scale=config.scale,
    )


def route(config: MoEConfig, logits: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights float32 and expert indices, both [n, top_k], of router logits float32 [n, experts].

    "sigmoid" (DeepSeek-V3, section 2.1.2): group score = sum of the two best biased scores; weights are unbiased scores.
    "softmax" (DeepSeek-V2, section 2.2.2): group score = the best score.
    """
    rows, logits = logits.shape[0], whole_tile(logits)
    scores = logits.sigmoid() if config.scoring == "sigmoid" else logits.softmax(dim=-1)
    biased = scores if bias is None else scores + bias
    if config.num_groups > 1:
        grouped = biased.view(-1, config.num_groups, config.num_experts // config.num_groups)
        best = 2 if config.scoring == "sigmoid" else 1
        group_scores = grouped.topk(best, dim=-1).values.sum(-1)
        kept = group_scores.topk(config.top_groups, dim=-1).indices
        mask = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, kept, False)
        biased = grouped.masked_fill(mask[..., None], -torch.inf).flatten(1)
    chosen = biased.topk(config.top_k, dim=-1).indices
    weights = scores.gather(1, chosen)
    if config.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights[:rows] * config.scale, chosen[:rows]
