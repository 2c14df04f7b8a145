"""How many tokens a step of `uncast serve` has, by the machine and the model."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch

from uncast.cli.serve import _step_tokens
from uncast.engine.core import EngineConfig


@pytest.mark.parametrize(
    ("gib", "indexer", "asked", "running", "tokens"),
    [
        (None, None, None, 64, EngineConfig.max_step_tokens), (24, None, None, 64, 2048), (80, None, None, 64, 8192),
        (141, object(), None, 64, 2048), (141, None, 100, 64, 100), (24, None, None, 4000, 4000),
    ],
)  # fmt: skip
def test_step_tokens(
    gib: int | None,
    indexer: object,
    asked: int | None,
    running: int,
    tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gib is not None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=(gib or 0) << 30)
    )
    args, config = Namespace(max_step_tokens=asked, max_running=running), SimpleNamespace(indexer=indexer)
    assert _step_tokens(args, config) == tokens  # type: ignore[arg-type]
