"""A decoder's small kernels: norms, rope, router, index keys, few-token mixtures. A failure is math, addressing or rounding."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")


def test_cases_in_the_interpreter() -> None:
    """Triton's interpreter is chosen when Triton is imported, hence the child process."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "tests.kernels.decoder_cases"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cases_on_the_gpu() -> None:
    from tests.kernels import decoder_cases as cases

    cases.main("cuda")
    cases.few_tokens("cuda", 16, 64, 4, 2048, 1536, 1, torch.bfloat16)
    cases.few_tokens("cuda", 1, 16, 8, 7168, 2048, 1, torch.bfloat16)
    cases.routes("cuda", cases.config(256, 8, "sigmoid", 8, 4), 32)
