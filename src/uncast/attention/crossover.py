"""Absorbed or un-absorbed: the operations of a causal chunk either way, and the choice, in one place for every device.

    absorbed     s = (q_nope W_UK) c + q_pe k_pe          out = W_UV (sum p c)            2 H (2 R + dr) a pair
    un-absorbed  s = q_nope (W_UK c) + q_pe k_pe          out = sum p (W_UV c)            2 H (dn + dr + dv) a pair

Un-absorbed saves on every (query, row) pair and pays 2 H R (dn + dv) for each row, where absorbed pays that for each query. On
a long prefix it has fewer operations from q_len = R (dn + dv) / (2 R - dn - dv) on: 398 queries with GLM's 192 + 256.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ExtendChunk:
    """One request's part of a step that goes un-absorbed: its query rows first..last are the last of its `kv_len` cached rows,
    which lie on `pages` (int32 or int64, in order, on the cache's device)."""

    first: int
    last: int
    kv_len: int
    pages: torch.Tensor


@dataclass(frozen=True)
class HeadDims:
    """num_heads query heads of nope + rope channels (queries, keys) and v channels (values) over a latent of `rank`."""

    num_heads: int
    rank: int
    nope: int
    rope: int
    v: int


@dataclass(frozen=True)
class Crossover:
    """When a device goes un-absorbed: absorbed >= min_gain * un-absorbed + overhead, in multiply-adds."""

    min_gain: float
    overhead: float


CROSSOVERS = {"cpu": Crossover(1.15, 0.0), "cuda": Crossover(1.25, 6e10)}
"""CPU: smaller matrix products may cost what is saved. CUDA: measured on an H200 with GLM's widths and 32k rows (fp8_e4m3), by
cuDNN and FlashInfer. 64 heads: 512 queries take 4.3 ms absorbed and 5.3 to 5.5 un-absorbed, ratio of operations 1.13; 1,024
take 8.8 and 6.7 to 6.9, ratio 1.49. 16 heads: 768 take 2.5 and 2.6, 1,024 take 3.4 and 2.1 to 3.0. The up-projection runs at
half the rate of attention, hence more than 1; 6e10 multiply-adds are 0.2 ms, the launches. It turns at 704 queries with 64
heads and at 896 with 16."""


def operations(dims: HeadDims, q_len: int, kv_len: int) -> tuple[int, int]:
    """Multiply-adds of one layer, absorbed and un-absorbed: `q_len` queries at the end of `kv_len` rows, causal."""
    pairs = q_len * kv_len - q_len * (q_len - 1) // 2
    projection = dims.rank * (dims.nope + dims.v)
    return (
        dims.num_heads * (pairs * (2 * dims.rank + dims.rope) + q_len * projection),
        dims.num_heads * (pairs * (dims.nope + dims.rope + dims.v) + kv_len * projection),
    )


def prefers_unabsorbed(dims: HeadDims, q_len: int, kv_len: int, device: str) -> bool:
    """The choice for one chunk; it depends on nothing but the model, the device and the chunk's own lengths."""
    if not 1 < q_len <= kv_len:
        return False
    absorbed, unabsorbed = operations(dims, q_len, kv_len)
    crossover = CROSSOVERS[device]
    return absorbed >= crossover.min_gain * unabsorbed + crossover.overhead


def may_prefer_unabsorbed(dims: HeadDims, max_q_len: int, max_kv_len: int, device: str) -> bool:
    """Whether any chunk within these bounds could be un-absorbed: says no without a look at lengths that a device holds.

    The gain grows with q_len and is linear in kv_len, so the ends decide.
    """
    ends = (max_q_len, max(max_q_len, max_kv_len))
    return any(prefers_unabsorbed(dims, max_q_len, kv_len, device) for kv_len in ends)
