"""The gated MLP and stacks of them, dense or packed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from uncast.models.fused import silu_mul
from uncast.quant.matmul import grouped_serves, linear
from uncast.quant.packed import Weight


@dataclass
class MLP:
    """SiLU-gated MLP: down(silu(gate(x)) * up(x)).

    Attributes:
        gate_up: [2 * intermediate, hidden], gate rows first; down: [hidden, intermediate].
    """

    gate_up: Weight
    down: Weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return linear(silu_mul(linear(x, self.gate_up)), self.down)


class ExpertStack:
    """All routed experts of a layer in two tensors; indexing gives one expert's MLP over views of them.

    Attributes:
        gate_up: [experts, 2 * intermediate, hidden]; down: [experts, hidden, intermediate].
    """

    def __init__(self, gate_up: Weight, down: Weight) -> None:
        self.gate_up, self.down = gate_up, down
        self._experts = [MLP(_expert(gate_up, i), _expert(down, i)) for i in range(gate_up.shape[0])]

    def __len__(self) -> int:
        return len(self._experts)

    def __getitem__(self, index: int) -> MLP:
        return self._experts[index]

    def is_grouped(self, x: torch.Tensor) -> bool:
        """Whether `routed` takes x: on a GPU in BF16, where one launch serves every expert."""
        return grouped_serves(x, self.gate_up, self.down)

    def mixed(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, shared: MLP | None) -> torch.Tensor:
        """`routed` plus the shared experts: [n, hidden] in x's dtype."""
        if self._few(x) and (shared is None or self._joins(shared)):
            both = None if shared is None else (shared.gate_up, shared.down)
            return self._of_few(x, weights, chosen, both, None)
        from uncast.quant.grouped import moe  # needs Triton

        return moe(x, weights, chosen, self.gate_up, self.down, more=None if shared is None else shared(x))

    def routed(
        self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """sum_k weights[n, k] * expert[chosen[n, k]](x[n]): [n, hidden] in `dtype` (x's if None), with no host sync.

        Args:
            x: [n, hidden]; weights: float32 [n, top_k].
            chosen: int64 [n, top_k]; an index of `len(self)` is an expert that is not here and adds nothing.
        """
        if self._few(x):
            return self._of_few(x, weights, chosen, None, dtype)
        from uncast.quant.grouped import moe  # needs Triton

        return moe(x, weights, chosen, self.gate_up, self.down, dtype)

    def _few(self, x: torch.Tensor) -> bool:
        """Whether x has so few rows that each reads its dense experts for itself."""
        if not isinstance(self.gate_up, torch.Tensor) or not isinstance(self.down, torch.Tensor):
            return False
        from uncast.kernels.few_tokens_moe import MAX_TOKENS

        return 0 < x.shape[0] <= MAX_TOKENS

    def _joins(self, shared: MLP) -> bool:
        """Whether shared experts are further slots: dense, and of a multiple of the routed experts' width."""
        dense = isinstance(shared.gate_up, torch.Tensor) and isinstance(shared.down, torch.Tensor)
        return dense and shared.down.shape[-1] % self.down.shape[-1] == 0

    def _of_few(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        chosen: torch.Tensor,
        shared: tuple[Weight, Weight] | None,
        dtype: torch.dtype | None,
    ) -> torch.Tensor:
        from uncast.kernels.few_tokens_moe import few_tokens_moe

        stacks = (self.gate_up, self.down) if shared is None else (self.gate_up, self.down, *shared)
        dense = [stack for stack in stacks if isinstance(stack, torch.Tensor)]
        return few_tokens_moe(x, weights, chosen, dense[0], dense[1], (dense[2], dense[3]) if shared else None, dtype)


def _expert(weight: Weight, index: int) -> Weight:
    return weight[index] if isinstance(weight, torch.Tensor) else weight.expert(index)
