"""A GPU that waits for the host in steps of graph replays is said to, with what the host did; other idle time is not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.doctor.synthetic import BF16, Tracer, layer_kernels
from uncast.doctor.diagnose import Options, diagnose
from uncast.doctor.intervals import overlap
from uncast.doctor.report import Finding, Report

DATA = Path(__file__).parent / "data"
LAYERS, STEPS = 12, 5
WORK_US = LAYERS * (90 + 15 + 80 + 1.5)
"""What one replay of `layer_kernels` keeps the GPU busy, with half a microsecond between kernels."""


def report(tmp_path: Path, t: Tracer) -> Report:
    return diagnose(t.write(tmp_path / "t.json")).report


def steps(
    *, python_us: float = 0.0, launch_us: float = 20.0, pause_us: float = 0.0, eager: int = 0, sync: bool = True,
    sync_within: bool = False, stacks: bool = False, label: str = "step[DECODE bs=1]",
) -> Tracer:  # fmt: skip
    """Graph replays; Python before each, `eager` operators, and a wait for the token after each."""
    t = Tracer(stacks=stacks)
    with t.frame("/srv/python/engine/server.py(12): run_batch"):
        for _ in range(STEPS):
            with t.span("user_annotation", "scheduler.get_next_batch_to_run"):
                t.cpu += python_us
            with t.step(label):
                for _ in range(eager):
                    t.op("aten::add", [[1, 64]] * 2, [BF16, BF16], "tiny", 2.0)
                if sync_within:
                    t.sync()
                    t.cpu += 1500.0
                t.replay(layer_kernels(0) * LAYERS, launch_us, pause_us)
            if sync:
                t.sync("cudaEventSynchronize")
    return t


def host_bound(r: Report) -> Finding:
    assert [f.kind for f in r.findings] == ["host_bound"]
    f = r.findings[0]
    assert f.confidence == "measured" and "profiler" in f.advice and f.source is None
    assert 0.2 <= f.share_of_step == pytest.approx(f.us_per_step / r.step_us)
    assert f.predicted_step_us.high == r.step_us
    assert f.predicted_step_us.low == pytest.approx(max(r.gpu_busy_us, r.step_us - f.us_per_step))
    assert sum(parts(f).values()) == pytest.approx(f.us_per_step, rel=0.01)
    assert r.predicted_step_us is None
    return f


def parts(f: Finding) -> dict[str, float]:
    """Microseconds by what the host did, out of the evidence."""
    words = f.evidence.split("The host meanwhile: ")[1].split("; by its annotations")[0]
    found = re.findall(r"([\d.,]+) (us|ms) (in [\w ]+|between them \(Python\))", words)
    assert len(found) == words.count(" us ") + words.count(" ms ")
    return {where: float(n.replace(",", "")) * (1000 if unit == "ms" else 1) for n, unit, where in found}


def test_python_between_the_steps(tmp_path: Path) -> None:
    """The wait for the token ends a step; what the scheduler then does keeps the GPU waiting until the next one's launch."""
    r = report(tmp_path, steps(python_us=2000.0))
    f = host_bound(r)
    assert r.step_us == pytest.approx(WORK_US + 2000, rel=0.03)
    assert parts(f)["between them (Python)"] == pytest.approx(2000, rel=0.01)
    assert parts(f)["in cudaGraphLaunch"] == pytest.approx(20)
    assert re.search(r"by its annotations: scheduler.get_next_batch_to_run 2.00 ms$", f.evidence)
    assert f.predicted_step_us.low == pytest.approx(WORK_US, rel=0.03)


def test_a_graph_that_takes_long_to_launch(tmp_path: Path) -> None:
    f = host_bound(report(tmp_path, steps(python_us=50.0, launch_us=850.0)))
    assert parts(f)["in cudaGraphLaunch"] == pytest.approx(850) and f.calls_per_step == 1
    assert "36 of 36 kernels a step are graph replays" in f.evidence


def test_operators_before_the_graph(tmp_path: Path) -> None:
    f = host_bound(report(tmp_path, steps(python_us=300.0, eager=30, launch_us=400.0)))
    found = parts(f)
    assert found["in cudaGraphLaunch"] == pytest.approx(400, abs=3)  # the last operator still ran
    assert 30 < found["in other calls"] < 30 * 4 and 30 < found["in operators"] < 30 * 4, (
        "30 calls of 4 us, some hidden"
    )
    assert "36 of 66 kernels a step" in f.evidence


@pytest.mark.parametrize(
    "quiet",
    [
        {"python_us": 100.0},
        {"python_us": 400.0, "launch_us": 100.0},
        {"python_us": 1500.0, "launch_us": 500.0, "sync": False},
        {"pause_us": 40.0},
        {"python_us": 60_000.0},
    ],
    ids=["short", "a fifth is not reached", "launched ahead", "pauses within the graph", "waits for a request"],
)
def test_other_steps_are_silent(tmp_path: Path, quiet: dict[str, float]) -> None:
    r = report(tmp_path, steps(**quiet))  # type: ignore[arg-type]
    assert r.findings == []
    if "pause_us" in quiet:
        assert r.step_us - r.gpu_busy_us > 0.35 * r.step_us


def test_the_host_that_is_behind_once_is_no_finding(tmp_path: Path) -> None:
    """The first step finds an empty GPU; those after it were launched ahead."""
    t = Tracer(stacks=False)
    for n in range(STEPS):
        t.cpu += 900.0 if n == 0 else 10.0
        with t.step("step[DECODE bs=1]"):
            t.replay(layer_kernels(0) * LAYERS, 900.0 if n == 0 else 30.0)
    assert report(tmp_path, t).findings == []


def test_a_wait_within_the_step_is_named_once(tmp_path: Path) -> None:
    r = report(tmp_path, steps(eager=4, sync_within=True))
    assert [f.kind for f in r.findings] == ["host_sync"]
    both = {f.kind: f for f in report(tmp_path, steps(eager=4, sync_within=True, python_us=2000.0)).findings}
    assert set(both) == {"host_sync", "host_bound"}
    assert both["host_sync"].us_per_step == pytest.approx(1500, rel=0.05)
    assert both["host_bound"].us_per_step == pytest.approx(2000, rel=0.05)


def test_stacks_slow_the_host_so_it_is_only_a_note(tmp_path: Path) -> None:
    r = report(tmp_path, steps(python_us=2000.0, stacks=True))
    assert r.findings == [] and any("not launched yet" in n and "stacks slow the CPU" in n for n in r.notes)


def test_a_finding_in_the_same_step_may_be_bound_by_the_host(tmp_path: Path) -> None:
    """Without the cast the host's launches remain: 1.5 ms of Python and the graph's launch between the step's two replays."""
    t = Tracer(stacks=False)
    for _ in range(STEPS):
        with t.step("step[DECODE bs=1 g_sk=4096]"):
            t.replay(layer_kernels(828.0) * LAYERS)
            t.cpu += 1500.0
            t.replay(layer_kernels(828.0) * LAYERS, 4000.0)
        t.sync()
    r = report(tmp_path, t)
    (f,) = r.findings
    assert f.kind == "pool_cast" and f.predicted_step_us.low == pytest.approx(2 * WORK_US, rel=0.02)
    assert f.predicted_step_us.high == pytest.approx(5520, rel=0.01)
    assert any("5.52 ms is the host's time to launch a step" in n for n in r.notes)


def test_sglangs_server_with_our_backend() -> None:
    """As an H200 recorded it: 0.3 to 0.5 ms are the graph's launch, the rest the scheduler's around it."""
    r = diagnose(DATA / "sglang_server_uncast.json.gz", Options(live_tokens=8192)).report
    f = host_bound(r)
    assert r.steps == 4 and r.layers == 8 and 0.4 < f.share_of_step < 0.65
    assert f.us_per_step <= r.step_us - r.gpu_busy_us
    assert 300 < parts(f)["in cudaGraphLaunch"] < 550 and parts(f)["between them (Python)"] > 500
    assert "step[DECODE bs=1]" in f.evidence and "scheduler.get_next_batch_to_run" in f.evidence
    assert f.predicted_step_us.low < 2490 < f.predicted_step_us.high, "its step without a profiler"


def test_sglangs_server_with_its_own_backend() -> None:
    """The GPU is busy with the cast; without it the step would meet the host, as ours does."""
    r = diagnose(DATA / "sglang_server_fa3.json.gz", Options(live_tokens=8192)).report
    (f,) = r.findings
    assert (f.kind, f.confidence, f.calls_per_step) == ("pool_cast", "inferred", 8)
    assert f.predicted_step_us.low < 2490 < f.predicted_step_us.high < r.step_us


def test_overlap() -> None:
    assert overlap([(0, 4), (6, 9)], [(1, 2), (3, 7), (8, 20)]) == 1 + 1 + 1 + 1
    assert overlap([], [(0, 1)]) == 0 and overlap([(0, 1)], [(1, 2)]) == 0
