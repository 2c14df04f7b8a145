"""Sparse attention of `native` on a GPU against the float64 oracle, on poisoned pools; both kernels where the GPU has both.

Selections are random tokens in random places of a line, with -1 between them and, for every third query, half empty: a failure
of the cover is addressing (a row that was not selected is NaN in a poisoned pool only past the end, so values tell) or math.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import tests.backends.native_kinds  # noqa: F401
from tests.backends.helpers import check, planned
from uncast.attention import MLAPagedAttention, ProblemSpec
from uncast.attention.oracle import mla_oracle, relative_errors
from uncast.kernels import mma_launch, sparse_launch
from uncast.latent.codec import encode_rows, store_rows
from uncast.verify.probe import MAX_ROW_ERROR, MAX_TENSOR_ERROR, ProbeCase, make_case, run_case

allpairs = pytest.importorskip("allpairspy")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LAYOUTS = ["fp8_ds_mla", "fp8_e4m3", "bf16"]
BACKENDS = ["native_mma", "native"]
COVER = list(
    allpairs.AllPairs(
        [
            LAYOUTS,
            [1, 8, 10, 16, 20, 32, 64, 96, 128],
            [1, 16, 64, 128],
            [1, 63, 64, 65, 200, 512, 2048],
            [1, 2, 7],
            [torch.bfloat16, torch.float16],
            BACKENDS,
        ]
    )
)


def spec_of(**kw: Any) -> ProblemSpec:
    return replace(ProblemSpec(num_heads=16, sm_scale=0.05, kv_layout="fp8_ds_mla", device="cuda", topk=512), **kw)


def against_oracle(attention: MLAPagedAttention, case: ProbeCase) -> torch.Tensor:
    assert attention.last_plan is not None
    out, _ = run_case(attention, case)
    expected, _ = mla_oracle(
        attention.last_plan.problem, case.q_nope, case.q_pe, case.cache,
        ckv_scale=case.ckv_scale, kpe_scale=case.kpe_scale, indices=case.indices,
    )  # fmt: skip
    errors = relative_errors(out, expected)
    assert errors[0] <= MAX_ROW_ERROR and errors[1] <= MAX_TENSOR_ERROR, errors
    return out


@pytest.mark.parametrize("case", COVER, ids=lambda case: "-".join(str(value) for value in case))
def test_pairwise_cover_matches_the_oracle(case: list[Any]) -> None:
    layout, heads, page, topk, q_len, dtype, backend = case
    spec = spec_of(num_heads=heads, page_size=page, kv_layout=layout, topk=topk, q_data_type=dtype, max_q_len=q_len)
    check(backend, spec, [3000, 0, page, 65, max(page - 1, 1), 1000, 1], [q_len, 1, 1, 2, 1, q_len, q_len])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_small_cases(backend: str, layout: str) -> None:
    """The part to run under `compute-sanitizer --tool memcheck`: `pytest -k small`, with PYTORCH_NO_CUDA_MEMORY_CACHING=1."""
    check(backend, spec_of(kv_layout=layout, num_heads=20, page_size=16, topk=130, max_q_len=2), [0, 1, 300], [1, 1, 2])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_heads", [8, 64, 128])
def test_a_lone_query_is_split_and_combined(backend: str, layout: str, num_heads: int) -> None:
    check(backend, spec_of(kv_layout=layout, num_heads=num_heads, topk=2048, lse_base="e"), [70001], [1])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sparse_extend_and_large_batches(backend: str, layout: str) -> None:
    check(backend, spec_of(kv_layout=layout, num_heads=12, topk=256, max_q_len=200), [700, 200, 64], [200, 200, 3])
    lens = [(37 * i) % 300 for i in range(400)]
    check(backend, spec_of(kv_layout=layout, num_heads=4, page_size=16, topk=64), lens, [1] * 400)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_heads", [16, 64])
def test_tiles_without_a_selected_row(backend: str, layout: str, num_heads: int) -> None:
    """Whole tiles of -1 before, between and behind the selected ones, and a query that selects nothing."""
    spec = spec_of(kv_layout=layout, num_heads=num_heads, topk=1024)
    case = make_case(spec, [3000] * 4, [1] * 4)
    assert case.indices is not None
    tokens = torch.randperm(3000, device="cuda")[:512].int()
    case.indices.fill_(-1)
    case.indices[0, 200:210] = tokens[:10]
    case.indices[1, 1023] = tokens[0]
    case.indices[2, ::128] = tokens[:8]
    for backend_query in (0, 1, 2):
        assert bool((case.indices[backend_query] >= 0).any())
    attention, _ = planned(backend, spec, case)
    out = against_oracle(attention, case)
    assert not out[3].any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_that_are_not_selected_are_not_read(backend: str, layout: str) -> None:
    """Every other row of the pool is NaN."""
    spec = spec_of(kv_layout=layout, num_heads=64, topk=300)
    case = make_case(spec, [2000, 500], [1, 1])
    attention, plan = planned(backend, spec, case)
    assert case.indices is not None
    keep = torch.zeros(case.cache.shape[:2], dtype=torch.bool, device="cuda")
    for request in range(2):
        chosen = case.indices[request][case.indices[request] >= 0].long()
        first = int(plan.problem.kv_indptr[request])
        keep[plan.problem.kv_indices[first + chosen // 64].long(), chosen % 64] = True
    case.cache[~keep] = 0xFF
    assert bool(against_oracle(attention, case).isfinite().all())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_heads", [8, 64])
def test_ds_mla_scales_that_are_no_powers_of_two(backend: str, num_heads: int) -> None:
    spec = spec_of(num_heads=num_heads)
    case = make_case(spec, [1000, 65], [1, 1])
    words = case.cache.view(torch.float32)[..., 128:132]
    factors = torch.rand(words.shape, device="cuda") + 0.5
    words.copy_(torch.where(words.isfinite(), words * factors, words))
    attention, _ = planned(backend, spec, case)
    against_oracle(attention, case)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_heads", [8, 64, 128])
@pytest.mark.parametrize("queries", [1, 150])
def test_ds_mla_latents_beyond_fp16(backend: str, num_heads: int, queries: int) -> None:
    """Latents of 2^20, in queries that are split (one) and that are not (150)."""
    case = make_case(spec_of(num_heads=num_heads), [3000] * queries, [1] * queries)
    case.cache.view(torch.float32)[..., 128:132] *= 2.0**20
    case = replace(case, q_nope=case.q_nope * 2.0**-20)
    attention, _ = planned(backend, spec_of(num_heads=num_heads), case)
    against_oracle(attention, case)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_heads", [8, 16, 64])
def test_the_variants_of_ampere_run_on_this_gpu(monkeypatch: pytest.MonkeyPatch, layout: str, num_heads: int) -> None:
    """The integer unpack and the stages that fit 99 KB of shared memory: what sm_86 runs, executed here."""
    monkeypatch.setattr(mma_launch, "is_native", lambda arch: False)
    monkeypatch.setattr(mma_launch, "shared_memory_limit", lambda arch: 99 * 1024)
    sparse_launch.compile_variant.cache_clear()
    check("native_mma", spec_of(kv_layout=layout, num_heads=num_heads, max_q_len=2), [0, 1, 65, 1000], [1, 1, 2, 1])
    sparse_launch.compile_variant.cache_clear()


@pytest.mark.parametrize("backend", BACKENDS)
def test_batch_invariant_bits(backend: str) -> None:
    spec = spec_of(num_heads=16, topk=2048, batch_invariant=True)
    case = make_case(spec, [3000, 500, 9000], [1, 1, 1])
    attention, plan = planned(backend, spec, case)
    together, _ = run_case(attention, case)
    assert case.indices is not None
    for request in range(3):
        problem, lone = plan.problem, MLAPagedAttention(backend)
        rows = slice(request, request + 1)
        pages = problem.kv_indices[int(problem.kv_indptr[request]) : int(problem.kv_indptr[request + 1])]
        one = torch.tensor([0, 1], dtype=torch.int32, device="cuda")
        lone.plan(
            one, one * pages.shape[0], pages.clone(), problem.kv_len_arr[rows].clone(), num_heads=16, page_size=64,
            sm_scale=spec.sm_scale, kv_layout=spec.kv_layout, topk=2048, batch_invariant=True,
        )  # fmt: skip
        alone = lone.run(case.q_nope[rows], case.q_pe[rows], case.cache, indices=case.indices[rows].contiguous())
        assert torch.equal(alone[0] if isinstance(alone, tuple) else alone, together[rows][0:1].view_as(alone))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["fp8_ds_mla", "fp8_e4m3"])
def test_a_graph_follows_indices_lengths_and_rows(backend: str, layout: str) -> None:
    """Captured once; then other indices, lengths, queries and stored rows."""
    spec = spec_of(kv_layout=layout, num_heads=64, topk=2048)
    case = make_case(spec, [4000, 900], [1, 1])
    attention, plan = planned(backend, spec, case)
    out = torch.empty_like(case.q_nope)
    scales = {"ckv_scale": case.ckv_scale, "kpe_scale": case.kpe_scale}

    def run() -> None:
        attention.run(case.q_nope, case.q_pe, case.cache, out=out, indices=case.indices, **scales)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    assert case.indices is not None
    for length in (3000, 1, 2500):
        plan.problem.kv_len_arr[0] = length
        case.indices.fill_(-1)
        case.indices[0, : min(length, 1500)] = torch.randperm(length, device="cuda")[:1500].int()
        case.indices[1, 5:500:3] = torch.randperm(900, device="cuda")[:165].int()
        case.q_nope.copy_(torch.randn_like(case.q_nope))
        rows = encode_rows(
            torch.randn(64, 512, device="cuda"), torch.randn(64, 64, device="cuda"), spec.layout,
            ckv_scale=case.ckv_scale, kpe_scale=case.kpe_scale,
        )  # fmt: skip
        first_page = int(plan.problem.kv_indices[int(plan.problem.kv_indptr[0])])
        store_rows(case.cache, rows, torch.arange(64, device="cuda") + first_page * 64)
        out.fill_(float("nan"))
        graph.replay()
        expected, _ = mla_oracle(plan.problem, case.q_nope, case.q_pe, case.cache, indices=case.indices, **scales)
        errors = relative_errors(out, expected)
        assert errors[0] <= MAX_ROW_ERROR and errors[1] <= MAX_TENSOR_ERROR, (length, errors)
