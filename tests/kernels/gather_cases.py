"""Cases of the gather kernel, run in Triton's interpreter on a CPU (`python -m tests.kernels.gather_cases`) and on a GPU."""

from __future__ import annotations

import torch

from uncast.kernels.gather_rows import gather_rows
from uncast.latent.codec import Scale, decode_rows, encode_rows
from uncast.latent.layouts import row_layout


def check_gather(
    device: str, layout_name: str, page: int, rank: int = 512, rope: int = 64, *, arch: int, on_device: bool = False
) -> None:
    """Asserts the bits of a cast by torch for repeated pages in any order, every code included, and nothing past them."""
    layout, copy = row_layout(layout_name, rank, rope), row_layout("bf16", rank, rope)
    generator = torch.Generator().manual_seed(page)
    scales: tuple[Scale, Scale] = (0.37, 1.9) if layout.has_external_scales else (None, None)
    rows = encode_rows(
        torch.randn(9 * page, rank, generator=generator) * 30, torch.randn(9 * page, rope, generator=generator), layout,
        ckv_scale=scales[0], kpe_scale=scales[1],
    )  # fmt: skip
    rows[0, : min(256, rank)] = torch.arange(256, dtype=torch.uint8)[:rank]  # every code, both NaN included
    rows[-1, :] = 0xFF
    cache, pages = rows.view(9, page, -1), torch.tensor([7, 0, 3, 3, 8], dtype=torch.int32)
    live = cache[pages.long()].view(-1, layout.row_bytes)
    expected = torch.cat(decode_rows(live, layout, ckv_scale=scales[0], kpe_scale=scales[1]), -1).to(torch.bfloat16)
    out = torch.full((6, page, copy.row_bytes), 0xAB, dtype=torch.uint8, device=device)
    given = [torch.tensor([s], device=device) if on_device and s is not None else s for s in scales]
    gather_rows(
        cache.to(device), pages.to(device), out, layout, arch=arch, ckv_scale=given[0], kpe_scale=given[1]
    )  # fmt: skip
    got = out[:5].view(-1, copy.row_bytes).cpu().view(torch.bfloat16)
    assert torch.equal(got.isnan(), expected.isnan()), layout_name
    assert torch.equal(got.nan_to_num(0.0).view(torch.int16), expected.nan_to_num(0.0).view(torch.int16)), layout_name
    assert bool((out[5] == 0xAB).all())


def main(device: str = "cpu", arch: int = 0) -> None:
    for page in (1, 16, 64):
        for name in ("fp8_e4m3", "fp8_ds_mla"):
            check_gather(device, name, page, arch=arch)
        check_gather(device, "fp8_e4m3", page, arch=arch, on_device=True)
    check_gather(device, "fp8_e4m3", 4, 96, 16, arch=arch)


if __name__ == "__main__":
    main()
