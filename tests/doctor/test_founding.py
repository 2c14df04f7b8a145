"""The founding case as an H200 recorded it: found eager, in a graph by names alone, and in a graph with its capture pass."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from uncast.doctor.compare import compare
from uncast.doctor.diagnose import Options, diagnose
from uncast.doctor.report import Finding, Report

DATA = Path(__file__).parent / "data"
MEASURED_MS = json.loads((DATA / "founding.json").read_text())["ms_per_step"]
CALL, SOURCE = 495_552 * 576 * 3, "record_founding.py(101): get_bf16_cache"


def report(name: str, folder: Path = DATA, options: Options | None = None) -> Report:
    return diagnose(folder / f"founding_{name}.json.gz", options).report


def pool_cast(r: Report) -> Finding:
    assert [f.kind for f in r.findings] == ["pool_cast"]
    f = r.findings[0]
    assert f.calls_per_step == 78 and f.layers_relation == "once in each of 78 layers" and r.layers == 78
    assert f.shape == [495_552, 1, 576] and (f.dtype_from, f.dtype_to) == ("fp8_e4m3", "bf16")
    assert f.bytes_per_call == CALL and round(CALL / 1e6) == 856
    assert f.bytes_per_step == 78 * CALL and round(78 * CALL / 1e9, 1) == 66.8
    assert f.bytes_needed_per_step == 78 * 4096 * 576 * 3
    assert 0.7 < f.share_of_step < 0.85
    return f


def test_eager() -> None:
    f = pool_cast(report("eager"))
    assert f.confidence == "measured" and f.source == SOURCE


def test_graph_without_capture(tmp_path: Path) -> None:
    alone = tmp_path / "founding_graph.json.gz"
    alone.write_bytes((DATA / alone.name).read_bytes())
    r = report("graph", tmp_path)
    f = pool_cast(r)
    assert f.confidence == "inferred" and f.source is None
    assert f.bytes_per_call_range is not None and f.bytes_per_call_range[0] <= CALL <= f.bytes_per_call_range[1]
    assert any("--capture" in note for note in r.notes)
    given = report("graph", tmp_path, Options(capture=DATA / "founding_graph.capture.json.gz"))
    assert pool_cast(given).confidence == "joined"


def test_graph_with_capture() -> None:
    r = report("graph")
    f = pool_cast(r)
    assert f.confidence == "joined" and f.source == SOURCE
    assert r.graphs is not None and r.graphs.joined == r.graphs.replayed == 2 * 78 * 8


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_the_prediction_meets_the_measured_step_without_the_cast(mode: str) -> None:
    predicted = pool_cast(report(mode)).predicted_step_us
    measured = 1e3 * MEASURED_MS[f"clean_{mode}"]
    assert abs(predicted.low - measured) < 0.1 * measured and abs(predicted.high - measured) < 0.1 * measured


@pytest.mark.parametrize("mode", ["clean_eager", "clean_graph"])
def test_the_clean_traces_have_no_findings(mode: str) -> None:
    assert report(mode).findings == []


def test_comparison() -> None:
    c = compare(diagnose(DATA / "founding_graph.json.gz"), diagnose(DATA / "founding_clean_graph.json.gz"))
    assert [f.kind for f in c.gone] == ["pool_cast"] and c.new == [] and 4 < c.speedup < 5
    assert "direct_copy_kernel_cuda" in c.kernels[0].kernel and c.kernels[0].calls_b == 0
