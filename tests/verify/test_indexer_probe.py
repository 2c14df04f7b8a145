"""The indexer's probe: what is right passes, and each way to be wrong is named before a model is served."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.fixtures import build_hf
from uncast.attention import Problem, ProblemSpec
from uncast.backends.lightning_indexer import select_tokens
from uncast.checkpoints.load import load_model
from uncast.engine.runner import ModelRunner, RunnerError
from uncast.latent.index_keys import IndexLayout, index_layout
from uncast.verify import indexer_probe
from uncast.verify.indexer_probe import probe_indexer

SPEC = ProblemSpec(
    num_heads=4, page_size=16, kv_layout="fp8_ds_mla", q_data_type=torch.float32, topk=40, max_q_len=8, device="cpu"
)
Fault = Callable[[torch.Tensor, torch.Tensor], None]


@pytest.mark.parametrize("name", ["fp8", "bf16", "fp32"])
@pytest.mark.parametrize(("topk", "page", "q_len"), [(1, 1, 1), (40, 16, 8), (2048, 64, 8)])
def test_the_indexer_selects_as_its_oracle(name: str, topk: int, page: int, q_len: int) -> None:
    spec = replace(SPEC, topk=topk, page_size=page, max_q_len=q_len, q_data_type=torch.bfloat16)
    assert probe_indexer("torch_cpu", spec, 32, index_layout(name)) == ""


def drops_one(got: torch.Tensor, _: torch.Tensor) -> None:
    got[-1, 3] = -1


def takes_one_twice(got: torch.Tensor, _: torch.Tensor) -> None:
    got[-1, 3] = got[-1, 4]


def looks_ahead(got: torch.Tensor, _: torch.Tensor) -> None:
    got[1, 0] = 1


def takes_a_bad_one(got: torch.Tensor, _: torch.Tensor) -> None:
    missing = (set(range(80)) - set(got[-1].tolist())).pop()
    got[-1, 3] = missing


def writes(_: torch.Tensor, cache: torch.Tensor) -> None:
    cache[-1, -1, -1] += 1


def never_the_same(got: torch.Tensor, _: torch.Tensor) -> None:
    got[-1] = got[-1][torch.randperm(got.shape[1])]


def patch(monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    def broken(
        q: torch.Tensor, weights: torch.Tensor, cache: torch.Tensor, problem: Problem, layout: IndexLayout
    ) -> torch.Tensor:
        got = select_tokens(q, weights, cache, problem, layout)
        fault(got, cache)
        return got

    monkeypatch.setattr(indexer_probe, "select_tokens", broken)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (drops_one, "not 40 different tokens"),
        (takes_one_twice, "not 40 different tokens"),
        (looks_ahead, "selects token 1 and may see 1"),
        (takes_a_bad_one, "with score"),
        (writes, "writes to the index cache"),
        (never_the_same, "the same tokens in the same order"),
    ],
)
def test_each_fault_is_named(fault: Fault, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patch(monkeypatch, fault)
    found = probe_indexer("torch_cpu", SPEC, 32, index_layout("fp8"))
    assert found.startswith("the lightning indexer differs from its oracle: ") and words in found


def test_a_model_is_not_served_with_a_broken_indexer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_hf("deepseek_v32", tmp_path, num_hidden_layers=2)
    model = load_model(tmp_path)
    ModelRunner(model, num_pages=4)
    patch(monkeypatch, drops_one)
    with pytest.raises(RunnerError, match="the lightning indexer differs from its oracle"):
        ModelRunner(model, num_pages=4)
