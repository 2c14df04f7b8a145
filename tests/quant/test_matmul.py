"""Packed matrix products against float64. A failure means that packed experts compute something else than their values."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from tests.quant.helpers import random_fp8, random_nvfp4
from uncast.quant.matmul import grouped_serves, kernel_serves, linear

pytest.importorskip("triton")


def test_products_in_the_interpreter() -> None:
    """Triton's interpreter is chosen when Triton is imported, hence the child process."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-m", "tests.quant.matmul_cases"], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("make", [random_nvfp4, random_fp8])
def test_on_a_cpu_a_packed_matrix_multiplies_as_its_values_do(make) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    weight, x = make(72, 256), torch.randn(3, 256)
    assert torch.equal(linear(x, weight), x @ weight.dequantize(torch.float32).T)
    assert not kernel_serves(x, weight) and not grouped_serves(x, weight)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_products_on_the_gpu() -> None:
    from tests.quant.matmul_cases import main

    main("cuda", asm=True)
