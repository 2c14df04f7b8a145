"""Few rows as whole tiles: what is read behind a tensor is its own storage, and nothing of it comes into a result.

On a GPU that is the default; here a CPU is told to do it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from uncast.kernels import row_tile
from uncast.kernels.row_tile import ROW_TILE, is_few, new_rows, tile_linear, whole_tile
from uncast.models.config import MoEConfig
from uncast.models.fused import rms_norm, route

BIG = 40
"""Rows of a buffer that views are taken of."""


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_tile, "DEVICES", ("cpu",))


def room(x: torch.Tensor) -> int:
    """Elements of x's storage."""
    return x.untyped_storage().nbytes() // x.element_size()


def end(x: torch.Tensor) -> int:
    """The element behind the last that x has."""
    return x.storage_offset() + 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "first rows": lambda x: x[:3],
    "rows in the middle": lambda x: x[9:12],
    "exactly to the end": lambda x: x[BIG - ROW_TILE : BIG - ROW_TILE + 5],
    "one row too near the end": lambda x: x[BIG - ROW_TILE + 1 : BIG - ROW_TILE + 6],
    "last row": lambda x: x[-1:],
    "columns": lambda x: x[:2, 4:9],
    "last columns at the end": lambda x: x[BIG - ROW_TILE : BIG - ROW_TILE + 5, 4:],
    "every other row": lambda x: x[::2][-15:],
    "one row again and again": lambda x: x[3:4].expand(7, -1),
    "columns as rows": lambda x: x.t()[:5],
    "one column as a row": lambda x: x[:, 2:3].t(),
    "fifteen rows": lambda x: x[:15],
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tile_begins_with_its_rows_and_stays_in_their_storage(name: str, dtype: torch.dtype) -> None:
    buffer = torch.arange(BIG * 12).view(BIG, 12).to(dtype)
    x = VIEWS[name](buffer)
    tile = whole_tile(x)
    assert tile.shape == (ROW_TILE, *x.shape[1:]) and torch.equal(tile[: x.shape[0]], x)
    assert end(tile) <= room(tile)
    same_storage = tile.data_ptr() == x.data_ptr()
    last_row_there = x.storage_offset() + (ROW_TILE - 1) * x.stride(0) + (x.shape[1] - 1) * x.stride(1) < room(buffer)
    assert same_storage == last_row_there  # no row is copied where the memory is there
    assert same_storage or not tile[x.shape[0] :].any()


@pytest.mark.parametrize("rows", [0, 1, 2, 15, 16, 17])
@pytest.mark.parametrize("shape", [(8,), (3, 8)])
def test_new_rows_have_a_tile_behind_them(rows: int, shape: tuple[int, ...]) -> None:
    x = new_rows(torch.empty(0, dtype=torch.bfloat16), rows, *shape)
    tile = whole_tile(x)
    assert x.shape == (rows, *shape) and x.dtype == torch.bfloat16 and x.is_contiguous()
    assert tile.data_ptr() == x.data_ptr() and tile.shape[0] == (ROW_TILE if is_few(x) else rows)
    assert is_few(x) == (rows in (1, 2, 15))
    assert new_rows(x, rows, *shape, dtype=torch.float32).dtype == torch.float32


def test_a_part_of_a_reinterpreted_buffer_counts_its_own_elements() -> None:
    """The storage is measured in elements of the view's dtype, not of the buffer's."""
    buffer = torch.zeros(20, 16, dtype=torch.uint8)
    x = buffer.view(torch.float32)[6:9]
    tile = whole_tile(x)
    assert end(tile) <= room(tile) and tile.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_what_lies_behind_the_rows_comes_into_no_result(garbage: float) -> None:
    generator = torch.Generator().manual_seed(1)
    weight, bias = torch.randn(24, 32, generator=generator), torch.randn(24, generator=generator)
    for rows in (1, 5, 15):
        x = new_rows(weight, rows, 32)
        whole_tile(x).fill_(garbage)
        x.copy_(torch.randn(rows, 32, generator=generator))
        zeros = x.clone()  # has nothing behind it
        product = tile_linear(x, weight)
        assert product.shape == (rows, 24) and bool(product.isfinite().all())
        assert torch.equal(product, tile_linear(zeros, weight))
        assert torch.equal(rms_norm(x, weight[0], 1e-5), rms_norm(zeros, weight[0], 1e-5))
        logits = new_rows(weight, rows, 24)
        whole_tile(logits).fill_(garbage)
        logits.copy_(product)
        for scoring in ("sigmoid", "softmax"):
            config = MoEConfig(24, 3, 1, 8, scoring, num_groups=4, top_groups=2, normalize=True, scale=1.0)
            found, expected = route(config, logits, bias), route(config, product.clone(), bias)
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
            assert found[1].shape == (rows, 3) and bool(found[0].isfinite().all())


def test_rows_have_the_same_bits_however_many_there_are() -> None:
    weight = torch.randn(300, 512)
    x = torch.randn(ROW_TILE, 512)
    expected = tile_linear(x, weight)
    for rows in range(1, ROW_TILE):
        assert torch.equal(tile_linear(x[:rows].clone(), weight), expected[:rows])


def test_other_devices_compute_the_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_tile, "DEVICES", ("cuda",))
    x = torch.randn(BIG, 4)[:3]
    assert not is_few(x) and whole_tile(x) is x and room(new_rows(x, 3, 4)) == 12
