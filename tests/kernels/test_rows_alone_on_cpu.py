"""Rows of one sequence as requests of their own (`alone_rows`): the bits that each has alone in a batch. Executed on a CPU
(`gluon_cpu`); `tests/backends/test_native_gpu.py` does it on a GPU."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.gluon_cpu import OnCpu
from tests.kernels.test_sparse_on_cpu import problem_of, spec_of
from uncast.attention.problem import Problem
from uncast.kernels import combine, wgmma_decode, wgmma_launch
from uncast.kernels.launch import make_call
from uncast.verify.cases import ProbeCase, make_case


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wgmma_launch, "wgmma_decode_kernel", OnCpu(wgmma_decode.wgmma_decode_kernel))
    monkeypatch.setattr(combine, "combine_kernel", OnCpu(combine.combine_kernel))


def attend(problem: Problem, case: ProbeCase, rows: slice, num_sms: int) -> tuple[torch.Tensor, wgmma_launch.WgmmaPlan]:
    plan = wgmma_launch.make_plan(problem, num_sms)
    out = torch.full(case.q_nope[rows].shape, math.nan, dtype=problem.spec.q_data_type)
    call = make_call(
        case.q_nope[rows], case.q_pe[rows], case.cache, out, None, lse_base="2", ckv_scale=case.ckv_scale,
        kpe_scale=case.kpe_scale, dummy=torch.ones(1),
    )  # fmt: skip
    wgmma_launch.launch(plan, call)
    return out, plan


@pytest.mark.parametrize("layout", ["fp8_ds_mla", "fp8_e4m3"])
@pytest.mark.parametrize(
    ("kv_lens", "rows"),
    [
        ([63, 64, 65], 3),  # one tile, then two
        ([382, 383, 384, 385, 386], 5),  # six tiles of a slot each, then more tiles than slots
        ([130, 131, 0, 70], 2),  # two sequences; a row of no one
    ],
)
def test_a_row_has_the_bits_that_it_has_alone(layout: str, kv_lens: list[int], rows: int) -> None:
    spec = spec_of(kv_layout=layout, num_heads=20, topk=0, max_q_len=1)
    case = make_case(spec, kv_lens, [1] * len(kv_lens))
    problem = problem_of(spec, case, kv_lens)
    together, plan = attend(replace(problem, alone_rows=rows), case, slice(None), num_sms=6)
    assert plan.splits.alone and plan.splits.own_slots == 6 and plan.splits.batch_bucket == 32
    for row, length in enumerate(kv_lens):
        one = replace(
            problem, qo_indptr=problem.qo_indptr[:2], kv_indptr=problem.kv_indptr[row : row + 2],
            kv_len_arr=problem.kv_len_arr[row : row + 1], total_q=1, max_kv_len=max(length, 1), alone_rows=1,
        )  # fmt: skip
        alone, plan = attend(one, case, slice(row, row + 1), num_sms=6)
        assert plan.splits.batch_bucket == 1
        assert torch.equal(alone, together[row : row + 1]) and bool(together[row].isfinite().all()), row
