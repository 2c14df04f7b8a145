"""Indexers of a checkpoint: read from full layers, in 16 bits or FP8 blocks, and one sentence for what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.checkpoints.packed_files import edit_tensors, to_fp8_blocks
from tests.fixtures import build_hf
from tests.models.helpers import fp32_pool, relative, step
from uncast.checkpoints.files import CheckpointError
from uncast.checkpoints.load import load_model

pytestmark = pytest.mark.filterwarnings("ignore::uncast.attention.ClaimedCapabilityWarning")

FIRST = "model.layers.0.self_attn.indexer."


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    build_hf("glm_moe_dsa_52", tmp_path, num_hidden_layers=2, index_topk_pattern="FS")
    return tmp_path


def test_fp8_blocks_of_an_indexer_load_as_the_values_they_stand_for(folder: Path) -> None:
    meant = to_fp8_blocks(folder)
    assert {FIRST + "wq_b.weight", FIRST + "wk.weight"} <= set(meant)
    ids = torch.arange(40)
    packed, dense = (
        step(model, fp32_pool(model.config, 5), list(range(5)), ids, start=0)
        for model in (load_model(folder), load_model(folder, keep_packed=False))
    )
    assert relative(packed, dense) < 1e-5
    weights = load_model(folder, keep_packed=False).layers[0].attention.indexer
    assert weights is not None and torch.equal(weights.q_b, meant[FIRST + "wq_b.weight"])
    assert weights.weights.dtype == torch.float32


@pytest.mark.parametrize("name", ["wq_b.weight", "wk.weight", "k_norm.bias", "weights_proj.weight"])
def test_a_missing_part_is_named_and_a_shared_layer_needs_none(folder: Path, name: str) -> None:
    assert load_model(folder).layers[1].attention.indexer is None
    edit_tensors(folder, **{FIRST + name: None})
    with pytest.raises(CheckpointError, match=f"has no tensor {FIRST}{name}"):
        load_model(folder)


def test_a_wrong_shape_is_named(folder: Path) -> None:
    edit_tensors(folder, **{FIRST + "wk.weight": torch.zeros(64, 256)})
    with pytest.raises(CheckpointError, match=r"indexer\.wk\.weight .* has shape \[64, 256\]: \[128, 256\] is needed"):
        load_model(folder)


def test_head_weights_stay_float32_in_a_16_bit_model(folder: Path) -> None:
    weights = load_model(folder, dtype=torch.bfloat16).layers[0].attention.indexer
    assert weights is not None and weights.weights.dtype == torch.float32 and weights.k_norm.dtype == torch.bfloat16
