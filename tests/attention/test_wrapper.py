"""`MLAPagedAttention`: refusals and errors in one sentence, two metadata forms, statuses."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch

from uncast.attention import (
    Backend,
    Capability,
    ClaimedCapabilityWarning,
    MLAPagedAttention,
    ProblemError,
    ProblemSpec,
    Refused,
    registry,
    verified,
    wrapper,
)
from uncast.attention.registry import UnknownBackend
from uncast.latent.codec import ScaleError
from uncast.verify.probe import make_case, plan_case, probe_combination, run_case

pytestmark = pytest.mark.filterwarnings("ignore::uncast.attention.ClaimedCapabilityWarning")


def spec(**changes: Any) -> ProblemSpec:
    defaults: dict[str, Any] = {
        "num_heads": 4,
        "kv_layout": "fp8_ds_mla",
        "q_data_type": torch.float32,
        "device": "cpu",
    }
    return ProblemSpec(**{**defaults, **changes})


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def plan(attention: MLAPagedAttention, **changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "qo_indptr": int32(0, 1),
        "block_tables": int32(0, 1)[None],
        "seq_lens": int32(70),
        "num_heads": 4,
        "sm_scale": 0.1,
        "q_data_type": torch.float32,
    }
    arguments.update(changes)
    return attention.plan(**arguments)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_heads": 129}, "num_heads is 129: allowed are 1 to 128"),
        ({"page_size": 48}, "page_size is 48: allowed are powers of two"),
        ({"q_data_type": torch.float64}, "q_data_type is torch.float64: allowed are"),
        ({"sm_scale": 0.0}, "sm_scale is 0.0: it must be positive"),
        ({"lse_base": "10"}, "lse_base is '10'"),
        ({"kv_layout": "fp4"}, "unknown KV cache layout 'fp4'"),
        ({"seq_lens": torch.tensor([70])}, "kv_len_arr is torch.int64: it must be int32"),
        ({"qo_indptr": int32(0, 1, 2)}, "qo_indptr has 3 entries: 1 requests need 2"),
        ({"qo_indptr": int32(1, 2)}, "qo_indptr must start at 0"),
        ({"seq_lens": None}, "give either kv_indptr, kv_indices and kv_len_arr, or block_tables and seq_lens"),
        ({"block_tables": int32(0, 1)}, "block_tables must be"),
        ({"block_tables": [[0, 1]]}, "block_tables is a list: it must be an int32 torch.Tensor"),
        ({"seq_lens": int32(70, 0, 1, 0)[::2]}, "kv_len_arr is a strided view"),
        ({"sm_scale": math.inf}, "sm_scale is inf: it must be positive and finite"),
        ({"sm_scale": "0.1"}, "sm_scale is '0.1': it must be positive and finite"),
        ({"num_pages": -7}, "num_pages is -7: it must be a whole number, 0 or more"),
        ({"total_q": -1}, "total_q is -1: it must be a whole number"),
        ({"max_kv_len": 1.5}, "max_kv_len is 1.5: it must be a whole number"),
        ({"page_size": 64.0}, "page_size is 64.0: it must be a whole number"),
        ({"alone_rows": -3}, "alone_rows is -3: it must be a whole number, 0 or more"),
        ({"alone_rows": 1.5}, "alone_rows is 1.5: it must be a whole number, 0 or more"),
        ({"alone_rows": True}, "alone_rows is True: it must be a whole number, 0 or more"),
        ({"alone_rows": "2"}, "alone_rows is '2': it must be a whole number, 0 or more"),
        ({"alone_rows": 2, "qo_indptr": int32(0, 2)}, "alone_rows is 2: it is for .* not for max_q_len 2, topk 0 and"),
        ({"alone_rows": 1, "topk": 64}, "alone_rows is 1: it is for .* not for max_q_len 1, topk 64 and"),
        ({"alone_rows": 1, "batch_invariant": True}, "alone_rows is 1: it is for .* and batch_invariant True"),
        # contents, always checked on a CPU
        ({"seq_lens": int32(129)}, "request 0 has 129 cached tokens: its 2 pages of 64 hold 0 to 128"),
        ({"seq_lens": int32(-1)}, "request 0 has -1 cached tokens"),
        ({"max_kv_len": 1}, "max_kv_len is 1, but request 0 has 70 cached tokens"),
        ({"block_tables": int32(0, -1)[None]}, "a live page of kv_indices or block_tables is -1"),
        ({"block_tables": int32(0, 9)[None], "num_pages": 9}, "block_tables is 9: the pool has 9 pages"),
        ({"qo_indptr": int32(0, 3), "max_q_len": 2, "total_q": 3}, "max_q_len is 2, but a request has 3 query rows"),
        ({"qo_indptr": int32(5, 7), "max_q_len": 2, "total_q": 7}, "qo_indptr must start at 0"),
        ({"max_q_len": 1, "total_q": 5}, "total_q is 5, but qo_indptr ends at 1"),
        ({"max_q_len": 1, "total_q": 0}, "total_q is 0, but qo_indptr ends at 1"),
        (
            {
                "qo_indptr": int32(0, 3, 1), "max_q_len": 3, "total_q": 1, "block_tables": int32(0, 1).repeat(2, 1),
                "seq_lens": int32(3, 3),
            },
            "qo_indptr must start at 0 and not decrease",
        ),
    ],
)  # fmt: skip
def test_impossible_problems_are_refused_in_one_sentence(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        plan(MLAPagedAttention("torch_cpu"), **changes)


def test_run_checks_its_tensors_against_the_plan() -> None:
    attention, case = MLAPagedAttention("torch_cpu"), make_case(spec(), [70], [1])
    with pytest.raises(ProblemError, match="before plan"):
        attention.run(case.q_nope, case.q_pe, case.cache)
    plan_case(attention, spec(), case)
    wrong = [
        ((case.q_nope[:, :2], case.q_pe, case.cache), "q_nope is"),
        ((case.q_nope.repeat(2, 1, 1), case.q_pe, case.cache), "q_nope has 2 rows: the plan is for 1"),
        ((case.q_nope, case.q_pe.double(), case.cache), "q_pe is torch.float64"),
        ((case.q_nope, case.q_pe, case.cache[:, :, :576]), "fp8_ds_mla needs"),
        ((case.q_nope.transpose(1, 2).contiguous().transpose(1, 2), case.q_pe, case.cache), "not contiguous"),
    ]
    for arguments, sentence in wrong:
        with pytest.raises(ProblemError, match=sentence):
            attention.run(*arguments)
    with pytest.raises(ScaleError, match="has no per-layer scale"):
        attention.run(case.q_nope, case.q_pe, case.cache, ckv_scale=2.0)


def test_block_tables_and_page_lists_are_the_same_problem() -> None:
    case = make_case(spec(page_size=16), [70, 5, 33], [1, 1, 1])
    tables, csr = MLAPagedAttention("torch_cpu"), MLAPagedAttention("torch_cpu")
    plan_case(tables, spec(page_size=16), case)
    pages = [case.block_tables[i, : -(-n // 16)] for i, n in enumerate((70, 5, 33))]
    csr.plan(
        case.qo_indptr, int32(0, 5, 6, 9), torch.cat(pages), case.seq_lens,
        num_heads=4, page_size=16, sm_scale=spec().sm_scale, q_data_type=torch.float32,
    )  # fmt: skip
    for a, b in zip(run_case(tables, case), run_case(csr, case), strict=True):
        assert torch.equal(a, b)


def test_block_tables_with_padded_rows() -> None:
    case = make_case(spec(page_size=16), [70, 5], [1, 1])
    wide = torch.full((2, 40), -7, dtype=torch.int32)
    wide[:, : case.block_tables.shape[1]] = case.block_tables
    attention = MLAPagedAttention("torch_cpu")
    plan_case(attention, spec(page_size=16), case)
    expected = run_case(attention, case)
    attention.plan(
        case.qo_indptr, block_tables=wide[:, :7], seq_lens=case.seq_lens, num_heads=4, page_size=16,
        sm_scale=spec().sm_scale, q_data_type=torch.float32,
    )  # fmt: skip
    assert torch.equal(run_case(attention, case)[0], expected[0])


def test_out_and_lse_are_written_in_place() -> None:
    case, attention = make_case(spec(), [70], [1]), MLAPagedAttention("torch_cpu")
    plan_case(attention, spec(), case)
    out, lse = torch.full_like(case.q_nope, 9.0), torch.full((1, 4), 9.0)
    result = attention.run(case.q_nope, case.q_pe, case.cache, out=out, lse=lse, return_lse=True)
    assert result[0] is out and result[1] is lse
    assert not bool((out == 9.0).any()) and not bool((lse == 9.0).any())


def test_unknown_and_missing_backends() -> None:
    with pytest.raises(
        UnknownBackend,
        match=r"unknown attention backend 'flash': use auto or one of flashinfer_cutlass, .*, native, torch_cpu",
    ):
        MLAPagedAttention("flash")
    registry.register("absent", "no_such_package.x:Y")
    try:
        with pytest.raises(UnknownBackend, match="cannot be imported: No module named 'no_such_package'"):
            MLAPagedAttention("absent")
    finally:
        registry._BACKENDS.pop("absent")
    for name in (None, 3):
        with pytest.raises(UnknownBackend, match=f"unknown attention backend {name}"):
            MLAPagedAttention(name)  # type: ignore[arg-type]
    for name in ("pool_cast:auto", "gather_cast:pool_cast:torch_cpu"):
        with pytest.raises(UnknownBackend, match=f"attention backend '{name}': .* is none of them"):
            MLAPagedAttention(name)


class NeedsLibrary(Backend):
    name = "needs_library"

    def __init__(self) -> None:
        import no_such_library  # noqa: F401

    def capability(self, spec: ProblemSpec) -> Capability:
        return Capability.claimed()

    def plan(self, problem: Any) -> None: ...

    def run(self, *args: Any, **kwargs: Any) -> None: ...


def test_a_backend_whose_library_is_not_installed_is_one_sentence() -> None:
    registry.register("needs_library", f"{__name__}:NeedsLibrary")
    try:
        for name in ("needs_library", "pool_cast:needs_library"):
            with pytest.raises(
                UnknownBackend, match="'needs_library' cannot be imported: No module named 'no_such_lib"
            ):
                MLAPagedAttention(name)
    finally:
        registry._BACKENDS.pop("needs_library")


class Picky(Backend):
    name = "picky"

    def capability(self, spec: ProblemSpec) -> Capability:
        return Capability.refused("it never can")

    def plan(self, problem: Any) -> None:
        raise AssertionError("a refused problem must not be planned")

    def run(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("a refused problem must not run")


def test_an_explicit_backend_that_cannot_is_refused_with_alternatives() -> None:
    registry.register("picky", f"{__name__}:Picky")
    try:
        with pytest.raises(Refused, match="picky cannot run this: it never can; use torch_cpu"):
            plan(MLAPagedAttention("picky"))
    finally:
        registry._BACKENDS.pop("picky")


def test_claimed_warns_once_strict_refuses_and_a_probe_verifies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verified, "_verified", set())
    monkeypatch.setattr(verified, "_loaded", {"cpu"})
    monkeypatch.setattr(wrapper, "_warned", set())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert plan(MLAPagedAttention()).status == "claimed"
        assert plan(MLAPagedAttention()).status == "claimed"
    assert len([w for w in caught if w.category is ClaimedCapabilityWarning]) == 1
    with pytest.raises(Refused, match="claimed but not verified"):
        plan(MLAPagedAttention(strict=True))
    assert probe_combination("torch_cpu", spec(sm_scale=0.1)).verified
    assert plan(MLAPagedAttention(strict=True)).status == "verified"
