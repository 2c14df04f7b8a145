"""What backends may err by: the bounds against float64 models, and that the probe sees what a backend does not say."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.verify.registered import registered
from tests.verify.rounding_backends import PATHS, SaysP
from tests.verify.rounding_model import KERNELS, batches, bf16, whole
from uncast.attention import ProblemSpec, registry
from uncast.attention.oracle import relative_errors
from uncast.backends.native import NativeBackend
from uncast.backends.pool_cast import PoolCastBackend
from uncast.backends.torch_cpu import TorchCpuBackend
from uncast.latent.codec import decode_rows
from uncast.verify.accuracy import (
    BF16_P_ERROR,
    BF16_PARTIALS_ERROR,
    BF16_RMS,
    BF16_UNIT,
    LARGE_OUTPUT,
    MAX_TENSOR_ERROR,
    Accuracy,
)
from uncast.verify.bf16_contexts import FEW_ROWS, targets, tune_few_rows
from uncast.verify.cases import make_case
from uncast.verify.probe import probe_combination
from uncast.verify.probe_grid import ProbeKey
from uncast.verify.probe_worker import probe_key

LAYOUTS = ("bf16", "fp8_e4m3", "fp8_ds_mla")


@pytest.fixture
def rounding() -> Iterator[None]:
    with registered(PATHS):
        yield


def spec(**changes: Any) -> ProblemSpec:
    defaults: dict[str, Any] = {"num_heads": 16, "kv_layout": "bf16", "device": "cpu", "sm_scale": 192**-0.5}
    return ProblemSpec(**{**defaults, **changes})


def test_the_constants_are_those_of_bf16() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(1_000_000, generator=generator, dtype=torch.float64).mul_(16).exp2()
    relative = (bf16(x) - x).abs() / x
    assert 0.998 * BF16_UNIT / (1 + BF16_UNIT) < float(relative.max()) <= BF16_UNIT
    assert float(relative.square().mean().sqrt()) == pytest.approx(BF16_RMS, rel=3e-3)
    assert (round(BF16_RMS, 6), round(BF16_P_ERROR, 5), round(BF16_PARTIALS_ERROR, 5)) == (0.001659, 0.00424, 0.003)


def test_no_model_of_a_kernel_is_above_its_bound_and_the_bound_is_close() -> None:
    nearest = dict.fromkeys(KERNELS, 0.0)
    above = dict.fromkeys(KERNELS, 0)
    for batch in batches(3, 250):
        expected = batch.expected()
        for name in KERNELS:
            error, allowed = batch.error(name, expected)
            assert error <= allowed, (name, error, allowed)
            nearest[name] = max(nearest[name], error / allowed)
            above[name] += error > MAX_TENSOR_ERROR
    assert min(nearest.values()) > 0.9, nearest
    assert above["pieces"] > 25, "a split context's error would not need its own bound"


def test_rounded_probabilities_alone_keep_the_default_from_so_many_rows_on() -> None:
    accuracy, visible = Accuracy(probabilities=True), torch.full((1,), 9)

    def allowed(heads: int, like: Accuracy = accuracy, seen: torch.Tensor = visible) -> float:
        return like.tensor_error(torch.ones(1, heads, 4), seen)

    assert allowed(LARGE_OUTPUT) == MAX_TENSOR_ERROR < allowed(LARGE_OUTPUT - 1)
    assert allowed(1) == pytest.approx(BF16_P_ERROR) and allowed(1, seen=torch.tensor([1])) == MAX_TENSOR_ERROR
    split = Accuracy(probabilities=True, partials=True)
    assert allowed(1000, split) == MAX_TENSOR_ERROR
    assert allowed(1000, split, torch.tensor([33])) == pytest.approx(BF16_PARTIALS_ERROR)
    assert split.large_error == BF16_PARTIALS_ERROR
    assert split.any_error == pytest.approx(allowed(1, split, torch.tensor([33])))
    assert allowed(1, Accuracy()) == MAX_TENSOR_ERROR and allowed(1, Accuracy(lossy=True)) == 0.05
    assert allowed(0) == MAX_TENSOR_ERROR


def test_the_loudest_rows_decide_how_many_count() -> None:
    expected, visible = torch.ones(400, 1, 4), torch.full((400,), 9)
    accuracy = Accuracy(probabilities=True)
    assert accuracy.tensor_error(expected, visible) == MAX_TENSOR_ERROR
    expected[7] *= 1000
    assert accuracy.tensor_error(expected, visible) == pytest.approx(BF16_P_ERROR, rel=1e-3)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("page", [1, 64])
def test_probabilities_of_few_rows_lie_between_two_numbers_of_bf16(layout: str, dtype: torch.dtype, page: int) -> None:
    problem = spec(kv_layout=layout, q_data_type=dtype, page_size=page, num_heads=5)
    case = make_case(problem, [70, FEW_ROWS], [1, 2])
    before = case.q_nope[0].clone()
    assert tune_few_rows(problem, case, 1) and torch.equal(case.q_nope[0], before)
    slots = case.block_tables[1][torch.arange(FEW_ROWS) // page].long() * page + torch.arange(FEW_ROWS) % page
    rows = case.cache.view(-1, problem.layout.row_bytes)[slots]
    ckv, kpe = decode_rows(
        rows, problem.layout, ckv_scale=case.ckv_scale, kpe_scale=case.kpe_scale, dtype=torch.float64
    )  # fmt: skip
    scores = (case.q_nope[1:].double() @ ckv.T + case.q_pe[1:].double() @ kpe.T) * problem.sm_scale
    p = (scores - scores.amax(-1, keepdim=True)).exp()
    assert float((p - targets(FEW_ROWS)).abs().max()) < 2.0**-16
    assert torch.allclose((bf16(p) - p)[..., 1:].abs(), torch.tensor(7 / 8 * 2.0**-9).double(), atol=2.0**-15)
    out, exact = whole(scores.flatten(0, 1), ckv)[0], p / p.sum(-1, keepdim=True) @ ckv
    assert 2.5e-3 < relative_errors(out, exact.view_as(out))[1] < BF16_UNIT


def test_few_rows_are_left_alone_where_channels_or_numbers_do_not_suffice() -> None:
    for problem in (spec(head_dim_ckv=128, head_dim_kpe=8), spec(sm_scale=1e-5)):
        case = make_case(problem, [FEW_ROWS], [1])
        cache, query = case.cache.clone(), case.q_pe.clone()
        assert not tune_few_rows(problem, case, 0)
        assert torch.equal(case.cache, cache) and torch.equal(case.q_pe, query)
        assert probe_combination("torch_cpu", problem).verified


@pytest.mark.usefixtures("rounding")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", ["decode", "extend"])
@pytest.mark.parametrize("heads", [1, 16, 128])
def test_what_a_backend_rounds_and_does_not_say_is_a_failed_row(layout: str, mode: str, heads: int) -> None:
    """Probabilities show at every number of heads; pieces beside them where the scatter of P leaves no room for both."""
    rows = {}
    inputs = None
    for name in PATHS:
        if mode == "extend" and heads == 128 and name != "rounds_p":
            continue
        key = ProbeKey(name, layout, "bfloat16", heads, 64, mode, "cpu", 0)
        rows[name], inputs = probe_key(key, inputs, lambda phase: None)
    assert rows["rounds_p"]["status"] == "failed"
    assert rows["rounds_p"]["reason"].startswith("rounds_p differs from the oracle over 8 cached rows: relative error ")
    assert "as if it rounded to BF16 on the way without saying so" in rows["rounds_p"]["reason"]
    assert 2.8e-3 < rows["rounds_p"]["few_rows_error"] < BF16_P_ERROR
    if len(rows) == 1:
        return
    assert rows["says_p"]["status"] == "verified", rows["says_p"]["reason"]
    assert rows["says_p"]["few_rows_error"] == pytest.approx(
        rows["rounds_p"]["few_rows_error"], rel=0.05
    )  # of more variants
    assert rows["says_pieces"]["status"] == "verified", rows["says_pieces"]["reason"]
    assert MAX_TENSOR_ERROR < rows["says_pieces"]["many_rows_error"] < 1.05 * BF16_PARTIALS_ERROR
    if heads * (8 if mode == "extend" else 1) >= 128:
        assert rows["rounds_pieces"]["status"] == "failed", rows["rounds_pieces"]["many_rows_error"]
        assert "differs from the oracle over 160 cached rows" in rows["rounds_pieces"]["reason"]


def test_a_backend_with_more_than_bf16_is_far_below_at_few_rows() -> None:
    for layout in LAYOUTS:
        result = probe_combination("torch_cpu", spec(kv_layout=layout))
        assert result.verified and result.few_rows_error < 1.8e-3 and result.many_rows_error < 1.8e-3


def test_who_rounds_what() -> None:
    """As their sources say; see the adapters."""
    own = [name for name in registry.paths() if registry.is_own(name)]
    made = {name: registry.backend_class(name) for name in own}
    said = {name: (tuple(m.bf16_probabilities), tuple(m.bf16_partials)) for name, m in made.items()}
    both = ("bf16", "fp8_e4m3")
    assert said == {
        "flashinfer_cutlass": (("bf16",), ()), "flashinfer_fa2": (both, both), "flashinfer_fa3": (both, both),
        "flashinfer_trtllm_gen": (("bf16",), ("bf16",)), "flashinfer_xqa": (("bf16",), ("bf16",)),
        "flashmla": (("bf16",), ()), "flashmla_lossy_q": ((), ()), "native": ((), ()), "torch_cpu": ((), ()),
    }  # fmt: skip


def test_a_cast_in_front_of_a_backend_rounds_what_that_rounds_over_bf16() -> None:
    fp8 = ("fp8_e4m3", "fp8_ds_mla")
    cast = PoolCastBackend(SaysP())
    assert tuple(cast.bf16_probabilities) == fp8 and not cast.bf16_partials
    assert Accuracy.of(cast, "fp8_ds_mla") == Accuracy(probabilities=True) and Accuracy.of(cast, "bf16") == Accuracy()
    for exact in (TorchCpuBackend(), NativeBackend()):
        cast = PoolCastBackend(exact)
        assert not cast.bf16_probabilities and not cast.bf16_partials
        assert math.isclose(Accuracy.of(cast, "fp8_e4m3").any_error, MAX_TENSOR_ERROR)
