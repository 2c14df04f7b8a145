"""Packed weights and their cache. A failure means that a matrix stands for other values, or that the bound is none."""

from __future__ import annotations

import pytest
import torch

from tests.quant.helpers import random_fp8, random_nvfp4
from uncast.numerics import e2m1, e4m3
from uncast.quant.packed import DequantCache, Fp8Blocks, Nvfp4, Packed, concat_rows, empty_stack, put_expert


def with_cache(weight: Packed, cache: DequantCache) -> Packed:
    import dataclasses

    return dataclasses.replace(weight, cache=cache)


def test_nvfp4_values_are_code_times_scale_times_global() -> None:
    weight = random_nvfp4(3, 6, 64)
    codes = e2m1.unpack(weight.codes).to(torch.int64)
    values = e2m1.table()[codes] * e4m3.table()[weight.scales.to(torch.int64)].repeat_interleave(16, -1)
    expected = values * weight.global_scale.double()[..., None]
    got = weight.dequantize(torch.float32)
    assert weight.shape == got.shape == (3, 6, 64)
    assert bool(((got.double() - expected).abs() <= expected.abs() * 2.0**-23).all())
    assert torch.equal(weight.expert(1).dequantize(torch.float32), got[1])
    assert weight.nbytes == 3 * 6 * (32 + 4 + 4)


def test_fp8_values_are_code_times_the_scale_of_their_block() -> None:
    weight = random_fp8(2, 200, 300)
    got = weight.dequantize(torch.float32)
    for row, column in ((0, 0), (127, 127), (128, 127), (199, 299)):
        value = e4m3.table()[int(weight.codes[1, row, column])] * weight.scales[1, row // 128, column // 128].double()
        assert float(got[1, row, column]) == float(value.float())
    assert torch.equal(weight.expert(1).dequantize(torch.float32), got[1])


@pytest.mark.parametrize("make", [random_nvfp4, random_fp8])
def test_rows_go_on_top_of_each_other(make) -> None:  # type: ignore[no-untyped-def]
    first, second = make(128, 64), make(72, 64)
    both = concat_rows(first, second)
    assert both is not None and not isinstance(both, torch.Tensor)
    dense = torch.cat([first.dequantize(torch.float32), second.dequantize(torch.float32)])
    assert torch.equal(both.dequantize(torch.float32), dense)
    assert concat_rows(first, torch.zeros(1, 64)) is None


def test_fp8_blocks_do_not_straddle_a_seam() -> None:
    assert concat_rows(random_fp8(100, 64), random_fp8(100, 64)) is None


@pytest.mark.parametrize("make", [random_nvfp4, random_fp8])
def test_a_stack_holds_its_experts(make) -> None:  # type: ignore[no-untyped-def]
    experts = [make(16, 32) for _ in range(3)]
    stack = empty_stack(experts[0], 3)
    assert all(put_expert(stack, i, expert) for i, expert in enumerate(experts))
    assert isinstance(stack, Nvfp4 | Fp8Blocks)
    for i, expert in enumerate(experts):
        assert torch.equal(stack.expert(i).dequantize(torch.float32), expert.dequantize(torch.float32))
    assert not put_expert(stack, 0, torch.zeros(16, 32))


def test_the_cache_stays_within_its_bound_and_saves_work() -> None:
    cache = DequantCache(3 * 16 * 32 * 4)
    weights = [with_cache(random_nvfp4(16, 32), cache) for _ in range(5)]
    for _ in range(20):
        for weight in weights:
            assert torch.equal(weight.dense(torch.float32), weight.dequantize(torch.float32))
            assert cache.nbytes <= cache.max_bytes
    assert cache.nbytes == cache.max_bytes
    assert cache.hits + cache.misses == 100 and cache.hits >= 20, "going in a circle must still find some"


def test_a_bound_of_nothing_keeps_nothing_and_a_negative_one_is_refused() -> None:
    cache = DequantCache(0)
    with_cache(random_nvfp4(16, 32), cache).dense(torch.float32)
    assert cache.nbytes == 0 and cache.misses == 1
    with pytest.raises(ValueError, match="-1 bytes: at least 0"):
        DequantCache(-1)
