"""Packed weights as they are stored: NVFP4 and FP8 in 128 x 128 blocks, one matrix or a stack of experts.

    Nvfp4      w[n, k] = e2m1[n, k] * (e4m3_scale[n, k // 16] * global_scale[n])      4.5 bits a weight
    Fp8Blocks  w[n, k] = e4m3[n, k] * scale[n // 128, k // 128]                       8 bits a weight

A global scale per row, not per tensor, so that rows of several tensors can be put together (gate and up of an MLP).
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch

from uncast.numerics import e2m1, e4m3

NVFP4_GROUP = 16
DEFAULT_CACHE_BYTES = 1 << 30


class DequantCache:
    """Dequantised matrices within a bound of bytes, shared by all packed weights of a model on a CPU.

    A step walks the layers in a circle, for which dropping the least recently used entry would drop every one just before
    it is needed; so a random one goes (seeded: the same run keeps the same).

    Attributes:
        max_bytes: bound; 0 keeps nothing.
        nbytes: held now. hits, misses: so far.
    """

    def __init__(self, max_bytes: int = DEFAULT_CACHE_BYTES) -> None:
        if max_bytes < 0:
            raise ValueError(f"the bound of the weight cache is {max_bytes} bytes: at least 0 is needed")
        self.max_bytes, self.nbytes, self.hits, self.misses = max_bytes, 0, 0, 0
        self._entries: dict[tuple[int, torch.dtype], tuple[Packed, torch.Tensor]] = {}
        self._random = random.Random(0)

    def get(self, weight: Packed, dtype: torch.dtype) -> torch.Tensor:
        """The dense matrix of `weight`; kept if it fits."""
        key = (id(weight), dtype)
        if key in self._entries:
            self.hits += 1
            return self._entries[key][1]
        self.misses += 1
        dense = weight.dequantize(dtype)
        if dense.nbytes <= self.max_bytes:
            while self.nbytes + dense.nbytes > self.max_bytes:
                victim = self._random.choice(list(self._entries))
                self.nbytes -= self._entries.pop(victim)[1].nbytes
            self._entries[key] = (weight, dense)
            self.nbytes += dense.nbytes
        return dense


@dataclass(frozen=True, eq=False)
class Nvfp4:
    """NVFP4 matrices.

    Attributes:
        codes: uint8 [..., rows, columns / 2], the even column in the low nibble.
        scales: uint8 [..., rows, columns / 16], e4m3 codes.
        global_scale: float32 [..., rows].
        cache: where `dense` keeps its result; None keeps nothing.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    global_scale: torch.Tensor
    cache: DequantCache | None = field(default=None, repr=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.codes.shape[:-1], 2 * self.codes.shape[-1])

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes + self.global_scale.nbytes

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """The dense matrices: the scale product and each value rounded once to float32 (as modelopt does), then to dtype."""
        values = e2m1.decode(self.codes).view(*self.scales.shape, NVFP4_GROUP)
        scales = _e4m3(self.scales) * self.global_scale[..., None]
        return values.mul_(scales[..., None]).flatten(-2).to(dtype)

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """As `dequantize`, from the cache where there is one."""
        return self.dequantize(dtype) if self.cache is None else self.cache.get(self, dtype)

    def expert(self, index: int) -> Nvfp4:
        """One matrix of a stack, a view."""
        return replace(self, codes=self.codes[index], scales=self.scales[index], global_scale=self.global_scale[index])

    def to(self, device: torch.device | str) -> Nvfp4:
        return replace(
            self, codes=self.codes.to(device), scales=self.scales.to(device), global_scale=self.global_scale.to(device)
        )


@dataclass(frozen=True, eq=False)
class Fp8Blocks:
    """FP8 matrices with a scale for each block; the last block of rows or columns may be partial.

    Attributes:
        codes: uint8 [..., rows, columns], e4m3 codes.
        scales: float32 [..., ceil(rows / block[0]), ceil(columns / block[1])].
        block: rows and columns of a block.
        cache: as in `Nvfp4`.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    block: tuple[int, int] = (128, 128)
    cache: DequantCache | None = field(default=None, repr=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.codes.shape)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """The dense matrices: each product rounded once to float32, then to dtype."""
        rows, columns = self.codes.shape[-2:]
        block = min(self.block[0], rows), min(self.block[1], columns)
        spread = self.scales.repeat_interleave(block[0], -2)[..., :rows, :]
        spread = spread.repeat_interleave(block[1], -1)[..., :columns]
        return _e4m3(self.codes).mul_(spread).to(dtype)

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """As `dequantize`, from the cache where there is one."""
        return self.dequantize(dtype) if self.cache is None else self.cache.get(self, dtype)

    def expert(self, index: int) -> Fp8Blocks:
        """One matrix of a stack, a view."""
        return replace(self, codes=self.codes[index], scales=self.scales[index])

    def to(self, device: torch.device | str) -> Fp8Blocks:
        return replace(self, codes=self.codes.to(device), scales=self.scales.to(device))


Packed: TypeAlias = Nvfp4 | Fp8Blocks
Weight: TypeAlias = torch.Tensor | Packed
"""A matrix [rows, columns], dense or packed."""


def _e4m3(codes: torch.Tensor) -> torch.Tensor:
    """float32 values; on a GPU by its own conversion, without the host's look at the values."""
    return e4m3.decode(codes) if codes.device.type == "cpu" else codes.view(torch.float8_e4m3fn).to(torch.float32)


def concat_rows(first: Weight, second: Weight) -> Weight | None:
    """Both matrices as one, first's rows on top; None if they are of two kinds, or blocks would straddle the seam."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return torch.cat([first, second], dim=-2)
    if isinstance(first, Nvfp4) and isinstance(second, Nvfp4):
        return Nvfp4(
            torch.cat([first.codes, second.codes], dim=-2),
            torch.cat([first.scales, second.scales], dim=-2),
            torch.cat([first.global_scale, second.global_scale], dim=-1),
            first.cache,
        )
    if isinstance(first, Fp8Blocks) and isinstance(second, Fp8Blocks) and first.block == second.block:
        if first.codes.shape[-2] % first.block[0]:
            return None
        return Fp8Blocks(
            torch.cat([first.codes, second.codes], dim=-2),
            torch.cat([first.scales, second.scales], dim=-2),
            first.block,
            first.cache,
        )
    return None


def split_rows(weight: Weight, at: int) -> tuple[Weight, Weight]:
    """Views of the rows before `at` and from there on; in FP8 blocks `at` is a multiple of a block's rows."""
    if isinstance(weight, torch.Tensor):
        return weight[:at], weight[at:]
    codes = weight.codes[:at], weight.codes[at:]
    if isinstance(weight, Fp8Blocks):
        block = at // weight.block[0]
        scales = weight.scales[:block], weight.scales[block:]
        return replace(weight, codes=codes[0], scales=scales[0]), replace(weight, codes=codes[1], scales=scales[1])
    first, second = (
        replace(weight, codes=code, scales=weight.scales[part], global_scale=weight.global_scale[part])
        for code, part in zip(codes, (slice(None, at), slice(at, None)), strict=True)
    )
    return first, second


def empty_stack(like: Weight, count: int) -> Weight:
    """Room for `count` matrices like this one; fill it with `put_expert`."""

    def room(x: torch.Tensor) -> torch.Tensor:
        return torch.empty((count, *x.shape), dtype=x.dtype, device=x.device)

    if isinstance(like, torch.Tensor):
        return room(like)
    if isinstance(like, Nvfp4):
        return replace(like, codes=room(like.codes), scales=room(like.scales), global_scale=room(like.global_scale))
    return replace(like, codes=room(like.codes), scales=room(like.scales))


def put_expert(stack: Weight, index: int, weight: Weight) -> bool:
    """Copies one matrix into its place; False, and nothing is done, if it is stored in another way than the stack's."""
    if isinstance(stack, torch.Tensor):
        if not isinstance(weight, torch.Tensor):
            return False
        stack[index].copy_(weight)
        return True
    if type(weight) is not type(stack):
        return False
    stack.codes[index].copy_(weight.codes)
    stack.scales[index].copy_(weight.scales)
    if isinstance(stack, Nvfp4) and isinstance(weight, Nvfp4):
        stack.global_scale[index].copy_(weight.global_scale)
    return True
