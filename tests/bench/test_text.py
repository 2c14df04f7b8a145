"""Bits per byte of the bundled model, re-measured on a slice of its held-out text, and the decode benchmark's rows."""

from __future__ import annotations

import csv
import math
from copy import copy
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tests.models.helpers import step
from tests.tiny_model import build_model_folder

from uncast.bench.text import bits_per_byte
from uncast.checkpoints.bundled import BUNDLED
from uncast.checkpoints.load import load_model
from uncast.cli import bench_decode, bench_text
from uncast.cli.bench_text import HELD_OUT
from uncast.cli.main import main
from uncast.engine.runner import ModelRunner, RunnerError
from uncast.engine.tokenizer import Tokenizer
from uncast.latent.layouts import row_layout
from uncast.latent.pool import OutOfPages, PagedPool
from uncast.models.decoder import MLADecoder

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
SLICE = 6000


@pytest.fixture(scope="module")
def model() -> MLADecoder:
    return load_model(BUNDLED["tiny-glm"])


def test_held_out_bits_per_byte_of_each_layout(model: MLADecoder) -> None:
    """The slice's own figure is near the recorded one, and no FP8 layout costs more than a hundredth of a bit."""
    with (RESULTS / "text-cpu.csv").open() as file:
        recorded = {row["kv_cache_dtype"]: float(row["bits_per_byte"]) for row in csv.DictReader(file)}
    tokenizer, text = Tokenizer(BUNDLED["tiny-glm"]), HELD_OUT.read_text(encoding="utf-8")[:SLICE]
    measured = {}
    for layout in recorded:
        runner = ModelRunner(model, kv_layout=layout, num_pages=16)
        measured[layout] = bits_per_byte(runner, tokenizer, text, context=1024)
    assert set(measured) == {"bf16", "fp8_ds_mla", "fp8_e4m3"}
    for layout, bits in measured.items():
        assert abs(bits - measured["bf16"]) < 0.01
        assert abs(bits - recorded[layout]) < 0.25, "the recorded file is of this model"


def test_bits_per_byte_is_the_definition(model: MLADecoder) -> None:
    """One window, one forward: the sum over tokens of -log2 p, by hand."""
    tokenizer, text = Tokenizer(BUNDLED["tiny-glm"]), "It was the best of times, it was the worst of times."
    ids, prefix = tokenizer.encode(text, add_special_tokens=False), tokenizer.encode("")
    pool = PagedPool(row_layout("fp32"), num_layers=model.config.num_layers, num_pages=2)
    log_p = step(model, pool, [0, 1], torch.tensor([*prefix, *ids]), start=0).double().log_softmax(-1)
    nats = -sum(float(log_p[len(prefix) - 1 + i, token]) for i, token in enumerate(ids))
    runner = ModelRunner(model, kv_layout="fp32", num_pages=16)
    got = bits_per_byte(runner, tokenizer, text, context=1024)
    assert got == pytest.approx(nats / math.log(2) / len(text), rel=1e-5)
    assert runner.pool.num_free == 16


def test_bench_decode_writes_rows_whose_bytes_do_not_depend_on_the_pool(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = build_model_folder(tmp_path / "model"), tmp_path / "out.csv"
    assert main(["bench", "decode", "--model", str(folder), "--context", "40", "--rounds", "3", "--csv", str(out)]) == 0
    with out.open() as file:
        rows = list(csv.DictReader(file))
    small, large, cast, cast_large = rows
    assert int(large["pool_tokens"]) >= 60 * int(small["pool_tokens"])
    for key in ("kv_bytes_read_per_step", "kv_bytes_needed_per_step"):
        assert small[key] == large[key] == small["kv_bytes_needed_per_step"]
    assert int(cast_large["kv_bytes_written_per_step"]) > 60 * int(cast["kv_bytes_written_per_step"]) > 0
    assert "torch=" in small["versions"] and small["device"]


def without(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(package) is not None, reason=f"{package} is installed")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["decode", "--context", "0"], "context is 0"),
        (["decode", "--context", "999999"], "exceed the model's"),
        (
            ["decode", "--context", "2044", "--rounds", "2"],
            "context 2044, 2 rounds and 3 steps of warm-up exceed the model's 2048",
        ),
        (
            ["decode", "--attention-backend", "pool_cast:torch_cpu"],
            "attention backend 'pool_cast:torch_cpu' casts already",
        ),
        (["decode", "--attention-backend", "gather_cast:auto"], "attention backend 'gather_cast:auto' casts already"),
        (["decode", "--attention-backend", "nothing"], "unknown attention backend 'nothing'"),
        (
            ["decode", "--attention-backend", "flashmla"],
            "attention backend 'flashmla' cannot be imported: No module named",
        ),
        pytest.param(
            ["decode", "--attention-backend", "flashinfer_fa2"],
            "'flashinfer_fa2' cannot be imported: No module named",
            marks=without("flashinfer"),
        ),
        (["decode", "--context", "8", "--rounds", "1", "--csv", "/nowhere/x.csv"], "cannot write '/nowhere/x.csv'"),
        (["decode", "--csv", "/tmp"], "cannot write '/tmp': it is a folder"),
        (["decode", "--csv", "a\0b"], "cannot write 'a\\x00b': embedded null byte"),
        (["text", "--csv", "/etc/passwd/x.csv"], "cannot write '/etc/passwd/x.csv': Not a directory"),
        (["attention", "--csv", "/nowhere/x.csv"], "there is no folder '/nowhere'"),
        (["founding", "--csv", "/nowhere/x.csv"], "there is no folder '/nowhere'"),
        (["text", "--max-bytes", "0"], "--max-bytes is 0: it must be at least 1"),
        (["text", "--file", "/dev/null"], "/dev/null is empty"),
        (["text", "--file", "a\0b"], "cannot read 'a\\x00b'"),
        (["text", "--file", "/nowhere.txt"], "cannot read /nowhere.txt"),
        (["text", "--context", "3"], "context is 3: allowed are 16 to"),
    ],
)
def test_bad_input_is_one_sentence_before_a_model_is_loaded(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("found only after the model was loaded")

    for module in (bench_decode, bench_text):
        monkeypatch.setattr(module, "load_with_bar", load)
    assert main(["bench", *arguments]) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1


def test_no_more_of_a_text_than_asked_for_is_read(tmp_path: Path) -> None:
    """/dev/zero has no end; a character that the limit cuts is dropped, and bytes that are no UTF-8 are told."""
    assert bench_text.read_text(Path("/dev/zero"), 200) == "\0" * 200
    path = tmp_path / "text"
    path.write_bytes("aé".encode())
    assert [bench_text.read_text(path, n) for n in (1, 2, 3, 10**30)] == ["a", "a", "aé", "aé"]
    path.write_bytes(b"\xc3")
    for limit, sentence in (
        (1, "the first 1 bytes of .* hold no whole character"),
        (2, "is not UTF-8: byte 0 is wrong"),
    ):
        with pytest.raises(ValueError, match=sentence):
            bench_text.read_text(path, limit)


@pytest.mark.parametrize("layout", ["fp8_e4m3", "fp8_ds_mla"])
def test_bench_decode_of_auto_sets_a_cast_beside_the_backend_that_it_means(layout: str, tmp_path: Path) -> None:
    folder, out = build_model_folder(tmp_path / "model"), tmp_path / "out.csv"
    arguments = ["--kv-cache-dtype", layout, "--attention-backend", "auto", "--context", "9", "--rounds", "1"]
    assert main(["bench", "decode", "--model", str(folder), *arguments, "--csv", str(out)]) == 0
    with out.open() as file:
        backends = [row["attention_backend"] for row in csv.DictReader(file)]
    assert backends == ["torch_cpu", "torch_cpu", "pool_cast:torch_cpu", "pool_cast:torch_cpu"]


@pytest.mark.parametrize(
    "error", [RunnerError("torch_cpu is off"), OutOfPages(3, 1, 2), torch.OutOfMemoryError("no\nmore")]
)
def test_a_run_that_cannot_go_on_is_one_sentence(
    error: Exception, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(bench_decode, "load_with_bar", fail)
    assert main(["bench", "decode"]) == 2
    assert capsys.readouterr().err == f"uncast: {str(error).splitlines()[0]}\n"


def test_a_model_whose_numbers_are_not_finite_has_no_bits_per_byte(model: MLADecoder) -> None:
    runner, tokenizer = ModelRunner(model, kv_layout="fp32", num_pages=16), Tokenizer(BUNDLED["tiny-glm"])
    broken = ModelRunner(copy(model), kv_layout="fp32", num_pages=16)
    broken.model.final_norm = model.final_norm * math.nan
    assert math.isfinite(bits_per_byte(runner, tokenizer, "It was", context=64))
    with pytest.raises(ValueError, match="not finite"):
        bits_per_byte(broken, tokenizer, "It was", context=64)
    with pytest.raises(ValueError, match="this one has no tokens"):
        bits_per_byte(runner, tokenizer, "", context=64)
