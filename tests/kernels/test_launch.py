"""One call's tensors in the kernels' form. A failure here is a wrong address or a scale that is silently ignored."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from uncast.kernels.launch import Call, is_aligned, make_call
from uncast.kernels.mma_launch import cache_views
from uncast.latent.codec import decode_rows, encode_rows
from uncast.latent.layouts import row_layout

Q_NOPE, Q_PE = torch.randn(3, 4, 512).bfloat16(), torch.randn(3, 4, 64).bfloat16()


def call(q_pe: torch.Tensor = Q_PE, **kw: object) -> Call:
    given: dict[str, object] = {"lse_base": "2", "ckv_scale": None, "kpe_scale": None, "dummy": torch.ones(1)} | kw
    return make_call(Q_NOPE, q_pe, torch.zeros(1, 64, 576), torch.empty(3, 4, 512), None, **given)  # type: ignore[arg-type]


def test_scales_travel_as_values_or_as_pointers() -> None:
    on_device = torch.tensor([0.5])
    assert (call().ckv_scale, call().scale_flags) == (1.0, 0)
    assert (call(ckv_scale=0.25).ckv_scale, call(ckv_scale=0.25).scale_flags) == (0.25, 0)
    by_pointer = call(kpe_scale=on_device)
    assert by_pointer.scale_flags == 2 and by_pointer.kpe_scale_ptr is on_device
    assert call(ckv_scale=on_device, kpe_scale=on_device).scale_flags == 3


def test_unaligned_queries_are_copied_and_aligned_ones_are_not() -> None:
    assert call().q_pe is Q_PE
    odd = torch.zeros(3, 4, 67).bfloat16()[:, :, 3:]
    odd.copy_(Q_PE)
    copied = call(odd).q_pe
    assert not is_aligned(odd) and is_aligned(copied) and torch.equal(copied, Q_PE)
    assert is_aligned(Q_NOPE.transpose(0, 1).contiguous().transpose(0, 1))


def test_cache_views_start_at_their_field() -> None:
    ckv, kpe = torch.randn(2, 512), torch.randn(2, 64)
    layout = row_layout("fp8_ds_mla")
    rows = encode_rows(ckv, kpe, layout)
    latent, rope, scale = cache_views(rows.view(1, 2, 656), layout)
    stored_ckv, stored_kpe = decode_rows(rows, layout)
    assert torch.equal(rope[328 : 328 + 64].float(), stored_kpe[1])
    codes = latent[328 : 328 + 256].view(torch.uint8).view(torch.float8_e4m3fn).float()
    assert torch.equal(codes.view(4, 128) * scale[164 : 164 + 4, None], stored_ckv[1].view(4, 128))
