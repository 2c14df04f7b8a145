"""Combine: merges the partial results of requests that were split (`schedule`).

    partial_o    fp32 or fp16 [partial_blocks, block_rows, 512], each row normalised by its own softmax sum
    partial_lse  fp32 [partial_blocks, block_rows], base 2, -inf for a row that saw nothing
    out row      sum_s 2^(lse_s - lse) * partial_o_s,  lse = log2(sum_s 2^lse_s)

Floor: each partial row is read once (1 or 2 KB) and mostly comes from L2. Work unit = one row x 32, 128 or 512 channels; a
fixed grid walks the groups that the attention kernel published, so a batch without splits costs one load per program. On sm_90
it is launched with programmatic dependent launch: its launch overlaps the attention kernel's end. The order of the
additions depends on the number of splits only, so results repeat bitwise.
"""

from __future__ import annotations

import triton
import triton.language as tl

from uncast.kernels.launch import Call, Scratch
from uncast.kernels.schedule import SplitPlan

_SCALARS = ["out_stride_t", "out_stride_h", "lse_stride_t", "lse_stride_h", "scale_from_ptr", "num_heads", "lse_mode"]
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _partials(partial_o, partial_lse, part, stride, row, c, n, d, BLOCK_ROWS: tl.constexpr, SPLITS: tl.constexpr):
    """Splits c .. c + SPLITS of one row: partial_o [SPLITS, channels] fp32 and partial_lse [SPLITS]."""
    s = c + tl.arange(0, SPLITS)
    at = (part.to(tl.int64) + s * stride) * BLOCK_ROWS + row
    x = tl.load(partial_o + at[:, None] * 512 + d[None, :], mask=(s < n)[:, None], other=0.0)
    return x.to(tl.float32), tl.load(partial_lse + at, mask=s < n, other=float("-inf"))


@triton.jit
def _merge(
    u, units, partial_o, partial_lse, sched, out, lse, out_stride_t, out_stride_h, lse_stride_t, lse_stride_h, scale,
    num_heads, lse_mode, BLOCK_ROWS: tl.constexpr, CHANNELS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """One unit. Its entry, then its first SPLITS partials are in flight at once: two round trips to L2 for most requests."""
    CHUNKS: tl.constexpr = 512 // CHANNELS
    entry = sched + (u // (BLOCK_ROWS * CHUNKS) + 1) * 8
    first = tl.load(entry)
    rows = tl.load(entry + 1)
    n = tl.load(entry + 2)
    part = tl.load(entry + 3)
    stride = tl.load(entry + 4)
    row = (u // CHUNKS) % BLOCK_ROWS
    if (u < units) & (row < rows):
        d = (u % CHUNKS) * CHANNELS + tl.arange(0, CHANNELS)
        x, part_lse = _partials(partial_o, partial_lse, part, stride, row, 0, n, d, BLOCK_ROWS, SPLITS)
        m = part_lse
        for c in range(SPLITS, n, SPLITS):
            s = c + tl.arange(0, SPLITS)
            at = (part.to(tl.int64) + s * stride) * BLOCK_ROWS + row
            m = tl.maximum(m, tl.load(partial_lse + at, mask=s < n, other=float("-inf")))
        top = tl.max(m, 0)
        base = tl.where(top == float("-inf"), 0.0, top)
        den = tl.exp2(part_lse - base)
        acc = tl.sum(x * den[:, None], 0)
        for c in range(SPLITS, n, SPLITS):
            x, part_lse = _partials(partial_o, partial_lse, part, stride, row, c, n, d, BLOCK_ROWS, SPLITS)
            w = tl.exp2(part_lse - base)
            acc += tl.sum(x * w[:, None], 0)
            den += w
        total = tl.sum(den, 0)
        acc = tl.where(total == 0, 0.0, acc * (scale / total))  # NaN stays NaN
        flat = first + row
        tok = (flat // num_heads).to(tl.int64)
        head = flat % num_heads
        tl.store(out + tok * out_stride_t + head * out_stride_h + d, acc.to(out.dtype.element_ty))
        value = (tl.log2(total) + base) * tl.where(lse_mode == 2, LN2, 1.0)
        tl.store(lse + tok * lse_stride_t + head * lse_stride_h, value, mask=(lse_mode > 0) & (u % CHUNKS == 0))


@triton.jit(do_not_specialize=_SCALARS, do_not_specialize_on_alignment=["out", "lse"])
def combine_kernel(
    partial_o, partial_lse, sched, out, lse, out_stride_t, out_stride_h, lse_stride_t, lse_stride_h,
    out_scale, out_scale_ptr, scale_from_ptr, num_heads, lse_mode, BLOCK_ROWS: tl.constexpr,
    CHANNELS: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: any number of programs, at most one per unit that `sched` has room for. `out` [tokens, heads, 512] and `lse`
    [tokens, heads] by strides; lse_mode 0 none, 1 base 2, 2 base e. The output is multiplied by `out_scale`, or by what
    `out_scale_ptr` holds if `scale_from_ptr`."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    scale = tl.where(scale_from_ptr != 0, tl.load(out_scale_ptr, mask=scale_from_ptr != 0, other=0.0), out_scale)
    units = tl.load(sched) * (BLOCK_ROWS * (512 // CHANNELS))
    _merge(
        tl.program_id(0), units, partial_o, partial_lse, sched, out, lse, out_stride_t, out_stride_h, lse_stride_t,
        lse_stride_h, scale, num_heads, lse_mode, BLOCK_ROWS, CHANNELS, SPLITS,
    )  # fmt: skip
    for u in range(tl.program_id(0) + tl.num_programs(0), units, tl.num_programs(0)):
        _merge(
            u, units, partial_o, partial_lse, sched, out, lse, out_stride_t, out_stride_h, lse_stride_t,
            lse_stride_h, scale, num_heads, lse_mode, BLOCK_ROWS, CHANNELS, SPLITS,
        )  # fmt: skip


def unit_shape(plan: SplitPlan) -> tuple[int, int]:
    """(channels, splits) that one program merges at once: wide rows for few splits, narrow ones for many."""
    splits = plan.partial_blocks // max(1, plan.num_groups)
    if splits <= 8:
        return 512, 8
    return (128, 32) if splits <= 32 else (32, 128)


def launch_combine(
    plan: SplitPlan, scratch: Scratch, call: Call, *, num_sms: int, pdl: bool, unscaled: bool = False
) -> None:
    """Launches the combine of `plan` on the current stream; nothing to do for a plan that cannot split.

    `pdl`: programmatic dependent launch, sm_90 and newer. `unscaled`: the partial results lack the factor `ckv_scale`.
    """
    if not plan.can_split:
        return
    channels, splits = unit_shape(plan)
    units = plan.num_groups * plan.block_rows * (512 // channels)
    lse = scratch.partial_lse if call.lse is None else call.lse
    combine_kernel[(min(units, 8 * num_sms),)](
        scratch.partial_o,
        scratch.partial_lse,
        scratch.sched,
        call.out,
        lse,
        call.out.stride(0),
        call.out.stride(1),
        lse.stride(0),
        lse.stride(1),
        call.ckv_scale if unscaled else 1.0,
        call.ckv_scale_ptr,
        call.scale_flags & 1 if unscaled else 0,
        plan.num_heads,
        call.lse_mode,
        BLOCK_ROWS=plan.block_rows,
        CHANNELS=channels,
        SPLITS=splits,
        PDL=pdl,
        num_warps=4,
        **({"launch_pdl": True} if pdl else {}),
    )
