"""Names of Gluon that moved between Triton 3.6 and 3.9, under one spelling. Kernels import them from here.

| here          | Triton 3.6                        | Triton 3.7 and later               |
|---------------|-----------------------------------|------------------------------------|
| `cta_barrier` | `gl.thread_barrier`               | `gl.barrier`                       |
| `cp_async`    | `async_copy.async_copy_global_..` | `async_copy.async_load`            |
| `tma_load`    | `tma.async_copy_global_to_shared` | `tma.async_load`                   |
| `smem_view`   | `descriptor._reinterpret`         | `descriptor.reinterpret`           |
"""

from __future__ import annotations

import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import tma

__all__ = [
    "TRITON_VERSION",
    "cp_async",
    "cp_async_commit",
    "cp_async_wait",
    "cta_barrier",
    "mma_v2",
    "smem_view",
    "tma_load",
]

TRITON_VERSION = tuple(int(part) for part in triton.__version__.split("+")[0].split(".")[:2])


def _first(module: object, *names: str) -> object:
    for name in names:
        if hasattr(module, name):
            return getattr(module, name)
    raise ImportError(f"Triton {triton.__version__} has none of {', '.join(names)}: use Triton 3.6 or newer")


cta_barrier = _first(gl, "barrier", "thread_barrier")
cp_async = _first(async_copy, "async_load", "async_copy_global_to_shared")
cp_async_commit = async_copy.commit_group
cp_async_wait = async_copy.wait_group
smem_view = _first(gl.shared_memory_descriptor, "reinterpret", "_reinterpret")
tma_load = _first(tma, "async_load", "async_copy_global_to_shared")
