"""Hugging Face tensor names for the training model, and the FP8 128x128 block format."""

from __future__ import annotations

import torch
from model import ModelConfig, MoE, TinyGlm
from torch import Tensor

BLOCK = 128
FP8_MAX = 448.0


def to_hf(model: TinyGlm) -> dict[str, Tensor]:
    """fp32 CPU tensors under the names that transformers' Glm4MoeLiteForCausalLM writes; MTP is layer `num_hidden_layers`."""
    return {name: view.detach().float().cpu().contiguous() for name, view in _views(model).items()}


def from_hf(config: ModelConfig, tensors: dict[str, Tensor]) -> TinyGlm:
    """The inverse of `to_hf`. Raises KeyError for a missing tensor and RuntimeError for a wrong shape."""
    model = TinyGlm(config)
    views = _views(model)
    with torch.no_grad():
        for name, view in views.items():
            if view.shape != tensors[name].shape:
                raise RuntimeError(
                    f"{name} has shape {tuple(tensors[name].shape)}, the config asks for {tuple(view.shape)}"
                )
            view.copy_(tensors[name].float())
    return model.eval()


def _views(model: TinyGlm) -> dict[str, Tensor]:
    """Writable views of the model's tensors under their Hugging Face names."""
    named: dict[str, Tensor] = {}
    for n, block in enumerate(model.blocks()):
        named |= {f"model.layers.{n}.{k}": p.data for k, p in block.named_parameters()}
        if isinstance(block.mlp, MoE):
            where = f"model.layers.{n}.mlp."
            for key in ("router", "gate_proj", "up_proj", "down_proj"):
                del named[where + key]
            moe, experts = block.mlp, block.mlp.c.n_routed_experts
            named[where + "gate.weight"] = moe.router.data
            named[where + "gate.e_score_correction_bias"] = moe.bias
            for e in range(experts + 1):
                expert = where + ("shared_experts." if e == experts else f"experts.{e}.")
                named[expert + "gate_proj.weight"] = moe.gate_proj.data[e]
                named[expert + "up_proj.weight"] = moe.up_proj.data[e]
                named[expert + "down_proj.weight"] = moe.down_proj.data[:, e]
    mtp = f"model.layers.{model.c.num_hidden_layers}."
    named |= {"model.embed_tokens.weight": model.embed_tokens.data, "model.norm.weight": model.norm.weight.data}
    named |= {mtp + "enorm.weight": model.enorm.weight.data, mtp + "hnorm.weight": model.hnorm.weight.data}
    named |= {mtp + "eh_proj.weight": model.eh_proj.weight.data}
    named |= {mtp + "shared_head.norm.weight": model.shared_head_norm.weight.data}
    return named


def is_quantised(name: str) -> bool:
    """Linear layers are; embedding, norms, router, bias and `eh_proj` are not."""
    return (name.endswith("_proj.weight") and "eh_proj" not in name) or name.endswith("kv_a_proj_with_mqa.weight")


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 [O, I] -> (e4m3 [O, I], fp32 scales [ceil(O / 128), ceil(I / 128)]); weight = e4m3 * scale. Edges may be partial."""
    rows, cols = weight.shape
    grid_rows, grid_cols = -(-rows // BLOCK), -(-cols // BLOCK)
    padded = torch.zeros(grid_rows * BLOCK, grid_cols * BLOCK)
    padded[:rows, :cols] = weight
    amax = padded.view(grid_rows, BLOCK, grid_cols, BLOCK).abs().amax(dim=(1, 3))
    scale = torch.where(amax > 0, amax / FP8_MAX, torch.ones_like(amax))
    return (weight / _spread(scale, rows, cols)).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale


def dequantise(weight: Tensor, scale: Tensor) -> Tensor:
    """e4m3 [O, I] and its scales -> fp32 [O, I]."""
    return weight.float() * _spread(scale, *weight.shape)


def _spread(scale: Tensor, rows: int, cols: int) -> Tensor:
    return scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :cols]


def to_fp8(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The stored form: linears as FP8 blocks with `weight_scale_inv`, the router's bias fp32, everything else bf16."""
    out: dict[str, Tensor] = {}
    for name, t in tensors.items():
        if is_quantised(name):
            out[name], out[name + "_scale_inv"] = quantise(t)
        else:
            out[name] = t if name.endswith("e_score_correction_bias") else t.to(torch.bfloat16)
    return out


def from_fp8(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """fp32 tensors of a stored checkpoint, FP8 or not."""
    plain = {k: v for k, v in tensors.items() if not k.endswith("_scale_inv")}
    scales = {k: tensors[k + "_scale_inv"] for k in plain if k + "_scale_inv" in tensors}
    return {k: dequantise(v, scales[k]) if k in scales else v.float() for k, v in plain.items()}
