"""Inventories against the files that transformers writes: names, formats, bytes, and what a configuration implies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.fixtures import FAMILIES, build_hf
from uncast.checkpoints.files import CheckpointError
from uncast.checkpoints.implied import implied_tensors
from uncast.checkpoints.inventory import Tensor, modules, place, read_headers
from uncast.checkpoints.quantization import Quantization
from uncast.models.config import ModelConfig


def header_bytes(path: Path) -> int:
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_configuration_implies_the_tensors_that_transformers_writes(family: str, tmp_path: Path) -> None:
    build_hf(family, tmp_path, max_shard_size="300KB", num_hidden_layers=3)
    stored = read_headers(tmp_path)
    config = ModelConfig.from_hf(json.loads((tmp_path / "config.json").read_text()))
    implied = implied_tensors(config, Quantization())
    assert {t.name: t.shape for t in implied} == {t.name: t.shape for t in stored}
    files = list(tmp_path.glob("*.safetensors"))
    assert len(files) > 1
    total = sum(file.stat().st_size - header_bytes(file) for file in files)
    assert sum(t.nbytes for t in stored) == total == sum(m.nbytes for m in modules(stored, 3))


def parts(**tensors: tuple[str, tuple[int, ...]]) -> list[Tensor]:
    return [Tensor(f"model.layers.1.mlp.up_proj.{name}", dtype, shape) for name, (dtype, shape) in tensors.items()]


@pytest.mark.parametrize(
    ("stored", "words", "parameters"),
    [
        (parts(weight=("BF16", (8, 32))), "BF16", 256),
        (parts(weight=("F8_E4M3", (8, 32)), weight_scale_inv=("F32", (1, 1))), "FP8 blocks", 256),
        (parts(weight=("F8_E4M3", (8, 32)), weight_scale=("F32", ())), "FP8 per tensor", 256),
        (parts(weight=("F8_E4M3", (8, 32)), weight_scale=("BF16", (8, 1))), "FP8 per channel", 256),
        (
            parts(weight=("U8", (8, 16)), weight_scale=("F8_E4M3", (8, 2)), weight_scale_2=("F32", ())),
            "NVFP4",
            256,
        ),
        (
            parts(
                weight_packed=("U8", (8, 16)), weight_scale=("F8_E4M3", (8, 2)), weight_global_scale=("F32", (1,))
            ),
            "NVFP4",
            256,
        ),
        (parts(weight_packed=("I32", (8, 4)), weight_scale=("BF16", (8, 1)), weight_shape=("I64", (2,))), "INT4 packed", 256),
        (parts(k_scale=("F32", ())), "KV scale", 0),
    ],
)  # fmt: skip
def test_formats_by_what_is_stored(stored: list[Tensor], words: str, parameters: int) -> None:
    (module,) = modules(stored, 2)
    assert (module.format, module.parameters, module.layer, module.part) == (words, parameters, 1, "dense MLP")
    assert module.nbytes == sum(t.nbytes for t in stored)


def test_parts_are_found_by_name() -> None:
    for name, expected in {
        "model.embed_tokens": (None, "embedding"),
        "lm_head": (None, "LM head"),
        "model.language_model.layers.3.self_attn.q_a_proj": (3, "attention"),
        "model.layers.12.self_attn.indexer.wk": (12, "indexer"),
        "model.layers.12.mlp.experts.255.up_proj": (12, "experts"),
        "model.layers.12.mlp.shared_experts.up_proj": (12, "shared experts"),
        "model.layers.12.mlp.gate": (12, "router"),
        "model.layers.12.mlp.gate_proj": (12, "dense MLP"),
        "model.layers.12.post_attention_layernorm": (12, "norms"),
        "model.layers.20.eh_proj": (20, "MTP"),
    }.items():
        assert place(name, 20) == expected


def test_nvfp4_settings_are_followed_with_their_exclusions() -> None:
    raw: dict[str, Any] = {**FAMILIES["deepseek_v3"], "num_hidden_layers": 3, "rms_norm_eps": 1e-6}
    config = ModelConfig.from_hf(raw)
    declared = Quantization("nvfp4", ("*self_attn*", "model.layers.1.mlp*"))
    found = modules(implied_tensors(config, declared), 3)
    by_format = {(m.layer, m.part): m.format for m in found if m.layer is not None}
    assert by_format[1, "attention"] == by_format[2, "attention"] == "BF16"
    assert by_format[1, "experts"] == "BF16" and by_format[2, "experts"] == "NVFP4" and by_format[2, "router"] == "BF16"
    (expert,) = [m for m in found if m.name.endswith("layers.2.mlp.experts.0.up_proj")]
    rows, columns = raw["moe_intermediate_size"], raw["hidden_size"]
    assert expert.nbytes == rows * columns // 2 + rows * columns // 16 + 8


def test_missing_and_damaged_shards_are_one_sentence(tmp_path: Path) -> None:
    save_file({"model.norm.weight": torch.ones(4)}, tmp_path / "a.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"b\.safetensors"):
        read_headers(tmp_path)
    (tmp_path / "b.safetensors").write_bytes(b"\x10" * 12)
    with pytest.raises(CheckpointError, match=r"cannot open .*b\.safetensors"):
        read_headers(tmp_path)
    index.write_text(json.dumps({"weight_map": [1]}))
    with pytest.raises(CheckpointError, match="has no weight_map"):
        read_headers(tmp_path)
