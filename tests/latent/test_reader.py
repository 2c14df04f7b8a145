"""Blocks of rows against the reference decoder. A failure here is what attention on a CPU would read wrong."""

from __future__ import annotations

import pytest
import torch

from uncast.latent.codec import decode_rows, encode_rows
from uncast.latent.layouts import row_layout
from uncast.latent.reader import BLOCK_ROWS, RowReader


@pytest.mark.parametrize("page_size", [1, 16, 128])
@pytest.mark.parametrize("layout_name", ["fp32", "bf16", "fp8_e4m3", "fp8_ds_mla"])
def test_blocks_are_what_the_codec_decodes(layout_name: str, page_size: int) -> None:
    layout, generator = row_layout(layout_name), torch.Generator().manual_seed(0)
    num_pages = 1100 // page_size
    rows = torch.randn(num_pages * page_size, 576, generator=generator) * 3
    cache = encode_rows(rows[:, :512], rows[:, 512:], layout).view(num_pages, page_size, -1)
    pages = torch.randperm(num_pages, generator=generator)
    expected = torch.cat(decode_rows(cache[pages].flatten(0, 1), layout), dim=-1)
    reader, length = RowReader(layout, page_size), num_pages * page_size - (page_size > 1)
    assert reader.rows_per_block == BLOCK_ROWS
    for start in range(0, length, reader.rows_per_block):
        count = min(reader.rows_per_block, length - start)
        assert torch.equal(reader.read_block(cache, pages, start, count), expected[start : start + count])


def test_a_block_is_at_least_one_page() -> None:
    assert RowReader(row_layout("bf16"), 1024).rows_per_block == 1024
