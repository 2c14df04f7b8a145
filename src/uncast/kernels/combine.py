"""Combine: merges the partial results of requests that were split (`schedule`).

    partial_o    fp32 or fp16 [partial_blocks, block_rows, 512], each row normalised by its own softmax sum
    partial_lse  fp32 [partial_blocks, block_rows], base 2, -inf for a row that saw nothing
    out row      sum_s 2^(lse_s - lse) * partial_o_s,  lse = log2(sum_s 2^lse_s)

Floor: each partial row is read once (1 or 2 KB) and mostly comes from L2. Work unit = one row x 256 channels; a
fixed grid walks the groups that the attention kernel published, so a batch without splits costs one load per program. On sm_90
it is launched with programmatic dependent launch: its launch overlaps the attention kernel's end. The order of the
additions depends on the number of splits only, so results repeat bitwise. The code is small on purpose: it runs once per
layer, and what a stream of cache rows leaves of it in L2 and the instruction caches has to be fetched again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from uncast.kernels.launch import Call, Scratch
from uncast.kernels.schedule import SplitPlan

CHANNELS = 256
"""Channels of a unit: 8 a lane, so a warp reads 512 contiguous bytes of each fp16 partial row."""
_SCALARS = ["out_stride_t", "out_stride_h", "lse_stride_t", "lse_stride_h", "scale_from_ptr", "num_heads", "lse_mode"]
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _merge(
    u, units, partial_o, partial_lse, sched, out, lse, out_stride_t, out_stride_h, lse_stride_t, lse_stride_h, scale,
    num_heads, lse_mode, BLOCK_ROWS: tl.constexpr, CHANNELS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """One unit: SPLITS partial rows at a time, softmax state carried from one step to the next."""
    CHUNKS: tl.constexpr = 512 // CHANNELS
    entry = sched + (u // (BLOCK_ROWS * CHUNKS) + 1) * 8
    first = tl.load(entry)
    rows = tl.load(entry + 1)
    n = tl.load(entry + 2)
    part = tl.load(entry + 3).to(tl.int64)
    stride = tl.load(entry + 4)
    row = (u // CHUNKS) % BLOCK_ROWS
    if (u < units) & (row < rows):
        d = (u % CHUNKS) * CHANNELS + tl.arange(0, CHANNELS)
        top = -1.0e30
        total = 0.0
        acc = tl.zeros([CHANNELS], tl.float32)
        for c in range(0, n, SPLITS):
            s = c + tl.arange(0, SPLITS)
            at = (part + s * stride) * BLOCK_ROWS + row
            x = tl.load(partial_o + at[:, None] * 512 + d[None, :], mask=(s < n)[:, None], other=0.0)
            row_lse = tl.load(partial_lse + at, mask=s < n, other=float("-inf"))
            new_top = tl.maximum(top, tl.max(row_lse, 0))
            w = tl.exp2(row_lse - new_top)
            old = tl.exp2(top - new_top)
            acc = acc * old + tl.sum(x.to(tl.float32) * w[:, None], 0)
            total = total * old + tl.sum(w, 0)
            top = new_top
        acc = tl.where(total > 0, acc * (scale / total), 0.0)
        tok = ((first + row) // num_heads).to(tl.int64)
        head = (first + row) % num_heads
        at_out = ((tok * out_stride_t + head * out_stride_h) // 8) * 8  # rows start at multiples of 16 bytes
        tl.store(out + at_out + d, acc.to(out.dtype.element_ty))
        value = (tl.log2(total) + top) * tl.where(lse_mode == 2, LN2, 1.0)
        tl.store(lse + tok * lse_stride_t + head * lse_stride_h, value, mask=(lse_mode > 0) & (u % CHUNKS == 0))


@triton.jit(do_not_specialize=_SCALARS, do_not_specialize_on_alignment=["lse"])
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
    # the first unit is looked up before the number of units is known: one round trip less
    u = tl.program_id(0)
    more = u >= 0
    while more:
        _merge(
            u, units, partial_o, partial_lse, sched, out, lse, out_stride_t, out_stride_h, lse_stride_t,
            lse_stride_h, scale, num_heads, lse_mode, BLOCK_ROWS, CHANNELS, SPLITS,
        )  # fmt: skip
        u += tl.num_programs(0)
        more = u < units


SPLITS_PER_WARP = 8
"""Splits that a lane holds of its channels at once; the warps of a program share the splits."""


def constexprs(block_rows: int, warps: int, *, pdl: bool) -> dict[str, object]:
    """Compile-time arguments of the kernel for partial blocks of `block_rows` rows and programs of `warps` warps."""
    return {"BLOCK_ROWS": block_rows, "CHANNELS": CHANNELS, "SPLITS": SPLITS_PER_WARP * warps, "PDL": pdl}


def num_warps(plan: SplitPlan) -> int:
    """Warps of a program, by the usual number of splits of this batch; any number of splits is merged correctly."""
    splits = plan.partial_blocks // max(1, plan.num_groups)
    return 1 if splits <= 8 else 4 if splits <= 32 else 16


def launch_combine(
    plan: SplitPlan, scratch: Scratch, call: Call, *, num_sms: int, pdl: bool, unscaled: bool = False
) -> None:
    """Launches the combine of `plan` on the current stream; nothing to do for a plan that cannot split.

    `pdl`: programmatic dependent launch, sm_90 and newer. `unscaled`: the partial results lack the factor `ckv_scale`.
    """
    if not plan.can_split:
        return
    warps = num_warps(plan)
    units = plan.num_groups * plan.block_rows * (512 // CHANNELS)
    lse = scratch.partial_lse if call.lse is None else call.lse
    combine_kernel[(min(units, max(1, 16 * num_sms // warps)),)](
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
        **constexprs(plan.block_rows, warps, pdl=pdl),
        num_warps=warps,
        **({"launch_pdl": True} if pdl else {}),
    )
