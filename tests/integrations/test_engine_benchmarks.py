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
        names = ("q_b_proj", "kv_b_proj", "o_proj", "down_proj", "embed_tokens")
        made = torch.nn.ModuleDict({n: torch.nn.Linear(256, 256) for n in names})
        made.register_parameter("w2_weight", torch.nn.Parameter(torch.zeros(4, 128, 256)))
        made["norm"] = torch.nn.LayerNorm(256)
        made.register_buffer("k_scale", torch.tensor(3.0))
        return made

    first, second = model(), model()
    for made in (first, second):
        engine_models.draw_weights(made)
    state = first.state_dict()
    assert all(torch.equal(value, second.state_dict()[name]) for name, value in state.items())
    assert not torch.equal(state["q_b_proj.weight"], 3 * state["kv_b_proj.weight"])
    expected = {"q_b_proj": 0.09, "kv_b_proj": 0.03, "o_proj": 1 / 16, "down_proj": 0.25 / 16, "embed_tokens": 1.0}
    for name, std in expected.items():
        assert state[f"{name}.weight"].std() == pytest.approx(std, rel=0.02), name
    assert state["w2_weight"].std() == pytest.approx(0.025 / 16, rel=0.02)
    assert state["norm.weight"].eq(1).all() and state["o_proj.bias"].eq(0).all() and state["k_scale"] == 3


def test_a_name_that_the_engine_does_not_read_is_refused() -> None:
    """A failure means that an engine may serve its own dummy weights under the name of ours."""
    import engine_models

    loader = SimpleNamespace(draw=None)
    engine_models.replace(loader, "draw", engine_models.draw_weights)
    assert loader.draw is engine_models.draw_weights
    with pytest.raises(AttributeError, match="draws its weights elsewhere"):
        engine_models.replace(loader, "draw_all", engine_models.draw_weights)


@pytest.mark.parametrize("model", ["glm", "v2lite"])
def test_transformers_knows_the_configs(model: str, tmp_path: Path) -> None:
    import engine_models
    from transformers import AutoConfig

    (tmp_path / "config.json").write_text(json.dumps(engine_models.model_config(model, 3)))
    config = AutoConfig.from_pretrained(tmp_path)
    assert (config.num_hidden_layers, config.kv_lora_rank, config.qk_rope_head_dim) == (3, 512, 64)
    prompts = engine_models.prompts(model, 2, 5)
    assert prompts == engine_models.prompts(model, 2, 5) and max(map(max, prompts)) < config.vocab_size


class _Profile:
    """A profiler of a GPU that is busy for half of every step; `now` is the clock, in ms."""

    now = 0.0
    made = 0

    def __init__(self, **_: Any) -> None:
        type(self).made += 1

    def start(self) -> None:
        self.begun = self.now

    def stop(self) -> None:
        self.ended = self.now

    def events(self) -> list[Any]:
        kinds, half = torch.autograd.DeviceType, (self.begun + self.ended) / 2
        spans = [(kinds.CUDA, self.begun, half), (kinds.CUDA, self.begun, half), (kinds.CPU, self.begun, self.ended)]
        return [
            SimpleNamespace(
                device_type=kind, time_range=SimpleNamespace(start=a * 1e3, end=b * 1e3), is_user_annotation=False
            )
            for kind, a, b in spans
        ] + [
            SimpleNamespace(
                device_type=kinds.CUDA,
                time_range=SimpleNamespace(start=0, end=self.ended * 1e3),
                is_user_annotation=True,
            )
        ]


def test_recorder_times_the_first_long_run_and_traces_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sglang_recorder
    from engine_models import FORCED_TOKEN, LOGIT_STEP

    monkeypatch.setattr(torch.profiler, "profile", _Profile)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(sglang_recorder.time, "perf_counter", lambda: _Profile.now / 1e3)
    monkeypatch.setattr(_Profile, "made", 0)
    recorder = sglang_recorder.StepRecorder(tmp_path)
    seen: list[torch.Tensor] = []

    def step(batch_size: int, decode: bool, took: float) -> None:
        def forward(_: Any, batch: Any) -> Any:
            _Profile.now += took
            seen.append(torch.full((batch.batch_size, 64), float(len(seen))))
            return SimpleNamespace(logits_output=SimpleNamespace(next_token_logits=seen[-1]))

        mode = SimpleNamespace(is_decode=lambda: decode)
        recorder.forward(forward, None, SimpleNamespace(forward_mode=mode, batch_size=batch_size))

    def times() -> list[Any]:
        step(1, False, 5)
        found: list[Any] = json.loads((tmp_path / "steps.json").read_text())["1"]
        return found

    step(1, False, 5)
    for _ in range(3):
        step(1, True, 9)  # a health check's
    step(1, False, 5)
    before = len(seen)
    for _ in range(40):
        step(1, True, 2)
    wall, gpu, steps = times()
    assert (wall, gpu, steps) == (pytest.approx(2), None, 40 - LOGIT_STEP - 1)
    assert not _Profile.made, "a timed step ran under a profiler"
    for _ in range(2):
        for _ in range(LOGIT_STEP + sglang_recorder.TRACED_STEPS + 4):
            step(1, True, 6)
        wall, gpu, steps = times()
    assert (wall, gpu, steps) == (pytest.approx(2), pytest.approx(3), 40 - LOGIT_STEP - 1)
    assert _Profile.made == 1
    kept = torch.load(tmp_path / "logits-1.pt")
    assert kept.eq(before + LOGIT_STEP - 1).all(), "the logits are the model's, before a token was forced"
    assert all(one.argmax(-1).eq(FORCED_TOKEN).all() for one in seen)


def test_states_of_engines() -> None:
    import engine_models
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
    assert engine_models.busy_ms([(0, 2000), (1000, 3000), (5000, 6000)]) == 4


def test_server_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sglang_server

    started: dict[str, Any] = {}
    monkeypatch.setattr(
        sglang_server.subprocess, "Popen", lambda command, **named: started.update(command=command, **named)
    )
    args = Namespace(
        out=tmp_path, model="glm", layers=2, port=31000, context=1024, pool_tokens=4096, batch=[2, 1],
        server_arguments="--tp-size 1",
    )  # fmt: skip
    server = sglang_server.Server("flashmla/fa3:fp8_e4m3", 1, args)
    command = " ".join(started["command"])
    assert "--decode-attention-backend flashmla --prefill-attention-backend fa3 --kv-cache-dtype fp8_e4m3" in command
    assert "--port 31010" in command and "--cuda-graph-bs-decode 1 2" in command and command.endswith("--tp-size 1")
    assert server.folder.name == "glm-flashmla-fa3-fp8_e4m3" and (server.folder / "config.json").exists()
    assert str(BENCHMARKS) in started["env"]["PYTHONPATH"]
    assert "--enable-profile-cuda-graph" not in command and started["env"]["SGLANG_GRAPH_BATCH_CAPTURE"] == "0"
    profiled = sglang_server.Server("fa3:fp8_e4m3", 0, args, profiled=True)
    command = " ".join(started["command"])
    assert "--attention-backend fa3" in command and "--enable-profile-cuda-graph" in command
    assert started["env"]["SGLANG_GRAPH_BATCH_CAPTURE"] == "1" and profiled.folder.name == "glm-fa3-fp8_e4m3-profile"


def test_profiled_servers_are_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure means that a row of the table was measured with CUPTI in the process, which slows launches down."""
    import sglang_server

    calls: list[tuple[str, bool, str]] = []

    class Fake:
        def __init__(self, name: str, index: int, args: Namespace, profiled: bool = False) -> None:
            self.backend, self.dtype = name.split(":")
            self.args, self.port, self.profiled, self.error, self.folder = args, index, profiled, "", tmp_path / name
            self.folder.mkdir(exist_ok=True)

        def ready(self) -> bool:
            return True

        def signal(self, number: int) -> None:
            pass

        def profile(self) -> None:
            calls.append((self.backend, self.profiled, "profile"))

        def measure(self) -> dict[int, list[Any]]:
            calls.append((self.backend, self.profiled, "measure"))
            return {1: [2.0, 1.0, 5]}

    monkeypatch.setattr(sglang_server, "Server", Fake)
    monkeypatch.setattr(sglang_server, "rows_of", lambda *_: [["row", *"-" * 12]])
    command = ["x", "--servers", "uncast:fp8_e4m3,fa3:auto", "--profile", "uncast:fp8_e4m3", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*command, "--csv", str(tmp_path / "rows.csv"), "--batch", "1"])
    assert sglang_server.main() == 0
    assert calls == [("fa3", False, "measure"), ("uncast", False, "measure"), ("uncast", True, "profile")]
    assert (tmp_path / "rows.csv").read_text().count("row") == 2
