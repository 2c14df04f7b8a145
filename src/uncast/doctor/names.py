"""What a kernel's name and grid tell: kind of work, destination dtype, number of elements.

Rules from aten/src/ATen/native/cuda (Copy.cu, CUDALoops.cuh, thread_constants.h), checked against eager kernels of real traces.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from uncast.doctor.dtypes import short_name
from uncast.doctor.trace import Grid

_COPY = ("direct_copy_kernel_cuda", "float16_copy_kernel_cuda", "bfloat16_copy_kernel_cuda", "float8_copy_kernel_cuda",
         "bfloat16tofloat32_copy_kernel_cuda", "float16tofloat32_copy_kernel_cuda", "converting_copy_kernel_cuda",
         "transpose_copy_tiled_kernel")  # fmt: skip
COLLECTIVE = re.compile(
    r"nccl|rccl|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|multimem|symm_mem|cross_device", re.I
)
ATTENTION = re.compile(
    r"flash_?(fwd|attn|mla)|fmha|paged_attention|unified_attention|attention_\dd|mla_(decode|attn)|batch(decode|prefill|mla)"
    r"|fwd_(grouped_)?kernel_stage|decode_att|(mma|wgmma)_decode|splitkv|scaled_dot_product|^combine_kernel$|_attn_fwd|mha_fwd|attn_kernel",
    re.I,
)
_ATTENTION_TAIL = re.compile(r"combine|reduce|merge|metadata|segments|stage2", re.I)
_GEMM = re.compile(r"gemm|cijk_|matmul|cutlass|nvjet|cublas|gemv|splitkreduce|xmma|_mm_|wmma|dot_kernel", re.I)
_LAMBDA_DTYPE = re.compile(r"\{lambda\(([\w:<> ]+)\)#\d+\}")
_PAIR = re.compile(r"converting_copy_kernel_cuda<\s*([\w:]+)\s*,\s*([\w:]+)\s*>")
_TRITON_MOVE = re.compile(
    r"^triton_poi_fused_(_to_copy|clone|copy|contiguous)(_(_to_copy|clone|copy|view|t|expand|slice|permute))*_\d+$"
)
_OPAQUE = re.compile(r"OpaqueType<(\d{1,2})u?>")
_UNROLLED = re.compile(r"unrolled_elementwise_kernel<")
_ELEMENTWISE = re.compile(r"(?<![a-z_])elementwise_kernel(?:_manual_unroll)?<\s*(\d+)\s*,\s*(\d+)")
_VECTORIZED = re.compile(r"vectorized_elementwise_kernel<\s*(\d+)")
_ROCM_CAST = re.compile(r"(?<![a-z_])elementwise_kernel<\s*512\s*,\s*1\b")


@dataclass(frozen=True)
class Named:
    """`kind`: copy, triton_move (generated, only moves), triton_pad, cat, index, attention, attention_tail, gemm, collective,
    memcpy_DtoD (DtoH, HtoD), memset or other. For copies: the dtypes the name gives (None where it is silent), whether they
    differ for certain, and whether it is the kernel for strided operands. For cat: bytes of an element."""

    kind: str
    dtype_from: str | None = None
    dtype_to: str | None = None
    converts: bool = False
    strided: bool = False
    width: int | None = None


@lru_cache(maxsize=65536)
def parse_name(name: str) -> Named:
    """What a kernel's or memcpy's name says."""
    if name.startswith("Memcpy"):
        way = next((w for w in ("DtoD", "PtoP", "DtoH", "HtoD", "HtoH") if w in name), "DtoD")
        return Named(f"memcpy_{way}")
    if name.startswith("Memset"):
        return Named("memset")
    if any(word in name for word in _COPY):
        return _copy(name)
    if _TRITON_MOVE.match(name):
        return Named("triton_move")
    if name.startswith("triton_") and "constant_pad_nd" in name:
        return Named("triton_pad")
    if "CatArrayBatchedCopy" in name:
        width = _OPAQUE.search(name)
        return Named("cat", width=int(width[1]) if width else None)
    if COLLECTIVE.search(name):
        return Named("collective")
    if ATTENTION.search(name):
        return Named("attention_tail" if _ATTENTION_TAIL.search(name) else "attention")
    if _GEMM.search(name):
        return Named("gemm")
    if "index_elementwise_kernel" in name or "vectorized_gather_kernel" in name or "indexSelect" in name:
        return Named("index")
    return Named("other")


def _copy(name: str) -> Named:
    strided = (
        bool(_ELEMENTWISE.search(name)) and not _ROCM_CAST.search(name) and "vectorized" not in name
    ) or "transpose_copy" in name
    if pair := _PAIR.search(name):
        source, target = (short_name(t) for t in pair.groups())
        return Named("copy", source, target, source != target, strided)
    if "bfloat16tofloat32" in name:
        return Named("copy", "bf16", "fp32", True, strided)
    if "float16tofloat32" in name:
        return Named("copy", "fp16", "fp32", True, strided)
    if "bfloat16_copy_kernel" in name:
        return Named("copy", "fp32", "bf16", True, strided)
    if "float16_copy_kernel" in name:
        return Named("copy", "fp32", "fp16", True, strided)
    if "float8_copy_kernel" in name:
        return Named("copy", None, "fp8_e5m2" if re.search("e5m2", name, re.I) else "fp8_e4m3", True, strided)
    target = next((d for t in _LAMBDA_DTYPE.findall(name) if (d := short_name(t))), None)
    converts = "LoadWithCast" in name or bool(_ROCM_CAST.search(name))
    return Named("copy", None if converts else target, target, converts, strided)


def elements(name: str, grid: Grid, amd: bool) -> tuple[int, int] | None:
    """(fewest, most) elements of an elementwise kernel: blocks x threads x elements a thread, off by less than a block.

    None where the name does not give the elements a thread (vectorised kernels differ by build) or the grid is unknown.
    """
    blocks, threads = grid[0], grid[3]
    if not blocks or not threads or grid[1] > 1 or grid[4] > 1:
        return None
    if _UNROLLED.search(name) and not amd:
        each = 4
    elif match := _ELEMENTWISE.search(name):
        each = int(match[2][:4])
    else:
        return None
    most = blocks * threads * each
    return most - threads * each + 1, most
