"""`RowReader`: stored rows as float32, block by block, in buffers that are made once.

The scratch is `BLOCK_ROWS` rows as bytes, as fp16 bits and as float32: it depends on neither the pool nor the context.
"""

from __future__ import annotations

import torch

from uncast.latent.layouts import DS_MLA_TILE, RowLayout
from uncast.numerics import e4m3

BLOCK_ROWS = 512


class RowReader:
    """Buffers of one block of rows on the CPU.

    Attributes:
        pages_per_block: whole pages that one `read` takes at most.
        rows_per_block: their rows; at least one page, else `BLOCK_ROWS`.
    """

    def __init__(self, layout: RowLayout, page_size: int) -> None:
        self.layout, self.rank, self.page_size = layout, layout.kv_lora_rank, page_size
        self.pages_per_block = max(1, BLOCK_ROWS // page_size)
        self.rows_per_block = rows = self.pages_per_block * page_size
        width = layout.kv_lora_rank + layout.qk_rope_head_dim
        self.bytes = torch.empty((self.pages_per_block, page_size, layout.row_bytes), dtype=torch.uint8)
        self.bits = torch.empty((rows, width), dtype=torch.int16) if layout.is_fp8 else None
        self.keys = torch.empty((rows, width))

    def read_block(self, cache: torch.Tensor, pages: torch.Tensor, start: int, count: int) -> torch.Tensor:
        """Rows start..start + count of a request that owns `pages`; `start` is a multiple of `rows_per_block`; see `read`."""
        first = start // self.page_size
        return self.read(cache, pages[first : first + -(-count // self.page_size)], count)

    def read(self, cache: torch.Tensor, pages: torch.Tensor, count: int) -> torch.Tensor:
        """float32 [count, rank + rope]: the first `count` rows of `pages`, external scales left out.

        Args:
            cache: uint8 [num_pages, page_size, row_bytes].
            pages: int32 or int64, at most `pages_per_block` of them.

        The result is overwritten by the next call.
        """
        stored = self.bytes[: pages.shape[0]]
        torch.index_select(cache, 0, pages, out=stored)
        return self._decode(stored.view(-1, self.layout.row_bytes)[:count])

    def read_rows(self, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """float32 [n, rank + rope]: the rows in `slots` (page * page_size + offset), int64, at most `rows_per_block`."""
        stored = self.bytes.view(-1, self.layout.row_bytes)[: slots.shape[0]]
        torch.index_select(cache.view(-1, self.layout.row_bytes), 0, slots, out=stored)
        return self._decode(stored)

    def _decode(self, rows: torch.Tensor) -> torch.Tensor:
        layout, rank, keys = self.layout, self.rank, self.keys[: rows.shape[0]]
        if layout.ckv_dtype == "fp32":
            return rows.view(torch.float32)
        if self.bits is None:
            return keys.copy_(rows.view(torch.bfloat16))
        if layout.has_external_scales:
            return e4m3.decode(rows, out=keys, bits=self.bits[: rows.shape[0]])
        e4m3.decode(rows[:, : layout.scale_offset], out=keys[:, :rank], bits=self.bits[: rows.shape[0], :rank])
        scales = rows[:, layout.scale_offset : layout.kpe_offset].view(torch.float32)
        keys[:, :rank].view(-1, layout.num_tiles, DS_MLA_TILE).mul_(scales[..., None])
        keys[:, rank:] = rows[:, layout.kpe_offset :].view(torch.bfloat16)
        return keys
