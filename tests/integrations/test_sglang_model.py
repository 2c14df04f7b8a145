"""A random DeepSeek-V2 through SGLang's model runner with our backend, against transformers in float32.

Prefill, extend on a prefix and decoding of ragged requests. A failure is a wrong answer of the whole chain: SGLang's hooks, its
pool, the scale, the page table and our kernels.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is not installed here", exc_type=ImportError)
pytest.importorskip(
    "sglang.benchmark.one_batch", reason="SGLang's model runner does not import here", exc_type=ImportError
)

ROOT = Path(__file__).parents[2]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LARGEST = {"auto": 0.06, "fp8_e4m3": 0.15}
"""Largest logit difference, logits having a deviation of 0.35; SGLang's BF16 model alone is off by 0.02."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    from tests.fixtures import build_hf

    folder = tmp_path_factory.mktemp("deepseek_v2")
    tokenizer = ROOT / "src/uncast/checkpoints/tiny_glm"
    vocabulary = json.loads((tokenizer / "config.json").read_text())["vocab_size"]
    model = build_hf("deepseek_v2", folder, sharpen=3.0, num_hidden_layers=3, vocab_size=vocabulary)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder / name)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "moe_layer_freq": 1,
        "scoring_func": "softmax",
        "norm_topk_prob": False,
    }  # as published checkpoints have them
    (folder / "config.json").write_text(json.dumps(config))
    return folder, model


@pytest.mark.parametrize(
    ("dtype", "page_size", "k_scale"),
    [("auto", 64, 1.0), ("auto", 1, 1.0), ("fp8_e4m3", 64, 1.0), ("fp8_e4m3", 64, 0.02)],
)
def test_logits_are_the_models(
    checkpoint: tuple[Path, Any], tmp_path: Path, dtype: str, page_size: int, k_scale: float
) -> None:
    folder, model = checkpoint
    command = [
        sys.executable, "-m", "tests.integrations.sglang_model", str(tmp_path / "out.pt"), str(k_scale),
        "--model-path", str(folder), "--device", DEVICE, "--dtype", "bfloat16", "--attention-backend", "uncast",
        "--kv-cache-dtype", dtype, "--page-size", str(page_size), "--max-total-tokens", "4096", "--mem-fraction-static", "0.3",
        "--disable-cuda-graph",
    ]  # fmt: skip
    environment = {**os.environ, **({"SGLANG_USE_CPU_ENGINE": "1"} if DEVICE == "cpu" else {})}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert (tmp_path / "out.pt").exists(), done.stderr[-2000:]
    saved = torch.load(tmp_path / "out.pt")
    steps, sequences = saved["steps"], saved["prompts"]
    assert [kind for kind, _, _ in steps[:2]] == ["extend", "extend"] and len(steps) > 10
    assert saved["unabsorbed"] == 3, (
        "the prefill without a prefix went un-absorbed in each of 3 layers, the rest did not"
    )
    largest = 0.0
    for _, logits, chosen in steps[1:]:
        for request, ids in enumerate(sequences):
            with torch.no_grad():
                expected = model(torch.tensor([ids])).logits[0, -1]
            largest = max(largest, float((logits[request] - expected).abs().max()))
            ids.append(int(chosen[request]))
    assert largest < LARGEST[dtype], largest
