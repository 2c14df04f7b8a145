"""One tiny random model for all engine tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.tiny_model import build_model_folder
from uncast.checkpoints.load import load_model
from uncast.engine.tokenizer import Tokenizer
from uncast.models.decoder import MLADecoder


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Sums are split in the same way on every machine, whatever a test before has asked for."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def model(folder: Path) -> MLADecoder:
    return load_model(folder)


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder)
