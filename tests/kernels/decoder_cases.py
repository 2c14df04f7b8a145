"""Norms, rope, router and few-token mixtures against torch's own operations; in Triton's interpreter: `python -m
tests.kernels.decoder_cases`."""

from __future__ import annotations

import itertools
import os

import torch
from torch.nn import functional as F

from uncast.kernels import few_tokens_moe as moe
from uncast.kernels import moe_rows, norm_rope, router
from uncast.kernels.index_write import write_keys
from uncast.latent.index_keys import index_layout, load_keys, store_keys
from uncast.models.config import MoEConfig
from uncast.models.fused import rms_norm, route
from uncast.models.rope import Rope, RopeConfig

DTYPES = (torch.bfloat16, torch.float16)
ULPS = {torch.bfloat16: 2**-6, torch.float16: 2**-9}
"""Two roundings, each to a neighbour, where torch's float32 sum differs in its last bit."""


def close(got: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    """Within `bound` of the largest value, in every element; of a rounding step where torch adds up in another order."""
    assert got.shape == expected.shape and got.dtype == expected.dtype
    error = (got.double() - expected.double()).abs().max() / expected.double().abs().max().clamp_min(1e-30)
    assert float(error) <= bound, float(error)


def norms(device: str, size: int, rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(size + rows)
    x, residual = torch.randn(rows, 2 * size, device=device).to(dtype)[:, size:], torch.randn(rows, size, device=device)
    weight, residual = torch.rand(size, device=device).to(dtype) + 0.5, residual.to(dtype)
    out, total = norm_rope.add_rms_norm(x, weight, 1e-5)
    assert total is x
    close(out, rms_norm(x, weight, 1e-5), ULPS[dtype])
    for factor in (1.0, 0.3):
        out, total = norm_rope.add_rms_norm(x, weight, 1e-5, residual, factor)
        expected = residual + (x if factor == 1.0 else x * factor)
        if device == "cuda" or dtype == torch.float16:  # the interpreter truncates to bf16
            assert torch.equal(total, expected), "the sum is torch's, bit for bit"
        close(total, expected, ULPS[dtype])
        close(out, rms_norm(total, weight, 1e-5), ULPS[dtype])
    both = torch.randn(rows, 2 * size, device=device).to(dtype)
    close(norm_rope.silu_mul(both), F.silu(both[:, :size]) * both[:, size:], 2 * ULPS[dtype])


def latents(device: str, q_rank: int, rank: int, width: int, interleaved: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(rank + width)
    rope = Rope(RopeConfig(dim=width, theta=1e4, interleaved=interleaved), device)
    angles = rope.angles(torch.tensor([0, 7, 100_000], device=device))
    row = torch.randn(3, q_rank + rank + width, device=device).to(dtype)
    q_norm, kv_norm = (torch.rand(n, device=device).to(dtype) + 0.5 for n in (max(q_rank, 1), rank))
    q_row, kv_row = (row[:, :q_rank] if q_rank else None), row[:, q_rank:]
    c_q, ckv, kpe = norm_rope.latent_parts(
        q_row, kv_row, q_norm if q_rank else None, kv_norm, 1e-6, angles, interleaved
    )
    if c_q is not None and q_row is not None:
        close(c_q, rms_norm(q_row, q_norm, 1e-6), ULPS[dtype])
    assert (c_q is None) == (q_rank == 0)
    close(ckv, rms_norm(kv_row[:, :rank], kv_norm, 1e-6), ULPS[dtype])
    close(kpe, rope.rotate(kv_row[:, rank:], angles), ULPS[dtype])
    query = torch.randn(3, 20, 24 + width, device=device).to(dtype)
    expected, before = rope.rotate(query[..., 24:], angles), query[..., :24].clone()
    close(norm_rope.rotate(query[..., 24:], angles, interleaved), expected, ULPS[dtype])
    assert torch.equal(query[..., :24], before), "channels before the rope ones stay"


def routes(device: str, config: MoEConfig, rows: int) -> None:
    torch.manual_seed(config.num_experts + rows)
    x = torch.randn(rows, 96, device=device).bfloat16()
    weight = torch.randn(config.num_experts, 96, device=device) / 10
    bias = torch.randn(config.num_experts, device=device) / 10 if config.scoring == "sigmoid" else None
    logits = router.router_logits(x, weight)
    close(logits, F.linear(x.float(), weight), 1e-5)
    options = {
        "sigmoid": config.scoring == "sigmoid", "groups": config.num_groups, "top_groups": config.top_groups,
        "top_k": config.top_k, "normalize": config.normalize, "scale": config.scale,
    }  # fmt: skip
    weights, chosen = router.choose(logits, bias, **options)  # type: ignore[arg-type]
    expected_weights, expected = route(config, logits, bias)
    assert torch.equal(chosen, expected), (chosen, expected)
    close(weights, expected_weights, 1e-5)
    pairs, ends = router.sort(chosen, config.num_experts)
    of_pair, order = chosen.flatten().sort(stable=True)
    assert torch.equal(pairs, order)
    assert torch.equal(
        ends.long(), torch.searchsorted(of_pair, torch.arange(config.num_experts, device=device), right=True)
    )
    logits[0, 1] = float("nan")
    _, chosen = router.choose(logits, bias, **options)  # type: ignore[arg-type]
    for row in chosen.tolist():
        assert len(set(row)) == config.top_k and all(0 <= expert < config.num_experts for expert in row)


def few_tokens(
    device: str, tokens: int, experts: int, top_k: int, hidden: int, width: int, shared: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(hidden + tokens)
    gate_up = (torch.randn(experts, 2 * width, hidden, device=device) / hidden**0.5).to(dtype)
    down = (torch.randn(experts, hidden, width, device=device) / width**0.5).to(dtype)
    x = torch.randn(tokens, hidden, device=device).to(dtype)
    weights = torch.rand(tokens, top_k, device=device)
    chosen = torch.stack([torch.randperm(experts + 1, device=device)[:top_k] for _ in range(tokens)])
    more = None
    expected = torch.zeros(tokens, hidden, dtype=torch.float64, device=device)
    if shared:
        more = (
            (torch.randn(2 * shared * width, hidden, device=device) / hidden**0.5).to(dtype),
            (torch.randn(hidden, shared * width, device=device) / width**0.5).to(dtype),
        )
        expected += _gated(x, *more)
    for token, slot in itertools.product(range(tokens), range(top_k)):
        if (e := int(chosen[token, slot])) < experts:
            expected[token] += weights[token, slot].double() * _gated(x[token], gate_up[e], down[e])
    got = moe.few_tokens_moe(x, weights, chosen, gate_up, down, more)
    error = float((got.double() - expected).norm() / expected.norm())
    assert error <= 8e-3, error
    wide = moe.few_tokens_moe(x, weights, chosen, gate_up, down, more, torch.float32)
    assert wide.dtype == torch.float32
    close(wide.to(dtype), got, 0.0 if device == "cuda" or dtype == torch.float16 else ULPS[dtype])
    alone = moe.few_tokens_moe(x[-1:], weights[-1:], chosen[-1:], gate_up, down, more)
    assert torch.equal(alone[0], got[-1]), "a token's bits depend on no other"


def rows(device: str, dtype: torch.dtype) -> None:
    """Three tokens of two slots over four experts, of which expert 4 is not here."""
    torch.manual_seed(3)
    x, chosen = torch.randn(3, 40, device=device).to(dtype), torch.tensor([[1, 4], [0, 1], [4, 3]], device=device)
    pairs, ends = router.sort(chosen, 4)
    assert torch.equal(moe_rows.spread(x, pairs, 2), x[pairs // 2])
    made, weights = torch.randn(6, 40, device=device).to(dtype), torch.rand(6, device=device)
    made[int(ends[-1]) :] = float("nan")
    expected = torch.zeros_like(made)
    for place, pair in enumerate(pairs.tolist()):
        if place < int(ends[-1]):
            expected[pair] = made[place].float() * weights[pair]
    got = moe_rows.collect(made, pairs, ends, weights)
    close(got, expected, ULPS[dtype])
    more = torch.randn(3, 40, device=device).to(dtype)
    close(
        moe_rows.sum_parts(got.view(3, 2, 40), 1, torch.float32, more), got.view(3, 2, 40).float().sum(1) + more, 1e-5
    )
    parts = torch.randn(4, 3, 1500, device=device)
    close(moe_rows.sum_parts(parts, 0, torch.float32), parts.sum(0), 1e-5)


def _gated(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    gate, up = (x.double() @ gate_up.double().T).chunk(2, dim=-1)
    return (F.silu(gate) * up) @ down.double().T


def index_keys(device: str, layout_name: str, interleaved: bool, dtype: torch.dtype, head_dim: int = 128) -> None:
    """The bytes are the reference writer's, but where the norm's rounding differs; skipped slots and other rows stay."""
    torch.manual_seed(7)
    layout, page_size, eps = index_layout(layout_name, head_dim), 4, 1e-6
    rope = Rope(RopeConfig(dim=32, theta=1e4, interleaved=interleaved), device)
    angles = rope.angles(torch.tensor([0, 9, 3000, 5], device=device))
    keys = torch.randn(4, head_dim, device=device).to(dtype)
    norm, bias = (torch.rand(head_dim, device=device) + 0.5).to(dtype), torch.randn(head_dim, device=device).to(dtype)
    slots = torch.tensor([9, 0, -1, 2], device=device)
    normed = F.layer_norm(keys, (head_dim,), norm, bias, eps)
    expected = torch.cat([rope.rotate(normed[:, :32], angles), normed[:, 32:]], dim=-1)
    caches = [torch.full((3, page_size, layout.row_bytes), 0x11, dtype=torch.uint8, device=device) for _ in range(2)]
    store_keys(caches[0], expected, slots, layout)
    write_keys(keys, norm, bias, eps, angles, interleaved, caches[1], slots, layout)
    pages = torch.arange(3, device=device)
    wanted, got = (load_keys(cache, pages, 12, layout) for cache in caches)
    close(got, wanted, 0.08 if layout_name == "fp8" else 2 * ULPS[dtype])
    written = torch.zeros(12, dtype=torch.bool, device=device)
    written[slots[slots >= 0]] = True
    assert torch.equal(got[~written], wanted[~written]), "rows of no slot stay"


def config(experts: int, top_k: int, scoring: str = "sigmoid", groups: int = 1, top_groups: int = 1) -> MoEConfig:
    return MoEConfig(experts, top_k, 1, 64, scoring, groups, top_groups, scoring == "sigmoid", 1.8)


def main(device: str = "cpu") -> None:
    for dtype in DTYPES:
        norms(device, 96, 3, dtype)
        norms(device, 2048, 1, dtype)
        for interleaved in (True, False):
            latents(device, 48, 128, 16, interleaved, dtype)
        latents(device, 0, 96, 12, True, dtype)
        rows(device, dtype)
    routes(device, config(64, 4), 2)
    routes(device, config(8, 2, "sigmoid", 4, 2), 5)
    routes(device, config(60, 6, "softmax", 3, 2), 3)
    routes(device, config(20, 3, "softmax"), 3)
    for layout_name, interleaved in itertools.product(("fp8", "bf16", "fp32"), (True, False)):
        index_keys(device, layout_name, interleaved, torch.bfloat16)
    index_keys(device, "bf16", True, torch.float16, 48)
    few_tokens(device, 3, 5, 2, 80, 48, 0, torch.bfloat16)
    few_tokens(device, 2, 4, 3, 1040, 40, 2, torch.float16)


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1"
    main()
