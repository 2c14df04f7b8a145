"""e4m3 bits. A failure here means every FP8 number in the product is suspect."""

from __future__ import annotations

import math

import pytest
import torch

from uncast.numerics import e4m3
from uncast.numerics.ue8m0 import ceil_pow2

CODES = torch.arange(256, dtype=torch.uint8)


def test_the_table_is_the_formats_definition() -> None:
    table = e4m3.table()
    assert table[0x7E] == 448 and table[0xFE] == -448
    assert table[0x01] == 2.0**-9 and table[0x08] == 2.0**-6
    assert math.isnan(table[0x7F]) and math.isnan(table[0xFF])
    assert int(table.isfinite().sum()) == 254
    assert torch.equal(table[:0x7F], table[:0x7F].sort().values)


def test_decode_is_exact_on_every_code_and_keeps_nan() -> None:
    decoded = e4m3.decode(CODES).double()
    assert torch.equal(decoded.isnan(), e4m3.table().isnan())
    finite = e4m3.table().isfinite()
    assert torch.equal(decoded[finite], e4m3.table()[finite])
    assert torch.equal(torch.signbit(decoded[finite]), CODES[finite] >= 0x80)


def test_decode_of_strided_input_into_strided_output() -> None:
    codes = torch.randint(0, 0x7F, (7, 40), dtype=torch.uint8)
    out = torch.full((7, 80), -1.0)
    e4m3.decode(codes[:, 3:20], out=out[:, 5:22])
    assert torch.equal(out[:, 5:22].double(), e4m3.table()[codes[:, 3:20].long()])
    assert bool((out[:, :5] == -1).all()) and bool((out[:, 22:] == -1).all())


def test_encode_inverts_decode() -> None:
    finite = e4m3.table().isfinite()
    assert torch.equal(e4m3.encode(e4m3.table()[finite].float()), CODES[finite])


def test_encode_rounds_to_the_nearest_code_and_ties_to_even() -> None:
    x = torch.cat([torch.randn(4000) * 10.0**k for k in range(-4, 3)]).clamp(-448, 448)
    codes = e4m3.encode(x)
    positive = e4m3.table()[:0x7F]
    chosen = positive[(codes & 0x7F).long()]
    best = (positive[None] - x.abs().double()[:, None]).abs().amin(1)
    assert torch.equal((chosen - x.abs().double()).abs(), best)
    middle = ((positive[:-1] + positive[1:]) / 2).float()
    assert bool((e4m3.encode(middle) % 2 == 0).all())


@pytest.mark.parametrize("value", [448.1, 464.0, 1e9, math.inf])
def test_encode_saturates_and_never_makes_a_nan(value: float) -> None:
    assert e4m3.encode(torch.tensor([value, -value])).tolist() == [0x7E, 0xFE]


def test_encode_keeps_nan() -> None:
    assert int(e4m3.encode(torch.tensor([math.nan]))[0]) & 0x7F == e4m3.NAN_CODE


def test_ceil_pow2_is_the_next_power_of_two() -> None:
    x = torch.cat([torch.rand(2000) * 10.0**k for k in range(-4, 5)]).clamp_min(1e-4)
    scale = ceil_pow2(x)
    assert bool((scale >= x).all()) and bool((scale < 2 * x).all())
    assert torch.equal(torch.frexp(scale).mantissa, torch.full_like(scale, 0.5))
    powers = 2.0 ** torch.arange(-13.0, 20.0)
    assert torch.equal(ceil_pow2(powers), powers)
    assert torch.equal(ceil_pow2(powers * (1 + 2.0**-23)), powers * 2)
