"""Rope fused with the cache write: bytes and queries are those of doing one after the other."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from tests.kernels.rope_write_cases import check_rope_write

pytest.importorskip("triton")


def test_bytes_and_queries_in_the_interpreter() -> None:
    """Triton's interpreter is chosen when Triton is imported, hence the child process."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.rope_write_cases"], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("layout", ["fp32", "bf16", "fp8_e4m3", "fp8_ds_mla"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_bytes_and_queries_on_the_gpu(layout: str, dtype: torch.dtype, interleaved: bool) -> None:
    check_rope_write("cuda", layout, dtype, interleaved=interleaved)
