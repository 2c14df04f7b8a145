"""`uncast generate` on a GGUF file. A failure means that a GGUF cannot be used, or says something else than its model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("gguf")

from gguf import GGMLQuantizationType as Kind

from tests.checkpoints.gguf_files import MIXED, write_gguf
from tests.tiny_model import build_model_folder
from uncast.cli.main import main

pytestmark = pytest.mark.filterwarnings("ignore::uncast.attention.ClaimedCapabilityWarning")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model_folder(tmp_path_factory.mktemp("model"), "deepseek_v3", sharpen=3.0)


def text(path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["generate", "the latent", "--model", str(path), "--max-tokens", "12", "--json", *options]) == 0
    return str(json.loads(capsys.readouterr().out)["text"])


def test_a_gguf_says_what_its_model_says(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_gguf(folder, tmp_path / "model.gguf", [Kind.F32])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, tmp_path)
    expected = text(folder, capsys)
    assert text(tmp_path / "model.gguf", capsys) == expected == text(tmp_path, capsys)
    assert text(tmp_path, capsys, "--chat") == text(folder, capsys, "--chat")


def test_mixed_block_types_generate(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_gguf(folder, tmp_path / "model.gguf", MIXED)
    shutil.copy(folder / "tokenizer.json", tmp_path)
    assert text(tmp_path / "model.gguf", capsys)


@pytest.mark.parametrize("damage", ["cut", "tensor", "tokenizer"])
def test_damage_is_one_sentence(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(folder, path, [Kind.Q8_0])
    if damage != "tokenizer":
        shutil.copy(folder / "tokenizer.json", tmp_path)
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-1000])
    elif damage == "tensor":
        path.write_bytes(path.read_bytes().replace(b"blk.0.attn_output", b"blk.0.attn_outpux"))
    sentence = {
        "cut": "is not a whole GGUF file", "tensor": "has no tensor blk.0.attn_output.weight",
        "tokenizer": "has no tokenizer.json",
    }[damage]  # fmt: skip
    assert main(["generate", "the latent", "--model", str(path)]) == (2 if damage == "tokenizer" else 1)
    captured = capsys.readouterr()
    assert sentence in captured.err and captured.err.count("\n") == 1 and captured.out == ""
