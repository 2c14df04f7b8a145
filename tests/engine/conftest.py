"""One tiny random model for all engine tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_model import build_model_folder
from uncast.checkpoints.bundled import BUNDLED
from uncast.checkpoints.load import load_model
from uncast.engine.tokenizer import Tokenizer
from uncast.models.decoder import MLADecoder


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def model(folder: Path) -> MLADecoder:
    return load_model(folder)


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


@pytest.fixture(scope="session")
def glm() -> MLADecoder:
    """The bundled model with its MTP layer."""
    return load_model(BUNDLED["tiny-glm"], mtp=True)


@pytest.fixture(scope="session")
def words() -> Tokenizer:
    return Tokenizer(BUNDLED["tiny-glm"])
