"""Deterministic mode: every matrix product sees exactly `ROW_TILE` rows, so a row's bits cannot depend on its batch.

A BLAS picks its code by the number of rows, and codes differ in their last bits; with one row count there is one code
(`uncast.kernels.row_tile` does so for few rows of every mode on a GPU). What remains is that this code computes a row alike
wherever it stands in the tile and whatever stands beside it: the runner tests that on this machine, with the model itself.

    step's rows   a17 | b40 b41 ... b55 | c3     a decodes, b prefills, c decodes
    tiles         [a17 b40 ... b54] [b55 c3 - ... -]     `-`: no row of anyone; written nowhere, attends to nothing

Attention takes each row as a request of its own with `position + 1` cached rows (in a tile, rows are written before anyone
attends). So a row that prefill computed equals the one that decode would have computed, and chunks may be cut anywhere: pages
from the prefix cache are good wherever they end. The price is that a prompt is read like decoded tokens, one query at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.nn import functional as F

from uncast.models.decoder import AnyMLP, MLADecoder
from uncast.models.layers import ExpertStack, MoE, route
from uncast.models.parallel import ShardedMLP, ShardedMoE


@dataclass
class FixedRowMoE(MoE):
    """A mixture whose experts see the whole tile instead of the rows that chose them; the other rows' results are dropped.

    On a GPU one launch serves every expert and has the same shape for every tile, however its rows are spread over the experts,
    so that the host need not look at the choice.
    """

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.experts, ExpertStack) and self.experts.is_grouped(x):
            return super().__call__(x)
        weights, chosen = route(self.config, F.linear(x.to(torch.float32), self.router), self.bias)
        out = self.shared(x) if self.shared is not None else torch.zeros_like(x)
        weights = weights.to(x.dtype)
        for index in sorted(set(chosen.flatten().tolist())):
            token, slot = (chosen == index).nonzero(as_tuple=True)
            out.index_add_(0, token, self.experts[index](x)[token] * weights[token, slot, None])
        return out


def with_fixed_rows(model: MLADecoder) -> MLADecoder:
    """The same weights in a decoder whose mixtures are `FixedRowMoE` and whose attention is always absorbed, as decoding is;
    `model` itself is unchanged."""
    layers = [replace(layer, mlp=_fixed(layer.mlp)) for layer in model.layers]
    parallel = None if model.parallel is None else replace(model.parallel, ordered=True)
    mtp = model.mtp
    if mtp is not None:
        mtp = replace(mtp, layer=replace(mtp.layer, mlp=_fixed(mtp.layer.mlp)))
    return MLADecoder(
        model.config,
        model.embed,
        layers,
        model.final_norm,
        model.lm_head,
        prefill="absorbed",
        parallel=parallel,
        mtp=mtp,
    )


def _fixed(mlp: AnyMLP) -> AnyMLP:
    if isinstance(mlp, MoE):
        return FixedRowMoE(**vars(mlp))
    if isinstance(mlp, ShardedMLP | ShardedMoE):
        mlp = replace(mlp, parallel=replace(mlp.parallel, ordered=True))
    return replace(mlp, whole=True) if isinstance(mlp, ShardedMoE) else mlp
