"""What the benchmarks of whole engines compute without an engine: weights, times of steps, states of processes.

A failure means that two engines of one comparison would not see the same model, or that a table shows another time than the one
measured.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_weights_depend_on_names_alone() -> None:
    import engine_models

    def model() -> torch.nn.Module:
        made = torch.nn.ModuleDict({n: torch.nn.Linear(256, 256) for n in ("q_b_proj", "o_proj")})
        made["norm"] = torch.nn.LayerNorm(256)
        made.register_buffer("k_scale", torch.tensor(3.0))
        return made

    first, second = model(), model()
    for made in (first, second):
        engine_models.draw_weights(made)
    state = first.state_dict()
    assert all(torch.equal(value, second.state_dict()[name]) for name, value in state.items())
    assert not torch.equal(state["q_b_proj.weight"], 3 * state["o_proj.weight"])
    assert state["q_b_proj.weight"].std() == pytest.approx(0.09, rel=0.02)
    assert state["o_proj.weight"].std() == pytest.approx(0.03, rel=0.02)
    assert state["norm.weight"].eq(1).all() and state["o_proj.bias"].eq(0).all() and state["k_scale"] == 3


@pytest.mark.parametrize("model", ["glm", "v2lite"])
def test_transformers_knows_the_configs(model: str, tmp_path: Path) -> None:
    import engine_models
    from transformers import AutoConfig

    (tmp_path / "config.json").write_text(json.dumps(engine_models.model_config(model, 3)))
    config = AutoConfig.from_pretrained(tmp_path)
    assert (config.num_hidden_layers, config.kv_lora_rank, config.qk_rope_head_dim) == (3, 512, 64)
    prompts = engine_models.prompts(model, 2, 5)
    assert prompts == engine_models.prompts(model, 2, 5) and max(map(max, prompts)) < config.vocab_size


class _Event:
    """A CUDA event whose time is when it was recorded, in steps."""

    now = 0.0

    def __init__(self, enable_timing: bool = False) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = _Event.now

    def elapsed_time(self, end: _Event) -> float:
        return end.at - self.at


def test_recorder_keeps_the_first_long_run_of_each_batch_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sglang_server
    from engine_models import FORCED_TOKEN, LOGIT_STEP

    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(sglang_server.time, "perf_counter", lambda: _Event.now / 1e3)
    recorder = sglang_server.StepRecorder(tmp_path)
    seen: list[torch.Tensor] = []

    def step(batch_size: int, decode: bool, took: float) -> None:
        def forward(_: Any, batch: Any) -> Any:
            _Event.now += took
            seen.append(torch.full((batch.batch_size, 64), float(len(seen))))
            return SimpleNamespace(logits_output=SimpleNamespace(next_token_logits=seen[-1]))

        mode = SimpleNamespace(is_decode=lambda: decode)
        recorder.forward(forward, None, SimpleNamespace(forward_mode=mode, batch_size=batch_size))

    step(1, False, 5)
    for _ in range(3):
        step(1, True, 9)  # a health check's
    step(1, False, 5)
    before = len(seen)
    for _ in range(40):
        step(1, True, 2)
    step(1, False, 5)
    for _ in range(40):
        step(1, True, 7)  # asked for again, as for a profile
    step(1, False, 5)
    wall, gpu, steps = json.loads((tmp_path / "steps.json").read_text())["1"]
    assert (wall, gpu, steps) == (pytest.approx(2), 2, 40 - LOGIT_STEP - 1)
    kept = torch.load(tmp_path / "logits-1.pt")
    assert kept.eq(before + LOGIT_STEP - 1).all(), "the logits are the model's, before a token was forced"
    assert all(one.argmax(-1).eq(FORCED_TOKEN).all() for one in seen[: before + 40])


def test_states_of_engines() -> None:
    import vllm_engine

    command = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"]
    process = subprocess.Popen(command)
    try:
        assert vllm_engine.wait_for({"one": process}, 600)["one"] == "stopped"
        assert vllm_engine.wait_for({"one": process}, 0.2)["one"] == "running"
        process.send_signal(signal.SIGCONT)
        assert vllm_engine.wait_for({"one": process}, 600)["one"] == "ended"
    finally:
        process.kill()
        process.wait()
    assert vllm_engine.busy_ms([(0, 2000), (1000, 3000), (5000, 6000)]) == 4


def test_server_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sglang_server

    started: dict[str, Any] = {}
    monkeypatch.setattr(
        sglang_server.subprocess, "Popen", lambda command, **named: started.update(command=command, **named)
    )
    args = Namespace(
        out=tmp_path, model="glm", layers=2, port=31000, profile="fa3", context=1024, pool_tokens=4096, batch=[2, 1],
        server_arguments="--tp-size 1",
    )  # fmt: skip
    server = sglang_server.Server("flashmla/fa3:fp8_e4m3", 1, args)
    command = " ".join(started["command"])
    assert "--decode-attention-backend flashmla --prefill-attention-backend fa3 --kv-cache-dtype fp8_e4m3" in command
    assert "--port 31010" in command and "--cuda-graph-bs-decode 1 2" in command and command.endswith("--tp-size 1")
    assert server.folder.name == "glm-flashmla-fa3-fp8_e4m3" and (server.folder / "config.json").exists()
    assert not server.profiled and str(BENCHMARKS) in started["env"]["PYTHONPATH"]
    assert sglang_server.Server("fa3:fp8_e4m3", 0, args).profiled and "--attention-backend fa3" in " ".join(
        started["command"]
    )
