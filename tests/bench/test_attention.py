"""`uncast bench attention` without a GPU: floors, recorded runs, plots, and one sentence for what cannot be done."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest
import torch

from uncast.bench.attention import AttentionResult, Inputs, Shape
from uncast.cli.bench_attention import read_results
from uncast.cli.main import main
from uncast.latent.layouts import row_layout

FIELDS = ["batch", "context", "heads", "layout", "backend", "us", "error", "floor_us", "gpu", "versions"]


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    rows = [
        AttentionResult(1, 4096, 64, "fp8_e4m3", "native", 10.5, 1.6e-3, 1.1, "GPU", "v"),
        AttentionResult(1, 4096, 64, "bf16", "flashmla bf16", 18.8, 1.7e-3, 1.1, "GPU", "v"),
        AttentionResult(2, 4096, 64, "bf16", "flashmla bf16", math.nan, math.nan, 1.1, "GPU", "v"),
    ]
    path = tmp_path / "run.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerows(row.row() for row in rows)
    return path


def test_floors_are_the_issues_arithmetic() -> None:
    """Bytes over 4.4 TB/s or FLOP over 770 TFLOP/s, whichever is larger."""
    row = row_layout("fp8_e4m3").row_bytes
    assert Shape(1, 131072, 8).floor_us(row) == pytest.approx(131072 * 576 / 4.4e6, rel=1e-9)
    assert Shape(64, 8192, 128).floor_us(row) == pytest.approx(2 * 64 * 8192 * 128 * 1088 / 770e6, rel=1e-9)
    assert Shape(32, 8192, 64).floor_us(row) == pytest.approx(47.4, abs=0.1)


def test_the_benchmarks_own_oracle_agrees_with_the_cpu_backend() -> None:
    from uncast.bench.contenders import ours

    inputs = Inputs(Shape(2, 200, 8), device="cpu")
    for name in ("fp8_e4m3", "fp8_ds_mla", "bf16"):
        layout = row_layout(name)
        cache = inputs.caches(layout)[0]
        expected = inputs.oracle(layout, cache)
        out = ours("torch_cpu", inputs, layout, [cache])(0)
        assert float((out.double() - expected).norm() / expected.norm()) < 2.5e-3


def test_a_recorded_run_is_shown_and_drawn(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "plot.png"
    assert main(["bench", "attention", "--from-csv", str(recorded), "--plot", str(picture)]) == 0
    out = capsys.readouterr().out
    assert "native" in out and "18.8" in out
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_part_of_a_recorded_run_is_shown(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["bench", "attention", "--from-csv", str(recorded)]
    rows = read_results(recorded)
    shape = f"{rows[0].batch},{rows[0].context},{rows[0].heads}"
    capsys.readouterr()
    assert main([*run, "--only", rows[-1].backend, "--shape", shape]) == 0
    assert rows[-1].backend in capsys.readouterr().out
    assert main([*run, "--only", "nobody"]) == 2
    assert "matches ['nobody']: native" in capsys.readouterr().err
    assert main([*run, "--shape", "7,7,7"]) == 2
    assert f"holds none of these shapes, it has {shape}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--from-csv", "/nowhere.csv"], "cannot read /nowhere.csv"),
        (["--plot", "plot.txt"], "its name must end in .png"),
        (["--shape", "1,2"], "is not B,N,H: three positive integers"),
        (["--shape", "1,2,300"], "has 300 heads: at most 128"),
        (["--shape", "1,x,8"], "is not B,N,H"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["bench", "attention", *arguments])
    except SystemExit as stop:
        code = int(str(stop.code))
    assert code == 2 and sentence in capsys.readouterr().err


def test_a_csv_of_something_else_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n")
    assert main(["bench", "attention", "--from-csv", str(other)]) == 2
    assert "is not a CSV of uncast bench attention" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("what", ["attention", "founding"])
def test_without_a_gpu_it_says_so(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", what]) == 2
    assert "needs a CUDA GPU and this machine has none" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (",".join(FIELDS) + "\n", "holds no results"),
        (",".join(FIELDS) + "\n1,4096,64,bf16,native,0,0,1.1,GPU,v\n", "is not a CSV of uncast bench attention"),
        ("batch\n" + "1" * 200_000 + "\n", "is not a CSV of uncast bench attention"),
    ],
)
def test_a_recorded_run_that_is_none(
    content: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.csv"
    path.write_text(content)
    assert main(["bench", "attention", "--from-csv", str(path), "--csv", str(tmp_path / "out.csv")]) == 2
    assert sentence in capsys.readouterr().err
