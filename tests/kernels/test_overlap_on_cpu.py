"""The overlapped loop of the Hopper decode kernel and the combine that warms up, executed on a CPU (`gluon_cpu`).

What the plan takes by itself is tested in `test_wgmma.py`; here every plan of 64 rows takes the loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.gluon_cpu import OnCpu
from tests.kernels.test_sparse_on_cpu import check, spec_of
from uncast.kernels import combine, wgmma_decode, wgmma_launch
from uncast.verify.cases import ProbeCase


@pytest.fixture(autouse=True)
def _overlapped_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wgmma_launch, "wgmma_decode_kernel", OnCpu(wgmma_decode.wgmma_decode_kernel))
    monkeypatch.setattr(combine, "combine_kernel", OnCpu(combine.combine_kernel))
    monkeypatch.setattr(wgmma_launch, "block_rows", lambda rows, tiles: 64)
    monkeypatch.setattr(wgmma_launch, "OVERLAP_BATCH", 1)
    monkeypatch.setattr(wgmma_launch, "OVERLAP_TILES", 0)


def run(
    kv_lens: list[int], q_lens: list[int], heads: int = 64, *, num_sms: int, dtype: torch.dtype = torch.bfloat16,
    change: Callable[[ProbeCase], ProbeCase] = lambda case: case,
) -> wgmma_launch.WgmmaPlan:  # fmt: skip
    spec = spec_of(kv_layout="fp8_e4m3", num_heads=heads, topk=0, max_q_len=max(q_lens), q_data_type=dtype)
    plan: wgmma_launch.WgmmaPlan = check(wgmma_launch, spec, kv_lens, q_lens, num_sms=num_sms, change=change)
    assert plan.overlap and plan.splits.block_rows == 64
    return plan


@pytest.mark.parametrize("kv_len", [1, 64, 65, 190, 257, 321])
def test_every_number_of_tiles_modulo_the_rings(kv_len: int) -> None:
    run([kv_len, 449], [1, 1], num_sms=1)


def test_the_ring_is_reused_in_any_order_of_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot released too early or a barrier too few is a matter of luck in one order."""
    for seed in range(6):
        monkeypatch.setattr(wgmma_launch, "wgmma_decode_kernel", OnCpu(wgmma_decode.wgmma_decode_kernel, seed))
        run([700], [1], num_sms=1)


def test_ragged_requests_are_split_and_merged() -> None:
    plan = run([700, 0, 65, 1], [1, 1, 1, 1], num_sms=6)
    assert plan.splits.can_split and plan.scratch.sched[0, 0] >= 1 and plan.scratch.sched[1, 2] >= 2


def test_rows_beyond_the_heads_and_several_blocks_of_rows() -> None:
    run([200, 70], [1, 1], 128, num_sms=2)
    run([130, 3], [3, 1], 20, num_sms=2, dtype=torch.float16)


@pytest.mark.parametrize("steps", [[-6, -4, -2, 0, 2, 4, 6, 8], [0, 6, 0, 0, 0, 8, 0, 0], [0, 0, 6, 0, 8, 0, 0, 0]])
@pytest.mark.parametrize("seed", [0, 1])
def test_column_maxima_that_move_in_tiles_of_either_warpgroup(
    monkeypatch: pytest.MonkeyPatch, steps: list[int], seed: int
) -> None:
    """Tile t times 2^steps[t]; the warpgroups take turns in two different orders."""
    monkeypatch.setattr(wgmma_launch, "wgmma_decode_kernel", OnCpu(wgmma_decode.wgmma_decode_kernel, seed))

    def change(case: ProbeCase) -> ProbeCase:
        pages = case.block_tables[0, : len(steps)].long()
        rows = case.cache.view(torch.float8_e4m3fn).float()
        rows[pages] *= 2.0 ** torch.tensor(steps)[:, None, None]
        return replace(case, cache=rows.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8))

    run([64 * len(steps) - 9], [1], num_sms=1, change=change)
