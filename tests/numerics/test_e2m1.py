"""e2m1 against its definition. A failure means every NVFP4 weight is read wrongly."""

from __future__ import annotations

import pytest
import torch

from uncast.numerics import e2m1


def test_values_are_those_of_the_standard() -> None:
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert [e2m1.value_of(c) for c in range(16)] == magnitudes + [-m for m in magnitudes]
    with pytest.raises(ValueError, match="0 to 15, not 16"):
        e2m1.value_of(16)


def test_every_code_survives_decode_and_encode() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    values = e2m1.decode(e2m1.pack(codes))
    assert torch.equal(values.to(torch.float64), e2m1.table())
    assert torch.equal(e2m1.encode(values), codes)
    assert torch.equal(e2m1.unpack(e2m1.pack(codes)), codes)


def test_the_even_element_is_in_the_low_nibble() -> None:
    assert e2m1.pack(torch.tensor([1, 10], dtype=torch.uint8)).tolist() == [0xA1]
    assert e2m1.decode(torch.tensor([[0xA1]], dtype=torch.uint8)).tolist() == [[0.5, -1.0]]


def test_rounding_is_to_the_nearest_and_ties_go_to_even_codes() -> None:
    table = e2m1.table()[:8]
    generator = torch.Generator().manual_seed(0)
    x = (torch.rand(4000, generator=generator, dtype=torch.float64) * 16 - 8).to(torch.float32)
    ties = ((table[:-1] + table[1:]) / 2).to(torch.float32)
    got = e2m1.encode(torch.cat([x, ties, -ties]))
    distance = (x.abs().clamp(max=6).to(torch.float64)[:, None] - table).abs()
    chosen = (got[:4000] & 7).to(torch.int64)
    assert torch.equal(distance.gather(1, chosen[:, None])[:, 0], distance.amin(1))
    assert bool((got[4000:] % 2 == 0).all())
    assert torch.equal(got[:4000] >= 8, torch.signbit(x))


def test_values_saturate_and_nan_is_refused() -> None:
    assert e2m1.encode(torch.tensor([6.1, 1e30, float("inf"), float("-inf"), -0.0])).tolist() == [7, 7, 7, 15, 8]
    with pytest.raises(ValueError, match="no NaN"):
        e2m1.encode(torch.tensor([float("nan")]))
