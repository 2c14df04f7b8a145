"""`uncast generate` as a user runs it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.tiny_model import build_model_folder
from uncast.checkpoints.load import load_config
from uncast.cli.generate import load_with_bar
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


@pytest.mark.parametrize(("family", "full"), [("glm_moe_dsa_52", 3), ("deepseek_v32", 4)])
def test_sparse_attention_reads_what_it_selects(
    family: str, full: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sparse = build_model_folder(tmp_path, family, num_hidden_layers=4)
    prompt = "quick brown foxes jump over lazy dogs"
    command = ["generate", prompt, "--model", str(sparse), "--max-tokens", "8"]
    assert main([*command, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    rows = facts["prompt_tokens"] + facts["tokens"] - 1
    assert rows > 16 and facts["index_bytes_per_token_layer"] == 132
    assert facts["kv_bytes_needed_per_step"] == 16 * 656 * 4 + rows * 132 * full == facts["kv_bytes_read_per_step"]
    assert main([*command, "--kv-cache-dtype", "bf16"]) == 0
    out = capsys.readouterr().out
    assert (
        f"index cache         256 B per token in {full} layers" in out
        and "at most 16 rows a query, and index keys" in out
    )
    assert main([*command, "--attention-backend", "gather_cast:torch_cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kv_bytes_read_per_step"] > facts["kv_bytes_read_per_step"]


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
    """Most of what tiny-glm writes are words that its held-out text knows: 80 to 95 %, and 2 % of random letters."""
    from uncast.cli.bench_text import HELD_OUT

    assert main(["generate", "It was in the month of", "--max-tokens", "120", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    known = set(re.findall(r"[a-z]+", HELD_OUT.read_text(encoding="utf-8").lower()))
    words = re.findall(r"[a-z]+", str(facts["text"]).lower())
    assert len(words) > 40 and sum(word in known for word in words) > 0.5 * len(words)
    assert facts["kv_bytes_needed_per_step"] == facts["kv_bytes_read_per_step"]


def damaged(folder: Path, target: Path, **config: object) -> Path:
    """A copy of the model with NaN in its final norm, or with other fields in config.json."""
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, target)
    if config:
        path = target / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
        return target
    weights = load_file(target / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] * float("nan")
    save_file(weights, target / "model.safetensors")
    return target


@pytest.mark.parametrize("options", [[], ["--json"], ["--temperature", "1"]])
def test_logits_that_are_not_numbers_exit_1(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    assert generate(damaged(folder, tmp_path / "nan"), *options) == 1
    captured = capsys.readouterr()
    assert captured.out.strip() == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("uncast: the model's logits are not finite")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--model", ""], "the model is '': a folder or one of tiny-glm is needed"),
        (["--kv-pool-tokens", "0"], "kv_pool_tokens is 0: at least 1 is needed"),
        (["--weight-cache-gib", "-1"], "weight_cache_gib is -1: allowed is 0 to 1e+06"),
        (["--weight-cache-gib", "nan"], "weight_cache_gib is nan: allowed is 0 to 1e+06"),
        (["--kv-pool-tokens", "-5"], "kv_pool_tokens is -5: at least 1 is needed"),
        (["--kv-pool-tokens", "1" + "0" * 15], "tokens does not fit into memory: ask for fewer"),
        (["--kv-pool-tokens", "1" + "0" * 30], "tokens does not fit into memory: ask for fewer"),
        (["--stop", "\udcff"], "a stop string is not valid Unicode: character 0 is a lone surrogate"),
    ],
)
def test_more_bad_input_is_one_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str], options: list[str], sentence: str
) -> None:
    assert generate(folder, *options) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err and captured.err.count("\n") == 1


@pytest.mark.parametrize("prompt", ["a\ud800b", "\udcff"])
@pytest.mark.parametrize("options", [[], ["--chat"]])
def test_undecodable_prompts_are_one_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str], prompt: str, options: list[str]
) -> None:
    assert main(["generate", prompt, "--model", str(folder), *options]) == 2
    captured = capsys.readouterr()
    assert "the prompt is not valid Unicode: character" in captured.err and captured.err.count("\n") == 1


def test_the_models_own_sampling_counts(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def text(config: str, *options: str) -> str:
        (own / "generation_config.json").write_text(config)
        assert generate(own, "--json", *options) == 0
        return str(json.loads(capsys.readouterr().out)["text"])

    own = damaged(folder, tmp_path / "own", tie_word_embeddings=False)
    greedy = text("{}")
    assert text('{"do_sample": true, "temperature": 0}') == text('{"do_sample": false, "temperature": 3.0}') == greedy
    hot = '{"do_sample": true, "temperature": 3.0}'
    assert text(hot) != greedy and text(hot, "--temperature", "0") == greedy
    assert text('{"do_sample": true, "temperature": 3.0, "top_k": 1}') == greedy
    (own / "generation_config.json").write_text('{"do_sample": "no"}')
    assert generate(own) == 2 and "do_sample = 'no': true or false is needed" in capsys.readouterr().err


def test_end_tokens_of_generation_config_end_the_text(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from uncast.checkpoints.load import load_model
    from uncast.engine.runner import ModelRunner, Sequence
    from uncast.engine.tokenizer import Tokenizer

    ids = Tokenizer(folder).encode("the latent")
    runner, sequence = ModelRunner(load_model(folder), num_pages=1), Sequence(list(ids))
    runner.ensure_pages(sequence, len(ids))
    first = int(runner.step([(sequence, len(ids))]).argmax())
    own = damaged(folder, tmp_path / "own", eos_token_id=[])
    (own / "generation_config.json").write_text(json.dumps({"eos_token_id": first}))
    assert generate(own, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["tokens"], facts["finish_reason"]) == (0, "stop")


def test_a_tokenizer_of_another_model_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = damaged(folder, tmp_path / "own", vocab_size=100, eos_token_id=1)
    assert generate(own) == 2
    assert "the model's vocabulary has ids 0 to 99" in capsys.readouterr().err


def test_a_damaged_template_matters_only_with_chat(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = damaged(folder, tmp_path / "own", tie_word_embeddings=False)
    (own / "chat_template.jinja").write_bytes(b"\xff\xfe")
    assert generate(own) == 0
    capsys.readouterr()
    assert generate(own, "--chat") == 2
    assert "chat_template.jinja is not UTF-8" in capsys.readouterr().err


def test_the_accounting_is_one_unpadded_line_each(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(folder) == 0
    lines = capsys.readouterr().out.splitlines()
    pool_cast = next(line for line in lines if line.startswith("a pool cast"))
    assert pool_cast.endswith("every layer)") and len(pool_cast) > 80
    assert all(line == line.rstrip() for line in lines[-6:])


def test_a_small_model_computes_on_one_thread_unless_the_user_says_otherwise(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
        load_with_bar(folder, load_config(folder), quiet=True)
        assert torch.get_num_threads() == 2
        monkeypatch.delenv("OMP_NUM_THREADS")
        load_with_bar(folder, load_config(folder), quiet=True)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("damage", ["shard", "tensor", "shape", "scale"])
def test_a_damaged_checkpoint_exits_1_in_one_sentence(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    from safetensors.torch import load_file, save_file

    own = damaged(folder, tmp_path / "own", tie_word_embeddings=False)
    weights, name = own / "model.safetensors", "model.layers.0.self_attn.o_proj.weight"
    tensors = load_file(weights)
    if damage == "shard":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif damage == "tensor":
        del tensors[name]
    elif damage == "shape":
        tensors[name] = tensors[name][:, 1:].contiguous()
    else:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    if damage != "shard":
        save_file(tensors, weights)
    sentence = {
        "shard": "cannot open", "tensor": f"has no tensor {name}", "shape": "is needed",
        "scale": f"is FP8 but {name}_scale_inv is missing",
    }[damage]  # fmt: skip
    assert generate(own) == 1
    captured = capsys.readouterr()
    assert sentence in captured.err and captured.err.count("\n") == 1 and captured.out == ""


def test_an_fp8_cache_without_scales_is_noted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(folder, "--kv-cache-dtype", "fp8_e4m3") == 0
    assert capsys.readouterr().err == (
        "uncast: note: no layer of this checkpoint has a k_scale: layout fp8_e4m3 uses 1.0 there\n"
    )
    assert generate(folder, "--kv-cache-dtype", "fp8_ds_mla") == 0
    assert capsys.readouterr().err == ""


def test_the_bound_of_the_weight_cache_reaches_the_model(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from uncast.checkpoints import layer_loader

    bounds: list[int] = []
    cache = layer_loader.DequantCache
    monkeypatch.setattr(layer_loader, "DequantCache", lambda max_bytes: bounds.append(max_bytes) or cache(max_bytes))
    assert generate(folder) == generate(folder, "--weight-cache-gib", "0.25") == 0
    assert bounds == [1 << 30, 1 << 28]
