"""Which kernels round probabilities to BF16, executed on a CPU (`gluon_cpu`): those over `NativeBackend.bf16_probabilities`.

A failure means that `uncast probe` would hold `native` to the wrong bound.
"""

from __future__ import annotations

import math
from types import ModuleType

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.gluon_cpu import OnCpu
from uncast.attention import Problem, ProblemSpec
from uncast.attention.oracle import mla_oracle
from uncast.backends.native import NativeBackend
from uncast.kernels import combine, mma_sparse, sparse_launch, wgmma_decode, wgmma_launch
from uncast.kernels.launch import make_call
from uncast.verify.accuracy import MAX_TENSOR_ERROR, Accuracy
from uncast.verify.bf16_contexts import FEW_ROWS, MANY_ROWS, flatten_scores, tune_few_rows
from uncast.verify.cases import make_case
from uncast.verify.probe_errors import parts_of

KV_LENS = [1, MANY_ROWS, FEW_ROWS]


@pytest.fixture(autouse=True)
def _kernels_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wgmma_launch, "wgmma_decode_kernel", OnCpu(wgmma_decode.wgmma_decode_kernel))
    monkeypatch.setattr(sparse_launch, "mma_sparse_kernel", OnCpu(mma_sparse.mma_sparse_kernel))
    monkeypatch.setattr(combine, "combine_kernel", OnCpu(combine.combine_kernel))
    monkeypatch.setattr(sparse_launch, "compile_variant", lambda *a: 12)


@pytest.mark.parametrize(
    ("kernel", "layout", "topk"),
    [
        (wgmma_launch, "fp8_e4m3", 0),
        (wgmma_launch, "fp8_ds_mla", 0),
        (sparse_launch, "fp8_e4m3", 256),
        (sparse_launch, "fp8_ds_mla", 256),
        (sparse_launch, "bf16", 256),
    ],
)
def test_probabilities_are_bf16_over_bf16_caches_only(kernel: ModuleType, layout: str, topk: int) -> None:
    spec = ProblemSpec(num_heads=16, kv_layout=layout, arch=90, device="cpu", topk=topk, sm_scale=192**-0.5)
    case = make_case(spec, KV_LENS, [1, 1, 1])
    flatten_scores(case, 1)
    assert tune_few_rows(spec, case, 2)
    if case.indices is not None:
        case.indices.fill_(-1)
        for row, kv_len in enumerate(KV_LENS):
            case.indices[row, :kv_len] = torch.arange(kv_len, dtype=torch.int32)
    width = case.block_tables.shape[1]
    problem = Problem(
        spec, case.qo_indptr, torch.arange(4, dtype=torch.int32) * width, case.block_tables.reshape(-1).contiguous(),
        case.seq_lens, 3, MANY_ROWS, case.cache.shape[0],
    )  # fmt: skip
    out, lse = torch.full(case.q_nope.shape, math.nan, dtype=torch.bfloat16), torch.full((3, 16), math.nan)
    scales = {"ckv_scale": case.ckv_scale, "kpe_scale": case.kpe_scale}
    call = make_call(
        case.q_nope, case.q_pe, case.cache, out, lse, lse_base=spec.lse_base, dummy=torch.ones(1), **scales
    )  # fmt: skip
    plan = kernel.make_plan(problem, 12)
    kernel.launch(plan, call, case.indices) if topk else kernel.launch(plan, call)
    expected, _ = mla_oracle(problem, case.q_nope, case.q_pe, case.cache, indices=case.indices, **scales)
    parts = parts_of(problem, True, out, expected, Accuracy.of(NativeBackend, layout))
    assert not any(part.fault for part in parts), [part.fault for part in parts]
    _, few, many = (part.errors[1] for part in parts)
    if layout in NativeBackend.bf16_probabilities:
        assert few > 2.8e-3 and many > 2.0e-3
        assert parts_of(problem, True, out, expected, Accuracy())[1].fault
    else:
        assert max(few, many) < 1.8e-3 < MAX_TENSOR_ERROR
