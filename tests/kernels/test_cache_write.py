"""The fused writer stores the codec's bytes. A failure means kernels and CPU disagree about what is in the cache."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from tests.kernels.writer_cases import check_writer

pytest.importorskip("triton")


def test_bytes_and_counters_in_the_interpreter() -> None:
    """Triton's interpreter is chosen when Triton is imported, hence the child process."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-m", "tests.kernels.writer_cases"], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("layout", ["fp32", "bf16", "fp8_e4m3", "fp8_ds_mla"])
def test_bytes_and_counters_on_the_gpu(layout: str, dtype: torch.dtype) -> None:
    check_writer("cuda", layout, dtype)
