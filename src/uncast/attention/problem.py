"""The attention problem: shapes and dtypes (`ProblemSpec`) and one batch's metadata (`Problem`).

Decode, verify and extend are one problem: request `b` owns the query rows `qo_indptr[b]:qo_indptr[b+1]`, which are the
*last* rows of its `kv_len_arr[b]` cached tokens; causal is bottom-right, so query `i` of `q_len` sees
`kv_len - q_len + i + 1` rows. The cache is `[num_pages, page_size, row_bytes]` uint8 (or a view of the same bytes), and
page `j` of request `b` is `kv_indices[kv_indptr[b] + j]`. A block table is the same thing with
`kv_indptr[b] = b * block_tables.stride(0)`.

Sparse attention (`topk` > 0) is the same problem with `indices` int32 [total_q, topk] at `run`: the tokens each query row
attends to, by position within its request (0..kv_len - 1, the same for every page size). A negative entry is none, and may
stand anywhere; an entry that occurs twice counts twice. A position that the query must not see (at or past `kv_len`, or past
the causal limit) is the caller's mistake: `validate` refuses it, no backend looks for the latter, and none reads a row for the
former. A query row that selects nothing gives output 0 and LSE -inf.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from uncast.latent.layouts import RowLayout, row_layout
from uncast.latent.pool import MAX_PAGE_SIZE

QUERY_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class ProblemError(ValueError):
    """A problem that no backend could run: inconsistent shapes, dtypes or sizes."""


@dataclass(frozen=True)
class ProblemSpec:
    """What a backend has to know to say whether it can run: no tensor, hashable.

    Attributes:
        num_heads: query heads on this rank, 1..128.
        head_dim_ckv: latent channels (kv_lora_rank), also the width of the output.
        head_dim_kpe: rope channels (qk_rope_head_dim).
        page_size: cache rows per page, a power of two 1..128.
        kv_layout: a name of `uncast.latent.layouts.LAYOUT_NAMES`.
        q_data_type: dtype of q_nope, q_pe and the output.
        causal: bottom-right causal mask; without effect for q_len 1.
        sm_scale: softmax scale, multiplied to the dot product of 576 (ckv + kpe) channels.
        max_q_len: upper bound of query rows of one request.
        device: "cpu" or "cuda".
        arch: compute capability as major * 10 + minor, 0 on a CPU.
        return_lse: whether the log-sum-exp is asked for.
        lse_base: "2" or "e".
        batch_invariant: a request's bits must not depend on the rest of the batch.
        topk: width of `indices`, the most rows that one query attends to; 0 for dense attention.
    """

    num_heads: int
    head_dim_ckv: int = 512
    head_dim_kpe: int = 64
    page_size: int = 64
    kv_layout: str = "fp8_ds_mla"
    q_data_type: torch.dtype = torch.bfloat16
    causal: bool = True
    sm_scale: float = 576**-0.5
    max_q_len: int = 1
    device: str = "cuda"
    arch: int = 0
    return_lse: bool = False
    lse_base: str = "2"
    batch_invariant: bool = False
    topk: int = 0

    @property
    def layout(self) -> RowLayout:
        return row_layout(self.kv_layout, self.head_dim_ckv, self.head_dim_kpe)

    def check(self) -> None:
        """Raises `ProblemError` in one sentence if the spec is not a possible problem."""
        for name in ("num_heads", "head_dim_ckv", "head_dim_kpe", "page_size", "max_q_len", "topk"):
            if not isinstance(getattr(self, name), int):
                raise ProblemError(f"{name} is {getattr(self, name)!r}: it must be a whole number")
        if not 1 <= self.num_heads <= 128:
            raise ProblemError(f"num_heads is {self.num_heads}: allowed are 1 to 128")
        if not 1 <= self.page_size <= MAX_PAGE_SIZE or self.page_size & (self.page_size - 1):
            raise ProblemError(f"page_size is {self.page_size}: allowed are powers of two from 1 to {MAX_PAGE_SIZE}")
        if self.q_data_type not in QUERY_DTYPES:
            raise ProblemError(f"q_data_type is {self.q_data_type}: allowed are bfloat16, float16 and float32")
        if self.lse_base not in ("2", "e"):
            raise ProblemError(f"lse_base is {self.lse_base!r}: allowed are '2' and 'e'")
        if not isinstance(self.sm_scale, int | float) or not 0 < self.sm_scale < math.inf:
            raise ProblemError(f"sm_scale is {self.sm_scale!r}: it must be positive and finite")
        if self.max_q_len < 1:
            raise ProblemError(f"max_q_len is {self.max_q_len}: it must be at least 1")
        if self.topk < 0:
            raise ProblemError(f"topk is {self.topk}: it must be at least 1, or 0 for dense attention")
        row_layout(self.kv_layout, self.head_dim_ckv, self.head_dim_kpe)


@dataclass(frozen=True)
class Problem:
    """A spec and the metadata of one batch; all tensors int32 on the spec's device.

    Attributes:
        spec: shapes and dtypes.
        qo_indptr: [batch + 1], start of each request's query rows.
        kv_indptr: [batch + 1], start of each request's entries in `kv_indices`.
        kv_indices: [any], page numbers; entries past a request's live pages may hold anything.
        kv_len_arr: [batch], cached tokens incl. this call's; 0 gives output 0 and LSE -inf.
        total_q: rows of q_nope, `qo_indptr[-1]` (or an upper bound of it, under a captured graph).
            Rows from `qo_indptr[-1]` on are not written.
        max_kv_len: an upper bound of `kv_len_arr`, from shapes: it bounds launch grids, never a result.
        num_pages: pages of the pool, if the caller said so.
        pages_per_request: width of the block table that `kv_indices` is a view of; None for page lists.
        alone_rows: a wish: each request, of one query, is to have the bits that it has alone in a batch, and so many of them
            each are rows of one sequence. A backend that `splits_alone` grants it, `native` to up to 32 requests (see
            `uncast.kernels.schedule`; it refuses more), others need not look at it. 0: no wish.
    """

    spec: ProblemSpec
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    kv_len_arr: torch.Tensor
    total_q: int
    max_kv_len: int
    num_pages: int | None = field(default=None)
    pages_per_request: int | None = field(default=None)
    alone_rows: int = field(default=0)

    @property
    def batch_size(self) -> int:
        return self.kv_len_arr.shape[0]
