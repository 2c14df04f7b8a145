"""Cases of the cache writer, run in Triton's interpreter on a CPU (`python -m tests.kernels.writer_cases`) and on a GPU."""

from __future__ import annotations

import math

import torch

from uncast.kernels.cache_write import write_rows
from uncast.latent.codec import Scale, encode_rows, new_counters, store_rows
from uncast.latent.layouts import row_layout


def special_rows(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows with ties, subnormals, saturating values, infinities and NaN, in bf16, fp16 or fp32."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(6, rank, generator=generator) * torch.tensor([1e-6, 0.01, 1.0, 30.0, 600.0, 5000.0])[:, None]
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()[:127]
    ties = (codes[:-1] + codes[1:]) / 2
    x[2, : min(rank, 126)] = ties[:rank]
    x[3, : min(rank, 127)] = -codes[:rank]
    x[4, :4] = torch.tensor([math.inf, -math.inf, math.nan, -0.0])
    x[1] = 0.0
    x = x.to(dtype)
    x[4, 4:6] = torch.tensor([math.nan, 1.0]).to(dtype)
    x[4, 4] = -x[4, 2]  # a NaN of each sign
    return x


def check_writer(device: str, layout_name: str, dtype: torch.dtype, rank: int = 512, rope: int = 64) -> None:
    """Asserts bytes and counters equal to the codec's, for scattered and skipped slots and both kinds of scale."""
    layout = row_layout(layout_name, rank, rope)
    ckv, kpe = special_rows(rank, dtype), special_rows(rope, dtype).flip(0)
    if not layout.is_fp8 or layout.name == "fp8_ds_mla":
        kpe = torch.nan_to_num(kpe)  # bf16 NaN has many spellings
    if not layout.is_fp8:
        ckv = torch.nan_to_num(ckv)
    slots = torch.tensor([17, 3, -1, 0, 9, 30])
    kinds: list[tuple[Scale, Scale]] = [(None, None)]
    if layout.has_external_scales:
        kinds += [(0.37, 1.9), (torch.tensor([0.037]), torch.tensor([0.5]))]
    for ckv_scale, kpe_scale in kinds:
        expected = torch.full((4, 8, layout.row_bytes), 0xAB, dtype=torch.uint8)
        got, counters, expected_counters = expected.clone().to(device), new_counters(device), new_counters()
        keep = slots >= 0
        rows = encode_rows(ckv[keep], kpe[keep], layout, ckv_scale=ckv_scale, kpe_scale=kpe_scale,
                           counters=expected_counters)  # fmt: skip
        store_rows(expected, rows, slots[keep])
        scales = [s.to(device) if isinstance(s, torch.Tensor) else s for s in (ckv_scale, kpe_scale)]
        wide = torch.cat([ckv, kpe], dim=-1).to(device)
        write_rows(
            wide[:, :rank], wide[:, rank:], got, slots.to(device),
            kv_layout=layout_name, ckv_scale=scales[0], kpe_scale=scales[1], counters=counters,
        )  # fmt: skip
        assert torch.equal(got.cpu(), expected), (layout_name, dtype, ckv_scale)
        assert counters.tolist() == expected_counters.tolist(), (layout_name, dtype, ckv_scale)


def main(device: str = "cpu") -> None:
    for name in ("fp32", "bf16", "fp8_e4m3", "fp8_ds_mla"):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            check_writer(device, name, dtype)
    for name in ("bf16", "fp8_e4m3"):
        check_writer(device, name, torch.bfloat16, 96, 16)


if __name__ == "__main__":
    main()
