"""Combine: merges the partial results of requests that were split (`schedule`).

    partial_o    fp32 [partial_blocks, block_rows, 512], each row normalised by its own softmax sum
    partial_lse  fp32 [partial_blocks, block_rows], base 2, -inf for a row that saw nothing
    out row      sum_s 2^(lse_s - lse) * partial_o_s,  lse = log2(sum_s 2^lse_s)

Floor: each partial row is read once (2 KB) and mostly comes from L2. Work unit = one row x 128 channels; a fixed grid walks
the groups that the attention kernel published, so a batch without splits costs one load per program. On sm_90 and newer
it is launched with programmatic dependent launch: its launch overlaps the attention kernel's end. The order of the
additions depends on the number of splits only, so results repeat bitwise.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from uncast.kernels.schedule import SplitPlan

CHANNELS = 128
LSE_MODES = {"2": 1, "e": 2}
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize=["num_heads", "lse_mode"])
def combine_kernel(
    partial_o, partial_lse, sched, out, lse, out_stride_t, out_stride_h, lse_stride_t, lse_stride_h,
    num_heads, lse_mode, BLOCK_ROWS: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: any number of programs. `out` [tokens, heads, 512] and `lse` [tokens, heads] by strides; lse_mode 0 none, 1 base
    2, 2 base e."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    units = tl.load(sched) * (BLOCK_ROWS * 4)
    for u in range(tl.program_id(0), units, tl.num_programs(0)):
        entry = sched + (u // (BLOCK_ROWS * 4) + 1) * 8
        row = (u // 4) % BLOCK_ROWS
        if row < tl.load(entry + 1):
            n = tl.load(entry + 2)
            part = tl.load(entry + 3).to(tl.int64)
            stride = tl.load(entry + 4)
            s = tl.arange(0, SPLITS)
            m = tl.full([SPLITS], float("-inf"), tl.float32)
            for c in range(0, n, SPLITS):
                at = (part + (c + s) * stride) * BLOCK_ROWS + row
                m = tl.maximum(m, tl.load(partial_lse + at, mask=c + s < n, other=float("-inf")))
            top = tl.max(m, 0)
            base = tl.where(top == float("-inf"), 0.0, top)
            d = (u % 4) * 128 + tl.arange(0, 128)
            acc = tl.zeros([128], tl.float32)
            den = tl.zeros([SPLITS], tl.float32)
            for c in range(0, n, SPLITS):
                at = (part + (c + s) * stride) * BLOCK_ROWS + row
                w = tl.exp2(tl.load(partial_lse + at, mask=c + s < n, other=float("-inf")) - base)
                x = tl.load(partial_o + at[:, None] * 512 + d[None, :], mask=(c + s < n)[:, None], other=0.0)
                acc += tl.sum(x * w[:, None], 0)
                den += w
            total = tl.sum(den, 0)
            acc = tl.where(total > 0, acc / total, 0.0)
            flat = tl.load(entry) + row
            tok = (flat // num_heads).to(tl.int64)
            head = flat % num_heads
            tl.store(out + tok * out_stride_t + head * out_stride_h + d, acc.to(out.dtype.element_ty))
            value = (tl.log2(total) + base) * tl.where(lse_mode == 2, LN2, 1.0)
            tl.store(lse + tok * lse_stride_t + head * lse_stride_h, value, mask=(lse_mode > 0) & (u % 4 == 0))


def launch_combine(
    plan: SplitPlan,
    partial_o: torch.Tensor,
    partial_lse: torch.Tensor,
    sched: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    lse_mode: int,
    num_sms: int,
    pdl: bool,
) -> None:
    """Launches the combine of `plan` on the current stream; nothing to do for a plan that cannot split.

    out [tokens, heads, 512] (last dimension contiguous), lse fp32 [tokens, heads] or None; the scratch tensors have the
    sizes of `plan`. `lse_mode` is LSE_MODES[base]. `pdl`: programmatic dependent launch, sm_90 and newer.
    """
    if not plan.can_split:
        return
    units = plan.num_groups * plan.block_rows * (512 // CHANNELS)
    lse_arg = partial_lse if lse is None else lse
    combine_kernel[(min(units, 8 * num_sms),)](
        partial_o,
        partial_lse,
        sched,
        out,
        lse_arg,
        out.stride(0),
        out.stride(1),
        0 if lse is None else lse.stride(0),
        0 if lse is None else lse.stride(1),
        plan.num_heads,
        0 if lse is None else lse_mode,
        BLOCK_ROWS=plan.block_rows,
        SPLITS=32,
        PDL=pdl,
        num_warps=4,
        **({"launch_pdl": True} if pdl else {}),
    )


def allocate_scratch(plan: SplitPlan, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """partial_o, partial_lse and sched of `plan` (see the module and `schedule`), uninitialised except `sched` = 0."""
    blocks = max(1, plan.partial_blocks)
    partial_o = torch.empty(blocks, plan.block_rows, 512, dtype=torch.float32, device=device)
    partial_lse = torch.empty(blocks, plan.block_rows, dtype=torch.float32, device=device)
    sched = torch.zeros(1 + plan.num_groups, 8, dtype=torch.int32, device=device)
    return partial_o, partial_lse, sched
