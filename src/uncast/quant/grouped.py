"""Mixtures of experts and packed matrices on a GPU: torch's grouped product for dense stacks, our kernel for packed ones.

No step comes back to the host, so all of it can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch.nn import functional as F

from uncast.kernels import moe_rows, router
from uncast.kernels import packed_matmul as kernel
from uncast.kernels.norm_rope import silu_mul
from uncast.kernels.row_tile import new_rows
from uncast.quant.packed import Fp8Blocks, Nvfp4, Packed, Weight

_SPLIT_PROGRAMS = 256
"""A lone matrix is split along its columns until about this many programs share it."""


@dataclass(frozen=True)
class Routing:
    """(token, slot) pairs in the order of their experts.

    Attributes:
        pairs: int64 [n * top_k], token * top_k + slot, sorted by expert. ends: int32 [experts], each expert's end there.
        top_k: slots of a token. weights: float32 [n * top_k], by pair.
    """

    pairs: torch.Tensor
    ends: torch.Tensor
    top_k: int
    weights: torch.Tensor


def sort_pairs(weights: torch.Tensor, chosen: torch.Tensor, experts: int) -> Routing:
    """The routing of chosen [n, top_k] and weights float32 [n, top_k]."""
    if chosen.is_cuda and 0 < chosen.numel() <= router.MAX_PAIRS:
        return Routing(*router.sort(chosen, experts), chosen.shape[1], weights.to(torch.float32).flatten())
    of_pair, pairs = chosen.flatten().sort(stable=True)
    ends = torch.searchsorted(of_pair, torch.arange(experts, device=chosen.device), right=True, out_int32=True)
    return Routing(pairs, ends, chosen.shape[1], weights.to(torch.float32).flatten())


def moe(
    x: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    dtype: torch.dtype | None = None,
    more: torch.Tensor | None = None,
) -> torch.Tensor:
    """sum_k weights[n, k] * down[e] (silu(gate[e] x[n]) * (up[e] x[n])), e = chosen[n, k], plus more [n, hidden].

    Returns [n, hidden] in `dtype` (x's if None).

    Args:
        x: [n, hidden]; weights: [n, top_k].
        chosen: int64 [n, top_k]; an index of `experts` is an expert that is not in the stacks and adds nothing.
        gate_up: [experts, 2 * intermediate, hidden], gate first; down: [experts, hidden, intermediate].
    """
    routing = sort_pairs(weights, chosen, gate_up.shape[0])
    act = _gated(x, gate_up, down, routing)
    rows = _weighted(act, down, routing).view(*chosen.shape, -1)
    return moe_rows.sum_parts(rows, 1, dtype or x.dtype, more)


def in_planes(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """x [rows, columns] with its columns in the planes that the kernel wants for `weight`; contiguous."""
    return x.reshape(x.shape[0], -1, _planes(weight)).transpose(1, 2).reshape(x.shape)


def _capability(device: torch.device) -> tuple[int, ...]:
    return torch.cuda.get_device_capability(device)[:1] if device.type == "cuda" else ()


def _planes(weight: Weight) -> int:
    """1 for a dense weight: columns stay as they are."""
    return 1 if isinstance(weight, torch.Tensor) else kernel.PLANES[_format(weight)]


def _format(weight: Packed) -> int:
    return int((kernel.NVFP4 if isinstance(weight, Nvfp4) else kernel.FP8).value)


def _gated(x: torch.Tensor, gate_up: Weight, down: Weight, routing: Routing) -> torch.Tensor:
    """[pairs, intermediate] in sorted order, in the planes of `down`."""
    if isinstance(gate_up, torch.Tensor):
        both = _grouped_mm(moe_rows.spread(x, routing.pairs, routing.top_k), gate_up, routing.ends)
        return in_planes(silu_mul(both), down)
    out = x.new_empty(routing.pairs.shape[0], gate_up.shape[-2] // 2)
    launch(in_planes(x, gate_up), gate_up, out, routing, gated=True, out_planes=_planes(down))
    return out


def _weighted(act: torch.Tensor, down: Weight, routing: Routing) -> torch.Tensor:
    """[pairs, hidden] by pair, each row times its weight; 0 for experts that are not here."""
    if isinstance(down, torch.Tensor):
        return moe_rows.collect(_grouped_mm(act, down, routing.ends), routing.pairs, routing.ends, routing.weights)
    out = act.new_zeros(routing.pairs.shape[0], down.shape[-2])
    launch(act, down, out, routing, scatter=True)
    return out


def _grouped_mm(x: torch.Tensor, stack: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = F.grouped_mm(x, stack.transpose(1, 2), offs=ends)
    return out


def packed_linear(x: torch.Tensor, weight: Packed, dtype: torch.dtype | None = None) -> torch.Tensor:
    """x [n, columns] @ weight [rows, columns]^T in `dtype` (x's if None), rounded once."""
    rows, columns = weight.shape
    x = in_planes(x, weight)
    tiles = triton.cdiv(rows, kernel.BLOCK_N) * triton.cdiv(
        x.shape[0], kernel.block_m(x.shape[0], *_capability(x.device))
    )
    splits, step = 1, _planes(weight) * kernel.block_words(_format(weight), columns)
    while tiles * splits < _SPLIT_PROGRAMS and columns % (2 * splits * step) == 0:
        splits *= 2
    if splits == 1:
        out = new_rows(x, x.shape[0], rows, dtype=dtype)
        launch(x, weight, out, None)
        return out
    parts = torch.empty(splits, x.shape[0], rows, dtype=torch.float32, device=x.device)
    launch(x, weight, parts, None, splits=splits)
    return moe_rows.sum_parts(parts, 0, dtype or x.dtype)


def launch(
    x: torch.Tensor,
    weight: Packed,
    out: torch.Tensor,
    routing: Routing | None,
    *,
    gated: bool = False,
    scatter: bool = False,
    out_planes: int = 1,
    splits: int = 1,
    asm: bool = True,
) -> None:
    """One launch of `packed_matmul_kernel`.

    Args:
        x: bf16 in planes, see `in_planes`: [tokens, columns] with `gated` (a row for each of its pairs), else [pairs, columns]
            in sorted order; without a routing, the rows of the product.
        asm: False in Triton's interpreter.
    """
    experts = 1 if routing is None else weight.shape[0]
    rows = x.shape[0] if routing is None else routing.pairs.shape[0]
    block_m = kernel.block_m(-(-rows // experts), *_capability(x.device))
    blocks = triton.cdiv(rows, block_m) if routing is None else min(rows, experts) + rows // block_m
    words = weight.codes.view(torch.int32)
    args = kernel.constexprs(
        _format(weight), weight.shape[-1], experts, block_m, gated=gated,
        gather=routing.top_k if routing is not None and gated else 0, scatter=scatter, out_planes=out_planes,
        block=weight.block if isinstance(weight, Fp8Blocks) else (1, 1), splits=splits, asm=asm,
    )  # fmt: skip
    kernel.packed_matmul_kernel[(blocks, triton.cdiv(out.shape[-1], kernel.BLOCK_N), splits)](
        x, words, weight.scales, weight.global_scale if isinstance(weight, Nvfp4) else weight.scales,
        words if routing is None else routing.pairs, words if routing is None else routing.ends,
        weight.scales if routing is None else routing.weights, out, rows, out.shape[-1],
        **args, num_warps=kernel.NUM_WARPS, num_stages=kernel.num_stages(block_m),
    )  # fmt: skip
