"""`uncast kv-error` and `--kv-scales` as a user runs them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_model import build_model_folder
from uncast.checkpoints.kv_scales import _SIZES as SIZE_NAMES
from uncast.cli.main import main
from uncast.engine.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("the latent cache is read as it is stored\nthe latent\nx\n")
    return path


def kv_error(capsys: pytest.CaptureFixture[str], folder: Path, prompts: Path, *options: str) -> dict[str, Any]:
    assert main(["kv-error", "--model", str(folder), "--prompts", str(prompts), "--json", *options]) == 0
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    return facts


def test_json_scales_and_plot(folder: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    scales, plot = tmp_path / "scales.json", tmp_path / "error.png"
    facts = kv_error(capsys, folder, prompts, "--write-scales", str(scales), "--plot", str(plot))
    assert [layout["name"] for layout in facts["layouts"]] == ["fp8_ds_mla", "fp8_e4m3", "fp8_e4m3 calibrated"]
    assert [layout["scales"] for layout in facts["layouts"]] == ["none", "1", "calibrated"]
    assert facts["prompts"] == 2 and facts["reference"] == "bf16" and facts["advice"]
    layer = facts["layouts"][1]["layers"][1]
    assert layer["values"] == facts["tokens"] * 576 and layer["attention_error"] > 0 and layer["kl"] >= 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    written = json.loads(scales.read_text())
    assert written["layers"] == facts["calibrated_scales"] and len(written["layers"]) == 2

    def text(*options: str) -> str:
        command = ["generate", "the latent", "--model", str(folder), "--max-tokens", "12", "--json"]
        assert main([*command, "--kv-cache-dtype", "fp8_e4m3", *options]) == 0
        return str(json.loads(capsys.readouterr().out)["saturated_subnormal_nan"])

    # Small scales move numbers out of the subnormal range: the file reaches the cache writer.
    assert text("--kv-scales", str(scales)) != text()


def test_the_context_cuts_and_layouts_are_chosen(
    folder: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = kv_error(capsys, folder, prompts, "--context", "3", "--layouts", "fp32", "--no-layer-kl")
    lengths = [len(Tokenizer(folder).encode(line)) for line in prompts.read_text().splitlines()]
    assert facts["tokens"] == sum(min(3, length) for length in lengths if length > 1)
    assert facts["prompts_cut"] == sum(length > 3 for length in lengths) > 0 and facts["calibrated_scales"] is None
    assert [layout["name"] for layout in facts["layouts"]] == ["fp32"]
    assert facts["layouts"][0]["layers"][0]["kl"] is None


def test_the_tables_name_every_layer(folder: Path, prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kv-error", "--model", str(folder), "--prompts", str(prompts)]) == 0
    out = capsys.readouterr().out
    for words in ("against bf16", "fp8_e4m3 calibrated", "attention error", "kpe_scale", "\n- "):
        assert words in out
    assert not any("…" in line for line in out.splitlines())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--prompts", "/nowhere/p.txt"], "cannot read /nowhere/p.txt"),
        (["--context", "1"], "context is 1: at least 2 is needed"),
        (["--max-prompts", "0"], "max_prompts is 0: at least 1 is needed"),
        (["--write-scales", "/nowhere/s.json"], "cannot write '/nowhere/s.json'"),
        (["--plot", "/nowhere/p.png"], "cannot write '/nowhere/p.png'"),
        (["--model", "/nowhere"], "/nowhere is not a folder with a model in it"),
    ],
)
def test_bad_input_is_one_sentence(
    folder: Path, prompts: Path, capsys: pytest.CaptureFixture[str], options: list[str], sentence: str
) -> None:
    assert main(["kv-error", "--model", str(folder), "--prompts", str(prompts), *options]) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err and captured.err.count("\n") == 1 and captured.out == ""


@pytest.mark.parametrize("lost", ["--write-scales", "--plot"])
def test_a_file_that_cannot_be_written_takes_nothing_else_along(
    folder: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], lost: str
) -> None:
    pytest.importorskip("matplotlib")
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    files = {"--write-scales": tmp_path / "s.json", "--plot": tmp_path / "p.png", lost: Path("/dev/full")}
    options = [word for option, path in files.items() for word in (option, str(path))]
    command = ["kv-error", "--model", str(folder), "--prompts", str(prompts), "--no-layer-kl", "--json", *options]
    assert main(command) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["layouts"] and "/dev/full" in captured.err and captured.err.count("\n") == 1
    assert all(path.stat().st_size > 0 for option, path in files.items() if option != lost)


@pytest.mark.parametrize(
    "options",
    [["--write-scales", "{prompts}"], ["--plot", "{prompts}"], ["--plot", "{tmp}/x", "--write-scales", "{tmp}/./x"]],
)
def test_no_file_is_written_over_another(
    folder: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    pytest.importorskip("matplotlib")
    before = prompts.read_text()
    words = [word.replace("{prompts}", str(prompts)).replace("{tmp}", str(tmp_path)) for word in options]
    assert main(["kv-error", "--model", str(folder), "--prompts", str(prompts), *words]) == 2
    assert "each needs a file of its own" in capsys.readouterr().err and prompts.read_text() == before


def test_damage_is_exit_1(prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("gguf")
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + b"\xff" * 100)
    assert main(["kv-error", "--model", str(tmp_path / "m.gguf"), "--prompts", str(prompts)]) == 1
    assert "is not a whole GGUF file" in capsys.readouterr().err


def test_prompts_of_one_token_are_not_enough(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p.txt").write_text("x\n")
    assert main(["kv-error", "--model", str(folder), "--prompts", str(tmp_path / "p.txt")]) == 2
    assert "holds no prompt of 2 tokens or more" in capsys.readouterr().err


LAYER = {"ckv_scale": 0.5, "kpe_scale": 1.0}
MODEL = {"name": "x", "hidden_size": 256, "num_heads": 4, "kv_lora_rank": 512, "qk_rope_head_dim": 64}


def test_a_scale_file_implies_its_layout_and_says_whose_it_is(
    folder: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "s.json"
    kv_error(capsys, folder, prompts, "--write-scales", str(path), "--no-layer-kl")
    written = json.loads(path.read_text())
    assert written["model"]["name"] == folder.name and set(written["model"]) == {"name", *SIZE_NAMES}

    def generate(content: dict[str, Any]) -> list[str]:
        path.write_text(json.dumps(content))
        command = ["generate", "the latent", "--model", str(folder), "--max-tokens", "2", "--kv-scales", str(path)]
        assert main([*command, "--json"]) == 0
        captured = capsys.readouterr()
        assert json.loads(captured.out)["kv_cache_dtype"] == "fp8_e4m3"
        return captured.err.splitlines()

    implied = "uncast: note: --kv-scales makes the cache's layout fp8_e4m3"
    assert generate(written) == [implied]
    other = generate({**written, "model": {**written["model"], "name": "another"}})
    assert other[0] == implied and "were measured on 'another', and this model is called" in other[1]
    old = generate({name: value for name, value in written.items() if name != "model"})
    assert "does not say which model it was measured on" in old[1] and len(other) == len(old) == 2


@pytest.mark.parametrize(
    ("content", "layout", "sentence"),
    [
        ({}, "fp8_e4m3", "has no format"),
        ({"format": "other/1"}, "fp8_e4m3", "has format = 'other/1': only 'uncast-kv-scales/1' is supported"),
        ({"layers": [LAYER]}, "fp8_e4m3", "of 1 layers: this model is a glm4_moe_lite of 2"),
        ({"layers": [LAYER, LAYER], "model_type": "deepseek_v3"}, "fp8_e4m3", "has scales for a deepseek_v3"),
        ({"layers": [LAYER, {"ckv_scale": 0, "kpe_scale": 1}]}, "fp8_e4m3", "layer 1, has ckv_scale = 0: a number of"),
        ({"layers": [{"ckv_scale": 1, "kpe_scale": 1e-320}] * 2}, "auto", "kpe_scale = 1e-320: a number of at least"),
        ({"layers": [LAYER, {"ckv_scale": 1}]}, "fp8_e4m3", "layer 1, has no kpe_scale"),
        ({"layers": 7}, "fp8_e4m3", "has no list of layers"),
        ({"layers": [LAYER, LAYER]}, "bf16", "kv_scales are for --kv-cache-dtype fp8_e4m3"),
        ({"layers": [LAYER, LAYER], "model": MODEL | {"hidden_size": 7}}, "auto", "with hidden_size 7: this model has"),
        ({"layers": [LAYER, LAYER], "model": MODEL | {"num_heads": 3}}, "auto", "with num_heads 3: this model has 4"),
        ({"layers": [LAYER, LAYER], "model": {"name": "x"}}, "auto", "model, has no hidden_size"),
        ({"layers": [LAYER, LAYER], "model": "x"}, "auto", "has a model that is not an object"),
    ],
)
@pytest.mark.parametrize("command", [["generate", "x"], ["serve", "--port", "0"]])
def test_wrong_scale_files_are_one_sentence(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    content: dict[str, Any],
    layout: str,
    sentence: str,
) -> None:
    path = tmp_path / "s.json"
    base = {"format": "uncast-kv-scales/1", "model_type": "glm4_moe_lite"} if content else {}
    path.write_text(json.dumps({**base, **content}))
    options = ["--model", str(folder), "--kv-scales", str(path), "--kv-cache-dtype", layout]
    assert main([*command, *options]) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err and captured.err.count("\n") == 1
