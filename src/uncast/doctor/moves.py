"""What a kernel moves: dtypes, shapes and bytes, from its operator's arguments or, without them, from its name and grid.

`aten::copy_` has the arguments (dst, src, non_blocking), so the first shape and dtype are the destination's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from uncast.doctor.dtypes import short_name, size_of
from uncast.doctor.names import Named, elements, parse_name
from uncast.doctor.trace import Grid, Signature

MLA_ROW = 576
"""Numbers of one row of an MLA cache: 512 latent and 64 rope (DeepSeek V2-V3.2, GLM-5, Kimi K2)."""
MLA_PAGE = 64
MAX_DIMS = 12


@dataclass(frozen=True)
class Move:
    """One call of a kernel that only moves numbers.

    Attributes:
        kind: cast, copy, strided, pad, cat, index or memcpy.
        shape: of the destination; (N,) where only a number of elements is known, () where nothing is.
        bytes_moved: read plus written, None if unknown; `bytes_low`..`bytes_high` where it is a range.
        certain: whether dtypes and shape come from arguments and not from a name.
    """

    kind: str
    dtype_from: str | None
    dtype_to: str | None
    shape: tuple[int, ...]
    bytes_moved: int | None
    certain: bool = True
    bytes_low: int | None = None
    bytes_high: int | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape) if self.shape else 0


def move_of(
    name: str, grid: Grid, size: int, op: str, signature: Signature | None, amd: bool, per_block: int | None
) -> Move | None:
    """The move of one kernel, None if it computes.

    Args:
        size: bytes of a memcpy.
        op: its innermost operator ("" if unknown).
        signature: that operator's arguments, None or empty if unknown.
        per_block: elements a block of this kernel, measured on another call of it, for names that do not tell.
    """
    named = parse_name(name)
    if named.kind in ("memcpy_DtoD", "memcpy_PtoP"):
        return _memcpy(size, op, signature)
    if named.kind not in ("copy", "triton_move", "triton_pad", "cat", "index"):
        return None
    if signature is not None and signature.dims:
        move = _from_arguments(named, op, signature)
        if move is not None:
            return move
    return _from_grid(named, name, grid, amd, per_block)


def _memcpy(size: int, op: str, signature: Signature | None) -> Move:
    if signature is not None and op == "aten::copy_":
        tensors = _tensors(signature)
        if tensors and tensors[0].numel * size_of(tensors[0].dtype) == size:
            return Move("memcpy", tensors[0].dtype, tensors[0].dtype, tensors[0].shape, 2 * size)
    return Move("memcpy", None, None, (), 2 * size)


@dataclass(frozen=True)
class Tensor:
    """An argument of an operator."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def unique(self) -> int:
        """Elements in memory: dimensions of stride 0 repeat them."""
        if self.strides is None:
            return self.numel
        return math.prod(n for n, s in zip(self.shape, self.strides, strict=True) if s != 0 or n == 0)

    @property
    def bytes(self) -> int:
        return self.unique * size_of(self.dtype)

    @property
    def contiguous(self) -> bool:
        expected = 1
        for n, stride in zip(reversed(self.shape), reversed(self.strides or ()), strict=False):
            if n != 1:
                if stride != expected:
                    return False
                expected *= n
        return True


def _tensors(signature: Signature) -> list[Tensor]:
    out = []
    for n, dims in enumerate(signature.dims):
        kind = signature.types[n] if n < len(signature.types) else None
        dtype = short_name(kind) if isinstance(kind, str) else None
        shape = _integers(dims)
        if dtype is None or not shape:
            continue
        strides = _integers(signature.strides[n]) if n < len(signature.strides) else None
        out.append(Tensor(dtype, shape, strides if strides and len(strides) == len(shape) else None))
    return out


def _integers(values: Any) -> tuple[int, ...] | None:
    if not isinstance(values, list) or not 0 < len(values) <= MAX_DIMS:
        return None
    good = all(isinstance(v, int) and 0 <= v < 2**48 for v in values)
    return tuple(values) if good else None


def _from_arguments(named: Named, op: str, signature: Signature) -> Move | None:
    if named.kind == "cat" or op == "aten::cat":
        return _cat(signature, named.width)
    tensors = _tensors(signature)
    if not tensors:
        return None
    if named.kind == "index":
        return _index(op, tensors)
    if named.kind == "triton_pad":
        big = max(tensors, key=lambda t: t.numel)
        return Move("pad", big.dtype, big.dtype, big.shape, sum(t.bytes for t in tensors))
    if named.kind == "triton_move":
        return _pair(tensors[-1], tensors[0]) if len(tensors) == 2 else None
    if op == "aten::copy_" and len(tensors) >= 2:
        return _pair(tensors[0], tensors[1])
    target = named.dtype_to
    if target is None or op in ("aten::fill_", "aten::zero_"):
        return None
    source = tensors[0]
    dst = Tensor(target, source.shape, None)
    return replace(_pair(dst, source), certain=False)


def _pair(dst: Tensor, src: Tensor) -> Move:
    moved = dst.bytes + src.bytes
    plain = "copy" if dst.contiguous and src.contiguous else "strided"
    kind = "cast" if dst.dtype != src.dtype else plain
    return Move(kind, src.dtype, dst.dtype, dst.shape, moved)


def _cat(signature: Signature, width: int | None) -> Move | None:
    parts = signature.dims[0] if signature.dims and isinstance(signature.dims[0], list) else []
    shapes = [s for p in parts if (s := _integers(p))]
    if not shapes:
        return None
    numel = sum(math.prod(s) for s in shapes)
    return Move("cat", None, None, (numel,), 2 * numel * width if width else None)


def _index(op: str, tensors: Sequence[Tensor]) -> Move | None:
    source = tensors[0]
    if op == "aten::gather":
        picked = next((t for t in tensors[1:] if t.dtype == "int64"), None)
        moved = 2 * picked.numel * size_of(source.dtype) if picked else None
        return Move("index", source.dtype, source.dtype, picked.shape, moved) if picked else None
    rows = next((t.numel for t in tensors[1:] if t.dtype in ("int64", "int32")), None)
    if rows is None or len(source.shape) < 1:
        return None
    shape = (rows, *source.shape[1:])
    return Move("index", source.dtype, source.dtype, shape, 2 * math.prod(shape) * size_of(source.dtype))


def _from_grid(named: Named, name: str, grid: Grid, amd: bool, per_block: int | None) -> Move | None:
    """Dtypes from the name, elements from the grid. What is still open becomes a range of bytes."""
    if named.kind == "triton_pad":
        return Move("pad", None, None, (), None, certain=False)
    if named.kind in ("triton_move", "cat", "index"):
        kind = {"triton_move": "cast" if "_to_copy" in name else "copy"}.get(named.kind, named.kind)
        return Move(kind, None, None, (), None, certain=False)
    found = elements(name, grid, amd)
    if found is None and per_block and grid[0]:
        found = ((grid[0] - 1) * per_block + 1, grid[0] * per_block)
    kind = "cast" if named.converts else "strided" if named.strided else "copy"
    if found is None:
        return Move(kind, named.dtype_from, named.dtype_to, (), None, certain=False)
    low, high = found
    shape = mla_pool_shape(low, high) or (high,)
    return _sized(Move(kind, named.dtype_from, named.dtype_to, shape, None, certain=False), low, high)


def mla_pool_shape(low: int, high: int) -> tuple[int, int, int] | None:
    """[tokens, 1, 576] if whole pages of 64 MLA rows fit into the few counts that a grid allows: chance hits are 1 in 72."""
    page = MLA_ROW * MLA_PAGE
    numel = high // page * page
    if numel < low or numel < 64 * page:
        return None
    return (numel // MLA_ROW, 1, MLA_ROW)


def _sized(move: Move, low: int, high: int) -> Move:
    """Fills in bytes. A generic cast to BF16 or FP16 comes from FP8 (FP32 has its own kernels): 1 byte, at most 2."""
    if move.dtype_to is None:
        return move
    width = size_of(move.dtype_to)
    if move.dtype_from is not None:
        each = width + size_of(move.dtype_from)
        return replace(move, bytes_moved=move.numel * each, bytes_low=low * each, bytes_high=high * each)
    if move.dtype_to in ("bf16", "fp16"):
        moved = move.numel * (width + 1)
        return replace(
            move, dtype_from="fp8_e4m3", bytes_moved=moved, bytes_low=low * (width + 1), bytes_high=high * (width + 2)
        )
    return replace(move, bytes_low=low * (width + 1), bytes_high=high * (width + 8))
