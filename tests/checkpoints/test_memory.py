"""Loading holds little more than its result, measured. A failure means that a model which fits into memory cannot be loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints.packed_files import GLM_52, WEIGHTS, to_modelopt
from tests.fixtures import FAMILIES
from tests.quant.helpers import random_nvfp4

EXPERTS = 48

CHILD = """
import os, sys, torch
from pathlib import Path
from uncast.checkpoints.load import load_model
from uncast.quant.packed import Nvfp4

def resident(key):
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(key))

def size(value, seen):
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
    elif isinstance(value, (list, tuple)):
        [size(item, seen) for item in value]
    elif hasattr(value, "__dict__"):
        [size(item, seen) for item in vars(value).values()]
    return seen

folder, dtype = Path(sys.argv[1]), getattr(torch, sys.argv[2])
# Linux counts pages on each core apart, and reports the sum roughly: on one core it is nearly exact.
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
torch.zeros(8, 8, dtype=dtype) @ torch.zeros(8, 8, dtype=dtype)
Path("/proc/self/clear_refs").write_text("5")
before = resident("VmRSS")
model = load_model(folder, dtype=dtype)
print(resident("VmHWM") - before, sum(size([model.embed, model.lm_head, model.layers], {}).values()))
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """150 MB in BF16, beside which a window of the file is small: twelve layers of GLM-4.7-Flash's kind."""
    folder = tmp_path_factory.mktemp("memory")
    config = {**FAMILIES["glm4_moe_lite"], "num_hidden_layers": 12, "rms_norm_eps": 1e-5, "first_k_dense_replace": 1}
    config |= {
        "routed_scaling_factor": 1.8,
        "n_shared_experts": 1,
        "max_position_embeddings": 4096,
        "n_routed_experts": EXPERTS,
        "num_attention_heads": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    heads, hidden = config["num_attention_heads"], config["hidden_size"]

    def rows(*shape: int) -> torch.Tensor:
        return torch.randn(*shape).to(torch.bfloat16) * 0.05

    tensors = {"model.embed_tokens.weight": rows(512, hidden), "lm_head.weight": rows(512, hidden)}
    tensors["model.norm.weight"] = torch.ones(hidden)
    for layer in range(12):
        at, mlp = f"model.layers.{layer}.self_attn.", f"model.layers.{layer}.mlp."
        tensors |= {
            at + "q_a_proj.weight": rows(128, hidden), at + "q_a_layernorm.weight": torch.ones(128),
            at + "q_b_proj.weight": rows(heads * 256, 128), at + "kv_a_proj_with_mqa.weight": rows(576, hidden),
            at + "kv_a_layernorm.weight": torch.ones(512), at + "kv_b_proj.weight": rows(heads * 448, 512),
            at + "o_proj.weight": rows(hidden, heads * 256),
        }  # fmt: skip
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{norm}.weight"] = torch.ones(hidden)
        widths = {"": 512} if layer == 0 else {"shared_experts.": 128} | {f"experts.{e}.": 128 for e in range(EXPERTS)}
        for name, width in widths.items():
            for part in ("gate_proj", "up_proj"):
                tensors[f"{mlp}{name}{part}.weight"] = rows(width, hidden)
            tensors[f"{mlp}{name}down_proj.weight"] = rows(hidden, width)
        if layer:
            tensors[mlp + "gate.weight"] = rows(EXPERTS, hidden)
            tensors[mlp + "gate.e_score_correction_bias"] = torch.zeros(EXPERTS)
    save_file(tensors, folder / WEIGHTS)
    return folder


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("kind", ["bf16 as bf16", "bf16 as fp32", "nvfp4", "gguf"])
def test_peak_memory_is_at_most_1_3_times_the_result(saved: Path, tmp_path: Path, kind: str) -> None:
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    if kind == "nvfp4":
        grow(tmp_path)
        to_modelopt(tmp_path, GLM_52, make=lambda weight: random_nvfp4(*weight.shape))
    if kind == "gguf":
        pytest.importorskip("gguf")
        from tests.checkpoints.gguf_files import MIXED, write_gguf

        write_gguf(tmp_path, tmp_path / "model.gguf", MIXED)
        (tmp_path / "config.json").unlink()
    dtype = "float32" if kind.endswith("fp32") else "bfloat16"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", CHILD, str(tmp_path), dtype]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    peak, result = map(int, done.stdout.split())
    assert result > 60e6, "a result too small to tell"
    assert peak <= 1.3 * result, f"{peak / result:.2f} times the result of {result / 1e6:.0f} MB"


def grow(folder: Path) -> None:
    """Wider experts, so that the packed model, too, is large enough to measure."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "moe_intermediate_size": 512}))
    tensors = load_file(folder / WEIGHTS)
    for name, t in tensors.items():
        if "experts" in name:
            tensors[name] = t.repeat(1, 4) if "down_proj" in name else t.repeat(4, 1)
    save_file(tensors, folder / WEIGHTS)
