"""The reader survives every layout and fault that profilers of the last years have written."""

from __future__ import annotations

import gzip
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.doctor.synthetic import decode
from uncast.doctor import chunks
from uncast.doctor.errors import TraceError
from uncast.doctor.reader import read_trace
from uncast.doctor.trace import Trace


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return decode(layers=6, steps=2, cast_us=800.0).document()


def totals(trace: Trace) -> tuple[int, ...]:
    return (len(trace.kernels), len(trace.launches), len(trace.ops), len(trace.frames), len(trace.marks))


@pytest.fixture(scope="module")
def expected(document: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[int, ...]:
    counts = [0] * 5
    for event in document["traceEvents"]:
        place = {"kernel": 0, "cuda_runtime": 1, "cpu_op": 2, "python_function": 3, "user_annotation": 4}[event["cat"]]
        counts[place] += 1
    assert min(counts) > 0
    return tuple(counts)


def read(tmp_path: Path, data: bytes | str, name: str = "t.json") -> Trace:
    path = tmp_path / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return read_trace(path)


@pytest.mark.parametrize("indent", [None, 0, 4, "\t"])
@pytest.mark.parametrize("order", ["plain", "sorted", "reversed"])
def test_layouts(tmp_path: Path, document: dict[str, Any], expected: tuple[int, ...], indent: Any, order: str) -> None:
    if order == "reversed":
        events = [dict(reversed(e.items())) for e in document["traceEvents"]]
        document = document | {"traceEvents": events}
    trace = read(tmp_path, json.dumps(document, indent=indent, sort_keys=order == "sorted"))
    assert totals(trace) == expected and not trace.skipped
    assert trace.gpu_name == "NVIDIA H200" and trace.meta["traceName"] == "synthetic"


def test_a_bare_list_a_bom_and_gzip_members(
    tmp_path: Path, document: dict[str, Any], expected: tuple[int, ...]
) -> None:
    text = json.dumps(document["traceEvents"]).encode()
    assert totals(read(tmp_path, text)) == totals(read(tmp_path, b"\xef\xbb\xbf" + text)) == expected
    members = gzip.compress(text[:1000]) + gzip.compress(text[1000:]) + b"\0" * 100
    assert totals(read(tmp_path, members, "t.json.gz")) == expected


def test_cuts_fall_between_events_at_any_chunk_size(
    tmp_path: Path, document: dict[str, Any], expected: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = json.dumps(document | {"after": {"list": [{"name": "no event", "ph": "X"}]}})
    for size in (200, 777, 5000, len(text) - 30):
        monkeypatch.setattr(chunks, "CHUNK", size)
        monkeypatch.setattr("uncast.doctor.source.BLOCK", max(64, size // 3))
        trace = read(tmp_path, text)
        assert totals(trace) == expected, size
        assert trace.events == len(document["traceEvents"]), size


def test_names_of_2021(tmp_path: Path, document: dict[str, Any], expected: tuple[int, ...]) -> None:
    old = {"kernel": "Kernel", "cpu_op": "Operator", "cuda_runtime": "Runtime"}
    events = [e | {"cat": old.get(e["cat"], e["cat"])} for e in document["traceEvents"]]
    assert totals(read(tmp_path, json.dumps(events))) == expected


def broken(document: dict[str, Any], old: str, new: str) -> str:
    text = json.dumps(document)
    assert old in text
    return text.replace(old, new, 1)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"cat": "kernel"', '"cat": "kernel", "Comms Id": 99999999999999999999999999'),
        ('"stream": 7', '"stream": NaN'),
        ('"stream": 7', '"stream": -Infinity'),
        ('"stream": 7', '"stream": N/A'),
        ('"stream": 7', '"stream": '),
        ('"stream": 7', '"stream": 7, "est": 1e999'),
        ('"nn.Module: MLALayer_0"', '"nn.Module: MLA"Layer"_0"'),
        ('"nn.Module: MLALayer_0"', '"nn.Module: MLA\nLayer\x01_0"'),
        ('}, {"ph"', '}, \nINFO:2026-01-01 12:00:00 1:1 Profiler.cpp:52] hello\n{"ph"'),
        ('"External id": 101', '"External id": "101"'),
        ('"pid": 4242', '"pid": "python 4242"'),
    ],
)
def test_faults_cost_no_event(
    tmp_path: Path, document: dict[str, Any], expected: tuple[int, ...], old: str, new: str
) -> None:
    trace = read(tmp_path, broken(document, old, new))
    assert totals(trace) == expected
    assert not (trace.skipped - Counter({"events mended": 9}))


def test_invalid_utf8_costs_no_event(tmp_path: Path, document: dict[str, Any], expected: tuple[int, ...]) -> None:
    data = json.dumps(document).encode().replace(b"MLALayer_0", b"MLA\xffLayer", 1)
    assert totals(read(tmp_path, data)) == expected


def test_what_is_lost_is_counted(tmp_path: Path, document: dict[str, Any], expected: tuple[int, ...]) -> None:
    text = json.dumps(document)
    cut = gzip.compress(text.encode())
    trace = read(tmp_path, cut[: len(cut) * 2 // 3], "cut.json.gz")
    assert 0 < trace.events < len(document["traceEvents"])
    assert any("ends early" in note for note in trace.notes) and trace.skipped["events cut off at the end"] <= 1
    half = read(tmp_path, text[: len(text) // 2])
    assert 0 < half.events < len(document["traceEvents"])
    bad = [
        {"ph": "X", "cat": "kernel", "name": "k", "ts": ts, "dur": dur} for ts, dur in (("x", 1), (1, None), (1, -1))
    ]
    trace = read(tmp_path, json.dumps(bad + document["traceEvents"]))
    assert totals(trace) == expected
    assert trace.skipped == {"events without time": 2, "events with an impossible time": 1}


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "is empty"),
        (b"hello world, this is a log", "is no PyTorch profiler trace: it starts with"),
        (b'{"model": "x", "layers": [1, 2]}', "is JSON but no PyTorch profiler trace: it has no list `traceEvents`"),
        (b"SQLite format 3\0" + bytes(64), "is no PyTorch profiler trace but an SQLite database"),
        (b"PK\x03\x04" + bytes(64), "is no PyTorch profiler trace but a zip archive"),
        (b"\x1f\x8b\x08\x00garbage garbage", "holds no events of a profiler trace: the gzip data is damaged"),
        (bytes(4096), "is no PyTorch profiler trace"),
    ],
)
def test_what_is_no_trace_is_said_in_one_sentence(tmp_path: Path, data: bytes, sentence: str) -> None:
    with pytest.raises(TraceError, match=r".") as caught:
        read(tmp_path, data)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read: No such file"):
        read_trace(tmp_path / "none.json")


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)  # nobody writes: opening it would wait for ever
    for path, sentence in (
        (pipe, "pipe.json is a pipe: a regular file is needed"),
        (tmp_path, "is a folder: a regular file is needed"),
        (Path("/dev/null"), "/dev/null is a device or socket: a regular file is needed"),
        (Path("-"), "- (standard input) is no file: a regular file is needed"),
    ):
        with pytest.raises(TraceError) as caught:
            read_trace(path)
        assert sentence in str(caught.value)


def test_a_kernel_without_a_name(tmp_path: Path, document: dict[str, Any]) -> None:
    events = [e | {"name": None} if e["cat"] == "kernel" else e for e in document["traceEvents"]]
    names = read(tmp_path, json.dumps(events)).names.values
    assert "(no name)" in names and "None" not in names
