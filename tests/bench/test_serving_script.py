"""benchmarks/serving_h200.py and the checkpoint that it serves: what would spoil a recorded row."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from uncast.bench.serve import Answer
from uncast.checkpoints.load import load_model
from uncast.engine.tokenizer import Tokenizer

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def answer(*chunks: float, tokens: int | None = None) -> Answer:
    return Answer(0.0, chunks=list(chunks), output_tokens=len(chunks) if tokens is None else tokens)


def test_time_per_token_counts_only_while_all_decode(capsys: pytest.CaptureFixture[str]) -> None:
    """The first answer's wait for the second's prefill, and the second's tokens alone at the end, are not in it."""
    serving = script("serving_h200")
    first = answer(0.0, 5.0, 5.01, 5.02, 5.03)
    second = answer(4.99, 5.0, 5.01, 5.02, 5.03, 6.0, 7.0)
    assert serving.per_token_ms([first, second]) == pytest.approx(10.0)
    assert serving.per_token_ms([answer(0.0, 0.02, 0.04, tokens=6)]) == pytest.approx(10.0)
    assert capsys.readouterr().out == ""
    assert serving.per_token_ms([answer(0.0, 1.0, tokens=11), answer(1.0, 3.0, tokens=11)]) == pytest.approx(150.0)
    assert "share less than two chunks" in capsys.readouterr().out


def test_random_checkpoint_loads_and_every_token_shows(tmp_path: Path) -> None:
    made = script("random_checkpoint")
    assert made.write(tmp_path, made.TOY, 5, 0.0, "cpu") == 2  # no seconds: the least it writes
    model = load_model(tmp_path)
    assert model.config.num_layers == 2 and model.config.vocab_size == made.TOY["vocab_size"]
    tokenizer = Tokenizer(tmp_path, model.config.vocab_size)
    assert tokenizer.encode("w5 w2046") == [5, 2046]
    assert tokenizer.decode([5, 0, 2046]) == "w5 w0 w2046"
