"""Host side of the portable kernel: what it supports, its variants, its plan and its launch (`mma_decode`)."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from uncast.attention.problem import Problem, ProblemSpec
from uncast.kernels.combine import launch_combine
from uncast.kernels.launch import Call, Scratch, resident_ctas
from uncast.kernels.mma_decode import mma_decode_kernel
from uncast.kernels.schedule import SplitPlan, batch_bucket, item_overhead, plan_splits
from uncast.kernels.unpack import is_native
from uncast.latent.layouts import RowLayout

OLDEST_ARCH = 80
LAYOUTS = ("bf16", "fp8_e4m3", "fp8_ds_mla")
QUERY_DTYPES = (torch.bfloat16, torch.float16)
NUM_WARPS = 4


@dataclass(frozen=True)
class MmaConfig:
    """A variant of the kernel: query rows per item, cache rows per step, stages of the ring."""

    block_rows: int
    step: int
    stages: int


def supports(spec: ProblemSpec) -> str | None:
    """None if the portable kernel can run `spec`, else the reason in one sentence. No device access."""
    if spec.device != "cuda":
        return f"the native kernels run on cuda, not on {spec.device}"
    if spec.arch < OLDEST_ARCH:
        return f"the native kernels need compute capability 8.0 or newer, and this GPU has {spec.arch / 10}"
    if (spec.head_dim_ckv, spec.head_dim_kpe) != (512, 64):
        return f"the native kernels are for 512 + 64 channels, not {spec.head_dim_ckv} + {spec.head_dim_kpe}"
    if spec.kv_layout not in LAYOUTS:
        return f"the native kernels read {', '.join(LAYOUTS)}, not {spec.kv_layout}"
    if spec.q_data_type not in QUERY_DTYPES:
        return (
            f"the native kernels take bfloat16 or float16 queries, not {str(spec.q_data_type).removeprefix('torch.')}"
        )
    return None


def needs_two(layout: str, q_data_type: torch.dtype) -> bool:
    """Whether queries meet bf16 keys as a sum of two bf16: fp16 queries have more bits than one holds."""
    return q_data_type == torch.float16 and layout != "fp8_e4m3"


def p_terms(layout: str) -> int:
    """P_TERMS: of how many 16-bit numbers the kernels make a probability; the only place that chooses.

    FP8 values meet one fp16, whose rounding is an eighth of bf16's. Values of layout `bf16` need operands in bf16, and a single
    one puts an output of few rows beyond the default accuracy: 3.5e-3 of it instead of 2.5e-3. Two leave 2^-17 of P and cost a
    second value product and 2 * step * block_rows bytes of shared memory. Bits must not depend on the batch, so the choice
    depends on the layout only.
    """
    return 2 if layout == "bf16" else 1


def shared_memory_limit(arch: int) -> int:
    """Bytes of shared memory one CTA may use, by compute capability (CUDA C++ Programming Guide, technical specifications)."""
    if arch in (80, 87):
        return 163 * 1024
    if 90 <= arch < 120:
        return 227 * 1024
    return 99 * 1024


def choose_config(spec: ProblemSpec) -> MmaConfig:
    """The variant for a problem, within the shared memory of its chip.

    Depends on the batch through `max_q_len` only, and for `batch_invariant` problems not at all.
    """
    rows = spec.num_heads * (1 if spec.batch_invariant else spec.max_q_len)
    large = shared_memory_limit(spec.arch) > 112 * 1024
    if spec.kv_layout == "bf16":
        if needs_two("bf16", spec.q_data_type):
            return MmaConfig(16, 32, 2 if large else 1)
        return MmaConfig(32 if large and rows > 16 else 16, 32, 2)
    if rows <= 8:
        return MmaConfig(8, 64, 2)
    if spec.kv_layout == "fp8_e4m3":
        return MmaConfig(16, 64, 2) if rows <= 16 else MmaConfig(32, 32, 3)
    if rows <= 16:
        return MmaConfig(16, 64, 2) if large else MmaConfig(16, 32, 3)
    return MmaConfig(32, 32, 2)


def constexprs(layout: str, q_data_type: torch.dtype, arch: int, config: MmaConfig, bucket: int) -> dict[str, object]:
    """Compile-time arguments of `mma_decode_kernel`; `bucket`: see `schedule.batch_bucket`."""
    return {
        "BH": config.block_rows,
        "BT": config.step,
        "ST": config.stages,
        "LAYOUT": layout,
        "NATIVE": is_native(arch),
        "TWO": needs_two(layout, q_data_type),
        "P_TERMS": p_terms(layout),
        "BATCH": bucket,
        "OVERHEAD": item_overhead(config.block_rows),
    }


def cache_views(cache: torch.Tensor, layout: RowLayout) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The cache's bytes as the kernel reads ckv, kpe and in-row scales: views that start at the field of the first row."""
    flat = cache.view(torch.uint8).view(-1)
    ckv = flat.view(torch.int16 if layout.is_fp8 else torch.bfloat16)
    kpe = flat[layout.kpe_offset :].view(torch.int16 if layout.kpe_dtype == "e4m3" else torch.bfloat16)
    scale = flat[max(layout.scale_offset, 0) :].view(torch.float32)
    return ckv, kpe, scale


@functools.cache
def compile_variant(
    layout: RowLayout, q_data_type: torch.dtype, arch: int, config: MmaConfig, bucket: int, device: torch.device
) -> int:
    """Compiles and loads one variant; returns how many of its CTAs the device holds at once."""
    i = torch.empty(64, dtype=torch.int32, device=device)
    f = torch.empty(64, dtype=torch.float32, device=device)
    q = torch.empty(64, dtype=q_data_type, device=device)
    views = cache_views(torch.empty(1, 1, 2304, dtype=torch.uint8, device=device), layout)
    compiled = mma_decode_kernel.warmup(
        q, q, *views, i, i, i, i, q, f, f, f, i, f, f, 1.0, 1.0, 1.0, *range(16),
        **constexprs(layout.name, q_data_type, arch, config, bucket), num_warps=NUM_WARPS, enable_fp_fusion=True,
        grid=(1,),
    )  # fmt: skip
    return resident_ctas(compiled, device)


@dataclass(frozen=True)
class MmaPlan:
    """Launch parameters and scratch of one problem; `launch` may be captured in a CUDA graph."""

    problem: Problem
    splits: SplitPlan
    scratch: Scratch
    config: MmaConfig
    num_sms: int


def make_plan(problem: Problem, num_sms: int) -> MmaPlan:
    """Compiles the variant of `problem` (once a process), sizes its launch and allocates scratch; no device sync.

    Raises:
        ScheduleError: batch beyond the schedule's bound.
    """
    spec, device = problem.spec, problem.kv_len_arr.device
    config, bucket = choose_config(spec), batch_bucket(problem.batch_size)
    num_ctas = compile_variant(spec.layout, spec.q_data_type, spec.arch, config, bucket, device)
    if problem.alone_rows:  # splits as alone are those of the kernel that runs a batch of one
        num_ctas = compile_variant(spec.layout, spec.q_data_type, spec.arch, config, 1, device)
    splits = plan_splits(
        batch=problem.batch_size,
        total_q=problem.total_q,
        num_heads=spec.num_heads,
        block_rows=config.block_rows,
        max_kv_len=problem.max_kv_len,
        max_q_len=spec.max_q_len,
        num_ctas=num_ctas,
        batch_invariant=spec.batch_invariant,
        alone_rows=problem.alone_rows,
    )
    return MmaPlan(problem, splits, Scratch.allocate(splits, device), config, num_sms)


def launch(plan: MmaPlan, call: Call) -> None:
    """One layer's attention on the current stream, without a device sync; may be captured in a CUDA graph."""
    problem, splits, scratch = plan.problem, plan.splits, plan.scratch
    spec = problem.spec
    lse = scratch.partial_lse if call.lse is None else call.lse
    mma_decode_kernel[(splits.num_items,)](
        call.q_nope, call.q_pe, *cache_views(call.cache, spec.layout),
        problem.qo_indptr, problem.kv_indptr, problem.kv_indices, problem.kv_len_arr,
        call.out, lse, scratch.partial_o, scratch.partial_lse, scratch.sched, call.ckv_scale_ptr, call.kpe_scale_ptr,
        spec.sm_scale, call.ckv_scale, call.kpe_scale,
        *(t.stride(d) // 8 for t in (call.q_nope, call.q_pe, call.out) for d in (0, 1)), lse.stride(0), lse.stride(1),
        problem.batch_size, spec.num_heads, splits.target, int(spec.causal), splits.mode,
        spec.page_size.bit_length() - 1, call.scale_flags, call.lse_mode,
        **constexprs(spec.kv_layout, spec.q_data_type, spec.arch, plan.config, splits.batch_bucket), num_warps=NUM_WARPS,
        enable_fp_fusion=True,
    )  # fmt: skip
    launch_combine(splits, scratch, call, num_sms=plan.num_sms, pdl=spec.arch >= 90)
