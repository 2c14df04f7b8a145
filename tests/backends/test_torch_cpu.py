"""The CPU backends against the oracle, on poisoned pools. A failure of a case here is attention math or addressing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from allpairspy import AllPairs

from tests.backends.helpers import check, planned
from tests.live_memory import LiveMemory
from uncast.attention import ProblemSpec
from uncast.backends.torch_cpu import BLOCK_ROWS, QUERY_ROWS
from uncast.verify.probe import make_case, run_case

PAGES = [1, 2, 4, 8, 16, 32, 64, 128]
COVER = list(
    AllPairs(
        [
            ["fp8_e4m3", "fp8_ds_mla", "bf16", "fp32"],
            [1, 5, 8, 10, 12, 16, 20, 32, 64, 96, 128],
            PAGES,
            [0, 1, 63, 64, 65, 4097],
            [1, 2, 3, 4, 5, 6, 7, 8],
            [torch.float32, torch.bfloat16, torch.float16],
            [True, False],
        ]
    )
)


@pytest.mark.parametrize("case", COVER, ids=lambda case: "-".join(str(value) for value in case))
def test_pairwise_cover_matches_the_oracle(case: list[Any]) -> None:
    layout, heads, page, kv_len, q_len, dtype, causal = case
    spec = ProblemSpec(
        num_heads=heads, page_size=page, kv_layout=layout, q_data_type=dtype, causal=causal, sm_scale=0.05,
        max_q_len=q_len, device="cpu",
    )  # fmt: skip
    ragged = [kv_len, 0, page, page + 1, max(page - 1, 1), 37]
    check("torch_cpu", spec, ragged, [q_len, 1, 1, 2, 1, q_len])


@pytest.mark.parametrize(("rank", "rope"), [(256, 32), (128, 32), (256, 64)])
@pytest.mark.parametrize("layout", ["fp8_e4m3", "bf16", "fp32"])
def test_other_head_dimensions(layout: str, rank: int, rope: int) -> None:
    spec = ProblemSpec(
        num_heads=6, head_dim_ckv=rank, head_dim_kpe=rope, page_size=16, kv_layout=layout, sm_scale=0.06,
        q_data_type=torch.float32, max_q_len=3, device="cpu",
    )  # fmt: skip
    check("torch_cpu", spec, [100, 17], [3, 1])


@pytest.mark.parametrize("base", ["2", "e"])
def test_lse_in_both_bases(base: str) -> None:
    spec = ProblemSpec(num_heads=4, kv_layout="fp8_ds_mla", q_data_type=torch.float32, lse_base=base, device="cpu")
    check("torch_cpu", spec, [70, 3], [1, 1])


def test_long_queries_over_several_tiles() -> None:
    q_len = QUERY_ROWS // 16 + 45
    spec = ProblemSpec(
        num_heads=16, kv_layout="fp8_e4m3", q_data_type=torch.float32, sm_scale=0.05, max_q_len=q_len, device="cpu"
    )
    check("torch_cpu", spec, [q_len + 700, q_len], [q_len, q_len])


def test_queries_longer_than_the_cache_see_nothing_before_it() -> None:
    spec = ProblemSpec(num_heads=4, kv_layout="fp8_e4m3", q_data_type=torch.float32, max_q_len=8, device="cpu")
    outcome = check("torch_cpu", spec, [3], [8])
    assert not outcome.out[:5].any() and bool(outcome.out[5:].any())


@pytest.mark.parametrize("layout", ["fp8_e4m3", "fp8_ds_mla"])
def test_poison_in_unused_places_changes_no_bit(layout: str) -> None:
    spec = ProblemSpec(num_heads=8, kv_layout=layout, q_data_type=torch.float32, sm_scale=0.05, device="cpu")
    case = make_case(spec, [65, 130, 1], [1, 1, 1])
    attention, _ = planned("torch_cpu", spec, case)
    poisoned = run_case(attention, case)
    clean = replace(case, cache=case.cache.clone(), block_tables=case.block_tables.clamp(0, case.cache.shape[0] - 1))
    nan = clean.cache.view(-1, clean.cache.shape[-1])
    nan[(nan == 0xFF).all(-1)] = 0
    attention, _ = planned("torch_cpu", spec, clean)
    assert all(torch.equal(a, b) for a, b in zip(poisoned, run_case(attention, clean), strict=True))


def test_a_nan_in_a_live_row_is_not_hidden() -> None:
    spec = ProblemSpec(num_heads=2, kv_layout="fp8_e4m3", q_data_type=torch.float32, device="cpu")
    case = make_case(spec, [64], [1])
    case.cache[case.block_tables[0, 0], 5, 3] = 0x7F
    attention, _ = planned("torch_cpu", spec, case)
    assert bool(run_case(attention, case)[0].isnan().any())


@pytest.mark.parametrize("layout", ["fp8_e4m3", "fp8_ds_mla"])
def test_peak_scratch_depends_on_neither_pool_nor_context(layout: str) -> None:
    """The scratch is one block of rows: bytes, 16-bit fields and float32, plus scores; never the pool or the context."""
    heads = 16
    spec = ProblemSpec(num_heads=heads, kv_layout=layout, q_data_type=torch.float32, device="cpu")
    bound = (
        BLOCK_ROWS * (spec.layout.row_bytes + 576 * (2 + 4 + 2)) + heads * (4 * BLOCK_ROWS * 4 + 576 * 4 * 6) + 65536
    )
    peaks = []
    for kv_len in (1024, 40_000):
        case = make_case(spec, [kv_len], [1])
        with LiveMemory() as memory:
            attention, _ = planned("torch_cpu", spec, case)
            run_case(attention, case)
        peaks.append(memory.peak)
        assert BLOCK_ROWS * 576 * 4 <= memory.peak <= bound
    with LiveMemory() as memory:
        attention, _ = planned("pool_cast:torch_cpu", spec, case)
        run_case(attention, case)
    assert memory.peak > 40_000 * 1152 > 5 * bound, "the measure must see a cast of the pool"
    assert abs(peaks[1] - peaks[0]) <= 40_000 // 64 * 8 * 4


@pytest.mark.parametrize("layout", ["fp8_e4m3", "fp8_ds_mla"])
@pytest.mark.parametrize("backend", ["gather_cast:torch_cpu", "pool_cast:torch_cpu"])
def test_casting_baselines_match_the_oracle_and_account_for_their_copies(backend: str, layout: str) -> None:
    spec = ProblemSpec(
        num_heads=8, page_size=16, kv_layout=layout, q_data_type=torch.float32, sm_scale=0.05, max_q_len=4, device="cpu"
    )
    outcome = check(backend, spec, [100, 0, 17, 16], [4, 1, 2, 1])
    row, live_rows, live_pages = spec.layout.row_bytes, 133, 7 + 2 + 1
    rows = live_pages * 16 if backend.startswith("gather") else outcome.case.cache.shape[0] * 16
    assert outcome.plan.bytes_needed == live_rows * row
    assert outcome.plan.bytes_written == rows * 1152
    assert outcome.plan.bytes_read == rows * row + live_rows * 1152


def test_torch_cpu_reads_what_is_needed_and_writes_no_copy() -> None:
    spec = ProblemSpec(num_heads=8, page_size=16, kv_layout="fp8_ds_mla", q_data_type=torch.float32, device="cpu")
    plan = check("torch_cpu", spec, [100, 0, 17, 16], [1, 1, 1, 1]).plan
    assert plan.bytes_needed == plan.bytes_read == 133 * 656
    assert plan.bytes_written == 0


def test_casting_baselines_refuse_what_needs_no_cast() -> None:
    from uncast.attention.registry import create

    spec = ProblemSpec(num_heads=8, kv_layout="bf16", device="cpu")
    for name in ("gather_cast:torch_cpu", "pool_cast:torch_cpu"):
        assert "layout bf16 is not FP8" in create(name).capability(spec).reason
