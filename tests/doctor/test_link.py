"""Kernels meet their operator and function by time, whatever ids a file has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.doctor.synthetic import BF16, Tracer, decode
from uncast.doctor.link import Source, deepest, enclosing, link
from uncast.doctor.reader import read_trace
from uncast.doctor.trace import Trace


def ops_by_kernel(trace: Trace) -> dict[str, set[str]]:
    links = link(trace)
    out: dict[str, set[str]] = {}
    for kernel in range(len(trace.kernels)):
        op = links.op_of_kernel(kernel)
        name = trace.names[trace.ops.name[op]] if op >= 0 else ""
        out.setdefault(trace.names[trace.kernels.name[kernel]], set()).add(name)
    return out


def write(tmp_path: Path, document: dict[str, Any]) -> Trace:
    path = tmp_path / "t.json"
    path.write_text(json.dumps(document))
    return read_trace(path)


@pytest.mark.parametrize("integer", [False, True])
def test_colliding_external_ids_do_not_mislead(tmp_path: Path, integer: bool) -> None:
    """Legacy files give a kernel its correlation as External id, which is another operator's id here."""
    t = decode(layers=10, steps=2, cast_us=50.0, tracer=Tracer(integer=integer))
    ids = [e["args"]["External id"] for e in t.events if e["cat"] == "cpu_op"]
    for event in t.events:
        if event["cat"] in ("kernel", "cuda_runtime"):
            event["args"]["External id"] = ids[event["args"]["correlation"] % len(ids)]
    found = ops_by_kernel(write(tmp_path, t.document()))
    assert {name.split("<")[0][:20]: ops for name, ops in found.items()} == {
        "nvjet_tst_64x8_64x16": {"aten::mm"},
        "void at::native::unr": {"aten::copy_"},
        "mma_decode_kernel": {""},
        "nvjet_tst_128x8_64x1": {"aten::mm"},
    }


def test_neighbours_that_share_a_microsecond(tmp_path: Path) -> None:
    def event(cat: str, name: str, ts: int, dur: int, **args: int) -> dict[str, Any]:
        return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": dur, "args": args}

    events = [
        event("cpu_op", "outer", 0, 100), event("cpu_op", "first", 10, 10), event("cpu_op", "second", 20, 10),
        event("cpu_op", "empty", 30, 0),
        event("cuda_runtime", "cudaLaunchKernel", 20, 5, correlation=1), event("kernel", "a", 50, 5, correlation=1),
        event("cuda_runtime", "cudaLaunchKernel", 10, 10, correlation=2), event("kernel", "b", 60, 5, correlation=2),
        event("cuda_runtime", "cudaLaunchKernel", 30, 4, correlation=3), event("kernel", "c", 70, 5, correlation=3),
        event("kernel", "d", 80, 5, correlation=99),
    ]  # fmt: skip
    trace = write(tmp_path, {"traceEvents": events})
    assert ops_by_kernel(trace) == {"a": {"second"}, "b": {"first"}, "c": {"outer"}, "d": {""}}


def test_launches_that_share_a_correlation(tmp_path: Path) -> None:
    """Merged ranks number their launches alike: the last before the kernel is its own."""
    t = Tracer()
    for _ in range(2):
        t.correlation = 100
        t.op("aten::mm" if t.cpu < 1_000_100 else "aten::add", [[1, 2], [2, 3]], [BF16, BF16], "k", 5.0)
        t.cpu += 500
    trace = write(tmp_path, t.document())
    links = link(trace)
    assert [links.launch[k] for k in range(2)] == [0, 1]


def test_the_deepest_own_frame_is_the_source() -> None:
    frames = [
        "threading.py(1): _bootstrap",
        "/opt/venv/lib/python3.12/site-packages/sglang/srt/layers/mla.py(410): forward",
        "nn.Module: Attention_3",
        "/x/site-packages/vllm/compilation/wrapper.py(3): __call__",
        "torch/_ops.py(1244): __call__",
        "<string>(1): launcher",
        "/tmp/torchinductor_root/ab/cab.py(12): call",
        "<built-in method to of Tensor object>",
    ]
    assert deepest(frames) == Source("sglang/srt/layers/mla.py", 410, "forward")
    assert deepest(frames[3:]) == Source("vllm/compilation/wrapper.py", 3, "__call__")
    assert deepest(frames[4:]) is None


def test_enclosing_spans_come_outermost_first(tmp_path: Path) -> None:
    t = Tracer()
    with t.frame("a.py(1): a"), t.frame("b.py(1): b"):
        t.launch("k", 1.0)
    trace = write(tmp_path, t.document())
    chain = enclosing(trace.frames, [(trace.launches.lane[0], trace.launches.ts[0]), (99, 0.0)])
    assert [trace.names[trace.frames.name[i]] for i in chain[0]] == ["a.py(1): a", "b.py(1): b"] and chain[1] == []
