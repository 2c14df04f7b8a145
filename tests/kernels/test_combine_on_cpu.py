"""The combine alone, executed on a CPU (`gluon_cpu`), against float64: any number of splits, and more than one step holds."""

from __future__ import annotations

import math
import random

import pytest

pytest.importorskip("triton")

import torch

from tests.kernels.gluon_cpu import OnCpu
from uncast.kernels import combine

SPLITS = (2, 3, 4, 5, 9, 16, 17, 33, 65, 129, 257)
SHAPES = {
    torch.float16: [(512, 1, 4), (256, 1, 8), (128, 1, 8), (64, 1, 8), (64, 1, 16), (64, 2, 16)],
    torch.float32: [(256, 1, 8), (128, 4, 8), (64, 2, 8), (64, 4, 8)],
}
OUT_SCALE, UNTOUCHED = 0.5, 7.0


class Groups:
    """Two groups to merge, one with more splits than a step of the kernel takes (`step`), and what comes out: out, lse, and the
    sizes of what is summed. What nobody wrote is NaN."""

    def __init__(self, seed: int, dtype: torch.dtype, scaled: bool, step: int) -> None:
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.block_rows, self.heads = rng.choice([8, 16, 64]), rng.choice([3, 16, 20, 128])
        counts = [rng.choice(SPLITS), step + rng.randint(1, step + 1)]
        blocks = sum(n * 2 for n in counts)
        self.partial_o = torch.full((blocks, self.block_rows, 512), math.nan, dtype=dtype)
        self.partial_lse = torch.full((blocks, self.block_rows), math.nan)
        self.partial_scale = torch.full((blocks, self.block_rows), math.nan) if scaled else self.partial_lse
        self.sched = torch.full((4, 8), 12345, dtype=torch.int32)
        self.sched[0, 0] = len(counts)
        outs, lses, sizes = [], [], []
        first = part = 0
        for group, n in enumerate(counts):
            rows, stride = rng.randint(1, self.block_rows), rng.randint(1, 2)
            self.sched[group + 1, :5] = torch.tensor([first, rows, n, part, stride])
            at = part + torch.arange(n) * stride
            lse = torch.randn(n, rows, generator=generator) * 20
            lse[torch.rand(n, rows, generator=generator) < 0.3] = -math.inf
            if rows > 1:
                lse[:, 0] = -math.inf  # a row that no split saw anything of
            x = torch.randn(n, rows, 512, generator=generator).masked_fill(lse[..., None] == -math.inf, 0.0).to(dtype)
            scale = 2.0 ** torch.randint(-20, 60, (n, rows), generator=generator).float()
            self.partial_o[at, :rows], self.partial_lse[at, :rows] = x, lse
            weights = (lse.double() * math.log(2)).softmax(0).nan_to_num(0.0)
            if scaled:
                self.partial_scale[at, :rows] = scale
                weights = weights * scale
            sizes.append((weights[..., None] * x.double().abs()).sum(0) * OUT_SCALE)
            outs.append((weights[..., None] * x.double()).sum(0) * OUT_SCALE)
            lses.append((lse.double() * math.log(2)).logsumexp(0) / math.log(2))
            first, part = first + rows, part + n * stride
        self.out, self.lse, self.sizes = torch.cat(outs), torch.cat(lses), torch.cat(sizes)

    def merge(self, shape: tuple[int, int, int], scaled: bool, programs: int, **how: bool) -> tuple[torch.Tensor, ...]:
        """The kernel's out [rows, 512] and LSE [rows], and rows behind them."""
        tokens = -(-self.out.shape[0] // self.heads) + 1
        out = torch.full((tokens, self.heads, 512), UNTOUCHED)
        lse = torch.full((tokens, self.heads), UNTOUCHED)
        args = combine.constexprs(self.block_rows, *shape, scaled=scaled, spread=25088, **how)
        OnCpu(combine.combine_kernel)[(programs,)](
            self.partial_o, self.partial_lse, self.partial_scale, self.sched, out, lse, out.stride(0), out.stride(1),
            lse.stride(0), lse.stride(1), OUT_SCALE, torch.ones(1), 0, self.heads, 1, **args, num_warps=shape[1],
        )  # fmt: skip
        return out.view(-1, 512), lse.view(-1)


@pytest.mark.parametrize(("dtype", "shape"), [(dtype, shape) for dtype, shapes in SHAPES.items() for shape in shapes])
def test_every_shape_merges_any_number_of_splits(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    scaled = dtype == torch.float16
    step = combine.constexprs(8, *shape, pdl=True)["SPLITS"]
    assert isinstance(step, int)
    groups = Groups(shape[0] + shape[2], dtype, scaled, step)
    out, lse = groups.merge(shape, scaled, 2, pdl=True, warm=True)
    rows = groups.out.shape[0]
    assert bool(((out[:rows].double() - groups.out).abs() <= 1e-5 * groups.sizes).all())
    torch.testing.assert_close(lse[:rows].double(), groups.lse, rtol=0, atol=1e-3)
    assert bool((out[rows:] == UNTOUCHED).all() and (lse[rows:] == UNTOUCHED).all())
    again = groups.merge(shape, scaled, 5, pdl=True, warm=False)
    assert torch.equal(out, again[0]) and torch.equal(lse, again[1])
