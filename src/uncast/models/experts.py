"""The gated MLP and stacks of them, dense or packed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

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
        gate, up = linear(x, self.gate_up).chunk(2, dim=-1)
        return linear(F.silu(gate) * up, self.down)


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

    def routed(
        self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """sum_k weights[n, k] * expert[chosen[n, k]](x[n]): [n, hidden] in `dtype` (x's if None), with no host sync.

        Args:
            x: [n, hidden]; weights: float32 [n, top_k].
            chosen: int64 [n, top_k]; an index of `len(self)` is an expert that is not here and adds nothing.
        """
        from uncast.quant.grouped import moe  # needs Triton

        return moe(x, weights, chosen, self.gate_up, self.down, dtype)


def _expert(weight: Weight, index: int) -> Weight:
    return weight[index] if isinstance(weight, torch.Tensor) else weight.expert(index)
