"""Cases of the fused rope and write, run in Triton's interpreter (`python -m tests.kernels.rope_write_cases`) and on a GPU."""

from __future__ import annotations

import itertools

import torch

from tests.kernels.writer_cases import special_rows
from uncast.kernels.rope_write import rope_write_rows
from uncast.latent.codec import Scale, encode_rows, new_counters, store_rows
from uncast.latent.layouts import row_layout
from uncast.models.rope import Rope, RopeConfig


def check_rope_write(
    device: str,
    layout_name: str,
    dtype: torch.dtype,
    *,
    interleaved: bool,
    rank: int = 512,
    rope: int = 64,
    heads: int = 20,
) -> None:
    """Asserts that bytes and counters are those of `Rope.rotate` on the same device and `encode_rows` on the CPU, whose NaN
    keep their sign (a GPU's division drops it), and that queries are `Rope.rotate`'s."""
    layout = row_layout(layout_name, rank, rope)
    ckv, kpe = special_rows(rank, dtype).to(device), special_rows(rope, dtype).flip(0).to(device)
    ckv, kpe = (x if layout.name == "fp8_e4m3" else torch.nan_to_num(x) for x in (ckv, kpe))
    kpe = kpe.masked_fill(~kpe.isfinite(), 3.0)  # inf - inf: a NaN of either sign
    if not layout.is_fp8:
        ckv = torch.nan_to_num(ckv)
    slots = torch.tensor([17, 3, -1, 0, 9, 30], device=device)
    turning = Rope(RopeConfig(rope, 10000.0, interleaved, attention_factor=0.9), device)
    angles = turning.angles(torch.tensor([0, 1, 77, 4095, 100_000, 3], device=device))
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(6, heads, 3 * rope, generator=generator).to(device).to(dtype)
    kinds: list[tuple[Scale, Scale]] = [(None, None)]
    if layout.has_external_scales:
        kinds += [(0.37, 1.9), (torch.tensor([0.037], device=device), torch.tensor([0.5], device=device))]
    for ckv_scale, kpe_scale in kinds:
        expected = torch.full((4, 8, layout.row_bytes), 0xAB, dtype=torch.uint8)
        got, counters, expected_counters = expected.clone().to(device), new_counters(device), new_counters()
        on_cpu = [s.cpu() if isinstance(s, torch.Tensor) else s for s in (ckv_scale, kpe_scale)]
        keep = slots >= 0
        rows = encode_rows(ckv[keep].cpu(), turning.rotate(kpe, angles)[keep].cpu(), layout, ckv_scale=on_cpu[0],
                           kpe_scale=on_cpu[1], counters=expected_counters)  # fmt: skip
        store_rows(expected, rows, slots[keep].cpu())
        wide, q = torch.cat([ckv, kpe], dim=-1), query.clone()
        rope_write_rows(
            wide[:, :rank], wide[:, rank:], q[..., rope : 2 * rope], angles, got, slots, interleaved=interleaved,
            kv_layout=layout_name, ckv_scale=ckv_scale, kpe_scale=kpe_scale, counters=counters,
        )  # fmt: skip
        what = layout_name, dtype, interleaved, ckv_scale
        assert torch.equal(got.cpu(), expected), what
        assert counters.tolist() == expected_counters.tolist(), what
        turned = turning.rotate(query[..., rope : 2 * rope], angles)
        assert torch.equal(q[..., rope : 2 * rope], turned), what
        assert torch.equal(q[..., :rope], query[..., :rope]) and torch.equal(q[..., 2 * rope :], query[..., 2 * rope :])


def main(device: str = "cpu") -> None:
    for name, interleaved in itertools.product(("fp32", "bf16", "fp8_e4m3", "fp8_ds_mla"), (False, True)):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            check_rope_write(device, name, dtype, interleaved=interleaved)
    check_rope_write(device, "bf16", torch.bfloat16, interleaved=True, rank=96, rope=16, heads=3)
    check_rope_write(device, "fp8_e4m3", torch.bfloat16, interleaved=False, rank=256, rope=32, heads=40)


if __name__ == "__main__":
    main()
