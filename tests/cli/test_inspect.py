"""`uncast inspect` as a user runs it, with figures that were counted by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from uncast.checkpoints.bundled import BUNDLED
from uncast.cli.main import main

GLM5: dict[str, Any] = {
    "model_type": "glm_moe_dsa", "vocab_size": 154880, "hidden_size": 6144, "num_hidden_layers": 78,
    "num_attention_heads": 64, "q_lora_rank": 2048, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
    "v_head_dim": 256, "intermediate_size": 12288, "moe_intermediate_size": 2048, "n_routed_experts": 256,
    "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 202752, "rope_parameters": {"rope_theta": 1e6}, "index_topk": 2048,
    "index_head_dim": 128, "index_n_heads": 32,
}  # fmt: skip


def inspect(capsys: pytest.CaptureFixture[str], path: Path | str, *options: str) -> dict[str, Any]:
    assert main(["inspect", str(path), "--json", *options]) == 0
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    return facts


def configured(folder: Path, **fields: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**GLM5, **fields}))
    return folder


def by_layout(facts: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {cache["layout"]: cache for cache in facts["cache"]}


def test_the_bundled_model(capsys: pytest.CaptureFixture[str]) -> None:
    facts = inspect(capsys, "tiny-glm", "--memory", "1", "--bandwidth", "0.05", "--context", "1000")
    file = BUNDLED["tiny-glm"] / "model.safetensors"
    header = 8 + int.from_bytes(file.open("rb").read(8), "little")
    weights, cache = facts["weights"], by_layout(facts)["fp8_ds_mla"]
    assert weights["bytes"] == file.stat().st_size - header and weights["stored"]
    assert (cache["bytes_per_token_layer"], cache["bytes_per_token"]) == (656, 6 * 656)
    assert cache["step_cache_bytes_read"] == 1000 * 6 * 656
    assert cache["tokens_that_fit"] == (10**9 - weights["bytes"] + weights["mtp_bytes"]) // (6 * 656)
    assert cache["step_floor_ms"] == pytest.approx(cache["step_bytes_read"] / 0.05e12 * 1e3)
    # Two of six experts are read, nothing of the MTP layer, and the whole embedding as the LM head.
    experts = next(row for row in weights["formats"] if row["part"] == "experts")["nbytes"]
    rest = weights["bytes"] - weights["mtp_bytes"] - experts
    assert facts["decode"]["weight_bytes_read"] == pytest.approx(rest + experts / 3 + 768, abs=2)
    assert facts["decode"]["experts_read_per_layer"] == pytest.approx(2.0)


def test_the_founding_model_from_its_configuration_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """GLM-5: bytes per token as counted from the engines' sources, 744 B parameters, topk rows and index rows a step."""
    facts = inspect(capsys, configured(tmp_path), "--context", "100000", "--memory", "2000")
    layouts = by_layout(facts)
    assert layouts["fp8_ds_mla"]["bytes_per_token"] == 61_464
    assert layouts["fp8_e4m3"]["bytes_per_token"] == 44_928 + 10_296
    assert layouts["bf16"]["bytes_per_token"] == 89_856 + 19_968
    assert layouts["fp8_ds_mla"]["step_cache_bytes_read"] == 78 * (2048 * 656 + 100_000 * 132)
    assert facts["weights"]["parameters"] == pytest.approx(744e9, rel=1e-3) and not facts["weights"]["stored"]
    assert "bytes are implied by config.json, all in BF16" in facts["notes"][0]


def test_shared_indexers_have_no_cache_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """GLM-5.2: 21 of 78 layers are full, by the pattern or by the list."""
    facts = inspect(capsys, configured(tmp_path, index_topk_freq=4, index_skip_topk_offset=3))
    assert by_layout(facts)["fp8_ds_mla"]["bytes_per_token"] == 53_940
    kinds = ["full" if index in facts["architecture"]["indexer"]["full_layers"] else "shared" for index in range(78)]
    assert kinds.count("full") == 21
    again = inspect(capsys, configured(tmp_path, indexer_types=kinds))
    assert again["cache"] == facts["cache"]


def test_nvfp4_of_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "exclude_modules": ["*self_attn*", "lm_head"]}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": settings}))
    facts = inspect(capsys, configured(tmp_path))
    experts = next(row for row in facts["weights"]["formats"] if row["part"] == "experts")
    assert list(experts["formats"]) == ["NVFP4"] and experts["layers"] == list(range(3, 78))
    assert experts["nbytes"] / experts["parameters"] == pytest.approx(9 / 16, rel=1e-3)
    assert "holds no scale for it" in facts["notes"][1]


def test_weights_that_cannot_be_loaded_are_shown_and_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = inspect(capsys, configured(tmp_path, quantization_config={"quant_method": "awq"}))
    assert facts["notes"][0].startswith("uncast cannot load these weights: quantization method 'awq' is not supported")


def test_fp8_blocks_of_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    facts = inspect(capsys, configured(tmp_path, quantization_config=settings))
    rows = {row["part"]: row for row in facts["weights"]["formats"]}
    assert rows["experts"]["nbytes"] == rows["experts"]["parameters"] * (1 + 4 / 128**2)
    assert list(rows["router"]["formats"]) == ["BF16"]


def test_the_tables_fit_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "tiny-glm", "--memory", "0.001", "--bandwidth", "4.8"]) == 0
    out = capsys.readouterr().out
    assert "1 x 2,048 rows" in out  # less than the default context
    assert "too little for the weights" in out and "FP8 blocks" in out
    (line,) = [line for line in out.splitlines() if line.startswith("fp8_ds_mla")]
    assert line.split()[1:4] == ["656", "3,936", "0"]


@pytest.mark.parametrize(
    ("options", "code", "sentence"),
    [
        (["/nowhere"], 2, "/nowhere is neither a folder with a model in it nor a GGUF file"),
        (["tiny-glm", "--memory", "0"], 2, "memory is 0.0: allowed is above 0"),
        (["tiny-glm", "--bandwidth", "nan"], 2, "bandwidth is nan: allowed is above 0"),
        (["tiny-glm", "--batch", "0"], 2, "batch is 0: allowed is 1 to"),
        (["tiny-glm", "--context", "9999999"], 2, "context is 9999999: this model's is 2048"),
        (["{tmp}"], 2, "cannot read"),
    ],
)
def test_bad_input_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], code: int, sentence: str
) -> None:
    assert main(["inspect", *[option.replace("{tmp}", str(tmp_path)) for option in options]]) == code
    captured = capsys.readouterr()
    assert sentence in captured.err and captured.err.count("\n") == 1 and captured.out == ""


def test_a_model_that_is_not_supported_is_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(configured(tmp_path, model_type="llama"))]) == 2
    assert "model_type 'llama' is not supported" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("weight_map", "sentence"),
    [
        ({"model.norm.weight": "model-00002-of-00002.safetensors"}, "00002.safetensors: No such file"),
        ({}, "has no weight_map of tensor names to files"),
        ([1], "has no weight_map of tensor names to files"),
    ],
)
@pytest.mark.parametrize("command", [["inspect"], ["generate", "x", "--model"]])
def test_a_missing_shard_or_a_broken_index_is_damage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str], weight_map: object, sentence: str
) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((BUNDLED["tiny-glm"] / name).read_bytes())
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert main([*command, str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert sentence in captured.err and captured.err.count("\n") == 1 and captured.out == ""


def test_damaged_weights_are_one_sentence_and_exit_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configured(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
    assert main(["inspect", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert "cannot open" in captured.err and captured.err.count("\n") == 1
