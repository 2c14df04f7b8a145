"""Host side of the Hopper sparse kernel: what it supports, its plan and its launch (`wgmma_sparse`)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from uncast.attention.problem import Problem, ProblemSpec
from uncast.kernels import wgmma_launch
from uncast.kernels.combine import launch_combine
from uncast.kernels.launch import Call, Scratch
from uncast.kernels.mma_launch import cache_views
from uncast.kernels.schedule import TILE
from uncast.kernels.sparse_launch import SparseSplits, sparse_plan
from uncast.kernels.wgmma_sparse import wgmma_sparse_kernel

STAGES = {"fp8_e4m3": {16: 5, 32: 4, 64: 3}, "fp8_ds_mla": {16: 4, 32: 4, 64: 3}}
"""Tiles in the ring per layout and block of heads: as many as fit 227 KB of shared memory, rope slots included."""


def supports(spec: ProblemSpec) -> str | None:
    """None if the Hopper sparse kernel can run `spec`, else the reason in one sentence. No device access.

    Rows are gathered one by one, so any page size will do.
    """
    return wgmma_launch.supports(replace(spec, page_size=wgmma_launch.PAGE_SIZES[0]))


def constexprs(layout: str, rows: int, bucket: int) -> dict[str, object]:
    """Compile-time arguments of the kernel for `rows` heads a CTA (a key of `STAGES[layout]`) and a batch bucket."""
    dense = wgmma_launch.constexprs(layout, rows, wgmma_launch.PAGE_SIZES[0], bucket)
    return {name: dense[name] for name in ("BN", "KC", "TC", "BATCH", "DS")} | {"ST": STAGES[layout][rows]}


@dataclass(frozen=True)
class WgmmaSparsePlan:
    """Launch parameters and scratch of one problem; `launch` may be captured in a CUDA graph."""

    problem: Problem
    work: SparseSplits
    num_sms: int
    scratch: Scratch


def make_plan(problem: Problem, num_sms: int) -> WgmmaSparsePlan:
    """Sizes and scratch for `problem`, from shapes alone (no device sync). `num_sms`: multiprocessors of the device.

    Raises:
        ScheduleError: batch beyond the schedule's bound.
    """
    spec = problem.spec
    tiles = wgmma_launch.MANY_TILES if spec.batch_invariant else problem.total_q * -(-spec.topk // TILE)
    work = sparse_plan(
        batch=problem.batch_size, total_q=problem.total_q, num_heads=spec.num_heads,
        block_rows=wgmma_launch.block_rows(spec.num_heads, tiles), topk=spec.topk, num_ctas=num_sms,
        batch_invariant=spec.batch_invariant,
    )  # fmt: skip
    scaled = spec.kv_layout == "fp8_ds_mla"
    scratch = Scratch.allocate(work.plan, problem.kv_len_arr.device, torch.float16, scaled=scaled)
    return WgmmaSparsePlan(problem, work, num_sms, scratch)


def launch(plan: WgmmaSparsePlan, call: Call, indices: torch.Tensor) -> None:
    """One layer's attention on the current stream, without a device sync; may be captured in a CUDA graph.

    indices: int32 [total_q, topk] positions, contiguous.
    """
    problem, work, scratch = plan.problem, plan.work, plan.scratch
    spec, external = problem.spec, problem.spec.layout.has_external_scales
    ckv, kpe, _ = cache_views(call.cache, spec.layout)
    lse = scratch.partial_lse if call.lse is None else call.lse
    wgmma_sparse_kernel[(work.plan.num_items,)](
        call.q_nope, call.q_pe, ckv, kpe.view(torch.int16), ckv.view(torch.float32), indices, problem.qo_indptr,
        problem.kv_indptr, problem.kv_indices, problem.kv_len_arr, call.out, lse, scratch.partial_o, scratch.partial_lse,
        scratch.sched, call.ckv_scale if external else 1.0, call.kpe_scale if external else 1.0, call.ckv_scale_ptr,
        call.kpe_scale_ptr, spec.sm_scale * wgmma_launch.LOG2E,
        *(t.stride(d) for t in (call.q_nope, call.q_pe, call.out, lse) for d in (0, 1)),
        spec.num_heads, problem.batch_size, spec.topk, work.splits, work.per, spec.page_size.bit_length() - 1,
        call.lse_mode, call.scale_flags if external else 0, scratch.partial_lse.numel(),
        **constexprs(spec.kv_layout, work.plan.block_rows, work.plan.batch_bucket), num_warps=4, launch_pdl=True,
    )  # fmt: skip
    launch_combine(work.plan, scratch, call, num_sms=plan.num_sms, pdl=True, unscaled=external, spread=True)
