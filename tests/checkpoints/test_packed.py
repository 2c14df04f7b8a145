"""NVFP4 checkpoints of modelopt and compressed-tensors. A failure means that published checkpoints are read wrongly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints.packed_files import (
    GLM_5,
    GLM_52,
    V32,
    WEIGHTS,
    edit_config,
    edit_tensors,
    quantize,
    to_compressed_tensors,
    to_modelopt,
)
from tests.models.helpers import step
from uncast.checkpoints.files import CheckpointError, DamagedCheckpoint
from uncast.checkpoints.load import load_model
from uncast.checkpoints.quantization import Quantization, read_quantization
from uncast.latent.layouts import row_layout
from uncast.latent.pool import PagedPool
from uncast.models.layers import ExpertStack, MoE
from uncast.quant.packed import Nvfp4

pytestmark = pytest.mark.filterwarnings("ignore::uncast.attention.ClaimedCapabilityWarning")

UP = "model.layers.1.mlp.experts.3.up_proj"


def logits(folder: Path, **options: object) -> torch.Tensor:
    model = load_model(folder, **options)  # type: ignore[arg-type]
    pool = PagedPool(row_layout("fp32"), num_layers=model.config.num_layers, num_pages=2)
    return step(model, pool, [1, 0], torch.arange(70), start=0)


def dense_again(folder: Path, meant: dict[str, torch.Tensor]) -> None:
    """The folder with the values themselves in place of their packed form."""
    parts = ("_scale", "_scale_2", "_packed", "_global_scale", "input_scale")
    tensors = {k: v for k, v in load_file(folder / WEIGHTS).items() if not k.endswith(parts)}
    save_file({**tensors, **meant}, folder / WEIGHTS)
    edit_config(folder, quantization_config=...)
    (folder / "hf_quant_config.json").unlink(missing_ok=True)


@pytest.mark.parametrize("excluded", [GLM_5, GLM_52, V32], ids=["glm-5", "glm-5.2", "v3.2"])
@pytest.mark.parametrize("in_config", [True, False])
def test_modelopt_loads_as_the_values_it_stands_for(folder: Path, excluded: list[str], in_config: bool) -> None:
    meant = to_modelopt(folder, excluded, in_config=in_config)
    assert f"{UP}.weight" in meant
    packed, multiplied_out = logits(folder), logits(folder, keep_packed=False)
    dense_again(folder, meant)
    expected = logits(folder)
    assert torch.equal(packed, expected) and torch.equal(multiplied_out, expected)


def test_what_is_packed_stays_packed(folder: Path) -> None:
    to_modelopt(folder, V32)
    model = load_model(folder)
    moe, attention = model.layers[1].mlp, model.layers[1].attention
    assert isinstance(moe, MoE) and isinstance(moe.experts, ExpertStack) and isinstance(moe.experts.gate_up, Nvfp4)
    assert isinstance(moe.experts[3].down, Nvfp4) and isinstance(attention.o, Nvfp4)
    assert isinstance(attention.q_b, torch.Tensor) and isinstance(attention.w_uk, torch.Tensor)
    assert moe.experts.gate_up.shape == (8, 256, 256)


def test_compressed_tensors_load_as_the_values_they_stand_for(folder: Path) -> None:
    meant = to_compressed_tensors(folder, ["lm_head", "re:.*self_attn.*"])
    assert f"{UP}.weight" in meant and not any("self_attn" in name for name in meant)
    packed = logits(folder)
    dense_again(folder, meant)
    assert float((packed - logits(folder)).abs().max()) < 1e-5, "1 / (1 / x) may differ from x in its last bit"


@pytest.mark.parametrize("cache_bytes", [0, 1 << 20])
def test_any_bound_of_the_cache_gives_the_same_bits(folder: Path, cache_bytes: int) -> None:
    to_modelopt(folder, GLM_5)
    assert torch.equal(logits(folder, cache_bytes=cache_bytes), logits(folder))


def test_globs_match_whole_names() -> None:
    declared = Quantization("nvfp4", ("model.layers.1.*", "model.layers.2*", "lm_head", "re:.*gate$"))
    for module, excluded in {
        "model.layers.1.mlp.up_proj": True,
        "model.layers.10.mlp.up_proj": False,
        "model.layers.20.mlp.up_proj": True,
        "lm_head": True,
        "model.layers.3.mlp.gate": True,
        "model.layers.3.mlp.gate_proj": False,
    }.items():
        assert declared.excludes(module) == excluded, module


def test_settings_of_every_spelling_are_read(tmp_path: Path) -> None:
    group = {"group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}, "targets": ["Linear"]}}
    modelopt = {"quant_algo": "NVFP4", "config_groups": group, "ignore": ["lm_head"], "producer": {"name": "modelopt"}}
    scheme = {"dynamic": False, "num_bits": 8, "type": "float"}
    found = read_quantization(tmp_path, {"quantization_config": {**modelopt, "kv_cache_scheme": scheme}})
    assert found == Quantization("nvfp4", ("lm_head",), fp8_cache=True)
    assert not read_quantization(tmp_path, {"quantization_config": modelopt}).fp8_cache
    ct = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "ignore": [], "config_groups": group}
    assert read_quantization(tmp_path, {"quantization_config": ct}).kind == "nvfp4"
    assert read_quantization(tmp_path, {}) == Quantization()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "quant_algo 'FP8' is not supported: NVFP4"),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32},
            "group_size = 32: only 16 is supported",
        ),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": "lm_head"}, "ignore = 'lm_head': a list of"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["re:("]}, r"ignore with 're:\('"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "format 'pack-quantized' is not supp"),
        ({"quant_method": "compressed-tensors"}, "quantization_config has no format"),
    ],
)
def test_settings_that_are_not_supported_are_one_sentence(tmp_path: Path, settings: object, sentence: str) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        read_quantization(tmp_path, {"quantization_config": settings})


def test_settings_that_the_files_do_not_follow_are_noted(folder: Path) -> None:
    to_modelopt(folder, GLM_5, cache=False)
    plain = torch.zeros(128, 256)
    edit_tensors(folder, **{f"{UP}.weight": plain, f"{UP}.weight_scale": None, f"{UP}.weight_scale_2": None})
    notes: list[str] = []
    model = load_model(folder, note=notes.append)
    assert (
        len(notes) == 1
        and notes[0].startswith("weights that the settings name NVFP4 but that are stored in 16 bits")
        and notes[0].endswith(f"such as {UP}.weight: 1, used as stored")
    )
    moe = model.layers[1].mlp
    assert isinstance(moe, MoE) and isinstance(moe.experts, list), "experts stored in two ways cannot share a tensor"


def test_an_fp8_cache_without_scales_is_noted(folder: Path) -> None:
    to_modelopt(folder, GLM_5)
    notes: list[str] = []
    load_model(folder, note=notes.append)
    assert notes == ["no layer of this checkpoint has a k_scale: layout fp8_e4m3 uses 1.0 there"]
    edit_tensors(folder, **{"model.layers.0.self_attn.k_proj.k_scale": torch.tensor(0.5)})
    notes.clear()
    model = load_model(folder, note=notes.append)
    assert notes == ["1 of 2 layers of this checkpoint have no k_scale: layout fp8_e4m3 uses 1.0 there"]
    assert [layer.attention.ckv_scale for layer in model.layers] == [0.5, None]
    edit_tensors(folder, **{"model.layers.1.self_attn.k_scale": torch.tensor([2.0])})
    notes.clear()
    assert load_model(folder, note=notes.append).layers[1].attention.kpe_scale == 2.0 and not notes


E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"weight_scale": None}, rf"{UP}.weight .* is NVFP4 but {UP}.weight_scale is missing"),
        ({"weight_scale_2": None}, rf"{UP}.weight .* is NVFP4 but {UP}.weight_scale_2 is missing"),
        ({"weight": None}, rf"has no tensor {UP}.weight"),
        (
            {"weight": torch.zeros(128, 64, dtype=torch.uint8)},
            r"shape \[128, 64\]: an NVFP4 weight of 128 x 256 needs \[128, 128\]",
        ),
        ({"weight_scale": torch.ones(128, 8).to(E4M3)}, r"shape \[128, 8\]: 128 x 256 weights need \[128, 16\]"),
        ({"weight_scale": torch.ones(128, 16)}, "weight_scale .* is F32: F8_E4M3 is needed"),
        ({"weight_scale": torch.full((128, 16), float("nan")).to(E4M3)}, "weight_scale .* negative values or NaN"),
        ({"weight_scale": -torch.ones(128, 16).to(E4M3).float().to(E4M3).float()}, "weight_scale .* is F32"),
        ({"weight_scale_2": torch.tensor(0.0)}, "weight_scale_2 .* is not one positive finite number"),
        ({"weight_scale_2": torch.ones(2)}, "weight_scale_2 .* is not one positive finite number"),
    ],
)
def test_damage_is_one_sentence(folder: Path, changes: dict[str, torch.Tensor | None], sentence: str) -> None:
    to_modelopt(folder, GLM_5)
    edit_tensors(folder, **{f"{UP}.{part}": value for part, value in changes.items()})
    with pytest.raises(DamagedCheckpoint, match=sentence):
        load_model(folder)


def test_modelopt_dequantises_to_the_same_bits() -> None:
    """Its own class, where it is installed: the quantiser's codes and the dequantised values."""
    tensor = pytest.importorskip("modelopt.torch.quantization.qtensor.nvfp4_tensor").NVFP4QTensor
    torch.manual_seed(0)
    weight = torch.randn(96, 256) * torch.exp2(torch.randint(-6, 6, (96, 1)).float())
    quantized, scale, double_scale = tensor.quantize(weight, 16)
    mine = Nvfp4(quantized._quantized_data, scale.view(torch.uint8), double_scale.expand(96).clone())
    for dtype in (torch.float32, torch.bfloat16):
        theirs = quantized.dequantize(dtype=dtype, scale=scale, double_scale=double_scale, block_sizes={-1: 16})
        assert torch.equal(mine.dequantize(dtype), theirs)


def test_compressed_tensors_decompresses_to_the_same_bf16_values() -> None:
    nvfp4 = pytest.importorskip("compressed_tensors.compressors.nvfp4")
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    torch.manual_seed(0)
    packed = quantize(torch.randn(64, 256))
    args = QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", group_size=16)
    parts = {
        "weight_packed": packed.codes, "weight_scale": packed.scales.view(E4M3),
        "weight_global_scale": 1.0 / packed.global_scale[:1],
    }  # fmt: skip
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    theirs = nvfp4.NVFP4PackedCompressor.decompress(parts, scheme)["weight"].float()
    mine = packed.dequantize(torch.float32)
    assert float(((mine - theirs).abs() / mine.abs().clamp(min=1e-30)).max()) < 2.0**-7, "bf16 has 8 significant bits"
