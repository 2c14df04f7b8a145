"""The lightning indexer on a GPU: scores of stored index keys, and the tokens that each query attends to.

    score[i, t] = sum_h weights[i, h] * relu(q[i, h] . k[t]) * scale[t]      keys as stored (`latent.index_keys`)
    indices[i]  = the topk largest, in order of position, then -1; of equal scores the earlier token; a NaN counts as largest

    scores   one program = BT keys x QB query rows, one after another; a product [heads, D] x [D, BT] each
    top-k    torch.topk finds the topk values of a row; their least is the threshold
    choice   one program = one row: a scan that writes the tokens above the threshold, and equal ones while there is room

Queries are not rounded to FP8. Scratch: `SCRATCH_BYTES` of scores at a time, a step with more query rows goes in pieces. No
device sync; may be captured: rows are scored up to `max_kv_len`, and blocks behind a row's end are only filled.

Floor of the scores: row_bytes a cached key and request, or 2 * heads * D FLOP a key and query row; at 32,768 keys, 64 heads of
128 and one query 0.98 us at 4.4 TB/s and 0.7 us at 770 TFLOP/s.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from uncast.attention.problem import Problem, ProblemError
from uncast.kernels.schedule import batch_bucket
from uncast.kernels.unpack import INTEGER_FACTOR, decode_codes, is_native
from uncast.latent.index_keys import IndexLayout

SCRATCH_BYTES = 256 * 2**20
KEYS, ROWS, NUM_WARPS = 128, 8, 8
"""Keys of a program (BT), its query rows where requests have several (QB), and its warps."""
FP8 = tl.constexpr("fp8")


@triton.jit
def _row(row, qo_indptr, kv_len_arr, batch, causal, BATCH: tl.constexpr):
    """(request, tokens it may see) of a query row; 0 tokens behind the last row."""
    i = tl.arange(0, BATCH)
    ends = tl.load(qo_indptr + 1 + i, mask=i < batch, other=2147483647)
    b = tl.minimum(tl.sum((ends <= row).to(tl.int32), 0), batch - 1)
    end = tl.load(qo_indptr + b + 1)
    visible = tl.load(kv_len_arr + b) - (end - 1 - row) * causal
    return b, tl.where(row < end, visible, 0)


_INTEGERS = [
    "first_row",
    "rows",
    "width",
    "batch",
    "heads",
    "q_stride_t",
    "q_stride_h",
    "w_stride_t",
    "page_shift",
    "causal",
]


@triton.jit(do_not_specialize=_INTEGERS)
def index_logits_kernel(
    q, weights, keys, scales, qo_indptr, kv_indptr, kv_indices, kv_len_arr, scores,
    first_row, rows, width, batch, heads, q_stride_t, q_stride_h, w_stride_t, page_shift, causal, factor,
    LAYOUT: tl.constexpr, NATIVE: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, ROW_ITEMS: tl.constexpr,
    ROW_WORDS: tl.constexpr, KEY_WORDS: tl.constexpr, BT: tl.constexpr, QB: tl.constexpr, BATCH: tl.constexpr,
):  # fmt: skip
    """Grid: (cdiv(width, BT), cdiv(rows, QB)). scores fp32 [rows, width]; -inf for tokens that a row must not see.

    keys: the index cache as uint8 codes, or in its dtype; scales: the same bytes as fp32. A page has its keys first, ROW_ITEMS
    (ROW_WORDS) items (words) a row in all. factor: of a score, `INTEGER_FACTOR` of unpacked codes or 1.
    """
    begin = tl.program_id(0) * BT
    t = begin + tl.arange(0, BT)
    h, d = tl.arange(0, HEADS), tl.arange(0, D)
    size = 1 << page_shift
    for i in range(QB):
        at = tl.program_id(1) * QB + i
        row = first_row + at
        if at < rows:
            b, visible = _row(row, qo_indptr, kv_len_arr, batch, causal, BATCH)
            s = tl.full([BT], float("-inf"), tl.float32)
            if begin < visible:
                live = t < visible
                page = tl.load(kv_indices + tl.load(kv_indptr + b) + (t >> page_shift), mask=live, other=0).to(tl.int64)
                offset = t & (size - 1)
                k = tl.load(
                    keys + (page * size * ROW_ITEMS + offset * D)[None, :] + d[:, None], mask=live[None, :], other=0
                )
                if LAYOUT == FP8:
                    k = decode_codes(k, NATIVE)
                token = row.to(tl.int64)
                x = tl.load(
                    q + token * q_stride_t + (h * q_stride_h)[:, None] + d[None, :],
                    mask=(h < heads)[:, None],
                    other=0.0,
                )
                w = tl.load(weights + token * w_stride_t + h, mask=h < heads, other=0.0)
                dots = tl.dot(x, k.to(x.dtype), input_precision="ieee")
                s = tl.sum(tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL) * w[:, None], 0)
                if LAYOUT == FP8:
                    s *= (
                        tl.load(scales + page * size * ROW_WORDS + size * KEY_WORDS + offset, mask=live, other=0.0)
                        * factor
                    )
                s = tl.where(s != s, float("inf"), s)
                s = tl.where(live, s, float("-inf"))
            tl.store(scores + at.to(tl.int64) * width + t, s, mask=t < width)


@triton.jit(do_not_specialize=["first_row", "width", "topk", "batch", "causal"])
def choose_kernel(
    scores, best, indices, qo_indptr, kv_len_arr, first_row, width, topk, batch, causal,
    TOPK: tl.constexpr, BLOCK: tl.constexpr, BATCH: tl.constexpr,
):  # fmt: skip
    """Grid: rows. best fp32 [rows, topk]: the topk largest scores of each row, in any order; writes the row of indices."""
    at = tl.program_id(0)
    k = tl.arange(0, TOPK)
    values = tl.load(best + at.to(tl.int64) * topk + k, mask=k < topk, other=float("inf"))
    least = tl.min(values, 0)
    room = tl.sum(((values == least) & (k < topk)).to(tl.int32), 0)
    line = indices + (first_row + at).to(tl.int64) * topk
    _, visible = _row(first_row + at, qo_indptr, kv_len_arr, batch, causal, BATCH)
    equal, taken = 0, 0
    for start in range(0, visible, BLOCK):
        t = start + tl.arange(0, BLOCK)
        s = tl.load(scores + at.to(tl.int64) * width + t, mask=t < visible, other=0.0)
        is_equal = ((s == least) & (t < visible)).to(tl.int32)
        take = (((s > least) & (t < visible)) | ((is_equal > 0) & (equal + tl.cumsum(is_equal, 0) <= room))).to(
            tl.int32
        )
        place = taken + tl.cumsum(take, 0) - 1
        tl.store(line + place, t, mask=(take > 0) & (place < topk))
        equal += tl.sum(is_equal, 0)
        taken += tl.sum(take, 0)
    for start in range(0, topk, BLOCK):
        place = start + tl.arange(0, BLOCK)
        tl.store(line + place, -1, mask=(place >= taken) & (place < topk))


def refusal(layout: IndexLayout, q_dtype: torch.dtype) -> str | None:
    """None if the kernels score keys of `layout` with queries of `q_dtype`, else why not, in one sentence."""
    if layout.head_dim & (layout.head_dim - 1) or not 16 <= layout.head_dim <= 128:
        return f"the indexer's kernels take keys of 16, 32, 64 or 128 channels, not {layout.head_dim}"
    if q_dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"the indexer's kernels take bfloat16, float16 and float32 queries, not {q_dtype}"
    return None


def select_tokens(
    q: torch.Tensor, weights: torch.Tensor, cache: torch.Tensor, problem: Problem, layout: IndexLayout
) -> torch.Tensor:
    """The `indices` of one layer's `MLAPagedAttention.run`: int32 [total_q, topk], tokens in order of position, then -1.

    Args:
        q: [total_q, heads, head_dim] bf16, fp16 or fp32, rope applied, unit last stride.
        weights: fp32 [total_q, heads], scales included.
        cache: uint8 [num_pages, page_size, row_bytes]; the keys of this call's tokens are in it.
        problem: of a plan with `topk`.

    Raises:
        ProblemError: keys or queries the kernels do not take.
    """
    reason = refusal(layout, q.dtype)
    if reason is not None:
        raise ProblemError(reason)
    spec = problem.spec
    indices = torch.empty(problem.total_q, spec.topk, dtype=torch.int32, device=q.device)
    width = max(problem.max_kv_len, spec.topk, 1)
    step = max(1, SCRATCH_BYTES // (4 * width))
    for first in range(0, problem.total_q, step):
        rows = min(step, problem.total_q - first)
        scores = index_scores(q, weights, cache, problem, layout, first, rows, width)
        best = scores.topk(spec.topk, dim=-1, sorted=False).values
        choose_kernel[(rows,)](
            scores, best, indices, problem.qo_indptr, problem.kv_len_arr, first, width, spec.topk, problem.batch_size,
            int(spec.causal), TOPK=triton.next_power_of_2(spec.topk), BLOCK=4096, BATCH=batch_bucket(problem.batch_size),
            num_warps=8,
        )  # fmt: skip
    return indices


def index_scores(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: torch.Tensor,
    problem: Problem,
    layout: IndexLayout,
    first: int,
    rows: int,
    width: int,
) -> torch.Tensor:
    """fp32 [rows, width] of query rows first..; -inf for tokens that a row must not see, +inf for NaN. See `select_tokens`."""
    spec, (_, heads, head_dim) = problem.spec, q.shape
    q = q if q.stride(2) == 1 else q.contiguous()
    weights = weights.float().contiguous()
    flat, item = cache.view(torch.uint8).view(-1), layout.key_bytes // head_dim
    keys = {1: flat, 2: flat.view(torch.bfloat16), 4: flat.view(torch.float32)}[item]
    native = q.is_cuda and is_native(spec.arch)
    scores = torch.empty(rows, width, dtype=torch.float32, device=q.device)
    group = 1 if spec.max_q_len == 1 else ROWS
    index_logits_kernel[(triton.cdiv(width, KEYS), triton.cdiv(rows, group))](
        q, weights, keys, flat.view(torch.float32), problem.qo_indptr, problem.kv_indptr, problem.kv_indices,
        problem.kv_len_arr, scores, first, rows, width, problem.batch_size, heads, q.stride(0), q.stride(1),
        weights.stride(0), spec.page_size.bit_length() - 1, int(spec.causal), 1.0 if native else INTEGER_FACTOR,
        **constexprs(layout, heads, native, group, batch_bucket(problem.batch_size)), num_warps=NUM_WARPS,
    )  # fmt: skip
    return scores


def constexprs(layout: IndexLayout, heads: int, native: bool, group: int, bucket: int) -> dict[str, object]:
    """Compile-time arguments of `index_logits_kernel`: `group` query rows a program, `bucket` of `schedule.batch_bucket`."""
    item = layout.key_bytes // layout.head_dim
    return {
        "LAYOUT": layout.name, "NATIVE": native, "HEADS": max(16, triton.next_power_of_2(heads)), "D": layout.head_dim,
        "ROW_ITEMS": layout.row_bytes // item, "ROW_WORDS": layout.row_bytes // 4, "KEY_WORDS": layout.key_bytes // 4,
        "BT": KEYS, "QB": group, "BATCH": bucket,
    }  # fmt: skip
