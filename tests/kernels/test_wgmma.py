"""The Hopper kernel: what it claims, how its plan is sized, and on a GPU the cases that only its own design can get wrong.

The general GPU suite is `tests/backends/test_native_gpu.py`; a failure here names a mechanism of `wgmma_decode`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from uncast.attention.oracle import mla_oracle, relative_errors
from uncast.attention.problem import Problem, ProblemSpec
from uncast.kernels import combine, wgmma_launch
from uncast.kernels.launch import make_call
from uncast.kernels.schedule import BATCH_BUCKETS

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
on_hopper = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]
LAYOUTS = ["fp8_e4m3", "fp8_ds_mla"]


def spec_of(**kw: Any) -> ProblemSpec:
    return replace(ProblemSpec(num_heads=16, kv_layout="fp8_e4m3", sm_scale=0.05, arch=90), **kw)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"arch": 80}, "needs compute capability 9.0, not 8.0"),
        ({"arch": 120}, "needs compute capability 9.0, not 12.0"),
        ({"kv_layout": "bf16"}, "reads fp8_e4m3, fp8_ds_mla, not bf16"),
        ({"page_size": 32}, "pages of 64 or 128 rows, not 32"),
        ({"q_data_type": torch.float32}, "takes bfloat16 or float16 queries"),
        ({"kv_layout": "fp8_ds_mla", "q_data_type": torch.float16}, "takes only bfloat16 queries for fp8_ds_mla"),
        ({"head_dim_ckv": 256}, "is for 512 + 64 channels, not 256 + 64"),
    ],
)
def test_every_refusal_is_one_sentence(change: dict[str, Any], reason: str) -> None:
    refusal = wgmma_launch.supports(spec_of(**change))
    assert refusal is not None and reason in refusal and "\n" not in refusal


def test_what_it_supports() -> None:
    for layout in LAYOUTS:
        for page in wgmma_launch.PAGE_SIZES:
            assert wgmma_launch.supports(spec_of(kv_layout=layout, page_size=page, num_heads=128, max_q_len=8)) is None


def make_problem(kv_lens: list[int], q_lens: list[int], spec: ProblemSpec, device: str) -> Problem:
    """Contiguous pages for every request, with garbage behind the live ones."""
    pages = [-(-n // spec.page_size) for n in kv_lens]
    width = max(pages) + 2
    table = torch.full((len(kv_lens), width), 2**31 - 1, dtype=torch.int32)
    first = 0
    for b, n in enumerate(pages):
        table[b, :n] = torch.arange(first, first + n, dtype=torch.int32).flip(0)
        first += n
    qo = torch.tensor([0, *torch.tensor(q_lens).cumsum(0).tolist()], dtype=torch.int32)
    return Problem(
        spec=spec,
        qo_indptr=qo.to(device),
        kv_indptr=(torch.arange(len(kv_lens) + 1, dtype=torch.int32) * width).to(device),
        kv_indices=table.view(-1).to(device),
        kv_len_arr=torch.tensor(kv_lens, dtype=torch.int32, device=device),
        total_q=sum(q_lens),
        max_kv_len=max([*kv_lens, 1]),
        num_pages=max(first, 1),
    )


@pytest.mark.parametrize(("kv_len", "rows", "items"), [(4096, 16, 132), (32768, 32, 132), (131072, 64, 132)])
def test_few_tiles_get_narrow_blocks_and_plan_and_kernel_agree(kv_len: int, rows: int, items: int) -> None:
    """A split may be one tile, and plan and kernel must agree on that, or tiles are lost."""
    plan = wgmma_launch.make_plan(make_problem([kv_len], [1], spec_of(num_heads=64), "cpu"), 132)
    assert (plan.splits.block_rows, plan.splits.min_chunk, plan.splits.num_items) == (rows, 1, items)
    args = wgmma_launch.constexprs("fp8_e4m3", rows, 64, plan.splits.batch_bucket)
    assert args["MIN_CHUNK"] == plan.splits.min_chunk and args["OVERHEAD"] == plan.splits.overhead


def test_a_batch_invariant_plan_does_not_look_at_the_batch() -> None:
    def rows(kv_lens: list[int]) -> int:
        problem = make_problem(kv_lens, [1] * len(kv_lens), spec_of(num_heads=64, batch_invariant=True), "cpu")
        return wgmma_launch.make_plan(problem, 132).splits.block_rows

    assert rows([100]) == rows([100] * 64) == rows([131072])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_plan_that_splits_as_alone_does_not_look_at_the_batch(layout: str) -> None:
    """Nor at bounds of lengths: a row's block, its merge and its loop are those of one request."""

    def plan(kv_lens: list[int]) -> tuple[object, ...]:
        spec = spec_of(num_heads=128, kv_layout=layout)
        problem = make_problem(kv_lens, [1] * len(kv_lens), spec, "cpu")
        made = wgmma_launch.make_plan(replace(problem, alone_rows=len(kv_lens)), 132)
        return (
            made.splits.block_rows,
            made.overlap,
            combine.unit_shape(made.splits, torch.float16),
            made.splits.own_slots,
        )

    assert plan([100]) == plan([100] * 9) == plan([131072]) == plan([131072] * 16) == (64, False, (64, 2, 16), 66)


@pytest.mark.parametrize(
    ("batch", "kv_len", "heads", "change", "overlap"),
    [
        (32, 8192, 64, {}, True),
        (128, 4096, 64, {}, True),
        (64, 8192, 128, {}, True),  # two blocks of rows
        (16, 8192, 128, {}, True),
        (16, 8192, 64, {}, False),  # 15.5 tiles a multiprocessor
        (32, 2048, 64, {}, False),  # blocks of 32 rows
        (256, 4096, 16, {}, False),
        (1, 131072, 64, {}, False),
        (15, 131072, 64, {}, False),
        (64, 8192, 128, {"kv_layout": "fp8_ds_mla"}, False),
        (64, 8192, 128, {"batch_invariant": True}, False),
    ],
)
def test_the_overlapped_loop_is_taken_where_it_wins(
    batch: int, kv_len: int, heads: int, change: dict[str, Any], overlap: bool
) -> None:
    """By shapes alone: with lengths of 0 in the buffers, as under capture, the choice is the same."""
    problem = make_problem([kv_len] * batch, [1] * batch, spec_of(num_heads=heads, **change), "cpu")
    plan = wgmma_launch.make_plan(problem, 132)
    problem.kv_len_arr.zero_()
    assert plan.overlap == wgmma_launch.make_plan(problem, 132).overlap == overlap
    assert plan.splits.batch_bucket in (wgmma_launch.OVERLAP_BUCKETS if overlap else BATCH_BUCKETS)
    assert not overlap or (plan.splits.block_rows, plan.splits.batch_bucket) == (64, max(32, batch))


def test_what_does_not_overlap_is_compiled_as_ever() -> None:
    assert wgmma_launch.constexprs("fp8_e4m3", 64, 64, 32)["OVERLAP"] is False


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rings_fit_shared_memory(layout: str) -> None:
    row, scales = (576, 0) if layout == "fp8_e4m3" else (640, 2048)
    for rows, stages in wgmma_launch.STAGES[layout].items():
        joint = wgmma_launch.constexprs(layout, rows, 64, 1)["JOINT"]
        ring = stages * (64 * row + scales) if joint else stages * 64 * 512 + 2 * 64 * 64
        assert ring + rows * (1024 + 128 + 256) <= 227 * 1024 - 2048


def test_combine_programs_hold_the_usual_number_of_splits() -> None:
    def splits(kv_lens: list[int], heads: int) -> object:
        problem = make_problem(kv_lens, [1] * len(kv_lens), spec_of(num_heads=heads), "cpu")
        plan = wgmma_launch.make_plan(problem, 132)
        shape = combine.unit_shape(plan.splits, plan.scratch.partial_o.dtype)
        return combine.constexprs(16, *shape, pdl=True)["SPLITS"]

    assert splits([131072], 8) == 128
    assert splits([4096], 64) == 32
    assert splits([32768], 64) == 64
    assert splits([8192] * 4, 16) == 32
    assert splits([8192] * 12, 64) == 16
    assert splits([8192] * 8, 64) == 8
    assert splits([8192] * 64, 64) == 4


@pytest.mark.parametrize("num_sms", [16, 78, 114, 132])
@pytest.mark.parametrize("share", [0.01, 0.9, 1.0, 1.1, 2.0, 3.5, 4.0, 5.0, 8.0])
def test_as_many_combine_programs_fit_a_multiprocessor_as_there_are_for_each(share: float, num_sms: int) -> None:
    programs = max(1, int(share * num_sms))
    each = next(n for n in (1, 2, 4, 8) if n * num_sms >= programs)
    room = combine.spread_bytes(programs, num_sms) + 1024
    assert room <= combine.SM_SHARED - 1024 and each * (room + 2048) <= combine.SM_SHARED < (each + 1) * room


def test_many_combine_programs_are_not_spread() -> None:
    assert combine.spread_bytes(1057, 132) == combine.spread_bytes(4096, 132) == 0


def test_only_fp8_ds_mla_has_scaled_partial_results() -> None:
    """Its latents may exceed fp16's range. The kernel writes a row's scale one `partial_lse` behind the row's LSE."""
    for layout in LAYOUTS:
        plan = wgmma_launch.make_plan(make_problem([4096], [1], spec_of(kv_layout=layout), "cpu"), 132)
        lse, scale = plan.scratch.partial_lse, plan.scratch.partial_scale
        assert (scale is not None) == (layout == "fp8_ds_mla")
        if scale is not None:
            assert scale.shape == lse.shape and bool((scale == 1).all())
            assert scale.data_ptr() == lse.data_ptr() + 4 * lse.numel()


def e4m3_rows(n: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(n, 576, generator=generator).to(torch.float8_e4m3fn).view(torch.uint8)


def ds_mla_rows(n: int, generator: torch.Generator, scales: torch.Tensor) -> torch.Tensor:
    codes = (torch.randn(n, 512, generator=generator) * 100).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    kpe = torch.randn(n, 64, generator=generator).bfloat16().view(torch.uint8)
    return torch.cat([codes, scales.contiguous().view(torch.uint8).view(n, 16), kpe], 1)


def pool_of(problem: Problem, rows: list[torch.Tensor]) -> torch.Tensor:
    """A pool whose dead rows are NaN codes (0xFF)."""
    spec = problem.spec
    pool = torch.full((problem.num_pages or 1, spec.page_size, spec.layout.row_bytes), 0xFF, dtype=torch.uint8)
    starts = problem.kv_indptr.tolist()
    for b, live in enumerate(rows):
        pages = problem.kv_indices[starts[b] : starts[b] + -(-len(live) // spec.page_size)].cpu().long()
        padded = torch.full((len(pages) * spec.page_size, spec.layout.row_bytes), 0xFF, dtype=torch.uint8)
        padded[: len(live)] = live
        pool[pages] = padded.view(-1, spec.page_size, spec.layout.row_bytes)
    return pool.cuda()


def run(
    problem: Problem, q_nope: torch.Tensor, q_pe: torch.Tensor, pool: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    plan = wgmma_launch.make_plan(problem, torch.cuda.get_device_properties(0).multi_processor_count)
    out = torch.full_like(q_nope, torch.nan)
    lse = torch.full(q_nope.shape[:2], torch.nan, device="cuda")
    call = make_call(
        q_nope, q_pe, pool, out, lse, lse_base="2", ckv_scale=None, kpe_scale=None, dummy=plan.scratch.partial_lse
    )  # fmt: skip
    wgmma_launch.launch(plan, call)
    torch.cuda.synchronize()
    return out, lse


def queries(problem: Problem, size: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shape = (problem.total_q, problem.spec.num_heads)
    nope, pe = (torch.randn(*shape, d, generator=generator) * size for d in (512, 64))
    return nope.bfloat16().cuda(), pe.bfloat16().cuda()


class TestOnHopper:
    pytestmark = on_hopper

    @pytest.mark.parametrize("heads", [16, 32, 64])
    def test_late_maxima_rescale_what_both_warpgroups_have(self, heads: int) -> None:
        """Keys grow along the context, so the column maximum moves again and again, in tiles of both warpgroups."""
        problem = make_problem([1500], [1], spec_of(num_heads=heads), "cuda")
        generator = torch.Generator().manual_seed(1)
        grown = torch.randn(1500, 576, generator=generator) * torch.logspace(-3, 7, 1500, 2)[:, None]
        pool = pool_of(problem, [grown.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)])
        q_nope, q_pe = queries(problem)
        out, lse = run(problem, q_nope, q_pe, pool)
        expected, expected_lse = mla_oracle(problem, q_nope, q_pe, pool)
        row, whole = relative_errors(out, expected)
        assert row <= 1e-2 and whole <= 2.5e-3 and torch.allclose(lse.double(), expected_lse, atol=2e-2)

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("kv_len", [1, 63, 64, 65, 127, 128, 129, 192, 4033])
    def test_every_number_of_tiles_modulo_the_rings(self, layout: str, kv_len: int) -> None:
        for heads in (8, 64):
            problem = make_problem([kv_len, 64 * 7 + 1], [1, 1], spec_of(num_heads=heads, kv_layout=layout), "cuda")
            generator = torch.Generator().manual_seed(kv_len)
            lens = problem.kv_len_arr.tolist()
            rows = [
                e4m3_rows(n, generator)
                if layout == "fp8_e4m3"
                else ds_mla_rows(n, generator, torch.full((n, 4), 2.0**-7))
                for n in lens
            ]
            pool = pool_of(problem, rows)
            q_nope, q_pe = queries(problem)
            out, _ = run(problem, q_nope, q_pe, pool)
            row, whole = relative_errors(out, mla_oracle(problem, q_nope, q_pe, pool)[0])
            assert row <= 1e-2 and whole <= 2.5e-3, heads

    @pytest.mark.parametrize("kv_lens", [[1, 449], [65, 449], [192, 449], [257, 449], [4033, 70, 0], [700] * 40])
    def test_the_overlapped_loop(self, monkeypatch: pytest.MonkeyPatch, kv_lens: list[int]) -> None:
        monkeypatch.setattr(wgmma_launch, "block_rows", lambda rows, tiles: 64)
        monkeypatch.setattr(wgmma_launch, "OVERLAP_BATCH", 1)
        monkeypatch.setattr(wgmma_launch, "OVERLAP_TILES", 0)
        generator = torch.Generator().manual_seed(len(kv_lens))
        for heads in (64, 128):
            problem = make_problem(kv_lens, [1] * len(kv_lens), spec_of(num_heads=heads), "cuda")
            assert wgmma_launch.make_plan(problem, 132).overlap
            pool = pool_of(problem, [e4m3_rows(n, generator) for n in kv_lens])
            q_nope, q_pe = queries(problem)
            out, lse = run(problem, q_nope, q_pe, pool)
            again, _ = run(problem, q_nope, q_pe, pool)
            expected, expected_lse = mla_oracle(problem, q_nope, q_pe, pool)
            row, whole = relative_errors(out, expected)
            live = expected_lse.isfinite()
            assert row <= 1e-2 and whole <= 2.5e-3 and torch.equal(out, again), heads
            assert torch.equal(lse.isfinite(), live) and torch.allclose(
                lse.double()[live], expected_lse[live], atol=5e-3
            )

    @pytest.mark.parametrize("heads", [16, 32, 64])
    @pytest.mark.parametrize("kind", ["powers of two, 2^16 apart", "any"])
    def test_scales_inside_the_row(self, heads: int, kind: str) -> None:
        """Scores of some hundreds: a scale rounded to fp16 would show. Tiles with and without powers of two are mixed."""
        problem = make_problem([700, 130], [1, 1], spec_of(num_heads=heads, kv_layout="fp8_ds_mla"), "cuda")
        generator = torch.Generator().manual_seed(9)
        rows = []
        for n in problem.kv_len_arr.tolist():
            scales = 2.0 ** torch.randint(-14, 3, (n, 4), generator=generator).float()
            if kind == "any":
                scales[64:] *= 1 + torch.rand(n - 64, 4, generator=generator)
            rows.append(ds_mla_rows(n, generator, scales))
        pool = pool_of(problem, rows)
        q_nope, q_pe = queries(problem, 0.5)
        out, lse = run(problem, q_nope, q_pe, pool)
        expected, expected_lse = mla_oracle(problem, q_nope, q_pe, pool)
        row, whole = relative_errors(out, expected)
        assert row <= 1e-2 and whole <= 2.5e-3
        assert ((lse.double() - expected_lse).abs() <= 1e-5 * expected_lse.abs() + 1e-3).all()

    def test_a_broken_query_row_breaks_no_other(self) -> None:
        problem = make_problem([300], [1], spec_of(num_heads=64), "cuda")
        pool = pool_of(problem, [e4m3_rows(300, torch.Generator().manual_seed(2))])
        q_nope, q_pe = queries(problem)
        expected, _ = mla_oracle(problem, q_nope, q_pe, pool)
        q_nope[0, 5, 100], q_pe[0, 9, 3] = torch.inf, torch.nan
        out, _ = run(problem, q_nope, q_pe, pool)
        others = [h for h in range(64) if h not in (5, 9)]
        assert relative_errors(out[:, others], expected[:, others])[0] <= 1e-2
        assert not out[:, [5, 9]].isfinite().any()
