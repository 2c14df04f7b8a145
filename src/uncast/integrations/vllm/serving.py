"""What serves a vLLM configuration: the layout of its cache rows, the attention backend, and refusals in one sentence.

Needs torch, not vLLM. vLLM's dense MLA rows are this project's `bf16` and `fp8_e4m3` byte for byte; its k_scale is both
`ckv_scale` and `kpe_scale`.

`UNCAST_VLLM_BACKEND` names the attention backend to take instead of the first that can (vLLM has no configuration channel to a
backend that is not its own).
"""

from __future__ import annotations

import functools
import os

import torch

from uncast.attention import ProblemSpec, registry
from uncast.integrations._common import EngineRefusal, serving_backend, warn_once

LAYOUTS = {"auto": "bf16", "bfloat16": "bf16", "fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3"}
"""vLLM's `--kv-cache-dtype` -> row layout. `auto` is the model's dtype, which must be bfloat16."""
BLOCK_SIZE = 64
"""The kernel block size: the page of the Hopper kernel. vLLM splits its own larger blocks into these."""
HEAD_SIZE = 576
BACKEND_VARIABLE = "UNCAST_VLLM_BACKEND"


def row_layout_name(kv_cache_dtype: str) -> str:
    """The row layout of a `--kv-cache-dtype`.

    Raises:
        EngineRefusal: a dtype whose rows are not read here.
    """
    if kv_cache_dtype not in LAYOUTS:
        raise EngineRefusal(
            f"UNCAST reads KV caches of {', '.join(LAYOUTS)}, not {kv_cache_dtype}: change --kv-cache-dtype"
        )
    return LAYOUTS[kv_cache_dtype]


def serving(spec: ProblemSpec) -> str:
    """The name of the first backend that can run `spec`, or the one `UNCAST_VLLM_BACKEND` names.

    Anything but the first choice is one warning a process.

    Raises:
        EngineRefusal: none can.
    """
    return _serving(spec, os.environ.get(BACKEND_VARIABLE, ""))


@functools.cache
def _serving(spec: ProblemSpec, wanted: str) -> str:
    name = serving_backend(spec, (wanted,) if wanted else None)
    backend = registry.create(name)
    if wanted:
        warn_once(f"vllm {wanted}", f"UNCAST decodes with {wanted}, as {BACKEND_VARIABLE} asks")
    if spec.device == "cuda" and not backend.cuda_graph:
        warn_once(f"vllm graphs {name}", f"UNCAST decodes with {name}, which runs without full CUDA graphs")
    return name


def runs_in_graphs(spec: ProblemSpec) -> bool:
    """Whether what serves `spec` may be captured in a CUDA graph.

    Raises:
        EngineRefusal: nothing serves it.
    """
    return registry.create(serving(spec)).cuda_graph


def refusal(
    *,
    head_size: int,
    dtype: torch.dtype,
    kv_cache_dtype: str | None,
    block_size: int | None,
    use_mla: bool,
    use_sparse: bool,
    arch: int,
    batch_invariant: bool = False,
) -> str | None:
    """Why UNCAST cannot serve a configuration, in one sentence; None if it can. `arch`: compute capability * 10, 0: a CPU."""
    if not use_mla:
        return "UNCAST serves MLA models only: leave --attention-backend out"
    if use_sparse:
        return "UNCAST serves dense MLA, and this model's attention is sparse (DSA): leave --attention-backend out"
    if dtype != torch.bfloat16:
        return f"UNCAST takes bfloat16 queries, not {str(dtype).removeprefix('torch.')}: run the model with --dtype bfloat16"
    if head_size != HEAD_SIZE:
        return (
            f"UNCAST reads rows of 512 + 64 channels, and this model's have {head_size}: leave --attention-backend out"
        )
    if block_size is not None and block_size % BLOCK_SIZE:
        return f"UNCAST needs blocks of a multiple of {BLOCK_SIZE} tokens, not {block_size}: leave --block-size out"
    try:
        serving(planned_spec(kv_cache_dtype or "auto", arch=arch, batch_invariant=batch_invariant))
    except EngineRefusal as error:
        return str(error)
    return None


def planned_spec(kv_cache_dtype: str, *, arch: int, batch_invariant: bool = False) -> ProblemSpec:
    """The spec of a configuration as far as it selects what serves it, before any layer exists.

    Raises:
        EngineRefusal: a cache dtype that is not read here.
    """
    return ProblemSpec(
        num_heads=1, page_size=BLOCK_SIZE, kv_layout=row_layout_name(kv_cache_dtype), device="cuda" if arch else "cpu",
        arch=arch, lse_base="e", batch_invariant=batch_invariant,
    )  # fmt: skip


def device_arch() -> int:
    """Compute capability * 10 of the current GPU, 0 without one."""
    if not torch.cuda.is_available():
        return 0
    major, minor = torch.cuda.get_device_capability()
    return major * 10 + minor
