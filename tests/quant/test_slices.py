"""Parts of packed and dense matrices: what they stand for, that they stay packed where they can, and that they are copies."""

from __future__ import annotations

import pytest
import torch

from uncast.numerics import e4m3
from uncast.quant.packed import Fp8Blocks, Nvfp4, Weight
from uncast.quant.slices import take_columns, take_rows


def nvfp4(rows: int, columns: int) -> Nvfp4:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, generator=generator)
    scales = e4m3.encode(torch.rand((rows, columns // 16), generator=generator) + 0.5)
    return Nvfp4(codes, scales, torch.rand(rows, generator=generator) + 0.1)


def blocks(rows: int, columns: int) -> Fp8Blocks:
    generator = torch.Generator().manual_seed(1)
    codes = e4m3.encode(torch.randn((rows, columns), generator=generator))
    return Fp8Blocks(codes, torch.rand((-(-rows // 128), -(-columns // 128)), generator=generator) + 0.1)


def dense(weight: Weight) -> torch.Tensor:
    return weight if isinstance(weight, torch.Tensor) else weight.dequantize(torch.float32)


WEIGHTS: list[Weight] = [torch.randn(320, 384), nvfp4(320, 384), blocks(320, 384)]
PARTS = [(0, 128), (128, 320), (0, 320), (64, 100), (128, 128)]


@pytest.mark.parametrize("weight", WEIGHTS, ids=["dense", "nvfp4", "blocks"])
@pytest.mark.parametrize("part", PARTS)
def test_parts_hold_the_same_numbers(weight: Weight, part: tuple[int, int]) -> None:
    start, stop = part
    whole = dense(weight)
    for take, expected in ((take_rows, whole[start:stop]), (take_columns, whole[:, start:stop])):
        found = take(weight, start, stop, torch.float32)
        assert tuple(found.shape) == tuple(expected.shape)
        torch.testing.assert_close(dense(found), expected, rtol=0, atol=0)


def test_packed_stays_packed_where_no_block_is_cut() -> None:
    assert isinstance(take_rows(WEIGHTS[1], 64, 100, torch.float32), Nvfp4)
    assert isinstance(take_columns(WEIGHTS[1], 16, 48, torch.float32), Nvfp4)
    assert isinstance(take_columns(WEIGHTS[1], 8, 48, torch.float32), torch.Tensor)
    assert isinstance(take_rows(WEIGHTS[2], 128, 320, torch.float32), Fp8Blocks)
    assert isinstance(take_columns(WEIGHTS[2], 128, 256, torch.float32), Fp8Blocks)
    assert isinstance(take_rows(WEIGHTS[2], 64, 320, torch.float32), torch.Tensor)


@pytest.mark.parametrize("weight", WEIGHTS, ids=["dense", "nvfp4", "blocks"])
def test_parts_do_not_keep_the_whole_alive(weight: Weight) -> None:
    for take in (take_rows, take_columns):
        found = take(weight, 0, 128, torch.float32)
        tensors = [found] if isinstance(found, torch.Tensor) else [found.codes, found.scales]
        assert all(tensor.untyped_storage().nbytes() == tensor.nbytes and tensor.is_contiguous() for tensor in tensors)
