"""`uncast serve` on a model with sparse attention: several long requests at once, in a pool that forces preemption."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.server.live import ServerProcess, metrics, post, wait_until
from tests.tiny_model import build_model_folder
from uncast.cli.main import main

PROMPTS = [f"quick brown foxes jump over {count} lazy dogs" for count in ("six", "seven", "eight")]


@pytest.mark.filterwarnings("ignore::uncast.attention.ClaimedCapabilityWarning")
def test_served_texts_are_those_of_generate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = build_model_folder(tmp_path, "glm_moe_dsa_52", num_hidden_layers=4)
    alone = []
    for prompt in PROMPTS:
        command = ["generate", prompt, "--model", str(folder), "--max-tokens", "20", "--page-size", "8", "--json"]
        assert main([*command, "--kv-cache-dtype", "fp32"]) == 0
        alone.append(json.loads(capsys.readouterr().out))
    longest = max(facts["prompt_tokens"] for facts in alone) + 20
    pool = str(-(-longest // 8) * 8 + 24)
    options = ("--kv-pool-tokens", pool, "--page-size", "8", "--kv-cache-dtype", "fp32")
    with ServerProcess(folder, *options, gate=tmp_path / "gate") as server, ThreadPoolExecutor(3) as clients:
        bodies = [{"prompt": prompt, "max_tokens": 20, "temperature": 0} for prompt in PROMPTS]
        server.hold(3)
        asked = [clients.submit(post, server.url + "/v1/completions", body) for body in bodies]
        wait_until(lambda: metrics(server.url)["uncast_requests_total"] == 3)
        server.release()
        answers = [future.result().json() for future in asked]
        seen = metrics(server.url)
    assert [answer["choices"][0]["text"] for answer in answers] == [facts["text"] for facts in alone]
    assert seen["uncast_preemptions_total"] > 0 and seen["uncast_kv_cache_bytes_read_total"] > 0
