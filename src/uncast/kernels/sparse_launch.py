"""Host side of the sparse kernels: the work split from shapes, the portable kernel's plan and its launch (`mma_sparse`)."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

from uncast.attention.problem import Problem, ProblemSpec
from uncast.kernels import mma_launch
from uncast.kernels.combine import launch_combine
from uncast.kernels.launch import Call, Scratch, resident_ctas
from uncast.kernels.mma_launch import MmaConfig, cache_views
from uncast.kernels.mma_sparse import mma_sparse_kernel
from uncast.kernels.schedule import TILE, SplitPlan, batch_bucket, item_overhead
from uncast.latent.layouts import RowLayout

INVARIANT_TILES = 8
"""Tiles of a split of a batch-invariant plan."""


@dataclass(frozen=True)
class SparseSplits:
    """`splits` of a query token's tiles, each of `per` tiles; grid and scratch in `plan`."""

    splits: int
    per: int
    plan: SplitPlan


def sparse_plan(
    *,
    batch: int,
    total_q: int,
    num_heads: int,
    block_rows: int,
    topk: int,
    num_ctas: int,
    batch_invariant: bool = False,
) -> SparseSplits:
    """Splits of every token's `topk` entries, alike for all, so that `num_ctas` CTAs at once end soonest.

    Each of total_q tokens has ceil(num_heads / block_rows) blocks. A wave of CTAs costs its tiles and an overhead in tiles
    (`schedule.item_overhead`); a batch-invariant plan looks at topk alone.

    Raises:
        ScheduleError: batch beyond the largest bucket.
    """
    bucket, tiles, overhead = batch_bucket(batch), -(-topk // TILE), item_overhead(block_rows)
    blocks = total_q * -(-num_heads // block_rows)
    if batch_invariant:
        splits = max(1, tiles // INVARIANT_TILES)
    else:
        most = max(1, min(tiles, 2 * num_ctas // max(1, blocks)))
        splits = min(range(1, most + 1), key=lambda n: _waves(blocks * n, num_ctas) * (-(-tiles // n) + overhead))
    per = -(-tiles // splits)
    splits = -(-tiles // per)
    items = max(1, blocks * splits)
    partial, groups = (items, blocks) if splits > 1 else (0, 0)
    plan = SplitPlan(batch, num_heads, block_rows, num_ctas, overhead, bucket, batch_invariant, items, partial, groups)
    return SparseSplits(splits, per, plan)


def _waves(items: int, num_ctas: int) -> int:
    return -(-items // num_ctas)


def supports(spec: ProblemSpec) -> str | None:
    """None if the portable sparse kernel can run `spec`, else the reason in one sentence. No device access."""
    return mma_launch.supports(spec)


def choose_config(spec: ProblemSpec) -> MmaConfig:
    """The variant for a problem: a CTA has heads of one query token."""
    return mma_launch.choose_config(replace(spec, max_q_len=1))


def constexprs(layout: str, q_data_type: torch.dtype, arch: int, config: MmaConfig, bucket: int) -> dict[str, object]:
    """Compile-time arguments of `mma_sparse_kernel`; `bucket`: see `schedule.batch_bucket`."""
    dense = mma_launch.constexprs(layout, q_data_type, arch, config, bucket)
    return {name: value for name, value in dense.items() if name != "OVERHEAD"}


@functools.cache
def compile_variant(
    layout: RowLayout, q_data_type: torch.dtype, arch: int, config: MmaConfig, bucket: int, device: torch.device
) -> int:
    """Compiles and loads one variant; returns how many of its CTAs the device holds at once."""
    i = torch.empty(64, dtype=torch.int32, device=device)
    f = torch.empty(64, dtype=torch.float32, device=device)
    q = torch.empty(64, dtype=q_data_type, device=device)
    views = cache_views(torch.empty(1, 1, 2304, dtype=torch.uint8, device=device), layout)
    compiled = mma_sparse_kernel.warmup(
        q, q, *views, i, i, i, i, i, q, f, f, f, i, f, f, 1.0, 1.0, 1.0, *range(16),
        **constexprs(layout.name, q_data_type, arch, config, bucket), num_warps=mma_launch.NUM_WARPS,
        enable_fp_fusion=True, grid=(1,),
    )  # fmt: skip
    return resident_ctas(compiled, device)


@dataclass(frozen=True)
class MmaSparsePlan:
    """Launch parameters and scratch of one problem; `launch` may be captured in a CUDA graph."""

    problem: Problem
    work: SparseSplits
    scratch: Scratch
    config: MmaConfig
    num_sms: int


def make_plan(problem: Problem, num_sms: int) -> MmaSparsePlan:
    """Compiles the variant of `problem` (once a process), sizes its launch and allocates scratch; no device sync.

    Raises:
        ScheduleError: batch beyond the schedule's bound.
    """
    spec, device = problem.spec, problem.kv_len_arr.device
    config, bucket = choose_config(spec), batch_bucket(problem.batch_size)
    num_ctas = compile_variant(spec.layout, spec.q_data_type, spec.arch, config, bucket, device)
    work = sparse_plan(
        batch=problem.batch_size, total_q=problem.total_q, num_heads=spec.num_heads, block_rows=config.block_rows,
        topk=spec.topk, num_ctas=num_ctas, batch_invariant=spec.batch_invariant,
    )  # fmt: skip
    return MmaSparsePlan(problem, work, Scratch.allocate(work.plan, device), config, num_sms)


def launch(plan: MmaSparsePlan, call: Call, indices: torch.Tensor) -> None:
    """One layer's attention on the current stream, without a device sync; may be captured in a CUDA graph.

    indices: int32 [total_q, topk] positions, contiguous.
    """
    problem, work, scratch = plan.problem, plan.work, plan.scratch
    spec = problem.spec
    lse = scratch.partial_lse if call.lse is None else call.lse
    mma_sparse_kernel[(work.plan.num_items,)](
        call.q_nope, call.q_pe, *cache_views(call.cache, spec.layout),
        indices, problem.qo_indptr, problem.kv_indptr, problem.kv_indices, problem.kv_len_arr,
        call.out, lse, scratch.partial_o, scratch.partial_lse, scratch.sched, call.ckv_scale_ptr, call.kpe_scale_ptr,
        spec.sm_scale, call.ckv_scale, call.kpe_scale,
        *(t.stride(d) // 8 for t in (call.q_nope, call.q_pe, call.out) for d in (0, 1)), lse.stride(0), lse.stride(1),
        problem.batch_size, spec.num_heads, spec.topk, work.splits, work.per, spec.page_size.bit_length() - 1,
        call.scale_flags, call.lse_mode,
        **constexprs(spec.kv_layout, spec.q_data_type, spec.arch, plan.config, work.plan.batch_bucket),
        num_warps=mma_launch.NUM_WARPS, enable_fp_fusion=True,
    )  # fmt: skip
    launch_combine(work.plan, scratch, call, num_sms=plan.num_sms, pdl=spec.arch >= 90)
