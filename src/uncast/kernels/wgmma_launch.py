"""Host side of the Hopper kernel: what it supports, its plan and its launch (`wgmma_decode`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from uncast.attention.problem import Problem, ProblemSpec
from uncast.kernels.combine import launch_combine
from uncast.kernels.launch import Call, Scratch
from uncast.kernels.schedule import BATCH_BUCKETS, TILE, SplitPlan, item_overhead, plan_splits
from uncast.kernels.wgmma_decode import wgmma_decode_kernel

ARCH = 90
PAGE_SIZES = (64, 128)
LAYOUTS = ("fp8_e4m3", "fp8_ds_mla")
QUERY_DTYPES = (torch.bfloat16, torch.float16)
LOG2E = 1.4426950408889634
MANY_TILES = 1 << 20
"""Stands for any batch: the choice of a plan that is batch-invariant, or splits as alone, must not depend on it."""
MIN_CHUNK = 1
"""Fewest tiles of a split: a tile's own chain outweighs what a second tile would share."""
STAGES = {"fp8_e4m3": {16: 5, 32: 5, 64: 4}, "fp8_ds_mla": {16: 4, 32: 4, 64: 3}}
"""Tiles in the ring per layout and block of query rows: as many as fit 227 KB of shared memory."""
OVERLAP_BATCH = 16
"""Fewest requests for the overlapped loop: with one it lost 6 to 13 % on an H200, at every length."""
OVERLAP_TILES = 24
"""Fewest tiles a multiprocessor for the overlapped loop: of 31, 62 and 124 it saves 5 to 8 %, its start costs as much as 15."""
OVERLAP_BUCKETS = (32, 64, 128, 256, 4096)
"""Batch buckets of the overlapped loop: its start is the dearer, the larger the bucket."""


def supports(spec: ProblemSpec) -> str | None:
    """None if the Hopper kernel can run `spec`, else the reason in one sentence. No device access."""
    if spec.device != "cuda" or spec.arch != ARCH:
        return f"the Hopper kernel needs compute capability 9.0, not {spec.arch / 10}: use the portable kernel"
    if spec.kv_layout not in LAYOUTS:
        return f"the Hopper kernel reads {', '.join(LAYOUTS)}, not {spec.kv_layout}: use the portable kernel"
    if (spec.head_dim_ckv, spec.head_dim_kpe) != (512, 64):
        return f"the Hopper kernel is for 512 + 64 channels, not {spec.head_dim_ckv} + {spec.head_dim_kpe}"
    if spec.page_size not in PAGE_SIZES:
        return f"the Hopper kernel reads pages of 64 or 128 rows, not {spec.page_size}: use the portable kernel"
    if spec.q_data_type not in QUERY_DTYPES:
        return f"the Hopper kernel takes bfloat16 or float16 queries, not {spec.q_data_type}"
    if spec.kv_layout == "fp8_ds_mla" and spec.q_data_type != torch.bfloat16:
        return "the Hopper kernel takes only bfloat16 queries for fp8_ds_mla: use the portable kernel"
    return None


def constexprs(layout: str, rows: int, page_size: int, bucket: int, *, overlap: bool = False) -> dict[str, object]:
    """Compile-time arguments of the kernel for `rows` query rows a CTA (a key of `STAGES[layout]`), a page size and a batch
    bucket of `schedule`. `overlap`: the loop of `wgmma_overlap`, for fp8_e4m3 and 64 rows."""
    scaled = layout == "fp8_ds_mla"
    wide = rows == 16 or (scaled and rows == 32)  # few accumulators: longer steps between waits
    return {
        "BN": rows,
        "ST": STAGES[layout][rows],
        "KC": 64 if wide else 32,
        "TC": 32 if wide else 16,
        "PAGE": page_size,
        "BATCH": bucket,
        "OVERHEAD": item_overhead(rows),
        "MIN_CHUNK": MIN_CHUNK,
        "DS": scaled,
        "JOINT": scaled or rows < 64,
        "OVERLAP": overlap,
    }


def block_rows(rows: int, tiles: int) -> int:
    """Query rows (token x head) of one CTA for requests of up to `rows` rows: the N of the MMA.

    `tiles`: upper bound of the batch's cache tiles, each as often as a request has blocks of 64 rows. Few leave multiprocessors
    idle, so narrower blocks share the rows out (measured for 64 rows on an H200: 16 up to 4k tokens, 32 at 32k, 64 at 128k).
    """
    widest = 16 if tiles <= 128 else 32 if tiles <= 1024 else 64
    return 16 if rows <= 16 else min(widest, 32 if rows <= 32 else 64)


def overlaps(spec: ProblemSpec, *, batch: int, rows: int, tiles: int, num_sms: int) -> bool:
    """Whether a plan takes the overlapped loop (`wgmma_overlap`): where it wins, by what is known without the lengths.

    `rows`: query rows of a CTA; `tiles`: as for `block_rows`. A batch-invariant plan never does, nor one that splits as alone:
    their bits must not depend on the batch.
    """
    fits = spec.kv_layout == "fp8_e4m3" and rows == 64 and not spec.batch_invariant
    return fits and batch >= OVERLAP_BATCH and tiles >= OVERLAP_TILES * num_sms


@dataclass(frozen=True)
class WgmmaPlan:
    """Launch parameters and scratch of one problem; `launch` may be captured in a CUDA graph.

    `overlap`: the loop of `wgmma_overlap`.
    """

    problem: Problem
    splits: SplitPlan
    num_sms: int
    scratch: Scratch
    overlap: bool = False


def make_plan(problem: Problem, num_sms: int) -> WgmmaPlan:
    """Sizes and scratch for `problem`, from shapes alone (no device sync). `num_sms`: multiprocessors of the device.

    Raises:
        ScheduleError: batch beyond the scheduler's bound.
    """
    spec = problem.spec
    most = spec.num_heads * (1 if spec.batch_invariant else spec.max_q_len)
    tiles = problem.batch_size * -(-problem.max_kv_len // TILE) * -(-most // 64)
    rows = block_rows(most, MANY_TILES if spec.batch_invariant or problem.alone_rows else tiles)
    overlap = not problem.alone_rows and overlaps(
        spec, batch=problem.batch_size, rows=rows, tiles=tiles, num_sms=num_sms
    )
    splits = plan_splits(
        batch=problem.batch_size,
        total_q=problem.total_q,
        num_heads=spec.num_heads,
        block_rows=rows,
        max_kv_len=problem.max_kv_len,
        max_q_len=spec.max_q_len,
        num_ctas=num_sms,
        batch_invariant=spec.batch_invariant,
        alone_rows=problem.alone_rows,
        min_chunk=MIN_CHUNK,
        buckets=OVERLAP_BUCKETS if overlap else BATCH_BUCKETS,
    )
    scaled = spec.kv_layout == "fp8_ds_mla"
    scratch = Scratch.allocate(splits, problem.kv_len_arr.device, torch.float16, scaled=scaled)
    return WgmmaPlan(problem, splits, num_sms, scratch, overlap)


def _descriptors(rows: torch.Tensor, layout: str) -> tuple[TensorDescriptor, TensorDescriptor]:
    """TMA descriptors of a tile's latent and rope in a pool viewed as `rows` [rows, row_bytes / 2] int16."""
    wide, narrow = gl.NVMMASharedLayout(128, 16, 2), gl.NVMMASharedLayout(64, 16, 2)
    ckv = TensorDescriptor.from_tensor(rows, [64, 128], wide)
    if layout == "fp8_ds_mla":
        return ckv, TensorDescriptor.from_tensor(rows, [64, 64], wide)
    return ckv, TensorDescriptor.from_tensor(rows, [64, 32], narrow)


def launch(plan: WgmmaPlan, call: Call) -> None:
    """One layer's attention on the current stream, without a device sync; may be captured in a CUDA graph.

    `call.cache` is [num_pages, page_size, row_bytes] contiguous bytes, 16-byte aligned.
    """
    problem, splits, scratch = plan.problem, plan.splits, plan.scratch
    spec = problem.spec
    rows = call.cache.view(torch.uint8).view(-1, spec.layout.row_bytes)
    ckv_desc, kpe_desc = _descriptors(rows.view(torch.int16), spec.kv_layout)
    external = spec.layout.has_external_scales
    lse = scratch.partial_lse if call.lse is None else call.lse
    wgmma_decode_kernel[(splits.num_items,)](
        call.q_nope,
        call.q_pe,
        ckv_desc,
        kpe_desc,
        problem.qo_indptr,
        problem.kv_indptr,
        problem.kv_indices,
        problem.kv_len_arr,
        call.out,
        lse,
        scratch.partial_o,
        scratch.partial_lse,
        scratch.sched,
        rows.view(torch.float32),
        call.ckv_scale if external else 1.0,
        call.kpe_scale if external else 1.0,
        call.ckv_scale_ptr,
        call.kpe_scale_ptr,
        spec.sm_scale * LOG2E,
        call.q_nope.stride(0),
        call.q_nope.stride(1),
        call.q_pe.stride(0),
        call.q_pe.stride(1),
        call.out.stride(0),
        call.out.stride(1),
        lse.stride(0),
        lse.stride(1),
        spec.num_heads,
        problem.batch_size,
        splits.target,
        int(spec.causal),
        splits.mode,
        call.lse_mode,
        call.scale_flags if external else 0,
        scratch.partial_lse.numel(),
        **constexprs(spec.kv_layout, splits.block_rows, spec.page_size, splits.batch_bucket, overlap=plan.overlap),
        num_warps=4,
        launch_pdl=True,
    )
    launch_combine(splits, scratch, call, num_sms=plan.num_sms, pdl=True, unscaled=external, warm=True, spread=True)
