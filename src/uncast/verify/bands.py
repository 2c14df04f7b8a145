"""Outputs between guard bands: a write outside of them is seen.

    bytes     [ band, 0xA5 ... ][ tensor, starts as NaN ... ][ band, 0xA5 ... ]

A band is 64 KiB, so a write further away than that is not seen here (the memory's owner may notice).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

BAND_BYTES = 1 << 16
_PATTERN = 0xA5


class BandedTensor:
    """A contiguous tensor of `shape`, filled with NaN, whose storage goes on before and after it.

    Attributes:
        tensor: what a backend is given; 64 KiB-aligned within its storage.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: str) -> None:
        size = math.prod(shape) * dtype.itemsize
        self._bytes = torch.full((2 * BAND_BYTES + size,), _PATTERN, dtype=torch.uint8, device=device)
        self._end = BAND_BYTES + size
        self.tensor = self._bytes[BAND_BYTES : self._end].view(dtype).view(*shape)
        self.tensor.fill_(math.nan)

    def changed(self) -> tuple[int, int]:
        """Bytes of the band before the tensor, and of the one after it, that no longer hold the pattern. Syncs."""
        before, after = self._bytes[:BAND_BYTES], self._bytes[self._end :]
        return int((before != _PATTERN).sum()), int((after != _PATTERN).sum())
