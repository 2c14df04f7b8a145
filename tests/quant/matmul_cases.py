"""Cases of packed matrix products, in Triton's interpreter on a CPU (`python -m tests.quant.matmul_cases`) and on a GPU."""

from __future__ import annotations

import torch

from tests.quant.helpers import random_fp8, random_nvfp4
from uncast.quant.grouped import in_planes, launch, moe, packed_linear, sort_pairs
from uncast.quant.packed import Nvfp4, Packed, Weight


def expert(weight: Weight, index: int) -> torch.Tensor:
    one = weight[index] if isinstance(weight, torch.Tensor) else weight.expert(index).dequantize(torch.float32)
    return one.double().cpu()


def oracle(x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, gate_up: Weight, down: Weight) -> torch.Tensor:
    """float64, pair by pair."""
    x, weights, chosen = x.double().cpu(), weights.double().cpu(), chosen.cpu()
    out = torch.zeros(x.shape[0], down.shape[-2], dtype=torch.float64)
    for token in range(x.shape[0]):
        for slot in range(chosen.shape[1]):
            e = int(chosen[token, slot])
            gate, up = (expert(gate_up, e) @ x[token]).chunk(2)
            out[token] += weights[token, slot] * (expert(down, e) @ (torch.nn.functional.silu(gate) * up))
    return out


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    assert bool(got.isfinite().all()), f"{int((~got.isfinite()).sum())} of {got.numel()} values are not finite"
    return float((got.double().cpu() - expected).norm() / expected.norm())


def check_linear(weight: Packed, rows: int, device: str, asm: bool) -> None:
    """One matrix, with the columns split and not."""
    x = torch.randn(rows, weight.shape[1]).to(torch.bfloat16).to(device)
    expected = x.double().cpu() @ weight.dequantize(torch.float32).double().cpu().T
    on_device = weight.to(device)
    for splits, dtype in ((1, torch.bfloat16), (1, torch.float32), (2, torch.float32)):
        shape = (splits, rows, weight.shape[0]) if splits > 1 else (rows, weight.shape[0])
        out = torch.full(shape, float("nan"), device=device, dtype=dtype)
        launch(in_planes(x, on_device), on_device, out, None, splits=splits, asm=asm)
        found = error(out.sum(0) if splits > 1 else out, expected)
        wide = dtype == torch.float32
        allowed = 2e-5 if wide else 2.5e-3 if asm else 4e-3  # the interpreter cuts bf16 off instead of rounding
        assert found < allowed, (type(weight).__name__, rows, splits, found)
    if device != "cpu":
        assert error(packed_linear(x, on_device), expected) < 2.5e-3
        assert error(packed_linear(x, on_device, torch.float32), expected) < 2e-5


def check_moe(gate_up: Packed, down: Packed, tokens: int, top_k: int, device: str, asm: bool) -> None:
    """Both products of a mixture, rows scattered over experts, some of which nobody chose."""
    experts, hidden = gate_up.shape[0], gate_up.shape[-1]
    x = torch.randn(tokens, hidden).to(torch.bfloat16)
    chosen = torch.stack([torch.randperm(experts - 1)[:top_k] for _ in range(tokens)])
    chosen[: tokens // 2, 0] = 0
    weights = torch.rand(tokens, top_k)
    expected = oracle(x, weights, chosen, gate_up, down)
    x, weights, chosen = x.to(device), weights.to(device), chosen.to(device)
    gate_up, down = gate_up.to(device), down.to(device)
    if device == "cpu":
        routing = sort_pairs(weights, chosen, experts)
        act = torch.full((tokens * top_k, down.shape[-1]), float("nan"), dtype=torch.bfloat16)
        planes = 8 if isinstance(down, Nvfp4) else 4
        launch(in_planes(x, gate_up), gate_up, act, routing, gated=True, out_planes=planes, asm=asm)
        out = torch.full((tokens * top_k, down.shape[-2]), float("nan"), dtype=torch.bfloat16)
        launch(act, down, out, routing, scatter=True, asm=asm)
        got = out.view(tokens, top_k, -1).float().sum(1)
    else:
        got = moe(x, weights, chosen, gate_up, down)
        dense = [w.dequantize(torch.bfloat16) for w in (gate_up, down)]
        assert error(moe(x, weights, chosen, *dense), expected) < 1e-2
        elsewhere = moe(x, weights, torch.where(chosen == 0, experts, chosen), gate_up, down, torch.float32)
        without = torch.where((chosen == 0).cpu(), 0.0, weights.cpu())
        assert error(elsewhere, oracle(x, without, chosen, gate_up, down)) < 5e-3
    found = error(got, expected)
    allowed = 5e-3 if asm else 9e-3
    assert found < allowed, (type(gate_up).__name__, tokens, found)


def main(device: str = "cpu", asm: bool = False) -> None:
    torch.manual_seed(0)
    for make in (random_nvfp4, random_fp8):
        check_linear(make(192, 512), 5, device, asm)
        check_linear(make(72, 512), 37, device, asm)
        check_moe(make(5, 256, 128), make(5, 128, 128), 9, 2, device, asm)


if __name__ == "__main__":
    main()
