"""Checkpoints on disk: FP8 blocks, and one sentence for everything that can be wrong."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints.packed_files import WEIGHTS, edit_config, edit_tensors, to_fp8_blocks
from tests.models.helpers import step
from uncast.checkpoints.files import CheckpointError
from uncast.checkpoints.load import load_config, load_model
from uncast.latent.layouts import row_layout
from uncast.latent.pool import PagedPool

pytestmark = pytest.mark.filterwarnings("ignore::uncast.attention.ClaimedCapabilityWarning")

KV_A = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"


def logits(folder: Path) -> torch.Tensor:
    model = load_model(folder)
    pool = PagedPool(row_layout("fp32"), num_layers=model.config.num_layers, num_pages=2)
    return step(model, pool, [1, 0], torch.arange(70), start=0)


def test_fp8_blocks_load_as_the_values_they_stand_for(folder: Path) -> None:
    meant = to_fp8_blocks(folder)
    assert load_file(folder / WEIGHTS)[f"{KV_A}_scale_inv"].shape == (5, 2), "576 rows: the last block is partial"
    from_fp8 = logits(folder)
    edit_config(folder, quantization_config=...)
    tensors = {k: v for k, v in load_file(folder / WEIGHTS).items() if not k.endswith("_scale_inv")}
    save_file({**tensors, **meant}, folder / WEIGHTS)
    assert torch.equal(from_fp8, logits(folder))


def test_shards_load_as_one_file_does(folder: Path) -> None:
    expected, tensors = logits(folder), load_file(folder / WEIGHTS)
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, held in parts.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    (folder / WEIGHTS).unlink()
    index = {"weight_map": {name: file for file, held in parts.items() for name in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(expected, logits(folder))

    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"cannot read .*model-00002-of-00002.safetensors"):
        load_model(folder)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    edit_tensors(folder, **{KV_A: None})
    with pytest.raises(CheckpointError, match=f"has no tensor {KV_A}"):
        load_model(folder)


def test_a_wrong_shape_is_named(folder: Path) -> None:
    edit_tensors(folder, **{KV_A: torch.zeros(575, 256)})
    with pytest.raises(CheckpointError, match=rf"{KV_A} .* has shape \[575, 256\]: \[576, 256\] is needed"):
        load_model(folder)


def test_an_integer_weight_is_refused(folder: Path) -> None:
    edit_tensors(folder, **{KV_A: torch.zeros(576, 256, dtype=torch.int8)})
    with pytest.raises(CheckpointError, match=r"is torch.int8: BF16, FP16, FP32 and FP8 e4m3 are read"):
        load_model(folder)


@pytest.mark.parametrize("scale", [None, torch.ones(4, 2)])
def test_a_missing_or_wrong_block_scale_is_named(folder: Path, scale: torch.Tensor | None) -> None:
    to_fp8_blocks(folder)
    edit_tensors(folder, **{f"{KV_A}_scale_inv": scale})
    sentence = "is missing" if scale is None else r"has shape \[4, 2\]: a 576 x 256 weight needs \[5, 2\]"
    with pytest.raises(CheckpointError, match=f"{KV_A}_scale_inv .*{sentence}"):
        load_model(folder)


def test_a_truncated_file_is_one_sentence(folder: Path) -> None:
    whole = (folder / WEIGHTS).read_bytes()
    for size in (0, 5, 100, len(whole) // 2, len(whole) - 1):
        (folder / WEIGHTS).write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"cannot (open|read) .*model.safetensors"):
            load_model(folder)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model_type": "llama"}, "model_type 'llama' is not supported: use one of deepseek_v2, .*glm4_moe_lite"),
        ({"model_type": ...}, "config.json has no model_type"),
        ({"kv_lora_rank": -4}, "kv_lora_rank = -4: a positive integer is needed"),
        ({"kv_lora_rank": "512"}, "kv_lora_rank = '512': a positive integer is needed"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu': only 'silu' is supported"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1.0}}, "rope type 'dynamic' is not supported"),
        ({"rope_parameters": ...}, "neither rope_parameters.rope_theta nor rope_theta"),
        ({"num_experts_per_tok": 9}, "chooses 9 of 8 experts"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization method 'awq' is not supported"),
    ],
)
def test_an_unsupported_config_is_one_sentence(folder: Path, changes: dict[str, Any], sentence: str) -> None:
    edit_config(folder, **changes)
    with pytest.raises(CheckpointError, match=sentence):
        load_model(folder)


def test_files_that_are_not_what_they_should_be(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a folder"):
        load_model(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match=r"cannot read .*config.json: No such file"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="holds JSON of type list, not an object"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not JSON"):
        load_model(tmp_path)


def test_a_folder_without_weights_is_one_sentence(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match=r"has neither model.safetensors nor model.safetensors.index.json"):
        load_model(folder)


def test_k_scale_of_the_checkpoint_sets_both_scales(folder: Path) -> None:
    edit_tensors(folder, **{"model.layers.0.self_attn.k_proj.k_scale": torch.tensor(0.25)})
    layers = load_model(folder).layers
    assert layers[0].attention.ckv_scale == layers[0].attention.kpe_scale == 0.25
    assert layers[1].attention.ckv_scale is None
    edit_tensors(folder, **{"model.layers.0.self_attn.k_proj.k_scale": torch.tensor(float("nan"))})
    with pytest.raises(CheckpointError, match="is not one positive finite number"):
        load_model(folder)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), 7])
def test_a_senseless_block_scale_is_named(folder: Path, value: float) -> None:
    to_fp8_blocks(folder)
    edit_tensors(folder, **{f"{KV_A}_scale_inv": torch.full((5, 2), value)})
    with pytest.raises(CheckpointError, match=f"{KV_A}_scale_inv .*(positive finite|floating-point) numbers"):
        load_model(folder)


@pytest.mark.parametrize(
    ("quantization", "sentence"),
    [
        ("x", "quantization_config = 'x': a JSON object is needed"),
        ([], r"quantization_config = \[\]: a JSON object is needed"),
        ({"quant_method": ["fp8"]}, r"quant_method = \['fp8'\]: a string is needed"),
        ({"quant_method": "fp8", "weight_block_size": 5}, "weight_block_size = 5: a list of 2 integers"),
        ({"quant_method": "fp8", "weight_block_size": [True, 128]}, "a list of 2 integers"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "a list of 2 integers"),
    ],
)
def test_a_senseless_quantization_is_one_sentence(folder: Path, quantization: object, sentence: str) -> None:
    edit_config(folder, quantization_config=quantization)
    with pytest.raises(CheckpointError, match=sentence):
        load_model(folder)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", WEIGHTS, "model.safetensors.index.json"])
def test_only_regular_files_are_read(folder: Path, name: str) -> None:
    """A pipe would hang, a device never end, a folder or a circle of links must not look like an absent file."""
    path = folder / name
    for make in (os.mkfifo, os.mkdir, lambda p: os.symlink(p, p), lambda p: os.symlink("/dev/zero", p)):
        path.unlink(missing_ok=True) if not path.is_dir() else path.rmdir()
        make(path)
        with pytest.raises(CheckpointError, match=f"cannot read .*{name}: "):
            load_model(folder)


@pytest.mark.parametrize(
    "raw", [b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe{}", b'{"vocab_size":' + b"9" * 5000 + b"}", b""]
)
def test_any_bytes_of_a_config_are_one_sentence(folder: Path, raw: bytes) -> None:
    (folder / "config.json").write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"is not (JSON|UTF-8)"):
        load_config(folder)


def test_end_tokens_of_both_files_count(folder: Path) -> None:
    edit_config(folder, eos_token_id=7)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert load_config(folder).stop_token_ids == (7, 9)
    edit_config(folder, eos_token_id=...)
    assert load_config(folder).stop_token_ids == (7, 9)
    for bad in ("true", "-1", "[512]", '"7"', "[null]"):
        (folder / "generation_config.json").write_text(f'{{"eos_token_id": {bad}}}')
        with pytest.raises(
            CheckpointError, match=r"generation_config.json has eos_token_id = .* from 0 to 511 is needed"
        ):
            load_config(folder)


@pytest.mark.parametrize("packed", [False, True])
def test_a_device_gets_its_tensors_and_nothing_stays_behind(packed: bool, folder: Path) -> None:
    """The device `meta` stands for a GPU: what is not moved there is left on the host, where no operation would find it."""
    if packed:
        to_fp8_blocks(folder)
    model = load_model(folder, dtype=torch.bfloat16, device="meta")
    found: list[str] = []

    def walk(value: object, where: str) -> None:
        if isinstance(value, torch.Tensor):
            found.append(value.device.type)
            assert value.device.type == "meta", where
        elif isinstance(value, list):
            for index, item in enumerate(value):
                walk(item, f"{where}[{index}]")
        elif type(value).__module__.startswith("uncast") and hasattr(value, "__dict__"):
            for name, item in vars(value).items():
                walk(item, f"{where}.{name}")

    walk(model, "model")
    assert len(found) >= 40
