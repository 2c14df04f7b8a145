"""Cases of the un-absorbed path's kernels in Triton's interpreter: `python -m tests.kernels.up_project_cases`; and on a GPU."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from uncast.kernels.merge_states import State, finish, fold
from uncast.kernels.unpack import INTEGER_FACTOR, decode_codes
from uncast.kernels.up_launch import prepare_weights
from uncast.latent.layouts import row_layout


@triton.jit
def decode_kernel(codes, out, NATIVE: tl.constexpr):
    i = tl.arange(0, 256)
    tl.store(out + i, decode_codes(tl.load(codes + i), NATIVE))


def check_decode(device: str, native: bool) -> None:
    """All 256 codes: exact, NaN stays NaN."""
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    out = torch.empty(256, dtype=torch.float16, device=device)
    decode_kernel[(1,)](codes, out, NATIVE=native)
    expected = codes.cpu().view(torch.float8_e4m3fn).float()
    got = out.cpu().float() * (1.0 if native else INTEGER_FACTOR)
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.nan_to_num(0.0), expected.nan_to_num(0.0))


def check_weights(device: str) -> None:
    """Rows of W of very different size keep every bit in fp16; bounds are those of the largest row."""
    w = torch.randn(3, 40, 96, generator=torch.Generator().manual_seed(1)) * torch.logspace(-20, 20, 40)[:, None]
    w[1, 3] = 0.0
    w = torch.cat([w, w], dim=1).bfloat16().to(device)
    prepared = prepare_weights(row_layout("fp8_e4m3", 96, 64), w[:, :40], w[:, 20:])
    for got, factor, part in (
        (prepared.w_uk, prepared.factor_k, w[:, :40]),
        (prepared.w_uv, prepared.factor_v, w[:, 20:]),
    ):
        back = got.double() * factor.double().view(3, -1, 1)
        top = part.double().abs().amax(-1, keepdim=True)
        assert bool(((back - part.double()).abs() <= top * 2.0**-25).all())
        assert torch.equal(back.where(part.abs() > top / 2**14, part.double()), part.double())
    sums = [part.float().abs().sum(-1).max() for part in (w[:, :40], w[:, 20:])]
    torch.testing.assert_close(prepared.bounds.view(torch.float32)[:2], torch.stack(sums), rtol=1e-6, atol=0.0)


def check_merge(device: str) -> None:
    """Three states of 5 heads and 7 tokens, LSE in both bases, -inf with NaN outputs, strided results, a factor."""
    generator = torch.Generator().manual_seed(2)
    outs = torch.randn(3, 5, 7, 24, generator=generator).half()
    lses = torch.randn(3, 5, 7, generator=generator, dtype=torch.float64) * 20
    lses[0, 0, 0] = lses[1, 1, 1] = -math.inf
    lses[:, 2, 2] = -math.inf
    outs[0, 0, 0] = outs[1, 1, 1] = torch.nan
    outs[:, 2, 2] = torch.nan
    weights = torch.exp2(lses - lses.logsumexp(0).nan_to_num(neginf=0.0))
    total = torch.exp2(lses).sum(0)
    expected = (outs.double().nan_to_num(0.0) * torch.exp2(lses)[..., None]).sum(0) / total.clamp_min(1e-300)[..., None]
    assert bool(weights.isfinite().all())
    bases = ("2", "e", "2")
    states = [
        State(out.to(device), (lse * (math.log(2) if base == "e" else 1.0)).float().to(device).T.contiguous().T, base)
        for out, lse, base in zip(outs, lses, bases, strict=True)
    ]
    factors = torch.full((6,), 0.25, device=device)
    for base, unit in (("2", 1.0), ("e", math.log(2))):
        out = torch.full((7, 5, 24), torch.nan, device=device).transpose(0, 1)
        lse = torch.full((7, 5), torch.nan, device=device).T
        finish([fold(states[0], states[1], 24), states[2]], factors, out, lse, base)
        torch.testing.assert_close(out.cpu().double(), expected * 0.25, rtol=2e-5, atol=1e-6)
        torch.testing.assert_close(lse.cpu().double(), total.log2() * unit, rtol=1e-5, atol=1e-5)
    alone = torch.empty(5, 7, 24, device=device)
    finish([states[2]], factors, alone)
    torch.testing.assert_close(alone.cpu().double()[0], outs[2, 0].double() * 0.25)
    assert bool((alone[2, 2] == 0).all())


def main(device: str = "cpu", native: bool = False) -> None:
    for mode in {False, native}:
        check_decode(device, mode)
    check_weights(device)
    check_merge(device)


if __name__ == "__main__":
    main()
