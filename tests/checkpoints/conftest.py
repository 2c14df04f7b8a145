"""A random GLM-4.7-Flash of two layers, as transformers saves it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fixtures import build_hf


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("glm")
    build_hf("glm4_moe_lite", folder, num_hidden_layers=2)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path
