"""Combine: merges the partial results of requests that were split (`schedule`).

    partial_o    fp32 or fp16 [partial_blocks, block_rows, 512], each row normalised by its own softmax sum
    partial_lse  fp32 [partial_blocks, block_rows], base 2, -inf for a row that saw nothing
    partial_scale  fp32 [partial_blocks, block_rows], SCALED only: what a row of partial_o is to be multiplied by
    out row      sum_s 2^(lse_s - lse) * partial_o_s,  lse = log2(sum_s 2^lse_s)

Floor: each partial row is read once (1 or 2 KB) and mostly comes from L2. Work unit = one row x 64 to 512 channels; a
fixed grid walks the groups that the attention kernel published, so a batch without splits costs one load per program. On sm_90
it is launched with programmatic dependent launch: its launch overlaps the attention kernel's end. The order of the
additions depends on the plan's unit shape and the number of splits only, so results repeat bitwise. Infinity in a partial row
makes its output infinity or NaN. The code is small on purpose: it runs once per
layer, and what a stream of cache rows leaves of it in L2 and the instruction caches has to be fetched again. WARM, for
attention kernels that let it start shortly before their end: program 0 runs through it once while the others still wait.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from uncast.kernels.launch import Call, Scratch
from uncast.kernels.pdl import grid_dependency_wait, launch_dependents
from uncast.kernels.schedule import SplitPlan

_SCALARS = ["out_stride_t", "out_stride_h", "lse_stride_t", "lse_stride_h", "scale_from_ptr", "num_heads", "lse_mode"]
LN2 = gl.constexpr(0.6931471805599453)
SM_SHARED = 228 * 1024
"""Shared memory of a Hopper multiprocessor in bytes, of which every CTA takes 1 KB beside its own."""


@gluon.jit
def _merge(
    u, units, partial_o, partial_lse, partial_scale, sched, out, lse, out_stride_t, out_stride_h, lse_stride_t, lse_stride_h,
    scale, num_heads, lse_mode, BLOCK_ROWS: gl.constexpr, CHANNELS: gl.constexpr, SPLITS: gl.constexpr, SCALED: gl.constexpr,
    WARPS: gl.constexpr, live=True,
):  # fmt: skip
    """One unit: SPLITS partial rows at a time, softmax state carried from one step to the next. Unless `live`, all of its code
    runs and touches no memory."""
    CHUNKS: gl.constexpr = 512 // CHANNELS
    ABREAST: gl.constexpr = 256 // CHANNELS if CHANNELS < 256 else 1  # splits that a warp's lanes read side by side
    L: gl.constexpr = gl.BlockedLayout([SPLITS // (ABREAST * WARPS), 8], [ABREAST, 32 // ABREAST], [WARPS, 1], [1, 0])
    # every warp holds the weights of all splits over its lanes: their reductions need no shared memory
    LANES: gl.constexpr = gl.BlockedLayout([(SPLITS + 31) // 32], [32], [WARPS], [0])
    entry = sched + (u // (BLOCK_ROWS * CHUNKS) + 1) * 8
    first = gl.load(entry, mask=live, other=0)
    rows = gl.load(entry + 1, mask=live, other=BLOCK_ROWS)
    n = gl.load(entry + 2, mask=live, other=1)
    part = gl.load(entry + 3, mask=live, other=0)
    step = gl.load(entry + 4, mask=live, other=0) * BLOCK_ROWS
    row = (u // CHUNKS) % BLOCK_ROWS
    if (u < units) & (row < rows):
        at = part.to(gl.int64) * BLOCK_ROWS + row
        d = (u % CHUNKS) * CHANNELS + gl.arange(0, CHANNELS, gl.SliceLayout(0, L))
        top = -1.0e30
        total = 0.0
        acc = gl.zeros([CHANNELS], gl.float32, gl.SliceLayout(0, L))
        for c in range(0, n, SPLITS):
            # behind the last split, its partial result is read again and weighs 0
            s = gl.minimum(c + gl.arange(0, SPLITS, gl.SliceLayout(1, L)), n - 1) * step
            rows_of = partial_o + at * 512 + s.to(gl.int64)[:, None] * 512 + d[None, :]
            x = gl.load(rows_of, mask=gl.full([SPLITS, CHANNELS], live, gl.int1, L), other=0.0)
            every = c + gl.arange(0, SPLITS, LANES)
            lse_at = at + every * step
            some = (every < n) & live
            every_lse = gl.load(partial_lse + lse_at, mask=some, other=float("-inf"))
            new_top = gl.maximum(top, gl.max(every_lse, 0))
            old = gl.exp2(top - new_top)
            weight = gl.exp2(every_lse - new_top)
            total = total * old + gl.sum(weight, 0)
            if SCALED:
                weight = weight * gl.load(partial_scale + lse_at, mask=some, other=0.0)
            weight = gl.convert_layout(weight, gl.SliceLayout(1, L))
            acc = acc * old + gl.sum(x.to(gl.float32) * weight[:, None], 0)
            top = new_top
        acc = gl.where(total == 0, 0.0, acc * (scale / total))  # a NaN of a live row stays one
        tok = ((first + row) // num_heads).to(gl.int64)
        head = (first + row) % num_heads
        at_out = ((tok * out_stride_t + head * out_stride_h) >> 3) * 8  # rows start at multiples of 16 bytes
        gl.store(out + at_out + d, acc.to(out.dtype.element_ty), mask=gl.full([CHANNELS], live, gl.int1, d.type.layout))
        value = (gl.log2(total) + top) * gl.where(lse_mode == 2, LN2, 1.0)
        gl.store(lse + tok * lse_stride_t + head * lse_stride_h, value, mask=(lse_mode > 0) & (u % CHUNKS == 0) & live)


@gluon.jit
def _scale_and_units(
    sched, out_scale, out_scale_ptr, scale_from_ptr, BLOCK_ROWS: gl.constexpr, CHANNELS: gl.constexpr
):  # fmt: skip
    """What the output is multiplied by, and the units that the attention kernel published."""
    from_ptr = scale_from_ptr != 0
    scale = gl.where(from_ptr, gl.load(out_scale_ptr, mask=from_ptr, other=0.0), out_scale)
    return scale, gl.load(sched) * (BLOCK_ROWS * (512 // CHANNELS))


@gluon.jit(do_not_specialize=_SCALARS, do_not_specialize_on_alignment=["lse"])
def combine_kernel(
    partial_o, partial_lse, partial_scale, sched, out, lse, out_stride_t, out_stride_h, lse_stride_t, lse_stride_h,
    out_scale, out_scale_ptr, scale_from_ptr, num_heads, lse_mode, BLOCK_ROWS: gl.constexpr,
    CHANNELS: gl.constexpr, SPLITS: gl.constexpr, SCALED: gl.constexpr, PDL: gl.constexpr, WARM: gl.constexpr,
    SPREAD: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Grid: any number of programs, at most one per unit that `sched` has room for. `out` [tokens, heads, 512] and `lse`
    [tokens, heads] by strides; lse_mode 0 none, 1 base 2, 2 base e. The output is multiplied by `out_scale`, or by what
    `out_scale_ptr` holds if `scale_from_ptr`."""
    u = gl.program_id(0)
    if SPREAD > 0:  # shared memory that only keeps other programs away
        lane: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
        room = gl.allocate_shared_memory(gl.int32, [SPREAD // 128, 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        room.index(0).store(gl.full([32], u, gl.int32, lane))
    if WARM:
        # program 0 starts long before the attention kernel ends: it first runs through the code, so that all find it in L2
        u = launch_dependents(u)
        live = u > 0
        more = u >= 0
        waiting = more
        scale = out_scale
        units = u * 0 + 1
        while more:
            if live & waiting:
                u = grid_dependency_wait(u)
                scale, units = _scale_and_units(sched, out_scale, out_scale_ptr, scale_from_ptr, BLOCK_ROWS, CHANNELS)
                waiting = u < 0
            _merge(
                u, units, partial_o, partial_lse, partial_scale, sched, out, lse, out_stride_t, out_stride_h, lse_stride_t,
                lse_stride_h, scale, num_heads, lse_mode, BLOCK_ROWS, CHANNELS, SPLITS, SCALED, num_warps, live,
            )  # fmt: skip
            u += gl.where(live, gl.num_programs(0), 0)
            more = (u < units) | waiting
            live = u >= 0
    else:
        if PDL:
            u = grid_dependency_wait(launch_dependents(u))
        # the first unit is looked up before the number of units is known: one round trip less
        scale, units = _scale_and_units(sched, out_scale, out_scale_ptr, scale_from_ptr, BLOCK_ROWS, CHANNELS)
        more = u >= 0
        while more:
            _merge(
                u, units, partial_o, partial_lse, partial_scale, sched, out, lse, out_stride_t, out_stride_h, lse_stride_t,
                lse_stride_h, scale, num_heads, lse_mode, BLOCK_ROWS, CHANNELS, SPLITS, SCALED, num_warps,
            )  # fmt: skip
            u += gl.num_programs(0)
            more = u < units


WIDTHS = (512, 256, 128, 64)
"""Channels of a unit; a lane holds 8 of them (of 512: 16), so narrower units merge more splits at once."""


def constexprs(
    block_rows: int, channels: int, warps: int, lane_splits: int, *, pdl: bool, scaled: bool = False,
    warm: bool = False, spread: int = 0,
) -> dict[str, object]:  # fmt: skip
    """Compile-time arguments of the kernel: partial blocks of `block_rows` rows, a width of `WIDTHS`, 1, 2 or 4 warps, 4, 8
    or 16 splits a lane. `warm`, with `pdl` only: its code is run through once before the attention kernel has ended. `spread`:
    bytes of shared memory that a program occupies, see `spread_bytes`."""
    splits = lane_splits * max(1, 256 // channels) * warps
    shape = {"BLOCK_ROWS": block_rows, "CHANNELS": channels, "SPLITS": splits}
    return {**shape, "SCALED": scaled, "PDL": pdl, "WARM": warm, "SPREAD": spread}


def unit_shape(plan: SplitPlan, dtype: torch.dtype) -> tuple[int, int, int]:
    """(channels, warps, splits a lane) of a program, by the usual number of splits of this batch; any number is merged
    correctly, in several steps. `dtype`: of the partial results. Few warps with much work each are fastest (measured for fp16
    on an H200)."""
    wide = dtype == torch.float32  # twice the registers
    if plan.batch_invariant:  # one shape for all batches: it decides the order of the additions
        return 256, 1, 8
    if plan.alone:  # as for one request that may be long
        return (64, 4, 8) if wide else (64, 2, 16)
    splits = plan.partial_blocks // max(1, plan.num_groups)
    if splits <= 8:
        return (512, 1, 4) if splits <= 4 and not wide else (256, 1, 8)
    if splits <= 16:
        return (128, 4, 8) if wide else (128, 1, 8)
    if splits <= 36:
        return (64, 2, 8) if wide else (64, 1, 8)
    if wide:
        return 64, 4, 8
    return (64, 1, 16) if splits <= 68 else (64, 2, 16)


def spread_bytes(programs: int, num_sms: int) -> int:
    """Shared memory of a program that lets only 1, 2, 4 or 8 of them onto a Hopper multiprocessor, about as many as there are
    for each; 0 for more.

    Programs wait for the attention kernel's CTAs to make room; without this, the first multiprocessors that are free take all
    the programs that fit, and the last units wait for those that share their issue slots.
    """
    each = 1 << max(0, -(-programs // num_sms) - 1).bit_length()
    return (SM_SHARED // each - 4096) // 128 * 128 if each <= 8 else 0


def launch_combine(
    plan: SplitPlan,
    scratch: Scratch,
    call: Call,
    *,
    num_sms: int,
    pdl: bool,
    unscaled: bool = False,
    warm: bool = False,
    spread: bool = False,
) -> None:
    """Launches the combine of `plan` on the current stream; nothing to do for a plan that cannot split.

    `pdl`: programmatic dependent launch, sm_90 and newer. `unscaled`: the partial results lack the factor `ckv_scale`.
    `spread`: see `spread_bytes`. `warm`: see `constexprs`; for an attention kernel that allows its dependents to start shortly
    before it ends.
    """
    if not plan.can_split:
        return
    channels, warps, lane_splits = unit_shape(plan, scratch.partial_o.dtype)
    units = plan.num_groups * plan.block_rows * (512 // channels)
    lse = scratch.partial_lse if call.lse is None else call.lse
    programs = min(units, 32 * num_sms // warps)
    combine_kernel[(programs,)](
        scratch.partial_o,
        scratch.partial_lse,
        scratch.partial_lse if scratch.partial_scale is None else scratch.partial_scale,
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
        **constexprs(
            plan.block_rows,
            channels,
            warps,
            lane_splits,
            pdl=pdl,
            scaled=scratch.partial_scale is not None,
            warm=warm,
            spread=spread_bytes(programs, num_sms) if spread else 0,
        ),
        num_warps=warps,
        **({"launch_pdl": True} if pdl else {}),
    )
