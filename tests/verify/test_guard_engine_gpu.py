"""Every path of the engine under the guard on a GPU: the paths of `test_guard_engine`, BF16 weights, native kernels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import uncast
from tests.tiny_model import build_model_folder
from tests.verify.test_guard_engine import PATHS, Walk, _prepared
from uncast.checkpoints.load import load_model
from uncast.engine.tokenizer import Tokenizer
from uncast.models.decoder import MLADecoder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore::uncast.attention.ClaimedCapabilityWarning"),
]
NATIVE, CAST = "native", "pool_cast:native"
Act = Callable[[Walk], Callable[[], object]]


def _model(folder: Path) -> MLADecoder:
    return load_model(folder, device="cuda", dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def model(folder: Path) -> MLADecoder:
    return _model(folder)


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> MLADecoder:
    return _model(build_model_folder(tmp_path_factory.mktemp("sparse"), "glm_moe_dsa_52", index_topk_pattern="FS"))


@pytest.mark.parametrize("kind", ["absorbed", "unabsorbed", "deterministic"])
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.__name__)
def test_every_path_reads_as_stored(path: Act, kind: str, model: MLADecoder, folder: Path) -> None:
    prefill = "auto" if kind == "deterministic" else kind
    model = MLADecoder(model.config, model.embed, model.layers, model.final_norm, model.lm_head, prefill)
    act, pool = _prepared(path, Walk(model, Tokenizer(folder), NATIVE, kind == "deterministic"))
    with uncast.guard(watch=[pool]):
        act()
    torch.cuda.synchronize()


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.__name__)
def test_every_path_of_sparse_attention_reads_as_stored(path: Act, sparse: MLADecoder, folder: Path) -> None:
    act, pool = _prepared(path, Walk(sparse, Tokenizer(folder), NATIVE))
    with uncast.guard(watch=[pool]):
        act()
    torch.cuda.synchronize()


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.__name__)
def test_every_path_catches_pool_cast(path: Act, model: MLADecoder, folder: Path) -> None:
    act, pool = _prepared(path, Walk(model, Tokenizer(folder), CAST))
    with pytest.raises(uncast.CastError, match=r"backends/_recast\.py:\d+"), uncast.guard(watch=[pool]):
        act()
