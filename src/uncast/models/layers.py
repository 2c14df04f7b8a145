"""Mixture of experts over plain weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from uncast.kernels.row_tile import is_few
from uncast.models.config import MoEConfig
from uncast.models.experts import MLP, ExpertStack
from uncast.models.fused import choose_experts, rms_norm, route

__all__ = ["MLP", "ExpertStack", "MoE", "rms_norm", "route"]


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
        weights, chosen = choose_experts(self.config, x, self.router, self.bias)
        if isinstance(self.experts, ExpertStack) and self.experts.is_grouped(x):
            return self.experts.mixed(x, weights, chosen, self.shared)
        out = self.shared(x) if self.shared is not None else torch.zeros_like(x)
        weights = weights.to(x.dtype)
        if x.shape[0] == 1 and not is_few(x):
            for weight, index in zip(weights[0], chosen[0].tolist(), strict=True):
                out = out + self.experts[index](x) * weight
            return out
        for index in sorted(set(chosen.flatten().tolist())):
            token, slot = (chosen == index).nonzero(as_tuple=True)
            out.index_add_(0, token, self.experts[index](x[token]) * weights[token, slot, None])
        return out
