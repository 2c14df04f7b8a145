"""The sparse kernels and the Hopper decode kernel, executed on a CPU (`gluon_cpu`) against the float64 oracle.

A failure is a wrong formula, index, phase or count, or a read outside a tensor. What only hardware does (asynchronous copies
and products, register layouts) is tested on GPUs: `tests/backends/test_native_sparse_gpu.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.gluon_cpu import OnCpu
from uncast.attention.oracle import mla_oracle, relative_errors
from uncast.attention.problem import Problem, ProblemSpec
from uncast.kernels import (
    combine,
    mma_sparse,
    sparse_launch,
    wgmma_decode,
    wgmma_launch,
    wgmma_sparse,
    wgmma_sparse_launch,
)
from uncast.kernels.launch import make_call
from uncast.verify.cases import ProbeCase, make_case
from uncast.verify.probe import MAX_LSE_ERROR, MAX_ROW_ERROR, MAX_TENSOR_ERROR

LAYOUTS = ["fp8_ds_mla", "fp8_e4m3"]
HOPPER, PORTABLE = wgmma_sparse_launch, sparse_launch


@pytest.fixture(autouse=True)
def _kernels_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wgmma_sparse_launch, "wgmma_sparse_kernel", OnCpu(wgmma_sparse.wgmma_sparse_kernel))
    monkeypatch.setattr(wgmma_launch, "wgmma_decode_kernel", OnCpu(wgmma_decode.wgmma_decode_kernel))
    monkeypatch.setattr(sparse_launch, "mma_sparse_kernel", OnCpu(mma_sparse.mma_sparse_kernel))
    monkeypatch.setattr(combine, "combine_kernel", OnCpu(combine.combine_kernel))
    monkeypatch.setattr(sparse_launch, "compile_variant", lambda *a: 12)


def spec_of(**kw: Any) -> ProblemSpec:
    return replace(
        ProblemSpec(num_heads=16, sm_scale=0.05, kv_layout="fp8_ds_mla", arch=90, device="cpu", topk=300), **kw
    )


def problem_of(spec: ProblemSpec, case: ProbeCase, kv_lens: list[int]) -> Problem:
    starts = torch.arange(len(kv_lens) + 1, dtype=torch.int32) * case.block_tables.shape[1]
    return Problem(
        spec=spec, qo_indptr=case.qo_indptr, kv_indptr=starts, kv_indices=case.block_tables.reshape(-1).contiguous(),
        kv_len_arr=case.seq_lens, total_q=case.q_nope.shape[0], max_kv_len=max(kv_lens), num_pages=case.cache.shape[0],
    )  # fmt: skip


def check(
    kernel: ModuleType, spec: ProblemSpec, kv_lens: list[int], q_lens: list[int], *, num_sms: int = 12,
    change: Callable[[ProbeCase], ProbeCase] = lambda case: case,
) -> Any:  # fmt: skip
    """Launches twice and asserts the design's tolerance and equal bits; returns the plan."""
    case = change(make_case(spec, kv_lens, q_lens))
    problem = problem_of(spec, case, kv_lens)
    plan = kernel.make_plan(problem, num_sms)
    results = []
    for _ in range(2):
        out = torch.full(case.q_nope.shape, math.nan, dtype=spec.q_data_type)
        lse = torch.full(out.shape[:2], math.nan)
        call = make_call(
            case.q_nope, case.q_pe, case.cache, out, lse, lse_base=spec.lse_base, ckv_scale=case.ckv_scale,
            kpe_scale=case.kpe_scale, dummy=torch.ones(1),
        )  # fmt: skip
        kernel.launch(plan, call, case.indices) if spec.topk else kernel.launch(plan, call)
        results.append((out, lse))
    scales = {"ckv_scale": case.ckv_scale, "kpe_scale": case.kpe_scale}
    expected, expected_lse = mla_oracle(problem, case.q_nope, case.q_pe, case.cache, **scales, indices=case.indices)
    errors = relative_errors(out, expected)
    assert errors[0] <= MAX_ROW_ERROR and errors[1] <= MAX_TENSOR_ERROR, errors
    dead = expected_lse == -math.inf
    assert torch.equal(lse == -math.inf, dead)
    assert float((lse.double() - expected_lse)[~dead].abs().max()) <= MAX_LSE_ERROR
    assert torch.equal(results[0][0], out) and torch.equal(results[0][1], lse)
    return plan


def large_latents(case: ProbeCase) -> ProbeCase:
    """Latents of 2^20 and queries of 2^-20: results far beyond fp16's range."""
    cache = case.cache.clone()
    cache.view(torch.float32)[..., 128:132] *= 2.0**20
    return replace(case, cache=cache, q_nope=case.q_nope * 2.0**-20)


@pytest.mark.parametrize("kernel", [HOPPER, PORTABLE])
@pytest.mark.parametrize("heads", [8, 16])
def test_latents_beyond_fp16_survive_a_split(kernel: ModuleType, heads: int) -> None:
    """The Hopper kernel's partial results are fp16 times a power of two per row, the portable kernel's are fp32."""
    plan = check(kernel, spec_of(num_heads=heads), [500, 100], [1, 1], change=large_latents)
    assert plan.work.splits > 1


def test_only_fp8_ds_mla_has_scaled_partial_results() -> None:
    for layout in LAYOUTS:
        spec = spec_of(kv_layout=layout)
        plan = HOPPER.make_plan(problem_of(spec, make_case(spec, [500], [1]), [500]), 12)
        assert (plan.scratch.partial_scale is not None) == (layout == "fp8_ds_mla")


@pytest.mark.parametrize("kernel", [HOPPER, PORTABLE])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("heads", "page_size"), [(20, 16), (64, 64)])
def test_ragged_batches_with_holes(kernel: ModuleType, layout: str, heads: int, page_size: int) -> None:
    spec = spec_of(kv_layout=layout, num_heads=heads, page_size=page_size, topk=130, max_q_len=2)
    check(kernel, spec, [0, 1, 65, 300], [1, 1, 2, 1])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heads", [64, 96, 128])
def test_wide_blocks_of_heads(monkeypatch: pytest.MonkeyPatch, layout: str, heads: int) -> None:
    monkeypatch.setattr(wgmma_launch, "block_rows", lambda rows, tiles: 64)
    plan = check(HOPPER, spec_of(kv_layout=layout, num_heads=heads, topk=520), [700], [1], num_sms=1)
    assert (plan.work.splits, plan.work.plan.block_rows) == (1, 64)


@pytest.mark.parametrize("heads", [16, 64])
def test_scales_that_are_no_powers_of_two(monkeypatch: pytest.MonkeyPatch, heads: int) -> None:
    def change(case: ProbeCase) -> ProbeCase:
        words = case.cache.view(torch.float32)[..., 128:132]
        words *= torch.rand(words.shape, generator=torch.Generator().manual_seed(3)) + 0.5
        return case

    monkeypatch.setattr(wgmma_launch, "block_rows", lambda rows, tiles: heads)
    check(HOPPER, spec_of(num_heads=heads), [500, 65], [1, 1], num_sms=3, change=change)


@pytest.mark.parametrize("kernel", [HOPPER, PORTABLE])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_that_are_not_selected_are_not_read(kernel: ModuleType, layout: str) -> None:
    """All rows but the selected ones are NaN; whole tiles of the line select nothing."""

    def change(case: ProbeCase) -> ProbeCase:
        assert case.indices is not None
        case.indices[0, 70:200] = -1
        chosen = case.indices[0][case.indices[0] >= 0].long()
        keep = torch.zeros(case.cache.shape[:2], dtype=torch.bool)
        keep[case.block_tables[0][chosen // 64].long(), chosen % 64] = True
        case.cache[~keep] = 0xFF
        return case

    check(kernel, spec_of(kv_layout=layout, topk=330), [900], [1], num_sms=2, change=change)


@pytest.mark.parametrize("change", [lambda case: case, large_latents])
@pytest.mark.parametrize(("layout", "heads"), [("fp8_ds_mla", 16), ("fp8_ds_mla", 64), ("fp8_e4m3", 16)])
def test_dense_decode(layout: str, heads: int, change: Callable[[ProbeCase], ProbeCase]) -> None:
    if layout == "fp8_ds_mla" or change is not large_latents:
        spec = spec_of(kv_layout=layout, num_heads=heads, topk=0, max_q_len=2)
        check(wgmma_launch, spec, [300, 0, 65], [2, 1, 1], change=change)
