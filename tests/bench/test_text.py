"""Bits per byte of the bundled model, re-measured on a slice of its held-out text, and the decode benchmark's rows."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest
import torch
from tests.models.helpers import step
from tests.tiny_model import build_model_folder

from uncast.bench.text import bits_per_byte
from uncast.checkpoints.bundled import BUNDLED
from uncast.checkpoints.load import load_model
from uncast.cli.bench_text import HELD_OUT
from uncast.cli.main import main
from uncast.engine.runner import ModelRunner
from uncast.engine.tokenizer import Tokenizer
from uncast.latent.layouts import row_layout
from uncast.latent.pool import PagedPool
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


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["decode", "--context", "0"], "context is 0"),
        (["decode", "--context", "999999"], "exceed the model's"),
        (["decode", "--context", "8", "--rounds", "1", "--csv", "/nowhere/x.csv"], "cannot write /nowhere/x.csv"),
        (["text", "--file", "/nowhere.txt"], "cannot read /nowhere.txt"),
        (["text", "--context", "3"], "context is 3: allowed are 16 to"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 2
    assert sentence in capsys.readouterr().err
