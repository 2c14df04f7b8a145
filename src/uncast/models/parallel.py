"""One rank's part of a model: attention by heads, MLPs by columns, routed experts by number.

    every rank      embedding, norms, kv_a, q_a, router, indexer; the hidden state; the latent cache, byte for byte the same
    heads           q_b, w_uk, w_uv by rows, o by columns: a rank's heads attend to the whole cache, parts are summed
    MLP             gate and up by rows, down by columns (dense layers and shared experts): parts are summed
    routed experts  rank r has experts E*r/n .. E*(r+1)/n; tokens stay where they are, parts are summed
    LM head         by rows: logits are gathered

Parts are summed in float32 and rounded once, as one process rounds the whole product. Two sums a layer, [n, hidden] each: one
of attention, one of the MLP or of routed and shared experts together.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.nn import functional as F

from uncast.models.config import ModelConfig, MoEConfig
from uncast.models.experts import MLP, ExpertStack
from uncast.models.fused import choose_experts, silu_mul
from uncast.models.layers import MoE
from uncast.quant.matmul import linear, linear_wide
from uncast.quant.packed import Weight, concat_rows
from uncast.quant.slices import take_columns, take_rows

_all_gather: Callable[[torch.Tensor, torch.Tensor], object] = (
    dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
)
"""One call by the names that torch gives it, the newer one first."""


class ParallelError(RuntimeError):
    """A group that cannot be formed or has lost a member, or a model that it cannot share; one sentence."""


def _raise(sentence: str) -> NoReturn:
    raise ParallelError(sentence)


@dataclass
class Parallel:
    """This process in its group.

    Attributes:
        rank, world: its number, and how many there are.
        on_failure: called with a sentence when a collective fails; it does not return.
        ordered: parts are added in the order of ranks wherever an element lies, which is slower; a reduction in rings has an
            order for each part of a tensor (deterministic mode).
    """

    rank: int
    world: int
    ordered: bool = False
    on_failure: Callable[[str], NoReturn] = field(default=_raise, repr=False)

    def range_of(self, count: int) -> range:
        """This rank's part of `count` things; parts differ by at most one."""
        return range(count * self.rank // self.world, count * (self.rank + 1) // self.world)

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's part; the same bits on every rank. `part` is used up."""
        if not self.ordered:
            self._collective(lambda: dist.all_reduce(part))
            return part
        parts = self._everyone(part)
        total = parts[0]
        for other in parts[1:]:
            total += other
        return total

    def gather(self, part: torch.Tensor, columns: int) -> torch.Tensor:
        """[m, columns] of the ranks' parts [m, their `range_of(columns)`]."""
        widest = -(-columns // self.world)
        parts = self._everyone(F.pad(part, (0, widest - part.shape[1])))
        widths = [len(Parallel(rank, self.world).range_of(columns)) for rank in range(self.world)]
        return torch.cat([one[:, :width] for one, width in zip(parts, widths, strict=True)], dim=-1)

    def from_first(self, tensor: torch.Tensor) -> None:
        """Rank 0's contents into every rank's contiguous tensor."""
        self._collective(lambda: dist.broadcast(tensor, src=0))

    def least(self, value: int, device: torch.device) -> int:
        """The smallest of the ranks' values."""
        held = torch.tensor([value], dtype=torch.int64, device=device)
        self._collective(lambda: dist.all_reduce(held, op=dist.ReduceOp.MIN))
        return int(held)

    def project(self, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        """x @ weight^T where every rank has some columns of both: the whole product, in x's dtype."""
        return self.sum(linear_wide(x, weight)).to(x.dtype)

    def _everyone(self, part: torch.Tensor) -> torch.Tensor:
        """[world, *part.shape], in the order of ranks."""
        parts = part.new_empty(self.world * part.shape[0], *part.shape[1:])
        self._collective(lambda: _all_gather(parts, part.contiguous()))
        return parts.view(self.world, *part.shape)

    def _collective(self, run: Callable[[], object]) -> None:
        try:
            run()
        except RuntimeError as error:
            reason = str(error).strip().split("\n")[0]
            self.on_failure(f"rank {self.rank} of {self.world}: exchange with the other ranks failed ({reason})")


def check_shares(config: ModelConfig, world: int) -> None:
    """Raises `ParallelError` unless `world` ranks can share the model's heads evenly and have an expert each."""
    if config.num_heads % world:
        allowed = ", ".join(str(n) for n in range(1, config.num_heads + 1) if config.num_heads % n == 0)
        raise ParallelError(
            f"{world} processes cannot share {config.num_heads} attention heads evenly: use one of {allowed}"
        )
    if config.moe is not None and config.moe.num_experts < world:
        raise ParallelError(f"{world} processes cannot share {config.moe.num_experts} experts: use no more than that")


def local_config(config: ModelConfig, parallel: Parallel) -> ModelConfig:
    """The configuration of one rank's decoder: its heads, everything else as it is."""
    return replace(config, num_heads=config.num_heads // parallel.world)


@dataclass
class ShardedMLP:
    """A gated MLP of which every rank has some intermediate channels."""

    part: MLP
    parallel: Parallel

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.parallel.sum(partial_mlp(self.part, x)).to(x.dtype)


@dataclass
class ShardedMoE:
    """A mixture of which every rank has the routed experts `mine` and some channels of the shared ones.

    Attributes:
        router, bias: of all experts, as in `MoE`.
        experts: this rank's, the first one is number `mine.start`.
        whole: experts see every row and drop what they were not chosen for (deterministic mode). On a GPU shapes are fixed
            by the number of rows anyway.
    """

    config: MoEConfig
    router: torch.Tensor
    bias: torch.Tensor | None
    experts: list[MLP] | ExpertStack
    shared: MLP | None
    mine: range
    parallel: Parallel
    whole: bool = False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = choose_experts(self.config, x, self.router, self.bias)
        routed = self._routed(x, weights, chosen)
        if self.shared is not None:
            routed += partial_mlp(self.shared, x)
        return self.parallel.sum(routed).to(x.dtype)

    def _routed(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """float32 [n, hidden]: what this rank's experts add."""
        local, count = chosen - self.mine.start, len(self.mine)
        if isinstance(self.experts, ExpertStack) and self.experts.is_grouped(x):  # fixed shapes: no row's bits change
            elsewhere = (local < 0) | (local >= count)
            return self.experts.routed(x, weights, local.masked_fill(elsewhere, count), dtype=torch.float32)
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for index in sorted({expert for expert in local.flatten().tolist() if 0 <= expert < count}):
            token, slot = (local == index).nonzero(as_tuple=True)
            rows = self.experts[index](x)[token] if self.whole else self.experts[index](x[token])
            out.index_add_(0, token, rows.to(torch.float32) * weights[token, slot, None].to(torch.float32))
        return out


def partial_mlp(mlp: MLP, x: torch.Tensor) -> torch.Tensor:
    """float32 [n, hidden]: what these intermediate channels add."""
    return linear_wide(silu_mul(linear(x, mlp.gate_up)), mlp.down)


def shard_mlp(mlp: MLP, parallel: Parallel, dtype: torch.dtype) -> MLP:
    """This rank's intermediate channels."""
    width = mlp.down.shape[-1]
    mine = parallel.range_of(width)
    gate = take_rows(mlp.gate_up, mine.start, mine.stop, dtype)
    up = take_rows(mlp.gate_up, width + mine.start, width + mine.stop, dtype)
    both = concat_rows(gate, up)
    if both is None:  # blocks would straddle the seam
        both = torch.cat([w if isinstance(w, torch.Tensor) else w.dequantize(dtype) for w in (gate, up)])
    return MLP(both, take_columns(mlp.down, mine.start, mine.stop, dtype))


def shard_moe(moe: MoE, mine: range, parallel: Parallel, dtype: torch.dtype) -> ShardedMoE:
    """A mixture whose `experts` are this rank's already; its shared experts are cut here."""
    shared = None if moe.shared is None else shard_mlp(moe.shared, parallel, dtype)
    return ShardedMoE(moe.config, moe.router, moe.bias, moe.experts, shared, mine, parallel)


def form_group(backend: str, rank: int, world: int, timeout_s: float) -> None:
    """Joins the process group that the launcher's environment describes.

    Raises:
        ParallelError: the other ranks were not there in time.
    """
    try:
        dist.init_process_group(backend, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=timeout_s))
    except (RuntimeError, ValueError, OSError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ParallelError(f"rank {rank} of {world} cannot join the other processes: {reason}") from None
