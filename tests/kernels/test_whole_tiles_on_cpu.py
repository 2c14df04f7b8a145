"""The Hopper decode kernel with few query rows and an e4m3 cache, whose ring has one barrier a tile: executed on a CPU
(`gluon_cpu`), where a barrier too few shows in some order of turns."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from tests.kernels.gluon_cpu import OnCpu
from tests.kernels.test_sparse_on_cpu import check, spec_of
from uncast.kernels import combine, wgmma_decode, wgmma_launch


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wgmma_launch, "wgmma_decode_kernel", OnCpu(wgmma_decode.wgmma_decode_kernel))
    monkeypatch.setattr(combine, "combine_kernel", OnCpu(combine.combine_kernel))


def run(
    monkeypatch: pytest.MonkeyPatch, kv_lens: list[int], q_lens: list[int], heads: int, rows: int, num_sms: int
) -> None:
    """In blocks of `rows`, which the plan would take for longer contexts only."""
    monkeypatch.setattr(wgmma_launch, "block_rows", lambda most, tiles: rows)
    spec = spec_of(kv_layout="fp8_e4m3", num_heads=heads, topk=0, max_q_len=max(q_lens))
    plan = check(wgmma_launch, spec, kv_lens, q_lens, num_sms=num_sms)
    assert plan.splits.block_rows == rows


@pytest.mark.parametrize(("heads", "rows"), [(8, 16), (16, 16), (20, 32)])
@pytest.mark.parametrize("kv_len", [1, 64, 65, 320, 321, 701])
def test_every_number_of_tiles_modulo_the_ring(
    monkeypatch: pytest.MonkeyPatch, heads: int, rows: int, kv_len: int
) -> None:
    run(monkeypatch, [kv_len, 449], [1, 1], heads, rows, num_sms=1)


def test_the_ring_is_reused_in_any_order_of_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(8):
        monkeypatch.setattr(wgmma_launch, "wgmma_decode_kernel", OnCpu(wgmma_decode.wgmma_decode_kernel, seed))
        run(monkeypatch, [1000], [1], 8, 16, num_sms=1)


def test_ragged_requests_and_several_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, [700, 0, 65, 1], [1, 1, 1, 1], 16, 16, num_sms=6)
    run(monkeypatch, [130, 3], [2, 1], 16, 32, num_sms=2)
