"""Replays meet their capture pass: by kernel names where the capture has them, in order where it has not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.doctor.synthetic import CAST, POOL_GRID, Tracer, capture, decode_graph, layer_kernels
from uncast.doctor.diagnose import Options, diagnose
from uncast.doctor.graphs import _matching
from uncast.doctor.moves import mla_pool_shape
from uncast.doctor.names import elements, parse_name
from uncast.doctor.report import Report
from uncast.doctor.windows import sequence_period


def report(tmp_path: Path, replay: Tracer, captured: Tracer) -> Report:
    path = captured.write(tmp_path / "captured.json")
    return diagnose(replay.write(tmp_path / "replay.json"), Options(capture=path)).report


def test_cuda_captures_join_in_order(tmp_path: Path) -> None:
    r = report(tmp_path, decode_graph(layers=12), capture(layers=12))
    assert r.graphs is not None and r.graphs.joined == r.graphs.replayed == 3 * 12 * 4
    assert (
        r.findings[0].confidence == "joined" and r.findings[0].source == "engine/attention/fa3.py(410): get_bf16_cache"
    )


def test_a_capture_of_another_graph_does_not_join(tmp_path: Path) -> None:
    other = Tracer()
    other.capturing = True
    for n in range(60):
        other.op("aten::add" if n % 2 else "aten::mm", [[4, 64], [64, 64]], ["c10::BFloat16"] * 2, "k", 1.0)
    r = report(tmp_path, decode_graph(layers=12), other)
    assert r.graphs is not None and r.graphs.joined == 0 and r.findings[0].confidence == "inferred"


def test_a_few_launches_more_in_the_capture(tmp_path: Path) -> None:
    """Two memsets that the replay does not show."""
    captured = capture(layers=12)
    extra = Tracer()
    extra.capturing, extra.cpu = True, captured.events[0]["ts"] + 1.0
    for _ in range(2):
        extra.launch("k", 1.0, call="cudaMemsetAsync")
    captured.events += extra.events
    r = report(tmp_path, decode_graph(layers=12), captured)
    assert r.graphs is not None and r.graphs.joined == r.graphs.replayed


def test_a_capture_that_lacks_launches_is_said_to(tmp_path: Path) -> None:
    captured = capture(layers=12)
    last = [e for e in captured.events if e["name"] == "cudaLaunchKernel"][-2:]
    captured.events = [e for e in captured.events if e not in last]
    r = report(tmp_path, decode_graph(layers=12), captured)
    assert r.graphs is not None and r.graphs.replayed - 9 <= r.graphs.joined < r.graphs.replayed
    assert any("met no launch of the capture: what is said by it is right only if it is the same" in n for n in r.notes)


def test_rocm_captures_join_by_name(tmp_path: Path) -> None:
    """The capture's launches have names, and more of them than were replayed, in another order."""
    captured = capture(layers=12)
    names = [name for name, _, _ in layer_kernels(828.0)] * 12
    launches = [e for e in captured.events if "Launch" in e["name"]]
    assert len(launches) == len(names)
    for event, name in zip(launches, names, strict=True):
        event["args"] = event["args"] | {"kernel": name}
    replay = decode_graph(layers=12)
    for event in replay.events:
        if event["cat"] == "kernel":
            event["args"] = {k: v for k, v in event["args"].items() if k not in ("grid", "block")}
    replay.meta["roctracer_version"] = 4.1
    r = report(tmp_path, replay, captured)
    assert r.graphs is not None and r.graphs.joined == r.graphs.replayed
    assert r.findings[0].shape == [495_552, 1, 576] and r.findings[0].confidence == "joined"


def test_several_graphs_in_one_capture(tmp_path: Path) -> None:
    captured = capture(layers=9)
    second = capture(layers=12)
    for event in second.events:
        event["ts"] += captured.cpu
        if "correlation" in event["args"]:
            event["args"]["correlation"] += 100_000
    captured.events += second.events
    r = report(tmp_path, decode_graph(layers=12), captured)
    assert r.graphs is not None and r.graphs.joined == r.graphs.replayed == 144


def test_alignment() -> None:
    assert _matching("abcdefgh", "abXcdefgh") == [(0, 0), (1, 1), *((n, n + 1) for n in range(2, 8))]
    assert _matching("abcdefgh", "abdefgh")[-1] == (7, 6)
    assert _matching("aaaa", "bbbb") == []


@pytest.mark.parametrize(
    ("values", "period"), [([1] * 9, 1), ([3, 1, 1] * 5, 3), ([1, 2, 3, 4, 5, 6], None), ([5], None), ([], None)]
)
def test_periods(values: list[int], period: int | None) -> None:
    assert sequence_period(values) == period


def test_sizes_from_names_and_grids() -> None:
    grid = (POOL_GRID, 1, 1, 128, 1, 1)
    assert POOL_GRID == 557_496
    assert elements(CAST, grid, amd=False) == (POOL_GRID * 512 - 511, POOL_GRID * 512)
    assert (
        elements(CAST, grid, amd=True) is None
        and elements("vectorized_elementwise_kernel<4, x>", grid, amd=False) is None
    )
    assert mla_pool_shape(POOL_GRID * 512 - 511, POOL_GRID * 512) == (495_552, 1, 576)
    hits = sum(mla_pool_shape(512 * n - 511, 512 * n) is not None for n in range(600_000, 607_200))
    assert hits == pytest.approx(7200 / 72, abs=2)


@pytest.mark.parametrize(
    ("name", "kind", "dtype_from", "dtype_to"),
    [
        (CAST, "copy", None, "bf16"),
        ("x<bfloat16tofloat32_copy_kernel_cuda>", "copy", "bf16", "fp32"),
        (
            "x<at::native::bfloat16_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda(float)#1}>",
            "copy",
            "fp32",
            "bf16",
        ),
        ("x<float8_copy_kernel_cuda ConvertToFloat8E4M3fnOp<float>>", "copy", None, "fp8_e4m3"),
        ("converting_copy_kernel_cuda<c10::Float8_e4m3fn, c10::BFloat16>", "copy", "fp8_e4m3", "bf16"),
        ("triton_poi_fused__to_copy_1", "triton_move", None, None),
        ("triton_red_fused__to_copy_add_mean_mul_2", "other", None, None),
        ("Memcpy DtoD (Device -> Device)", "memcpy_DtoD", None, None),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "collective", None, None),
        ("flash_fwd_splitkv_mla_combine_kernel", "attention_tail", None, None),
        ("Cijk_Alik_Bljk_BBS_BH", "gemm", None, None),
    ],
)
def test_names(name: str, kind: str, dtype_from: str | None, dtype_to: str | None) -> None:
    named = parse_name(name)
    assert (named.kind, named.dtype_from, named.dtype_to) == (kind, dtype_from, dtype_to)
