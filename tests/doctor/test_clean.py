"""Times that cannot be true and events that occur twice change no number of the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.doctor.synthetic import decode, decode_graph
from uncast.doctor.clean import FAR, REPEATED
from uncast.doctor.diagnose import diagnose
from uncast.doctor.page import render
from uncast.doctor.report import Report

DATA = Path(__file__).parent / "data"
SHARED = Path(__file__).parents[3] / "shared" / "traces"
IMPOSSIBLE = "events with an impossible time"


def write(tmp_path: Path, document: dict[str, Any]) -> Path:
    path = tmp_path / "t.json"
    path.write_text(json.dumps(document))
    return path


def report(tmp_path: Path, document: dict[str, Any]) -> Report:
    return diagnose(write(tmp_path, document)).report


def numbers(r: Report) -> Any:
    """Everything but the file's name and what was left out of it."""
    return msgspec.to_builtins(msgspec.structs.replace(r, trace="", skipped={}, notes=[]))


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return decode(layers=6, steps=2, cast_us=800.0).document()


@pytest.mark.parametrize("ts", [1e300, 1e308, -1e308, 9e18, -9e18, 1e16, 2e12, -2e12])
@pytest.mark.parametrize("category", ["kernel", "cuda_runtime", "cpu_op", "python_function", "user_annotation"])
def test_a_wild_time_moves_nothing(tmp_path: Path, document: dict[str, Any], ts: float, category: str) -> None:
    events = document["traceEvents"]
    wild = next(e for e in reversed(events) if e["cat"] == category) | {"ts": ts}
    r = report(tmp_path, document | {"traceEvents": [*events, wild]})
    assert numbers(r) == numbers(report(tmp_path, document))
    assert r.skipped == {IMPOSSIBLE if abs(ts) > 1e17 else FAR: 1}


@pytest.mark.parametrize("dur", [1e14, 1e300])
def test_a_wild_length_moves_nothing(tmp_path: Path, document: dict[str, Any], dur: float) -> None:
    events = document["traceEvents"]
    wild = next(e for e in events if e["cat"] == "kernel") | {"dur": dur}
    r = report(tmp_path, document | {"traceEvents": [*events, wild]})
    assert numbers(r) == numbers(report(tmp_path, document)) and r.skipped == {IMPOSSIBLE: 1}


def test_times_shifted_as_a_whole_are_good(tmp_path: Path, document: dict[str, Any]) -> None:
    """Shifted as a whole, the times are still good: only their differences count."""
    shifted = [e | {"ts": e["ts"] + 2**50} for e in document["traceEvents"]]
    diagnosis = diagnose(write(tmp_path, document | {"traceEvents": shifted}))
    assert diagnosis.report.findings[0].calls_per_step == 6 and not diagnosis.report.skipped
    render(diagnosis)


@pytest.mark.parametrize("graph", [False, True])
def test_events_that_occur_twice_count_once(tmp_path: Path, graph: bool) -> None:
    document = (decode_graph(layers=6) if graph else decode(layers=6, cast_us=800.0)).document()
    events = document["traceEvents"]
    once = report(tmp_path, document)
    for twice in ([*events, *events], [e for e in events for _ in range(2)]):
        r = report(tmp_path, document | {"traceEvents": twice})
        assert numbers(r) == numbers(once) and r.skipped == {REPEATED: len(events)}
        assert any("the same run twice" in note for note in r.notes)


def test_two_gzip_members_of_the_same_run_count_once(tmp_path: Path) -> None:
    data = (DATA / "founding_eager.json.gz").read_bytes()
    path = tmp_path / "t.json.gz"
    path.write_bytes(data + data)
    once, twice = diagnose(DATA / "founding_eager.json.gz").report, diagnose(path).report
    assert twice.findings[0].calls_per_step == 78 and numbers(twice) == numbers(once)
    assert any("the same run twice" in note for note in twice.notes)


def test_short_events_of_a_coarse_clock_are_no_repeats(tmp_path: Path) -> None:
    """Whole microseconds: two kernels of one graph replay that take under 1 us each begin in the same one."""
    document = decode_graph(layers=6).document()
    events = []
    for e in document["traceEvents"]:
        e = e | {"ts": int(e["ts"]), "dur": int(e["dur"])}
        events += (
            [e | {"name": "tiny", "dur": 1}] * 2 if e["cat"] == "kernel" and e["name"] == "mma_decode_kernel" else [e]
        )
    r = report(tmp_path, document | {"traceEvents": events})
    assert r.skipped == {} and r.kernels == sum(e["cat"] == "kernel" for e in events)


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"no real traces at {SHARED}")
def test_real_traces_lose_nothing() -> None:
    for path in sorted(SHARED.glob("*.json.gz")):
        if ".capture." not in path.name:
            skipped = diagnose(path).report.skipped
            assert not {FAR, REPEATED, IMPOSSIBLE} & skipped.keys(), (path.name, skipped)


def test_parallel_streams_may_exceed_the_step_and_say_so(tmp_path: Path) -> None:
    """A finding's kernels, summed over streams, cannot be shown as more than the step without a word."""
    document = decode(layers=6, cast_us=800.0).document()
    events = document["traceEvents"]
    for stream in (8, 9):
        for e in list(events):
            if e["cat"] == "kernel" and "copy_kernel" in e["name"] and e["args"]["stream"] == 7:
                args = e["args"] | {"stream": stream}
                events.append(e | {"tid": stream, "args": args})
    r = report(tmp_path, document)
    f = r.findings[0]
    assert f.us_per_step > r.step_us and f.exposed_us_per_step <= r.step_us
    assert any("more than the step" in note for note in r.notes)
