"""The fused gather gives the bits of a cast by torch. A failure means `gather_cast` measures other values than it names."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels import gather_cases
from uncast.kernels.variants import CHIPS, compile_variant, variants


def test_bits_in_the_interpreter() -> None:
    """Triton's interpreter is chosen when Triton is imported, hence the child process."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-m", "tests.kernels.gather_cases"], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_compiles_for_every_chip() -> None:
    chosen = [v for v in variants() if v.name.startswith("gather_rows")]
    assert {chip for v in chosen for chip in v.chips} == set(CHIPS)
    for name, chip in (("gather_rows_fp8_ds_mla_integer", 80), ("gather_rows_fp8_e4m3", 90)):
        variant = next(v for v in chosen if v.name == name)
        assert compile_variant(variant, chip).problems == ()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_bits_on_the_gpu() -> None:
    major, minor = torch.cuda.get_device_capability()
    gather_cases.main("cuda", major * 10 + minor)
