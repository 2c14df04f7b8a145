"""The index cache's bytes. A failure is a key that a reader of another project would not find, or a lossy writer."""

from __future__ import annotations

import struct

import pytest
import torch

from uncast.latent.index_keys import index_layout, key_scales, load_keys, pages_view, store_keys
from uncast.latent.layouts import LayoutError
from uncast.numerics import e4m3


def test_bytes_per_key() -> None:
    assert [index_layout(name).row_bytes for name in ("fp8", "bf16", "fp32")] == [132, 256, 512]
    assert index_layout("fp8", 256).row_bytes == 264


def test_a_page_holds_its_codes_first_and_then_its_scales() -> None:
    """Read byte by byte, as DeepGEMM and vLLM lay a page out."""
    layout, keys = index_layout("fp8"), torch.randn(3, 128, generator=torch.Generator().manual_seed(0)) * 5
    cache = torch.zeros(2, 64, 132, dtype=torch.uint8)
    store_keys(cache, keys, torch.tensor([64 + 7, 3, -1]), layout)
    for row, (page, offset) in enumerate(((1, 7), (0, 3))):
        raw = bytes(cache[page].flatten().tolist())
        codes = raw[offset * 128 : offset * 128 + 128]
        (scale,) = struct.unpack("<f", raw[64 * 128 + 4 * offset : 64 * 128 + 4 * offset + 4])
        assert scale == float(key_scales(keys[row : row + 1]))
        expected = [e4m3.value_of(code) * scale for code in codes]
        assert max(abs(a - b) / max(abs(a), 0.1) for a, b in zip(keys[row].tolist(), expected, strict=True)) < 2**-4
    assert int((cache != 0).sum()) <= 2 * 132


def test_scales_are_powers_of_two_that_no_channel_overflows() -> None:
    keys = torch.tensor([448.0, 449.0, 1e-9, 3.5, 0.0]).repeat_interleave(128).view(5, 128)
    keys[4, 3] = torch.inf
    assert key_scales(keys)[:, 0].tolist() == [1.0, 2.0, 2.0**-22, 2.0**-7, 2.0**-22]
    layout = index_layout("fp8")
    cache = torch.zeros(1, 8, 132, dtype=torch.uint8)
    store_keys(cache, keys, torch.arange(5), layout)
    got = load_keys(cache, torch.tensor([0]), 5, layout)
    assert bool(got.isfinite().all()) and torch.equal(got[0], keys[0])
    store_keys(cache, torch.full((1, 128), torch.nan), torch.tensor([0]), layout)
    assert bool(load_keys(cache, torch.tensor([0]), 1, layout).isnan().all())


@pytest.mark.parametrize("name", ["fp8", "bf16", "fp32"])
def test_negative_slots_are_skipped(name: str) -> None:
    layout, keys = index_layout(name), torch.randn(5, 128, generator=torch.Generator().manual_seed(3))
    cache = torch.randint(0, 120, (3, 4, layout.row_bytes), dtype=torch.uint8)
    expected = cache.clone()
    store_keys(cache, keys, torch.full((5,), -1), layout)
    store_keys(cache, keys[:0], torch.zeros(0).long(), layout)
    assert torch.equal(cache, expected)
    store_keys(expected, keys[[1, 4]], torch.tensor([0, 9]), layout)
    store_keys(cache, keys, torch.tensor([-1, 0, -7, -1, 9], dtype=torch.int32), layout)
    assert torch.equal(cache, expected)


@pytest.mark.parametrize(("name", "width"), [("fp8", 128), ("fp8", 256), ("bf16", 128), ("fp32", 96)])
@pytest.mark.parametrize("page_size", [1, 16, 128])
def test_what_is_stored_is_read_back(name: str, width: int, page_size: int) -> None:
    layout = index_layout(name, width)
    cache = torch.full((300, page_size, layout.row_bytes), 0xFF, dtype=torch.uint8)
    keys = torch.randn(130, width, generator=torch.Generator().manual_seed(1)).bfloat16()
    pages = torch.randperm(300, generator=torch.Generator().manual_seed(2))[: -(-130 // page_size)]
    token = torch.arange(130)
    slots = pages[token // page_size] * page_size + token % page_size
    store_keys(cache, keys, slots, layout)
    got = load_keys(cache, pages, 130, layout, torch.float64)
    error = float((got - keys.double()).norm() / keys.double().norm())
    assert error == 0.0 if name != "fp8" else error < 0.03
    codes, scales = pages_view(cache, layout)
    assert codes.data_ptr() == cache.data_ptr() and scales.shape[-1] == layout.num_tiles


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: index_layout("fp9"), "unknown index cache layout 'fp9': use one of fp8, bf16, fp32"),
        (lambda: index_layout("fp8", 64), "multiple of 128 channels, not 64: use bf16"),
        (lambda: index_layout("fp32", 0), "head_dim is 0"),
        (
            lambda: store_keys(
                torch.zeros(1, 8, 132, dtype=torch.uint8),
                torch.zeros(2, 64),
                torch.zeros(2).long(),
                index_layout("fp8"),
            ),
            r"need \[2, 128\] and 132 bytes",
        ),
    ],
)
def test_one_sentence_for_what_does_not_fit(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(LayoutError, match=message):
        call()
