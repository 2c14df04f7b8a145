"""The GPU indexer: chosen tokens against the float64 oracle, ties, NaN keys; a failure is math, addressing or the scan."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels import index_select_cases as cases
from uncast.attention.problem import ProblemError
from uncast.kernels import index_select
from uncast.latent.index_keys import index_layout

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_cases_in_the_interpreter() -> None:
    """Triton's interpreter is chosen when Triton is imported, hence the child process."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "tests.kernels.index_select_cases"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("_gpu", [pytest.param(None, marks=gpu)])
def test_cases_on_the_gpu(_gpu: None) -> None:
    cases.main("cuda", (torch.bfloat16, torch.float16, torch.float32))


@pytest.mark.parametrize("_gpu", [pytest.param(None, marks=gpu)])
def test_long_contexts_and_prefill_on_the_gpu(_gpu: None) -> None:
    cases.check("fp8", [40000, 5000, 0, 2048], [1, 1, 1, 1], heads=64, topk=2048, dtype=torch.bfloat16, device="cuda")
    cases.check("fp8", [3000], [200], heads=32, topk=512, dtype=torch.bfloat16, device="cuda", scratch=2**20)


def test_refusals() -> None:
    assert index_select.refusal(index_layout("fp8"), torch.bfloat16) is None
    assert "not 96" in str(index_select.refusal(index_layout("bf16", 96), torch.bfloat16))
    assert "not torch.float64" in str(index_select.refusal(index_layout("fp8"), torch.float64))
    problem = cases.problem_of([5], [1], topk=4, page_size=16, device="cpu")
    cache = torch.zeros(2, 16, 192, dtype=torch.uint8)
    with pytest.raises(ProblemError, match="not 96"):
        index_select.select_tokens(torch.zeros(1, 2, 96), torch.zeros(1, 2), cache, problem, index_layout("bf16", 96))
