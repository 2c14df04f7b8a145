"""The Blackwell adapters: claims, arguments and results, with a stand-in for the library, and with the library where it is
installed. A failure means a user of such a chip would meet an exception or wrong numbers."""

from __future__ import annotations

import inspect
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.backends import flashinfer_double
from uncast.attention import Problem, ProblemError, ProblemSpec, Refused, registry
from uncast.attention.oracle import mla_oracle, relative_errors
from uncast.backends.flashinfer_dense import CUTLASS_SM_SCALE
from uncast.verify.cases import ProbeCase, make_case

CHIPS = {"flashinfer_trtllm_gen": 100, "flashinfer_xqa": 120, "flashinfer_cutlass": 103}
INTERNALS = "flashinfer.mla._batch_mla._backends"


def spec_of(name: str, **changes: Any) -> ProblemSpec:
    return replace(
        ProblemSpec(num_heads=128, kv_layout="bf16", sm_scale=CUTLASS_SM_SCALE, arch=CHIPS[name]), **changes
    )  # fmt: skip


def batch(spec: ProblemSpec, kv_lens: list[int], q_lens: list[int]) -> tuple[Problem, ProbeCase]:
    """A problem of a GPU whose tensors lie on the CPU."""
    case = make_case(replace(spec, device="cpu"), kv_lens, q_lens)
    width = case.block_tables.shape[1]
    indptr = torch.arange(len(kv_lens) + 1, dtype=torch.int32) * width
    spec = replace(spec, max_q_len=max(1, *q_lens))
    return Problem(
        spec, case.qo_indptr, indptr, case.block_tables.reshape(-1), case.seq_lens, sum(q_lens), width * spec.page_size,
        case.cache.shape[0], width,
    ), case  # fmt: skip


def run(name: str, problem: Problem, case: ProbeCase, with_lse: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    backend = registry.create(name)
    assert backend.capability(problem.spec).ok, backend.capability(problem.spec).reason
    backend.plan(problem)
    out = torch.full((*case.q_nope.shape[:2], 2 * case.q_nope.shape[2]), torch.nan, dtype=torch.bfloat16)
    out = out[..., : case.q_nope.shape[2]]  # rows of another stride than the kernels have
    lse = torch.full(out.shape[:2], torch.nan) if with_lse else None
    backend.run(case.q_nope, case.q_pe, case.cache, ckv_scale=None, kpe_scale=None, out=out, lse=lse)
    return out, lse


def check(name: str, spec: ProblemSpec, kv_lens: list[int], q_lens: list[int]) -> None:
    with_lse = name == "flashinfer_trtllm_gen"
    problem, case = batch(spec, kv_lens, q_lens)
    out, lse = run(name, problem, case, with_lse)
    expected, expected_lse = mla_oracle(problem, case.q_nope, case.q_pe, case.cache)
    assert relative_errors(out, expected)[1] < 2.5e-3
    if lse is not None:
        assert torch.allclose(lse.double(), expected_lse, rtol=1e-6)


CASES: list[tuple[str, dict[str, Any], list[int], list[int]]] = [
    ("flashinfer_trtllm_gen", {"num_heads": 16}, [70, 0, 64, 130], [1, 1, 1, 1]),
    ("flashinfer_trtllm_gen", {"num_heads": 8, "page_size": 32, "lse_base": "e"}, [70, 0, 5], [4, 4, 4]),
    ("flashinfer_trtllm_gen", {"num_heads": 32, "head_dim_ckv": 256, "causal": False}, [3], [1]),
    ("flashinfer_xqa", {"page_size": 16}, [1, 0, 40], [1, 1, 1]),
    ("flashinfer_cutlass", {"page_size": 1, "causal": False}, [3, 0, 5], [1, 1, 1]),
]


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in flashinfer_double.modules().items():
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(("name", "changes", "kv_lens", "q_lens"), CASES)
def test_results_are_the_oracles_and_empty_requests_are_empty(
    name: str, changes: dict[str, Any], kv_lens: list[int], q_lens: list[int]
) -> None:
    check(name, spec_of(name, **changes), kv_lens, q_lens)
    assert flashinfer_double.Wrapper.last.backend == {
        "flashinfer_trtllm_gen": "trtllm-gen", "flashinfer_xqa": "xqa", "flashinfer_cutlass": "cutlass",
    }[name]  # fmt: skip


REFUSED = [
    ("flashinfer_trtllm_gen", {"arch": 90}, "is built for sm_100, sm_103, sm_107, not sm_90"),
    ("flashinfer_trtllm_gen", {"kv_layout": "fp8_e4m3"}, "takes bfloat16 queries over a bf16 cache, not bfloat16 queries over"),
    ("flashinfer_trtllm_gen", {"page_size": 16}, "reads pages of 32, 64 rows, not 16"),
    ("flashinfer_trtllm_gen", {"num_heads": 20}, "takes a power of two of heads"),
    ("flashinfer_trtllm_gen", {"max_q_len": 2, "causal": False}, "masks several queries a request causally only"),
    ("flashinfer_trtllm_gen", {"batch_invariant": True}, "splits work over the whole batch"),
    ("flashinfer_trtllm_gen", {"head_dim_kpe": 128}, "is not built for head dims 512/128"),
    ("flashinfer_trtllm_gen", {"topk": 4}, "attends to every row"),
    ("flashinfer_xqa", {"num_heads": 64}, "takes 128 heads, not 64"),
    ("flashinfer_xqa", {"max_q_len": 2}, "takes one query a request, not more"),
    ("flashinfer_xqa", {"return_lse": True}, "gives no LSE: leave return_lse off"),
    ("flashinfer_cutlass", {"sm_scale": 0.05}, "has the softmax scale 192**-0.5 built in, not 0.05"),
    ("flashinfer_cutlass", {"device": "cpu", "arch": 0}, "is built for sm_100, sm_103, sm_107, sm_110, not cpu"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "reason"), REFUSED)
def test_what_is_outside_a_contract_is_refused_without_the_library(
    name: str, changes: dict[str, Any], reason: str
) -> None:
    capability = registry.backend_class(name).capability(spec_of(name, **changes))  # type: ignore[call-arg,arg-type]
    assert not capability.ok and capability.reason.startswith(f"{name} {reason}")


@pytest.mark.usefixtures("double")
def test_a_batch_that_does_not_fit_is_refused_in_a_sentence() -> None:
    backend = registry.create("flashinfer_trtllm_gen")
    with pytest.raises(Refused, match="needs the same number of queries in every request of a batch"):
        backend.plan(batch(spec_of(backend.name, num_heads=16), [9, 9], [1, 2])[0])
    with pytest.raises(
        Refused, match=r"cannot run this batch: trtllm-gen requires .* divisible by 5; use native"
    ) as refused:
        backend.plan(batch(spec_of(backend.name, num_heads=64), [9], [1])[0])
    assert "\n" not in str(refused.value)
    problem, case = batch(spec_of("flashinfer_xqa"), [9], [1])
    with pytest.raises(ProblemError, match="gives no LSE: plan with return_lse=True"):
        run("flashinfer_xqa", problem, case, True)


@pytest.mark.usefixtures("double")
def test_a_batch_without_queries_runs_nothing() -> None:
    problem, case = batch(spec_of("flashinfer_xqa"), [9], [0])
    out, _ = run("flashinfer_xqa", problem, case, False)
    assert out.shape[0] == 0


@pytest.mark.usefixtures("double")
def test_a_batch_of_empty_requests_does_not_reach_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_double.Wrapper, "plan", None)
    problem, case = batch(spec_of("flashinfer_trtllm_gen", num_heads=16), [0, 0], [2, 2])
    out, lse = run("flashinfer_trtllm_gen", problem, case, True)
    assert lse is not None and bool((out == 0).all()) and bool((lse == -torch.inf).all())


def test_the_library_takes_these_arguments() -> None:
    """Signatures of the installed FlashInfer: a failure is a change of its interface."""
    mla = pytest.importorskip("flashinfer.mla")
    wrapper, theirs = mla.BatchMLAPagedAttentionWrapper, flashinfer_double.Wrapper
    for method in ("__init__", "plan", "run"):
        known = inspect.signature(getattr(wrapper, method)).parameters
        assert set(inspect.signature(getattr(theirs, method)).parameters) <= set(known), method
    dense = list(inspect.signature(mla.MLAPlanMetadata.dense).parameters)
    assert dense[:3] == ["cum_seq_lens_q", "block_tables", "seq_lens"]
    csr = list(inspect.signature(mla.MLAPlanMetadata.csr).parameters)
    assert csr == ["qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr"]
    for name in ("fa2", "fa3", "trtllm-gen", "xqa", "cutlass"):
        wrapper(torch.zeros(1, dtype=torch.uint8), backend=name)


class Launches:
    """The libraries' compiled modules: each entry point computes what its arguments say."""

    @staticmethod
    def _mla_plan_head_divisor(*_: Any) -> int:
        return 8

    @staticmethod
    def trtllm_paged_attention_decode(*a: Any) -> None:
        out, query, cache, table, lens = a[0], a[2], a[3], a[7], a[8]
        batch_size, lse = a[16], a[28]
        rows = query.shape[0] // batch_size
        starts = torch.arange(batch_size + 1, dtype=torch.int32) * rows
        result, base2 = flashinfer_double.attend(
            query, cache[:, 0], table, lens, starts, causal=True, sm_scale=a[11] * a[12]
        )  # fmt: skip
        out.copy_(result.view(out.shape))
        lse.copy_(base2)

    @staticmethod
    def xqa_mla(*a: Any) -> None:
        _, sm_scale, out, query, cache, _, table, _, lens, batch_size = a[:10]
        starts = torch.arange(batch_size + 1, dtype=torch.int32)
        out.copy_(
            flashinfer_double.attend(
                query[:, 0], cache[:, :, 0], table, lens[:, 0], starts, causal=False, sm_scale=sm_scale
            )[0]
        )

    @staticmethod
    def cutlass_mla_paged_attention(*a: Any) -> None:
        _, out, _, query, cache, lens, table, _ = a
        starts = torch.arange(query.shape[0] + 1, dtype=torch.int32)
        out.copy_(
            flashinfer_double.attend(query, cache, table, lens, starts, causal=False, sm_scale=CUTLASS_SM_SCALE)[0]
        )


@pytest.mark.parametrize(("name", "changes", "kv_lens", "q_lens"), CASES)
def test_the_librarys_own_checks_accept_what_is_claimed(
    name: str, changes: dict[str, Any], kv_lens: list[int], q_lens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The installed FlashInfer plans and runs on a CPU that says it is the chip; only its compiled modules are stand-ins."""
    pytest.importorskip("flashinfer.mla")
    major, minor = divmod(CHIPS[name], 10)
    for module in ("trtllm_gen_backend", "xqa_backend", "cutlass_backend"):
        for attribute, value in (
            ("get_compute_capability", lambda device: (major, minor)),
            ("get_device_sm_count", lambda device: 148),
            ("device_support_pdl", lambda device: True),
            ("is_sm12x_supported", lambda device: True),
            ("_validate_xqa_device_capability", lambda device: None),
            ("get_trtllm_gen_fmha_module", lambda: Launches),
            ("get_xqa_module_mla", lambda *a: Launches),
            ("get_mla_module", lambda: Launches),
            ("_get_trtllm_gen_multi_ctas_kv_counter_buffer", lambda *a: torch.zeros(1)),
        ):
            monkeypatch.setattr(f"{INTERNALS}.{module}.{attribute}", value, raising=False)
    check(name, spec_of(name, **changes), kv_lens, q_lens)
