"""Headers that do not fit. A failure means that `inspect` describes what cannot be loaded, or refuses a good checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.checkpoints.packed_files import (
    GLM_5,
    V32,
    WEIGHTS,
    edit_tensors,
    to_compressed_tensors,
    to_fp8_blocks,
    to_modelopt,
)
from tests.fixtures import FAMILIES, build_hf
from uncast.cli.main import main
from uncast.engine.survey import survey

UP = "model.layers.1.mlp.experts.3.up_proj"


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_good_folders_pass(family: str, tmp_path: Path) -> None:
    build_hf(family, tmp_path, num_hidden_layers=3)
    assert survey(tmp_path).stored


@pytest.mark.parametrize("excluded", [GLM_5, V32])
def test_good_packed_folders_pass(folder: Path, excluded: list[str]) -> None:
    before = (folder / WEIGHTS).read_bytes()
    to_modelopt(folder, excluded)
    assert survey(folder).stored
    (folder / WEIGHTS).write_bytes(before)
    to_compressed_tensors(folder, excluded)
    assert survey(folder).stored


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"weight_scale": None}, f"{UP}.weight_scale is missing"),
        ({"weight_scale_2": None}, f"{UP}.weight_scale_2 is missing"),
        ({"weight": torch.zeros(128, 64, dtype=torch.uint8)}, "shape [128, 64]: [128, 128] is needed"),
        ({"weight_scale": torch.ones(128, 8).to(torch.float8_e4m3fn)}, "shape [128, 8]: [128, 16] is needed"),
    ],
)
def test_inspect_names_a_missing_scale_or_a_wrong_shape_and_exits_1(
    folder: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, torch.Tensor | None], sentence: str
) -> None:
    to_modelopt(folder, GLM_5)
    edit_tensors(folder, **{f"{UP}.{part}": value for part, value in changes.items()})
    assert main(["inspect", str(folder)]) == 1
    captured = capsys.readouterr()
    assert sentence in captured.err and captured.err.count("\n") == 1 and captured.out == ""


@pytest.mark.parametrize(
    "part", ["self_attn.o_proj.weight", "self_attn.kv_a_layernorm.weight", "input_layernorm.weight"]
)
def test_a_missing_tensor_is_named(folder: Path, capsys: pytest.CaptureFixture[str], part: str) -> None:
    name = f"model.layers.1.{part}"
    edit_tensors(folder, **{name: None})
    assert main(["inspect", str(folder)]) == 1
    assert f"has no tensor {name}" in capsys.readouterr().err


def test_a_dense_tensor_of_another_shape_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit_tensors(folder, **{"model.layers.1.self_attn.o_proj.weight": torch.zeros(256, 1000)})
    assert main(["inspect", str(folder)]) == 1
    assert "o_proj.weight" in (error := capsys.readouterr().err) and "has shape [256, 1000]: [256, 1024]" in error


def test_fp8_blocks_pass_with_their_scales_and_not_without(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    to_fp8_blocks(folder)
    assert survey(folder).stored
    name = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight_scale_inv"
    edit_tensors(folder, **{name: torch.ones(4, 2)})
    assert main(["inspect", str(folder)]) == 1 and "has shape [4, 2]: [5, 2] is needed" in capsys.readouterr().err
    edit_tensors(folder, **{name: None})
    assert main(["inspect", str(folder)]) == 1 and f"{name} is missing" in capsys.readouterr().err
