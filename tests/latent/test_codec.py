"""Rows in bytes. A failure here means the writer, a kernel or another engine would read other numbers than were stored."""

from __future__ import annotations

import math

import pytest
import torch

from uncast.latent.codec import RowError, ScaleError, decode_rows, ds_mla_scales, encode_rows, new_counters, store_rows
from uncast.latent.layouts import LAYOUT_NAMES, LayoutError, row_layout


def randn(rows: int, width: int, *, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * scale


def flashmla_rows(ckv: torch.Tensor, kpe: torch.Tensor) -> torch.Tensor:
    """The 656-byte row by its published recipe, with torch's logarithm and float8 cast instead of ours."""
    rows = torch.empty(ckv.shape[0], 656, dtype=torch.uint8)
    for tile in range(4):
        part = ckv[:, tile * 128 : tile * 128 + 128].float()
        inverse = (part.abs().amax(-1) / 448.0).clamp_min(1e-4)
        scale = torch.pow(2, inverse.log2().ceil())
        codes = (part / scale[:, None]).to(torch.float8_e4m3fn)
        rows[:, tile * 128 : tile * 128 + 128] = codes.view(torch.uint8)
        rows[:, 512 + 4 * tile : 516 + 4 * tile] = scale.float()[:, None].view(torch.uint8)
    rows[:, 528:] = kpe.bfloat16().contiguous().view(torch.uint8)
    return rows


def test_row_bytes() -> None:
    assert [row_layout(name).row_bytes for name in LAYOUT_NAMES] == [2304, 1152, 576, 656]
    assert row_layout("auto").name == "fp8_ds_mla"
    assert row_layout("auto", 256, 32).name == "bf16"
    assert row_layout("fp8_e4m3", 256, 32).row_bytes == 288


def test_unknown_layouts_and_dimensions_are_refused() -> None:
    with pytest.raises(LayoutError, match="unknown KV cache layout 'fp8'"):
        row_layout("fp8")
    with pytest.raises(LayoutError, match="512 and qk_rope_head_dim 64 only, not 256 and 32"):
        row_layout("fp8_ds_mla", 256, 32)


@pytest.mark.parametrize("spread", [1e-6, 0.01, 1.0, 30.0, 5000.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ds_mla_is_byte_identical_to_the_published_recipe(spread: float, dtype: torch.dtype) -> None:
    ckv, kpe = randn(300, 512, scale=spread).to(dtype), randn(300, 64, seed=1, scale=100).to(dtype)
    assert torch.equal(encode_rows(ckv, kpe, row_layout("fp8_ds_mla")), flashmla_rows(ckv, kpe))


@pytest.mark.parametrize("name", LAYOUT_NAMES)
def test_all_zero_rows_give_zeros(name: str) -> None:
    layout = row_layout(name)
    ckv, kpe = decode_rows(encode_rows(torch.zeros(3, 512), torch.zeros(3, 64), layout), layout)
    assert not ckv.any() and not kpe.any()


@pytest.mark.parametrize(("rank", "rope"), [(512, 64), (256, 32), (128, 32), (96, 16)])
@pytest.mark.parametrize("name", ["fp32", "bf16", "fp8_e4m3"])
def test_round_trip_error_is_the_formats(name: str, rank: int, rope: int) -> None:
    layout = row_layout(name, rank, rope)
    scales = {"ckv_scale": 0.0213, "kpe_scale": 0.37} if name == "fp8_e4m3" else {}
    ckv, kpe = randn(50, rank), randn(50, rope, seed=1, scale=20)
    rows = encode_rows(ckv, kpe, layout, **scales)
    assert rows.shape == (50, layout.row_bytes)
    got = decode_rows(rows, layout, **scales, dtype=torch.float64)
    step = {"fp32": 0.0, "bf16": 2.0**-8, "fp8_e4m3": 2.0**-4}[name]
    for value, want, scale in zip(got, (ckv, kpe), (0.0213, 0.37), strict=True):
        floor = scale * 2.0**-10 if name == "fp8_e4m3" else 0.0
        assert bool(((value - want).abs() <= want.abs() * step + floor).all())


def test_scales_other_than_one_change_bytes_and_come_back() -> None:
    layout, ckv, kpe = row_layout("fp8_e4m3"), randn(9, 512), randn(9, 64, seed=1)
    host = encode_rows(ckv, kpe, layout, ckv_scale=0.03, kpe_scale=0.5)
    device = encode_rows(ckv, kpe, layout, ckv_scale=torch.tensor([0.03]), kpe_scale=torch.tensor(0.5))
    assert torch.equal(host, device)
    assert not torch.equal(host, encode_rows(ckv, kpe, layout))


def test_saturation_subnormals_and_nan_are_counted() -> None:
    ckv, kpe = torch.ones(1, 512), torch.ones(1, 64)
    ckv[0, 0], ckv[0, 1], ckv[0, 2], ckv[0, 3] = 1000.0, -math.inf, 2.0**-8, math.nan
    kpe[0, 0] = -500.0
    counters, layout = new_counters(), row_layout("fp8_e4m3")
    rows = encode_rows(ckv, kpe, layout, counters=counters)
    assert counters.tolist() == [3, 1, 1]
    values, rope = decode_rows(rows, layout)
    assert values[0, :2].tolist() == [448.0, -448.0] and rope[0, 0] == -448.0
    assert int(values.isnan().sum()) == 1
    encode_rows(ckv, kpe, layout, counters=counters)
    assert counters.tolist() == [6, 2, 2]


def test_ds_mla_infinities_saturate_and_nan_does_not_spoil_its_tile() -> None:
    ckv = torch.full((1, 512), 2.0)
    ckv[0, 0], ckv[0, 130] = math.inf, math.nan
    assert bool(ds_mla_scales(ckv).isfinite().all())
    values, _ = decode_rows(encode_rows(ckv, torch.zeros(1, 64), row_layout("fp8_ds_mla")), row_layout("fp8_ds_mla"))
    assert int(values.isnan().sum()) == 1 and bool(values[0, 130].isnan())
    assert bool(values[0, 0].isfinite()) and bool((values[0, 1:128] == 2.0).all())


def test_ds_mla_reads_scales_that_are_no_powers_of_two() -> None:
    layout = row_layout("fp8_ds_mla")
    rows = encode_rows(torch.ones(2, 512), torch.zeros(2, 64), layout)
    rows[:, 512:528] = torch.tensor([0.3, 1.7, 5.0, 1e-3]).repeat(2, 1).view(torch.uint8)
    ckv, _ = decode_rows(rows, layout, dtype=torch.float64)
    code = (
        decode_rows(encode_rows(torch.ones(1, 512), torch.zeros(1, 64), layout), layout)[0][0, 0]
        / ds_mla_scales(torch.ones(1, 512))[0, 0]
    )
    expected = torch.tensor([0.3, 1.7, 5.0, 1e-3]).double() * code.double()
    assert torch.equal(ckv[0, ::128], expected)


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf])
def test_bad_scales_are_refused(scale: float) -> None:
    with pytest.raises(ScaleError, match="must be positive and finite"):
        encode_rows(torch.ones(1, 512), torch.ones(1, 64), row_layout("fp8_e4m3"), ckv_scale=scale)


def test_scales_for_layouts_without_them_are_refused() -> None:
    for name in ("bf16", "fp8_ds_mla"):
        with pytest.raises(ScaleError, match="has no per-layer scale"):
            encode_rows(torch.ones(1, 512), torch.ones(1, 64), row_layout(name), kpe_scale=0.5)


def test_store_rows_skips_negative_slots() -> None:
    cache = torch.full((4, 2, 576), 7, dtype=torch.uint8)
    rows = torch.arange(3, dtype=torch.uint8)[:, None].expand(3, 576)
    store_rows(cache, rows, torch.tensor([5, -1, 0]))
    assert cache.view(8, 576)[:, 0].tolist() == [2, 7, 7, 7, 7, 0, 7, 7]


@pytest.mark.parametrize("name", LAYOUT_NAMES)
def test_no_rows_are_no_bytes(name: str) -> None:
    layout = row_layout(name)
    rows = encode_rows(torch.zeros(0, 512), torch.zeros(0, 64), layout, counters=new_counters())
    assert rows.shape == (0, layout.row_bytes)
    assert [tuple(part.shape) for part in decode_rows(rows, layout)] == [(0, 512), (0, 64)]


@pytest.mark.parametrize("name", LAYOUT_NAMES)
@pytest.mark.parametrize(
    ("ckv", "kpe"),
    [
        (torch.zeros(2, 511), torch.zeros(2, 65)),
        (torch.zeros(2, 512), torch.zeros(3, 64)),
        (torch.zeros(512), torch.zeros(64)),
        (torch.zeros(2, 512, dtype=torch.int32), torch.zeros(2, 64)),
    ],
)
def test_rows_of_another_shape_are_refused(name: str, ckv: torch.Tensor, kpe: torch.Tensor) -> None:
    with pytest.raises(RowError, match="need floats"):
        encode_rows(ckv, kpe, row_layout(name))


def test_rows_and_counters_that_would_be_broadcast_are_refused() -> None:
    rows, cache = torch.ones(1, 2, dtype=torch.uint8), torch.zeros(1, 4, 576, dtype=torch.uint8)
    with pytest.raises(RowError, match=r"rows are \[1, 2\]: 1 slots of this cache need \[1, 576\]"):
        store_rows(cache, rows, torch.tensor([0]))
    with pytest.raises(RowError, match=r"counters is torch\.int64"):
        encode_rows(torch.zeros(1, 512), torch.zeros(1, 64), row_layout("fp8_e4m3"), counters=new_counters()[:2])
