"""`uncast doctor` as a user runs it, with and without torch."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.doctor.synthetic import decode
from uncast.cli.main import main

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "doctor" / "data"
EAGER, GRAPH, CLEAN = (DATA / f"founding_{name}.json.gz" for name in ("eager", "graph", "clean_graph"))
GRAPH_CAPTURE, SERVER = DATA / "founding_graph.capture.json.gz", DATA / "sglang_server_fa3.json.gz"
FINDING_KEYS = {
    "kind", "calls_per_step", "dtype_from", "dtype_to", "shape", "bytes_per_call", "bytes_per_step", "bytes_needed_per_step",
    "us_per_step", "share_of_step", "source", "confidence", "predicted_step_us", "advice",
}  # fmt: skip
NO_TORCH = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "numpy", "triton", "transformers", "safetensors", "starlette", "prometheus_client"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Refuse())
from uncast.cli.main import main
code = main(sys.argv[1:])
assert not any(m.split(".")[0] in ("torch", "numpy") for m in sys.modules)
sys.exit(code)
"""


def run(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str, str]:
    code = main(["doctor", *options])
    out = capsys.readouterr()
    return code, out.out, out.err


def as_json(capsys: pytest.CaptureFixture[str], *options: str) -> Any:
    code, out, _ = run(capsys, *options, "--json")
    assert code == 0
    return json.loads(out)


def test_json_has_the_promised_fields(capsys: pytest.CaptureFixture[str]) -> None:
    report = as_json(capsys, str(EAGER))
    assert report.keys() >= {"steps", "layers", "step_us", "phases", "findings"}
    (finding,) = report["findings"]
    assert finding.keys() >= FINDING_KEYS and finding["predicted_step_us"].keys() == {"low", "high"}
    assert report["layers"] == 78 and report["steps"] == 2 and finding["shape"] == [495_552, 1, 576]
    described = (ROOT / "docs" / "doctor.md").read_text()
    for key in {*report, *finding, *report["phases"][0], *report["movements"][0], *report["attention"][0]}:
        assert f"`{key}`" in described, f"docs/doctor.md does not describe {key}"


def test_it_runs_without_torch(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    command = [sys.executable, "-c", NO_TORCH, "doctor", str(EAGER), "--html", str(page)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    for words in (
        "the whole KV pool is cast",
        "78 calls a step",
        "856.3 MB a call",
        "66.8 GB a step",
        "get_bf16_cache",
    ):
        assert words in done.stdout
    assert page.stat().st_size > 10_000


def test_a_clean_trace_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, str(CLEAN))
    assert code == 0 and "Nothing found" in out


def test_two_traces_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, str(EAGER), str(CLEAN))
    assert code == 0 and "gone in B: the whole KV pool is cast" in out and "as fast" in out
    result = as_json(capsys, str(EAGER), str(CLEAN))
    assert result["speedup"] > 4 and result["gone"][0]["kind"] == "pool_cast" and result["new"] == []


def test_a_folder_of_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank, cast_us in enumerate((500.0, 900.0)):
        t = decode(layers=6, cast_us=cast_us)
        t.meta["distributedInfo"] = {"rank": rank, "world_size": 2}
        t.write(tmp_path / f"r-TP-{rank}.json.gz")
    code, out, _ = run(capsys, str(tmp_path))
    assert code == 0 and "The slowest rank:" in out and "rank 1" in out
    assert [r["rank"] for r in as_json(capsys, str(tmp_path))] == [0, 1]


def test_a_refused_rank_is_not_forgotten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 2):
        decode(layers=6, cast_us=500.0).write(tmp_path / f"r-TP-{rank}.json.gz")
    (tmp_path / "r-TP-1.json").write_text("{}")
    code, out, err = run(capsys, str(tmp_path))
    assert code == 1 and "The slowest rank:" in out and "1 of 3 files was refused" in out and "r-TP-1.json" in err
    code, out, _ = run(capsys, str(tmp_path), "--json")
    reports = json.loads(out)
    assert code == 1 and len(reports) == 3 and ["error" in r for r in reports] == [False, True, False]
    assert reports[1]["trace"].endswith("r-TP-1.json") and "no list `traceEvents`" in reports[1]["error"]
    for name in ("r-TP-0.json.gz", "r-TP-2.json.gz"):
        (tmp_path / name).unlink()
    code, out, err = run(capsys, str(tmp_path), "--json")
    assert code == 2 and out == "" and "no list `traceEvents`" in err and err.count("\n") == 1


def test_capture_given_as_file_and_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replay = shutil.copy(DATA / "founding_graph.json.gz", tmp_path / "replay.json.gz")
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    capture = shutil.copy(DATA / "founding_graph.capture.json.gz", folder / "bs_1_rank0.json.gz")
    assert as_json(capsys, str(replay))["findings"][0]["confidence"] == "inferred"
    for given in (capture, folder):
        report = as_json(capsys, str(replay), "--capture", str(given))
        assert report["findings"][0]["confidence"] == "joined" and report["graphs"]["joined"] == 1248
    for name in ("capture_traces", "graph_capture_profile"):
        folder = folder.rename(tmp_path / name)
        for options in ([], ["--capture", str(tmp_path)]):
            assert as_json(capsys, str(replay), *options)["findings"][0]["confidence"] == "joined"


def test_a_capture_that_does_not_fit_or_is_cut_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = as_json(capsys, str(SERVER), "--capture", str(GRAPH_CAPTURE))
    assert report["graphs"]["joined"] == 0 and any(
        f"do not fit {GRAPH_CAPTURE}: is it the same server's" in note for note in report["notes"]
    )
    cut = tmp_path / "cut.json.gz"
    cut.write_bytes(GRAPH_CAPTURE.read_bytes()[:2000])
    code, out, err = run(capsys, str(GRAPH), "--capture", str(cut))
    assert code == 2 and out == "" and err.count("\n") == 1 and "it is not whole (the gzip data ends early" in err


def test_two_folders_of_one_trace_each_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder, trace in (("a", EAGER), ("b", CLEAN)):
        (tmp_path / folder).mkdir()
        shutil.copy(trace, tmp_path / folder)
    code, out, _ = run(capsys, str(tmp_path / "a"), str(tmp_path / "b"))
    assert code == 0 and "gone in B: the whole KV pool is cast" in out


def test_options_reach_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    report = as_json(capsys, str(EAGER), "--live-tokens", "1000", "--peak-gbps", "1234")
    assert report["findings"][0]["bytes_needed_per_step"] == 78 * 1000 * 576 * 3
    assert report["live_tokens_source"] == "--live-tokens" and report["peak_gb_per_s"] == 1234
    assert report["attention"][0]["floor_us_per_step"] == pytest.approx(78 * 1000 * 1152 / 1234e3, rel=1e-3)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ([], "0 traces were given: one is read, two are compared"),
        (["a", "b", "c"], "3 traces were given"),
        (["/nowhere.json"], "/nowhere.json cannot be read: No such file"),
        ([str(ROOT / "README.md")], "is no PyTorch profiler trace"),
        ([str(ROOT / "src")], "holds no traces"),
        ([str(EAGER), "--live-tokens", "0"], "--live-tokens is 0: allowed are 1 to 1,000,000,000,000"),
        ([str(EAGER), "--live-tokens", "1" + "0" * 22], "0: allowed are 1 to 1,000,000,000,000"),
        ([str(EAGER), str(DATA)], f"{DATA} is a folder of"),
        ([str(EAGER), "--capture", str(GRAPH_CAPTURE)], "holds no graph replays: there is nothing to join with"),
        (
            [str(GRAPH), "--capture", str(EAGER)],
            "is no trace of a graph's capture pass: no launch in it lacks its kernel",
        ),
        ([str(GRAPH), "--capture", str(ROOT / "src")], "holds no traces: a capture folder has .json or .json.gz files"),
        ([str(EAGER), "--peak-gbps", "-1"], "--peak-gbps is -1.0: allowed are 1 to 1,000,000 (GB/s)"),
        ([str(EAGER), "--peak-gbps", "inf"], "--peak-gbps is inf: allowed are 1 to 1,000,000 (GB/s)"),
        ([str(EAGER), "--peak-gbps", "nan"], "--peak-gbps is nan: allowed are 1 to 1,000,000 (GB/s)"),
        ([str(EAGER), "--peak-gbps", "1e300"], "--peak-gbps is 1e+300: allowed are 1 to 1,000,000 (GB/s)"),
        ([str(EAGER), "--peak-gbps", "1e-300"], "--peak-gbps is 1e-300: allowed are 1 to 1,000,000 (GB/s)"),
        ([str(EAGER), "--no-stacks"], "--no-load and --no-stacks go with --url"),
        (["-"], "- (standard input) is no file: a regular file is needed"),
        (["/dev/null"], "/dev/null is a device or socket: a regular file is needed"),
        ([str(EAGER), "--phase", "prefill"], "holds no prefill steps; it has decode"),
        ([str(EAGER), "--html", "/no/where.html"], "/no/where.html cannot be written: /no is not a folder"),
        ([str(GRAPH), "--capture", str(ROOT / "README.md")], "is no PyTorch profiler trace"),
        ([str(GRAPH), "--capture", str(GRAPH)], "is no trace of a graph's capture pass"),
        ([str(EAGER), "--capture", str(GRAPH)], "holds no graph replays: there is nothing to join"),
        ([str(EAGER), "--url", "http://localhost:1"], "give a trace or --url, not both"),
        (["--url", "http://localhost:1"], "http://localhost:1/v1/models does not answer"),
        (["--url", "localhost"], "is no address"),
        (["--url", "http://localhost:1", "--steps", "0"], "--steps is 0: allowed are 1 to 1000"),
        ([str(EAGER), "--metrics-url", "http://localhost:1"], "http://localhost:1/metrics does not answer"),
        ([str(EAGER), str(CLEAN), "--html", "/tmp/x.html"], "--html is for one trace"),
    ],
)
def test_bad_input_is_one_sentence(capsys: pytest.CaptureFixture[str], options: list[str], sentence: str) -> None:
    code, out, err = run(capsys, *options)
    assert code == 2 and sentence in err and err.count("\n") == 1 and out == ""


def test_a_cpu_only_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    t = decode(layers=4)
    t.events = [e for e in t.events if e["cat"] != "kernel"]
    code, _, err = run(capsys, str(t.write(tmp_path / "cpu.json")))
    assert code == 2 and "holds no GPU kernels" in err and "ProfilerActivity.CUDA" in err


def test_a_cut_file_without_kernels_says_that_it_is_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = EAGER.read_bytes()
    cut = tmp_path / "cut.json.gz"
    cut.write_bytes(data[: len(data) // 12])
    code, _, err = run(capsys, str(cut))
    assert code == 2 and "holds no GPU kernels" in err and "the gzip data ends early" in err and err.count("\n") == 1


@pytest.mark.parametrize("how", ["same", "symlink", "hardlink", "rank", "capture", "beside"])
def test_the_page_never_replaces_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str) -> None:
    trace = shutil.copy(DATA / "founding_graph.json.gz", tmp_path / "founding_graph.json.gz")
    capture = shutil.copy(DATA / "founding_graph.capture.json.gz", tmp_path / "founding_graph.capture.json.gz")
    link = tmp_path / "link.html"
    if how in ("symlink", "hardlink"):
        (link.symlink_to if how == "symlink" else link.hardlink_to)(trace)
    page = {"same": trace, "rank": trace, "capture": capture, "beside": capture}.get(how, link)
    options = [str(tmp_path if how == "rank" else trace), *(["--capture", str(capture)] if how == "capture" else [])]
    before = Path(trace).read_bytes(), Path(capture).read_bytes()
    code, out, err = run(capsys, *options, "--html", str(page))
    assert (
        code == 2 and "is a trace that is read: --html needs another file" in err and err.count("\n") == 1 and not out
    )
    assert (Path(trace).read_bytes(), Path(capture).read_bytes()) == before


def test_help_shows_a_runnable_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", "--help"])
    words = " ".join(capsys.readouterr().out.split())  # lines are as wide as the terminal
    assert "example: uncast doctor trace.json.gz" in words
