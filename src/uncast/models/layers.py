"""Norm and mixture of experts, as plain functions over weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from uncast.models.config import MoEConfig
from uncast.models.experts import MLP, ExpertStack

__all__ = ["MLP", "ExpertStack", "MoE", "rms_norm", "route"]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x * rsqrt(mean(x^2) + eps) * weight over the last dimension, in float32, back in x's dtype."""
    wide = x.to(torch.float32)
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (scaled.to(x.dtype)) * weight


@dataclass
class MoE:
    """Routed experts plus shared experts.

    Attributes:
        router: float32 [experts, hidden]; bias: float32 [experts] or None, added only for choosing.
        experts: an MLP per routed expert; shared: the shared experts as one MLP, or None.
    """

    config: MoEConfig
    router: torch.Tensor
    bias: torch.Tensor | None
    experts: list[MLP] | ExpertStack
    shared: MLP | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = route(self.config, F.linear(x.to(torch.float32), self.router), self.bias)
        out = self.shared(x) if self.shared is not None else torch.zeros_like(x)
        if isinstance(self.experts, ExpertStack) and self.experts.is_grouped(x):
            return out + self.experts.routed(x, weights, chosen)
        weights = weights.to(x.dtype)
        if x.shape[0] == 1:
            for weight, index in zip(weights[0], chosen[0].tolist(), strict=True):
                out = out + self.experts[index](x) * weight
            return out
        for index in sorted(set(chosen.flatten().tolist())):
            token, slot = (chosen == index).nonzero(as_tuple=True)
            out.index_add_(0, token, self.experts[index](x[token]) * weights[token, slot, None])
        return out


def route(config: MoEConfig, logits: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights float32 and expert indices, both [n, top_k], of router logits float32 [n, experts].

    "sigmoid" (DeepSeek-V3, section 2.1.2): group score = sum of the two best biased scores; weights are unbiased scores.
    "softmax" (DeepSeek-V2, section 2.2.2): group score = the best score.
    """
    scores = logits.sigmoid() if config.scoring == "sigmoid" else logits.softmax(dim=-1)
    biased = scores if bias is None else scores + bias
    if config.num_groups > 1:
        grouped = biased.view(-1, config.num_groups, config.num_experts // config.num_groups)
        best = 2 if config.scoring == "sigmoid" else 1
        group_scores = grouped.topk(best, dim=-1).values.sum(-1)
        kept = group_scores.topk(config.top_groups, dim=-1).indices
        mask = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, kept, False)
        biased = grouped.masked_fill(mask[..., None], -torch.inf).flatten(1)
    chosen = biased.topk(config.top_k, dim=-1).indices
    weights = scores.gather(1, chosen)
    if config.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * config.scale, chosen
