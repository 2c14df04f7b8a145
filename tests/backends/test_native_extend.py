"""Un-absorbed extend against float64 on stored values, and its tiling.

A failure of the cases is math or addressing (poisoned pools, garbage in page lists); of the tiling, a scratch beyond its bound.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

from tests.backends.extend_cases import check, make_case
from uncast.attention.problem import ProblemError
from uncast.backends import flash_libraries as libraries
from uncast.backends.native_extend import SCRATCH_BYTES, Tiling, plan_tiling, unabsorbed_extend, unabsorbed_refusal
from uncast.latent.layouts import row_layout

LAYOUTS = ["fp8_e4m3", "fp8_ds_mla", "bf16"]
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def gpu(function):
    for mark in on_gpu:
        function = mark(function)
    return function


def available(library: str, qk: int, v: int) -> str:
    major, minor = torch.cuda.get_device_capability()
    reason = libraries.refusal(library, major * 10 + minor, qk, v)
    if reason:
        pytest.skip(reason)
    return library


def test_cases_in_the_interpreter() -> None:
    """Triton's interpreter is chosen when Triton is imported, hence the child process."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.backends.extend_cases"], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@gpu
@pytest.mark.parametrize("library", [*libraries.LIBRARIES, "reference"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ragged_blocks_of_every_kind(layout: str, library: str) -> None:
    """Whole granules and tails, several blocks, no prefix, one query; 4 MiB of scratch are 1,024 rows of 4 heads."""
    lens = [(256, 1536), (300, 905), (5, 5), (1, 70), (512, 512), (256, 9000)]
    case = make_case(layout, lens, 4, 192, 256, device="cuda", page_size=64)
    check(case, available(library, 256, 256), 4 * 2**20)


@gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_size", [1, 128])
def test_groups_of_heads(layout: str, page_size: int) -> None:
    case = make_case(layout, [(300, 5000), (2, 33)], 8, 192, 256, device="cuda", page_size=page_size)
    check(case, None, 4 * 2**20, 2)


@gpu
@pytest.mark.parametrize("library", libraries.LIBRARIES)
def test_values_narrower_than_keys(library: str) -> None:
    case = make_case("fp8_e4m3", [(256, 1000), (40, 300)], 16, 128, 128, device="cuda", page_size=64)
    check(case, available(library, 192, 128))


@gpu
@pytest.mark.parametrize(("q_size", "w_size"), [(1e30, 0.02), (1e-30, 0.02), (1.0, 1e6), (1.0, 1e-6)])
def test_queries_and_weights_of_any_size(q_size: float, w_size: float) -> None:
    check(make_case("fp8_ds_mla", [(256, 600)], 4, 192, 256, device="cuda", q_size=q_size, w_size=w_size), None)


@gpu
def test_scales_as_device_tensors_equal_scales_as_floats() -> None:
    case = make_case("fp8_e4m3", [(64, 600)], 4, 192, 256, device="cuda")
    plain = case.run(None)
    case.scales = tuple(torch.tensor([s], device="cuda") for s in case.scales)
    assert torch.equal(case.run(None), plain)


@gpu
def test_scratch_does_not_grow_with_the_prefix() -> None:
    peaks = []
    for kv_len in (20000, 40000):
        case = make_case("fp8_e4m3", [(512, kv_len)], 8, 192, 256, device="cuda", page_size=64)
        case.run("flash", 16 * 2**20)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        case.run("flash", 16 * 2**20)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < peaks[0] + 2**20 and peaks[0] < 64 * 2**20, peaks


def test_a_long_prefix_is_few_blocks_of_few_heads() -> None:
    """GLM on 132 multiprocessors: 16 heads of 4,096 queries fill them thrice, and 16,384 rows of 16 heads are 256 MiB."""
    tiling = plan_tiling(4096, 36864, 64, 256, library="cudnn", num_sms=132)
    assert tiling == Tiling(16, 64, 4096, ((0, 16384), (16384, 16384)))
    tiling = plan_tiling(4096, 36864, 64, 256, library="flashinfer", num_sms=132)
    assert tiling == Tiling(16, 16, 16384, ((0, 16384), (16384, 4096)))
    assert plan_tiling(512, 8704, 16, 256, library="flashinfer", num_sms=132) == Tiling(16, 16, 8704, ())


@pytest.mark.parametrize("library", libraries.LIBRARIES)
@pytest.mark.parametrize("heads", [1, 20, 64, 128])
@pytest.mark.parametrize(
    ("q_len", "kv_len"), [(1, 1), (300, 301), (4096, 1_000_000), (256, 100_001), (16384, 20000), (7, 9)]
)
def test_blocks_cover_all_rows_within_the_scratch(library: str, heads: int, q_len: int, kv_len: int) -> None:
    tiling = plan_tiling(q_len, kv_len, heads, 256, library=library, num_sms=132)
    assert heads % tiling.causal_heads == 0 and tiling.causal_heads % tiling.heads == 0
    assert q_len <= tiling.causal_rows <= kv_len
    assert tiling.causal_rows == q_len or libraries.is_bottom_right(library)
    assert tiling.causal_heads * tiling.causal_rows * 1024 <= SCRATCH_BYTES
    position = 0
    for start, rows in tiling.blocks:
        assert start == position and rows > 0
        assert rows * tiling.heads * 1024 <= SCRATCH_BYTES
        position += rows
    assert position == kv_len - tiling.causal_rows


def test_cudnn_gets_shapes_that_recur_and_flash_the_tails() -> None:
    tiling = plan_tiling(512, 512 + 9 * 256 + 7, 64, 256, library="cudnn", num_sms=132)
    shapes = [(libraries.library_for_block("cudnn", 512, rows), rows) for _, rows in tiling.blocks]
    assert shapes == [("cudnn", 9 * 256), ("flash", 7)]
    assert libraries.library_for_block("cudnn", 512, 512) == "cudnn"
    assert libraries.library_for_block("cudnn", 500, 512) == "flash"
    assert plan_tiling(512, 2823, 64, 256, library="flash", num_sms=132).blocks == ((0, 2311),)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arch": 75}, "un-absorbed extend needs compute capability 8.0 or newer, and this GPU has 7.5"),
        ({"layout": row_layout("fp32")}, "un-absorbed extend reads fp8_e4m3, fp8_ds_mla, bf16 with a rank"),
        ({"layout": row_layout("fp8_e4m3", 96, 64)}, "multiple of 64, not fp8_e4m3 with 96"),
        ({"w_dtype": torch.float32}, "un-absorbed extend takes bfloat16 weights and 16-bit queries, not torch.float32"),
        ({"nope": 256}, "no attention library here takes heads of 320 and 256 channels"),
    ],
)
def test_refusals(change: dict, message: str) -> None:
    given = {"layout": row_layout("fp8_e4m3"), "arch": 90, "q_dtype": torch.bfloat16, "w_dtype": torch.bfloat16}
    reason = unabsorbed_refusal(**{**given, "nope": 192, "v": 256, **change})
    assert reason is not None and message in reason
    assert unabsorbed_refusal(**given, nope=192, v=256) is None


def test_wrong_shapes_are_refused_in_a_sentence() -> None:
    case = make_case("fp8_e4m3", [(4, 40)], 2, 24, 16)

    def run(**change) -> None:
        given = {
            "q_nope": case.q_nope,
            "q_pe": case.q_pe,
            "cache": case.cache,
            "chunks": case.chunks,
            "w_uk": case.w_uk,
        }
        given |= {"w_uv": case.w_uv, "layout": case.layout, "sm_scale": 1.0, "library": "reference"}
        unabsorbed_extend(**given | change)

    with pytest.raises(ProblemError, match="q_pe is"):
        run(q_pe=case.q_pe[..., :60])
    with pytest.raises(ProblemError, match="w_uk is"):
        run(w_uv=case.w_uv[:1])
    with pytest.raises(ProblemError, match="cache is"):
        run(layout=row_layout("fp8_ds_mla"))
    with pytest.raises(ProblemError, match="at most as many as the rows"):
        run(chunks=[type(case.chunks[0])(0, 4, 3, case.chunks[0].pages)])
    with pytest.raises(ProblemError, match="has 1 pages"):
        run(chunks=[type(case.chunks[0])(0, 4, 40, case.chunks[0].pages[:1])])
    with pytest.raises(ProblemError, match="there is no attention library 'fa9'"):
        run(library="fa9")
    with pytest.raises(ProblemError, match="does not divide 2 heads"):
        plan_tiling(4, 40, 2, 96, library="flash", num_sms=1, group=3)
