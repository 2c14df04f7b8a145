"""The un-absorbed path's kernels: exact decoding, weights, merging; compiled for every chip inside its limits.

Whole calls against float64 are in `tests/backends/test_native_extend.py`.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.kernels import up_project_cases
from uncast.kernels.mma_launch import shared_memory_limit
from uncast.kernels.unpack import NATIVE_ARCH, is_native
from uncast.kernels.up_launch import LAYOUTS, choose_config
from uncast.kernels.up_project import up_project_kernel
from uncast.latent.layouts import row_layout

CHIPS = (80, 86, 89, 90, 100, 120)


def test_cases_in_the_interpreter() -> None:
    """Triton's interpreter is chosen when Triton is imported, hence the child process."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "tests.kernels.up_project_cases"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cases_on_the_gpu() -> None:
    major, minor = torch.cuda.get_device_capability()
    up_project_cases.main("cuda", is_native(major * 10 + minor))


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("layout_name", LAYOUTS)
def test_up_projection_compiles_inside_the_limits_of_its_chip(layout_name: str, chip: int) -> None:
    layout, config = row_layout(layout_name), choose_config(layout_name, chip)
    constants = {
        "LAYOUT": layout_name, "NATIVE": is_native(chip), "RANK": 512, "CH": 192,
        "ROW_ITEMS": layout.row_bytes // (1 if layout.is_fp8 else 2), "ROW_WORDS": layout.row_bytes // 4,
        "SCALE_WORD": max(layout.scale_offset, 0) // 4, "BM": config.rows, "BN": config.channels, "BK": config.step,
        "GROUP": 8,
    }  # fmt: skip
    items, w = ("*u8", "*fp16") if layout.is_fp8 else ("*bf16", "*bf16")
    pointers = {"items": items, "words": "*fp32", "pages": "*i32", "w": w, "row_factor": "*fp32", "factor": "*fp32",
                "out": "*fp16"}  # fmt: skip
    names = up_project_kernel.arg_names
    signature = {n: pointers.get(n, "constexpr" if n in constants else "i32") for n in names}
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, n in enumerate(names)
        if n in pointers or n in ("channels", "w_stride_head", "out_stride_head", "out_stride_row")
    }
    source = ASTSource(up_project_kernel, signature, {(names.index(n),): v for n, v in constants.items()}, attributes)
    log = io.StringIO()
    with knobs.compilation.scope(), knobs.nvidia.scope(), contextlib.redirect_stdout(log):
        knobs.compilation.always_compile = True
        knobs.nvidia.dump_ptxas_log = True
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        compiled = triton.compile(source, target=GPUTarget("cuda", chip, 32), options=options)
    spilled = [int(n) for n in re.findall(r"(\d+) bytes spill stores", log.getvalue())]
    assert compiled.metadata.shared <= shared_memory_limit(chip)
    assert spilled and max(spilled) <= 64
    assert "C7512" not in log.getvalue()
    assert chip >= NATIVE_ARCH or "e4m3" not in compiled.asm["ptx"]
    assert ("wgmma" in compiled.asm["ptx"]) == (chip == 90)
