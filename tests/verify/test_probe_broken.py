"""Broken backends become rows with a reason each; the probe itself comes to its end."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.verify.broken import FIVE, PATHS
from tests.verify.patient import LONG_S
from tests.verify.registered import registered
from uncast.attention.verified import ERRORS, read_rows
from uncast.verify.probe_crew import MAX_DEATHS, Worker
from uncast.verify.probe_grid import Filters, ProbeKey
from uncast.verify.probe_run import Report, run_probe
from uncast.verify.probe_worker import MAX_REASON, explain, probe_key

ROOT = Path(__file__).parents[2]
REASONS = {
    "abort": "abort ends its process with SIGABRT in run(): kernel.cu:143: no eligible operator",
    "hang": "hang does not come back from run() within 1 s",
    "nan": "nan leaves NaN or infinity in 1 of 65536 output values, and the oracle's are finite",
    "zeros": "zeros gives zeros only, and the oracle does not",
    "out_of_bounds": "out_of_bounds writes out of bounds: 0 bytes before `out` and 16 after it changed",
}
IN_PROCESS = {
    "before": "before writes out of bounds: 4 bytes before `lse` and 0 after it changed",
    "partial": "partial leaves NaN or infinity in 8192 of 65536 output values",
    "scribbler": "scribbler writes to the cache in run(): only write() may",
    "quantises_queries": "quantises_queries writes to its inputs in run(): q_nope",
    "neighbour": "neighbour gives a request other bits in a batch than alone, and batch_invariant was asked for",
    "static_assertion": "static_assertion fails to compile on a static assertion: mla_hopper.cuh(143): error: static assertion",
    "illegal_access": "illegal_access makes an illegal memory access: CUDA error: an illegal memory access was encountered",
    "fickle": "fickle claims this and refuses it in plan(): heads of 16 are not for me",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is verified before, whatever other tests have probed."""
    monkeypatch.setenv("UNCAST_CACHE_DIR", str(tmp_path))


@pytest.fixture
def broken() -> Iterator[None]:
    with registered(PATHS):
        yield


def probe(*backends: str, **kw: Any) -> Report:
    filters = Filters(backends=backends, layouts=("fp8_e4m3",), dtypes=("float32",), modes=("decode",), quick=True)
    return run_probe(filters, device="cpu", arch=0, seconds=LONG_S, **kw)


def key(backend: str) -> ProbeKey:
    return ProbeKey(backend, "fp8_e4m3", "float32", 16, 64, "decode", "cpu", 0)


def test_the_command_ends_normally_with_five_rows_and_five_reasons() -> None:
    options = ["--quick", "--layout", "fp8_e4m3", "--dtype", "float32", "--mode", "decode", "--timeout", "1", "--json"]
    options += [part for name in FIVE for part in ("--register", f"{name}={PATHS[name]}", "--backend", name)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.verify.patient", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LONG_S,
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    report = json.loads(done.stdout)
    found = {row["backend"]: row["reason"].split(" (causal")[0] for row in report["rows"]}
    assert found == REASONS
    assert report["counts"] == {"verified": 0, "failed": 5, "skipped": 0}
    assert read_rows("cpu") == [] and all(row["variants"] == [] for row in report["rows"])


@pytest.mark.parametrize("name", IN_PROCESS)
@pytest.mark.usefixtures("broken")
def test_each_other_fault_has_its_reason(name: str) -> None:
    row, _ = probe_key(key(name), None, lambda phase: None)
    assert row["status"] == "failed" and row["reason"].startswith(IN_PROCESS[name]), row["reason"]
    assert len(row["reason"]) <= MAX_REASON + 60


@pytest.mark.usefixtures("broken")
def test_errors_that_are_no_numbers_in_one_variant_are_none_of_the_row() -> None:
    row, _ = probe_key(key("nan_in_base_e"), None, lambda phase: None)
    assert "LSE base e" in row["reason"] and [row[name] for name in ERRORS] == [None] * 5


@pytest.mark.usefixtures("broken")
def test_a_backend_that_dies_when_asked_is_a_row_and_the_others_go_on() -> None:
    report = probe("dies_when_asked", "torch_cpu")
    assert [(row["backend"], row["status"]) for row in report.rows] == [
        ("dies_when_asked", "failed"),
        ("torch_cpu", "verified"),
    ]
    assert report.rows[0]["reason"] == "dies_when_asked ends its process with exit code 3 in capability()"


@pytest.mark.usefixtures("broken")
def test_a_backend_that_dies_when_asked_is_asked_once() -> None:
    """One that hangs would cost the time limit for every layout."""
    report = run_probe(Filters(backends=("dies_when_asked",), quick=True), device="cpu", arch=0, seconds=LONG_S)
    assert [row["status"] for row in report.rows] == ["failed"] + ["skipped"] * 3
    assert report.rows[1]["reason"].startswith(
        "dies_when_asked is not asked again: it ends its process with exit code 3"
    )


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("dies_when_asked", "dies_when_asked ends its process with exit code 3 in capability()"),
        ("raises_when_asked", "raises_when_asked raises ZeroDivisionError in capability():  [31mheads [0m by zero"),
    ],
)
def test_what_a_backend_does_when_asked_ends_no_command(name: str, reason: str) -> None:
    """Neither the probe, which on a CPU also lists what it would ask on a GPU, nor the matrix."""
    options = ["--register", f"{name}={PATHS[name]}", "--backend", name, "--layout", "fp8_e4m3", "--json"]
    for more, part in ((["--quick"], "rows"), (["--claims"], "claims")):
        done = subprocess.run(
            [sys.executable, "-m", "uncast", "probe", *options, *more],
            cwd=ROOT, capture_output=True, text=True, timeout=LONG_S,
        )  # fmt: skip
        assert done.returncode == 0 and not done.stderr, done.stderr
        (row,) = json.loads(done.stdout)[part]
        assert row["reason"] == reason and row["status"] in ("failed", "refused")


@pytest.mark.usefixtures("broken")
def test_after_three_deaths_a_backend_is_left_alone() -> None:
    filters = Filters(
        backends=("abort",),
        layouts=("fp8_e4m3",),
        dtypes=("float32",),
        heads=(1, 2, 3),
        page_sizes=(16,),
        modes=("decode", "extend"),
    )
    report = run_probe(filters, device="cpu", arch=0, seconds=LONG_S, jobs=1)
    assert [row["status"] for row in report.rows] == ["failed"] * MAX_DEATHS + ["skipped"] * 3
    assert report.rows[-1]["reason"] == "abort is not run here: its process ended 3 times before"


@pytest.mark.parametrize(
    ("error", "phase", "reason"),
    [
        (type("CompilationError", (Exception,), {})("at 3:7: bad"), "plan", "b fails to compile: at 3:7: bad"),
        (RuntimeError("CUDA out of memory. Tried"), "run", "b does not fit: CUDA out of memory. Tried"),
        (KeyError("x"), "create", "b raises KeyError in create(): 'x'"),
        (ValueError(""), "run", "b raises ValueError in run(): ValueError"),
        (RuntimeError("x" * 1000), "run", "b raises RuntimeError in run(): " + "x" * 205 + "..."),
    ],
)
def test_an_exception_is_one_short_sentence(error: Exception, phase: str, reason: str) -> None:
    assert explain("b", phase, error) == reason


@pytest.mark.usefixtures("broken")
def test_a_process_that_cannot_go_on_is_replaced_and_counts_as_a_death(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU an illegal access ends the context: here the worker's word for it."""
    asked: list[str] = []

    class Unusable(Worker):
        def __init__(self, log: Path) -> None:
            super().__init__(log)
            asked.append("new worker")

        def ask(self, task: str, payload: Any, seconds: float) -> Any:
            answer = super().ask(task, payload, seconds)
            return answer if task == "survey" else (answer[0], False)

    monkeypatch.setattr("uncast.verify.probe_crew.Worker", Unusable)
    filters = Filters(
        backends=("zeros",), layouts=("bf16",), dtypes=("float32",), heads=(1, 2, 3, 4, 5), page_sizes=(16,)
    )
    report = run_probe(replace(filters, modes=("decode",)), device="cpu", arch=0, seconds=LONG_S, jobs=1)
    assert asked == ["new worker"] * 4  # the survey's and three
    assert [row["status"] for row in report.rows] == ["failed"] * 3 + ["skipped"] * 2
