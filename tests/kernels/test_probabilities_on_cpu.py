"""That no kernel rounds its probabilities to one BF16, executed on a CPU (`gluon_cpu`), as `NativeBackend` says.

A failure means that `uncast probe` would hold `native` to the wrong bound, or that a product has lost the second term of P.
"""

from __future__ import annotations

import math
from functools import partial
from types import ModuleType

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.gluon_cpu import OnCpu
from uncast.attention import Problem, ProblemSpec
from uncast.attention.oracle import mla_oracle, relative_errors
from uncast.backends.native import NativeBackend
from uncast.kernels import combine, mma_decode, mma_launch, mma_sparse, sparse_launch, wgmma_decode, wgmma_launch
from uncast.kernels.launch import make_call
from uncast.latent.codec import Scale, encode_rows
from uncast.verify.accuracy import MAX_TENSOR_ERROR, Accuracy
from uncast.verify.bf16_contexts import FEW_ROWS, MANY_ROWS, flatten_scores, tune_few_rows
from uncast.verify.cases import make_case
from uncast.verify.probe_errors import parts_of

KV_LENS = [1, MANY_ROWS, FEW_ROWS]


@pytest.fixture(autouse=True)
def _kernels_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wgmma_launch, "wgmma_decode_kernel", OnCpu(wgmma_decode.wgmma_decode_kernel))
    monkeypatch.setattr(mma_launch, "mma_decode_kernel", OnCpu(mma_decode.mma_decode_kernel))
    monkeypatch.setattr(sparse_launch, "mma_sparse_kernel", OnCpu(mma_sparse.mma_sparse_kernel))
    monkeypatch.setattr(combine, "combine_kernel", OnCpu(combine.combine_kernel))
    for launched in (mma_launch, sparse_launch):
        monkeypatch.setattr(launched, "compile_variant", lambda *a: 12)


def _output(
    kernel: ModuleType, problem: Problem, q_nope: torch.Tensor, q_pe: torch.Tensor, cache: torch.Tensor,
    indices: torch.Tensor | None, **scales: Scale,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """What the kernel and the oracle make of a batch."""
    out = torch.full(q_nope.shape, math.nan, dtype=q_nope.dtype)
    lse = torch.full(q_nope.shape[:2], math.nan)
    call = make_call(q_nope, q_pe, cache, out, lse, lse_base=problem.spec.lse_base, dummy=torch.ones(1), **scales)
    plan = kernel.make_plan(problem, 12)
    kernel.launch(plan, call, indices) if problem.spec.topk else kernel.launch(plan, call)
    expected, _ = mla_oracle(problem, q_nope, q_pe, cache, indices=indices, **scales)
    return out, expected


def _few_rows(kernel: ModuleType, layout: str, topk: int, dtype: torch.dtype, heads: int) -> tuple[float, float, bool]:
    """Errors of the whole over few and over many rows, and whether a bound without rounded probabilities holds for all."""
    spec = ProblemSpec(
        num_heads=heads, kv_layout=layout, q_data_type=dtype, arch=90, device="cpu", topk=topk, sm_scale=192**-0.5
    )
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
    scales = {"ckv_scale": case.ckv_scale, "kpe_scale": case.kpe_scale}
    out, expected = _output(kernel, problem, case.q_nope, case.q_pe, case.cache, case.indices, **scales)
    parts = parts_of(problem, True, out, expected, Accuracy())
    return parts[1].errors[1], parts[2].errors[1], not any(part.fault for part in parts)


PORTABLE = [(mma_launch, 0), (sparse_launch, 256)]


@pytest.mark.parametrize(
    ("kernel", "layout", "topk"),
    [
        (wgmma_launch, "fp8_e4m3", 0),
        (wgmma_launch, "fp8_ds_mla", 0),
        *((kernel, layout, topk) for kernel, topk in PORTABLE for layout in mma_launch.LAYOUTS),
    ],
)
def test_no_probability_is_rounded_to_one_bf16(kernel: ModuleType, layout: str, topk: int) -> None:
    few, many, kept = _few_rows(kernel, layout, topk, torch.bfloat16, 16)
    assert kept and max(few, many) < 1.8e-3 < MAX_TENSOR_ERROR
    assert not NativeBackend.bf16_probabilities


@pytest.mark.parametrize(("kernel", "topk"), PORTABLE)
@pytest.mark.parametrize("heads", [5, 64])
def test_fp16_queries_and_other_blocks_over_bf16_caches_keep_it_too(kernel: ModuleType, topk: int, heads: int) -> None:
    """64 heads are blocks of 32 rows; an fp16 output is rounded so little that the rest shows."""
    few, many, kept = _few_rows(kernel, "bf16", topk, torch.bfloat16, heads)
    assert kept and max(few, many) < 1.8e-3
    few, many, kept = _few_rows(kernel, "bf16", topk, torch.float16, heads)
    assert kept and max(few, many) < 3e-4


@pytest.mark.parametrize(("kernel", "topk"), PORTABLE)
def test_one_term_would_not_do(kernel: ModuleType, topk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a bf16 cache; so the tests above can fail, and what the second term is for is a figure."""
    monkeypatch.setattr(mma_launch, "p_terms", lambda layout: 1)
    few, many, kept = _few_rows(kernel, "bf16", topk, torch.bfloat16, 16)
    assert not kept and few > 2.8e-3 and many > 2.0e-3


def _rows_by_weight(
    kernel: ModuleType, topk: int, weights: list[float], sizes: list[float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and oracle for rows of `weights` (P, the first is 1) whose values are one random vector times `sizes`."""
    count = len(weights)
    spec = ProblemSpec(
        num_heads=3, kv_layout="bf16", q_data_type=torch.float16, arch=90, device="cpu", topk=topk, sm_scale=1.0
    )
    value = torch.randn(512, generator=torch.Generator().manual_seed(3)).bfloat16().float()
    kpe, q_pe = torch.zeros(64, 64), torch.zeros(1, 3, 64, dtype=torch.float16)
    for row, weight in enumerate(weights):
        kpe[row, 2 * row : 2 * row + 2] = 1.0
        score = torch.tensor(weight, dtype=torch.float64).log()
        q_pe[..., 2 * row] = score.half()
        q_pe[..., 2 * row + 1] = (score - score.half().double()).half()
    ckv = torch.zeros(64, 512)
    ckv[:count] = torch.tensor(sizes)[:, None] * value
    cache = encode_rows(ckv, kpe, spec.layout).view(1, 64, spec.layout.row_bytes)
    ints = partial(torch.tensor, dtype=torch.int32)
    problem = Problem(spec, ints([0, 1]), ints([0, 1]), ints([0]), ints([count]), 1, count, 1)
    indices = torch.arange(topk, dtype=torch.int32).view(1, -1)  # what lies behind the context selects nothing
    return _output(
        kernel, problem, torch.zeros(1, 3, 512, dtype=torch.float16), q_pe, cache, indices if topk else None,
        ckv_scale=None, kpe_scale=None,
    )  # fmt: skip


MIDDLE = 0.5 + 2.0**-9
"""Half a unit of BF16 above 1/2: a single BF16 is off by a 256th of it."""


@pytest.mark.parametrize(("kernel", "topk"), PORTABLE)
def test_a_row_that_dominates_the_output_at_the_worst_weight(
    kernel: ModuleType, topk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, expected = _rows_by_weight(kernel, topk, [1.0, MIDDLE - 2.0**-14], [0.0, 1024.0])
    assert relative_errors(out, expected)[1] < 3e-4
    monkeypatch.setattr(mma_launch, "p_terms", lambda layout: 1)
    out, expected = _rows_by_weight(kernel, topk, [1.0, MIDDLE - 2.0**-14], [0.0, 1024.0])
    assert 3.7e-3 < relative_errors(out, expected)[1] < 4.1e-3


@pytest.mark.parametrize(("kernel", "topk"), PORTABLE)
def test_two_rows_half_a_unit_of_bf16_apart_are_told_apart(
    kernel: ModuleType, topk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opposite values, so that nothing but the difference of their weights, a 512th, is left in the output."""
    weights, sizes = [1.0, MIDDLE - 2.0**-14, 0.5], [0.0, 64.0, -64.0]
    out, expected = _rows_by_weight(kernel, topk, weights, sizes)
    assert relative_errors(out, expected)[1] < MAX_TENSOR_ERROR
    monkeypatch.setattr(mma_launch, "p_terms", lambda layout: 1)
    out, expected = _rows_by_weight(kernel, topk, weights, sizes)
    assert relative_errors(out, expected)[1] > 0.9
