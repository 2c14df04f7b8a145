"""`native` on a GPU against the float64 oracle, on poisoned pools; both kernels where the GPU has both.

A failure of the pairwise cover is math or addressing; of `bits`, a race; of `graph`, a value that was read on the host.
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
from uncast.kernels import mma_launch
from uncast.latent.codec import encode_rows, store_rows
from uncast.verify.probe import MAX_ROW_ERROR, MAX_TENSOR_ERROR, ProbeCase, make_case, run_case

allpairs = pytest.importorskip("allpairspy")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PAGES = [1, 2, 4, 8, 16, 32, 64, 128]
LAYOUTS = ["fp8_e4m3", "fp8_ds_mla", "bf16"]
BACKENDS = ["native_mma", "native"]
COVER = list(
    allpairs.AllPairs(
        [
            LAYOUTS,
            [1, 5, 8, 10, 12, 16, 20, 32, 64, 96, 128],
            PAGES,
            [0, 1, 63, 64, 65, 4097],
            [1, 2, 3, 4, 5, 6, 7, 8],
            [torch.bfloat16, torch.float16],
            [True, False],
            BACKENDS,
        ]
    )
)


def spec_of(**kw: Any) -> ProblemSpec:
    return replace(ProblemSpec(num_heads=16, sm_scale=0.05, kv_layout="fp8_e4m3", device="cuda"), **kw)


def against_oracle(attention: MLAPagedAttention, case: ProbeCase) -> tuple[float, float]:
    assert attention.last_plan is not None
    out, _ = run_case(attention, case)
    expected, _ = mla_oracle(
        attention.last_plan.problem, case.q_nope, case.q_pe, case.cache,
        ckv_scale=case.ckv_scale, kpe_scale=case.kpe_scale,
    )  # fmt: skip
    errors = relative_errors(out, expected)
    assert errors[0] <= MAX_ROW_ERROR and errors[1] <= MAX_TENSOR_ERROR, errors
    return errors


@pytest.mark.parametrize("case", COVER, ids=lambda case: "-".join(str(value) for value in case))
def test_pairwise_cover_matches_the_oracle(case: list[Any]) -> None:
    layout, heads, page, kv_len, q_len, dtype, causal, backend = case
    spec = spec_of(num_heads=heads, page_size=page, kv_layout=layout, q_data_type=dtype, causal=causal, max_q_len=q_len)
    ragged = [kv_len, 0, page, page + 1, max(page - 1, 1), 37, 1]
    check(backend, spec, ragged, [q_len, 1, 1, 2, 1, q_len, q_len])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page", [1, 64])
def test_small_cases(backend: str, layout: str, page: int) -> None:
    """The part to run under `compute-sanitizer --tool memcheck`: `pytest -k small`, with PYTORCH_NO_CUDA_MEMORY_CACHING=1."""
    spec = spec_of(kv_layout=layout, num_heads=20, page_size=page, max_q_len=2)
    check(backend, spec, [0, 1, 63, 65, 1000], [1, 1, 2, 1, 2])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("num_heads", "dtype"), [(8, torch.bfloat16), (16, torch.bfloat16), (20, torch.bfloat16), (16, torch.float16)]
)
def test_the_variants_of_ampere_run_on_this_gpu(
    monkeypatch: pytest.MonkeyPatch, layout: str, num_heads: int, dtype: torch.dtype
) -> None:
    """The integer unpack and the stages that fit 99 KB of shared memory: what sm_86 runs, executed here."""
    monkeypatch.setattr(mma_launch, "is_native", lambda arch: False)
    monkeypatch.setattr(mma_launch, "shared_memory_limit", lambda arch: 99 * 1024)
    mma_launch.compile_variant.cache_clear()
    spec = spec_of(kv_layout=layout, num_heads=num_heads, q_data_type=dtype, max_q_len=2)
    check("native_mma", spec, [0, 1, 65, 1000, 9000], [1, 1, 2, 1, 2])
    mma_launch.compile_variant.cache_clear()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_long_context_is_split_and_combined(backend: str, layout: str) -> None:
    outcome = check(backend, spec_of(kv_layout=layout, num_heads=8, lse_base="e"), [70001, 9], [1, 1])
    assert outcome.plan.bytes_written == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_large_ragged_batch(backend: str, layout: str) -> None:
    lens = [(37 * i) % 300 for i in range(400)]
    check(backend, spec_of(kv_layout=layout, num_heads=4, page_size=16), lens, [1] * 400)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_absorbed_extend(backend: str, layout: str) -> None:
    check(backend, spec_of(kv_layout=layout, num_heads=12, max_q_len=200), [700, 200, 64, 1], [200, 200, 3, 1])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_queries_of_any_size(backend: str, dtype: torch.dtype) -> None:
    size = 1e30 if dtype == torch.bfloat16 else 3e3
    spec = spec_of(num_heads=20, sm_scale=0.05 / size, q_data_type=dtype)
    case = make_case(spec, [400, 65], [1, 1])
    per_head = torch.logspace(-9, 0, 20, 2, device="cuda")[None, :, None] * size
    case = replace(case, q_nope=(case.q_nope * per_head).to(dtype), q_pe=(case.q_pe * per_head).to(dtype))
    attention, _ = planned(backend, spec, case)
    against_oracle(attention, case)


@pytest.mark.parametrize(
    ("backend", "size", "shift"),
    [(b, size, 0.0) for b in BACKENDS for size in (2.0**-20, 2.0**-27)] + [("native", 2.0**-7, -20.0)],
)
@pytest.mark.parametrize("num_heads", [8, 16, 64])
def test_ds_mla_scales_of_any_size(backend: str, size: float, shift: float, num_heads: int) -> None:
    """Readers accept any positive scale, also where tokens of one tile differ by 2^40: 2^-20, 1 and 2^20, moved by 2^shift.

    Queries of 2^(-27 - shift) give ordinary scores; at 2^-20 scores reach several hundred, where a relative error of 2^-12 in a
    score moves the softmax by percents. Latents reach 2^31, far beyond fp16's range, also where a request is split.
    """
    spec = spec_of(kv_layout="fp8_ds_mla", num_heads=num_heads)
    case = make_case(spec, [500, 65, 3000], [1, 1, 1])
    generator = torch.Generator().manual_seed(7)
    cache = case.cache.cpu().clone()
    scales = cache[:, :, 512:528].clone().view(torch.float32)
    exponent = torch.rand(scales.shape, generator=generator) * 4 - 2 + shift
    exponent += torch.randint(-1, 2, scales.shape[:2], generator=generator)[..., None] * 20.0
    live = scales.isfinite()
    cache[:, :, 512:528] = torch.where(live, 2**exponent, scales).view(torch.uint8)
    case = replace(case, cache=cache.cuda(), q_nope=case.q_nope * size)
    attention, _ = planned(backend, spec, case)
    against_oracle(attention, case)


@pytest.mark.parametrize("backend", BACKENDS)
def test_scales_as_device_tensors_equal_scales_as_floats(backend: str) -> None:
    spec = spec_of(num_heads=64, max_q_len=2)
    case = make_case(spec, [300, 20000], [2, 1])
    attention, _ = planned(backend, spec, case)
    out, lse = run_case(attention, case)
    as_tensors = {
        "ckv_scale": torch.tensor([case.ckv_scale], device="cuda"), "kpe_scale": torch.tensor([case.kpe_scale], device="cuda")
    }  # fmt: skip
    again = attention.run(case.q_nope, case.q_pe, case.cache, return_lse=True, **as_tensors)
    assert torch.equal(out, again[0]) and torch.equal(lse, again[1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_queries_and_outputs(backend: str) -> None:
    spec = spec_of(num_heads=10, max_q_len=3)
    case = make_case(spec, [300, 20000, 5], [2, 1, 3])
    attention, _ = planned(backend, spec, case)
    out, _ = run_case(attention, case)
    heads_first = case.q_nope.transpose(0, 1).contiguous().transpose(0, 1)
    odd = torch.zeros(6, 10, 67, dtype=torch.bfloat16, device="cuda")[:, :, 3:]
    odd.copy_(case.q_pe)
    target = torch.full((10, 6, 512), torch.nan, dtype=torch.bfloat16, device="cuda").transpose(0, 1)
    attention.run(heads_first, odd, case.cache, ckv_scale=case.ckv_scale, kpe_scale=case.kpe_scale, out=target)
    assert torch.equal(target, out)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_batch_invariant_bits_do_not_depend_on_the_batch(backend: str, layout: str) -> None:
    spec = spec_of(kv_layout=layout, num_heads=12, batch_invariant=True, max_q_len=4)
    case = make_case(spec, [5000, 130, 3, 70000], [1, 4, 2, 1])
    attention, _ = planned(backend, spec, case)
    together, _ = run_case(attention, case)
    for request, (first, last) in enumerate([(0, 1), (1, 5), (5, 7), (7, 8)]):
        alone = replace(
            case, block_tables=case.block_tables[request : request + 1], seq_lens=case.seq_lens[request : request + 1],
            qo_indptr=torch.tensor([0, last - first], dtype=torch.int32, device="cuda"),
            q_nope=case.q_nope[first:last], q_pe=case.q_pe[first:last],
        )  # fmt: skip
        single, _ = planned(backend, replace(spec, max_q_len=last - first), alone)
        assert torch.equal(run_case(single, alone)[0], together[first:last]), request


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heads", [4, 20, 64])
@pytest.mark.filterwarnings("ignore::uncast.attention.ClaimedCapabilityWarning")
def test_rows_of_a_sequence_have_the_bits_that_each_has_alone(backend: str, layout: str, heads: int) -> None:
    """2 to 9 rows, at lengths where tiles and splits change, whatever bound of lengths the plans have."""
    spec = spec_of(kv_layout=layout, num_heads=heads)
    for last, rows in [(9, 9), (66, 3), (700, 2), (4097, 5), (8450, 4), (16899, 3), (17000, 9), (40000, 2)]:
        case = make_case(spec, list(range(last - rows + 1, last + 1)), [1] * rows)
        given: dict[str, Any] = {
            "num_heads": heads, "page_size": spec.page_size, "sm_scale": spec.sm_scale, "kv_layout": layout, "max_q_len": 1,
        }  # fmt: skip
        attention = MLAPagedAttention(backend)
        attention.plan(
            case.qo_indptr,
            block_tables=case.block_tables,
            seq_lens=case.seq_lens,
            total_q=rows,
            alone_rows=rows,
            **given,
        )
        together, _ = run_case(attention, case)
        single = MLAPagedAttention(backend)
        for row in range(rows):
            one = slice(row, row + 1)
            single.plan(
                case.qo_indptr[:2], block_tables=case.block_tables[one, : -(-(last - rows + 1 + row) // spec.page_size)],
                seq_lens=case.seq_lens[one], total_q=1, alone_rows=1, **given,
            )  # fmt: skip
            alone, _ = run_case(single, replace(case, q_nope=case.q_nope[one], q_pe=case.q_pe[one]))
            assert torch.equal(alone, together[one]), (last, rows, row)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_graph_replays_with_other_lengths_and_tables(backend: str, layout: str) -> None:
    spec = spec_of(kv_layout=layout, num_heads=16, max_q_len=2)
    case = make_case(spec, [70, 9000, 1], [2, 2, 2])
    attention, plan = planned(backend, spec, case)
    out, lse = run_case(attention, case)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention.run(
            case.q_nope, case.q_pe, case.cache, ckv_scale=case.ckv_scale, kpe_scale=case.kpe_scale, out=out, lse=lse,
            return_lse=True,
        )  # fmt: skip
    generator = torch.Generator().manual_seed(11)
    problem = plan.problem
    width = case.block_tables.shape[1]
    for lens in [[9000, 64, 0], [0, 0, 0], [65, 9001, 8000], [70, 9000, 1]]:
        problem.kv_len_arr.copy_(torch.tensor(lens))
        tables = torch.full((3, width), 2**31 - 1, dtype=torch.int32)
        for request, length in enumerate(lens):
            pages = -(-length // spec.page_size)
            tables[request, :pages] = torch.randint(0, case.cache.shape[0], (pages,), generator=generator)
        case.block_tables.copy_(tables)
        case.cache.copy_(_clean(case.cache, spec))
        out.fill_(torch.nan)
        graph.replay()
        expected, _ = mla_oracle(
            problem, case.q_nope, case.q_pe, case.cache, ckv_scale=case.ckv_scale, kpe_scale=case.kpe_scale
        )
        errors = relative_errors(out, expected)
        assert errors[0] <= MAX_ROW_ERROR and errors[1] <= MAX_TENSOR_ERROR, (lens, errors)


def _clean(cache: torch.Tensor, spec: ProblemSpec) -> torch.Tensor:
    """The pool without NaN rows: random pages may be live in the next replay."""
    rows = cache.view(-1, spec.layout.row_bytes)
    bad = (rows == 0xFF).all(-1)
    return torch.where(bad[:, None], rows[~bad][0], rows).view_as(cache)


@pytest.mark.parametrize("backend", BACKENDS)
def test_pool_beyond_two_to_the_31_elements(backend: str) -> None:
    spec = spec_of(num_heads=16)
    case = make_case(spec, [200], [1])
    far = torch.zeros(2**32 // (64 * 576) + 300, 64, 576, dtype=torch.uint8, device="cuda")
    shift = far.shape[0] - case.cache.shape[0]
    far[shift:] = case.cache
    tables = torch.where(case.block_tables < 2**30, case.block_tables + shift, case.block_tables)
    moved = replace(case, cache=far, block_tables=tables)
    attention, _ = planned(backend, spec, moved)
    against_oracle(attention, moved)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_in_a_live_row_is_not_hidden_and_stays_in_its_request(backend: str) -> None:
    spec = spec_of(num_heads=16)
    case = make_case(spec, [300, 20000, 65], [1, 1, 1])
    attention, _ = planned(backend, spec, case)
    out, _ = run_case(attention, case)
    page = int(case.block_tables[1, 5])
    case.cache[page, 7, 100] = 0x7F
    bad, _ = run_case(attention, case)
    assert bool(bad[1].isnan().any(-1).all())
    assert torch.equal(bad[0], out[0]) and torch.equal(bad[2], out[2])


@pytest.mark.parametrize("backend", BACKENDS)
def test_batches_without_rows_or_without_queries(backend: str) -> None:
    outcome = check(backend, spec_of(), [0, 0], [1, 1])
    assert not outcome.out.any() and bool((outcome.lse == -torch.inf).all())
    case = make_case(spec_of(), [64], [0])
    attention, _ = planned(backend, spec_of(), case)
    assert run_case(attention, case)[0].shape[0] == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_written_by_the_backend_are_the_codecs(layout: str) -> None:
    spec = spec_of(kv_layout=layout, num_heads=8)
    case = make_case(spec, [100], [1])
    attention, _ = planned("native", spec, case)
    ckv, kpe = torch.randn(3, 512, device="cuda").bfloat16(), torch.randn(3, 64, device="cuda").bfloat16()
    slots = torch.tensor([70, -1, 5], device="cuda")
    scales = {"ckv_scale": case.ckv_scale, "kpe_scale": case.kpe_scale}
    expected = case.cache.clone()
    store_rows(expected, encode_rows(ckv, kpe, spec.layout, **scales), slots)
    attention.write(ckv, kpe, case.cache, slots, **scales)
    assert torch.equal(case.cache, expected)
