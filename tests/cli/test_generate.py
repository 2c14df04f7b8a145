"""`uncast generate` as a user runs it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_model import build_model_folder
from uncast.cli.main import main

KEYS = {
    "text", "tokens", "tokens_per_s", "kv_bytes_per_token_layer", "kv_bytes_read_per_step", "kv_bytes_needed_per_step",
    "pool_cast_bytes_per_step", "attention_backend", "kv_cache_dtype",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model_folder(tmp_path_factory.mktemp("tiny"))


def generate(folder: Path, *options: str) -> int:
    return main(["generate", "the latent", "--model", str(folder), "--max-tokens", "12", *options])


def test_json_is_one_object_with_the_promised_fields(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(folder, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts.keys() >= KEYS
    assert (
        facts["tokens"] == 12 and facts["kv_cache_dtype"] == "fp8_ds_mla" and facts["attention_backend"] == "torch_cpu"
    )
    assert facts["kv_bytes_per_token_layer"] == 656
    assert facts["kv_bytes_read_per_step"] == facts["kv_bytes_needed_per_step"] > 0


def test_every_layout_and_backend_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = {}
    for layout in ("fp32", "bf16", "fp8_e4m3", "fp8_ds_mla"):
        assert generate(folder, "--json", "--kv-cache-dtype", layout) == 0
        texts[layout] = json.loads(capsys.readouterr().out)["text"]
    for backend in ("gather_cast:torch_cpu", "pool_cast:torch_cpu"):
        assert generate(folder, "--json", "--attention-backend", backend) == 0
        facts = json.loads(capsys.readouterr().out)
        assert facts["attention_backend"] == backend and facts["text"] == texts["fp8_ds_mla"]
        assert facts["kv_bytes_read_per_step"] > facts["kv_bytes_needed_per_step"]


def test_the_text_streams_and_the_accounting_follows(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(folder) == 0
    out = capsys.readouterr().out
    for words in ("tokens/s", "656 B per token and layer", "cache bytes needed", "1.00x needed", "a pool cast"):
        assert words in out


def test_sampling_options_reach_the_sampler(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def text(*options: str) -> str:
        assert generate(folder, "--json", "--temperature", "2", *options) == 0
        return str(json.loads(capsys.readouterr().out)["text"])

    greedy = text("--temperature", "0")
    assert text("--top-k", "1") == text("--top-p", "1e-9") == text("--min-p", "1") == greedy
    assert text("--seed", "1") == text("--seed", "1") != text("--seed", "2")
    assert text("--top-k", "1", "--stop", greedy[5:7]) == greedy[: greedy.index(greedy[5:7])]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--model", "/nowhere"], "/nowhere is not a folder with a model in it"),
        (["--top-p", "7"], "top_p is 7.0: allowed is above 0, up to 1"),
        (["--max-tokens", "0"], "max_tokens is 0: at least 1 is needed"),
        (["--page-size", "3"], "page_size is 3: allowed are powers of two"),
        (["--page-size", "0"], "page_size is 0: allowed are powers of two"),
        (["--kv-pool-tokens", "5", "--max-tokens", "70"], "exceed the KV pool of 64 tokens"),
        (["--attention-backend", "fast"], "unknown attention backend 'fast'"),
        (["--stop", ""], "a stop string must not be empty"),
        (["--max-tokens", "9999999"], "exceed the model's context"),
    ],
)
def test_bad_input_is_one_sentence_and_no_traceback(
    folder: Path, capsys: pytest.CaptureFixture[str], options: list[str], sentence: str
) -> None:
    assert generate(folder, *options) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err and captured.err.count("\n") == 1 and captured.err.startswith("uncast: ")


def test_help_of_every_command_shows_an_example() -> None:
    for arguments in (["--help"], ["generate", "--help"]):
        run = subprocess.run([sys.executable, "-m", "uncast", *arguments], capture_output=True, text=True, check=True)
        assert "example: uncast " in run.stdout


def test_unknown_commands_and_options_exit_2() -> None:
    for arguments in (["frobnicate"], ["generate", "x", "--frobnicate"], ["generate", "x", "--kv-cache-dtype", "fp4"]):
        run = subprocess.run([sys.executable, "-m", "uncast", *arguments], capture_output=True, text=True)
        assert run.returncode == 2 and "Traceback" not in run.stderr


def test_the_bundled_model_writes_english_words(capsys: pytest.CaptureFixture[str]) -> None:
    """Most of what tiny-glm writes are words that its held-out text knows."""
    from uncast.cli.bench_text import HELD_OUT

    assert main(["generate", "It was in the month of", "--max-tokens", "120", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    known = set(re.findall(r"[a-z]+", HELD_OUT.read_text(encoding="utf-8").lower()))
    words = re.findall(r"[a-z]+", str(facts["text"]).lower())
    assert len(words) > 40 and sum(word in known for word in words) > 0.75 * len(words)
    assert facts["kv_bytes_needed_per_step"] == facts["kv_bytes_read_per_step"]
