"""Sparse attention of the CPU backends against the oracle, on poisoned pools. A failure is a selection that was misread."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.backends.helpers import check, planned
from uncast.attention import MLAPagedAttention, ProblemError, ProblemSpec, Refused, registry
from uncast.attention.oracle import mla_oracle
from uncast.verify.probe import make_case, run_case

BASE = ProblemSpec(
    num_heads=8, page_size=16, kv_layout="fp8_ds_mla", q_data_type=torch.float32, sm_scale=0.05, topk=24, device="cpu"
)


@pytest.mark.parametrize("layout", ["fp8_e4m3", "fp8_ds_mla", "bf16", "fp32"])
@pytest.mark.parametrize(("heads", "page", "topk"), [(1, 64, 1), (5, 1, 24), (64, 32, 700), (128, 16, 77)])
def test_selected_rows_match_the_oracle(layout: str, heads: int, page: int, topk: int) -> None:
    spec = replace(BASE, kv_layout=layout, num_heads=heads, page_size=page, topk=topk, max_q_len=5)
    check("torch_cpu", spec, [0, 1, page, page + 1, 900, 37], [1, 1, 1, 1, 5, 3])


@pytest.mark.parametrize("backend", ["gather_cast:torch_cpu", "pool_cast:torch_cpu"])
def test_casts_pass_the_selection_on(backend: str) -> None:
    case = make_case(BASE, [70, 3, 130], [1, 1, 1])
    got = [run_case(planned(name, BASE, case)[0], case)[0] for name in (backend, "torch_cpu")]
    assert float((got[0] - got[1]).norm() / got[1].norm()) < 5e-3


@pytest.mark.parametrize("causal", [True, False])
def test_a_selection_of_every_row_is_dense_attention(causal: bool) -> None:
    spec = replace(BASE, topk=90, max_q_len=4, causal=causal)
    case = make_case(spec, [90, 40], [4, 4])
    indices = torch.full((8, 90), -1, dtype=torch.int32)
    for row in range(8):
        kv_len = 90 if row < 4 else 40
        visible = kv_len - 3 + row % 4 if causal else kv_len
        indices[row, 90 - visible :] = torch.arange(visible - 1, -1, -1)
    sparse, lse = run_case(planned("torch_cpu", spec, case)[0], replace(case, indices=indices))
    dense_spec = replace(spec, topk=0)
    dense, dense_lse = run_case(planned("torch_cpu", dense_spec, case)[0], replace(case, indices=None))
    assert float((sparse - dense).norm() / dense.norm()) < 1e-6
    assert float((lse - dense_lse).abs().max()) < 1e-5


def test_only_selected_rows_are_read() -> None:
    """NaN in every live row that no query selects changes no bit."""
    case = make_case(BASE, [300, 41], [1, 1])
    attention, _ = planned("torch_cpu", BASE, case)
    clean = run_case(attention, case)
    poisoned = replace(case, cache=case.cache.clone())
    for request, kv_len in enumerate((300, 41)):
        assert case.indices is not None
        for token in set(range(kv_len)) - set(case.indices[request].tolist()):
            poisoned.cache[case.block_tables[request, token // 16], token % 16] = 0xFF
    assert all(torch.equal(a, b) for a, b in zip(clean, run_case(attention, poisoned), strict=True))


def test_the_order_of_a_selection_changes_no_bit() -> None:
    case = make_case(BASE, [300, 41], [1, 1])
    attention, _ = planned("torch_cpu", BASE, case)
    assert case.indices is not None
    shuffled = case.indices[:, torch.randperm(BASE.topk, generator=torch.Generator().manual_seed(1))].contiguous()
    got = run_case(attention, replace(case, indices=shuffled))
    assert all(torch.equal(a, b) for a, b in zip(run_case(attention, case), got, strict=True))


def test_a_token_listed_twice_counts_twice() -> None:
    case = make_case(BASE, [300], [1])
    twice = torch.full((1, BASE.topk), -1, dtype=torch.int32)
    twice[0, [1, 7, 20]] = torch.tensor([5, 250, 5], dtype=torch.int32)
    once = twice.clone()
    once[0, 20] = -1
    attention, plan = planned("torch_cpu", BASE, case)
    (out2, lse2), (out1, lse1) = (run_case(attention, replace(case, indices=i)) for i in (twice, once))
    assert float(lse2.exp2().sub(lse1.exp2()).min()) > 0.0
    expected, lse = mla_oracle(plan.problem, case.q_nope, case.q_pe, case.cache, indices=twice)
    assert float((out2 - expected).norm() / expected.norm()) < 1e-5 and not torch.equal(out1, out2)
    assert float((lse2 - lse).abs().max()) < 1e-5


def test_a_query_that_selects_nothing_gives_zero() -> None:
    case = make_case(BASE, [20, 20], [1, 1])
    assert case.indices is not None
    case.indices[0] = -1
    out, lse = run_case(planned("torch_cpu", BASE, case)[0], case)
    assert not out[0].any() and bool((lse[0] == -math.inf).all()) and bool(out[1].any())


@pytest.mark.parametrize("causal", [True, False])
def test_a_token_beyond_what_the_query_sees_is_refused(causal: bool) -> None:
    spec = replace(BASE, max_q_len=3, causal=causal)
    case = make_case(spec, [0, 50], [1, 3])
    attention, _ = planned("torch_cpu", spec, case)
    assert case.indices is not None
    case.indices[2, 11] = 48
    run_case(attention, case)
    case.indices[2, 11] = 49
    if causal:
        with pytest.raises(ProblemError, match=r"query row 2 selects token 49: it may see 49 tokens"):
            run_case(attention, case)
    else:
        run_case(attention, case)
        case.indices[2, 11] = 50
        with pytest.raises(ProblemError, match=r"query row 2 selects token 50: it may see 50 tokens"):
            run_case(attention, case)
    case.indices[2, 11], case.indices[0, 3] = -1, 0
    with pytest.raises(ProblemError, match=r"query row 0 selects token 0: it may see 0 tokens"):
        run_case(attention, case)


def test_indices_that_do_not_fit_the_plan_are_one_sentence() -> None:
    case = make_case(BASE, [20], [1])
    attention, _ = planned("torch_cpu", BASE, case)
    assert case.indices is not None
    wrong = {
        "no indices were given: the plan is for topk 24": None,
        r"indices is torch.int64 \[1, 24\]": case.indices.long(),
        r"indices is torch.int32 \[1, 23\]": case.indices[:, :23].contiguous(),
        "contiguous torch.int32": case.indices.expand(24, 24).T[:1],
    }
    for message, indices in wrong.items():
        with pytest.raises(ProblemError, match=message):
            run_case(attention, replace(case, indices=indices))
    dense, _ = planned("torch_cpu", replace(BASE, topk=0), case)
    with pytest.raises(ProblemError, match="the plan is for dense attention"):
        run_case(dense, case)
    with pytest.raises(ProblemError, match="topk is -1"):
        planned("torch_cpu", replace(BASE, topk=-1), case)
    with pytest.raises(ProblemError, match=r"topk is 2\.0: it must be a whole number"):
        planned("torch_cpu", replace(BASE, topk=2.0), case)  # type: ignore[arg-type]


def test_bytes_are_those_of_the_selection() -> None:
    spec = replace(BASE, max_q_len=3)
    case = make_case(spec, [10, 300, 30], [1, 1, 3])
    _, plan = planned("torch_cpu", spec, case)
    assert plan.bytes_needed == (10 + 24 + 30) * 656
    assert plan.bytes_read == (10 + 24 + 3 * 24) * 656


@pytest.mark.parametrize("name", ["flashmla", "flashinfer_fa2", "flashinfer_fa3"])
def test_dense_backends_refuse_in_one_sentence(name: str) -> None:
    """Asked of the class: the libraries need not be installed."""
    spec = replace(BASE, device="cuda", arch=90, q_data_type=torch.bfloat16, kv_layout="bf16", page_size=64)
    try:
        found = registry.backend_class(name)
    except registry.UnknownBackend:
        pytest.skip(f"{name}'s library is not installed")
    for topk, ok in ((0, True), (2048, False)):
        capability = found.capability(replace(spec, topk=topk))
        assert capability.ok == ok, capability.reason
    assert "topk is 2048" in capability.reason


def test_a_refusal_names_who_can() -> None:
    with pytest.raises(Refused, match="torch_cpu"):
        MLAPagedAttention("native").resolve(BASE)
