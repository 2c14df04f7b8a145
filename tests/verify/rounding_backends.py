"""Backends on a CPU that round to BF16 on the way, as tensor-core kernels do; with and without saying so."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from tests.verify.rounding_model import pieces, whole
from uncast.attention import Capability, ProblemSpec
from uncast.attention.oracle import request_rows
from uncast.backends.torch_cpu import TorchCpuBackend
from uncast.latent.codec import decode_rows

ALL = ("fp32", "bf16", "fp8_e4m3", "fp8_ds_mla")


class RoundsP(TorchCpuBackend):
    """Rounds probabilities, and does not say so."""

    name = "rounds_p"

    def capability(self, spec: ProblemSpec) -> Capability:
        return Capability.refused(f"{self.name} is dense") if spec.topk else super().capability(spec)

    @property
    def attend(self) -> Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
        return whole

    def run(self, q_nope: torch.Tensor, q_pe: torch.Tensor, cache: torch.Tensor, **kwargs: Any) -> None:
        problem, spec = self._problem, self._problem.spec
        starts, out, lse = problem.qo_indptr.tolist(), kwargs["out"], kwargs["lse"]
        for request, kv_len in enumerate(problem.kv_len_arr.tolist()):
            rows = slice(starts[request], starts[request + 1])
            ckv, kpe = decode_rows(
                request_rows(problem, cache, request), spec.layout, ckv_scale=kwargs["ckv_scale"],
                kpe_scale=kwargs["kpe_scale"], dtype=torch.float64,
            )  # fmt: skip
            scores = (q_nope[rows].double() @ ckv.T + q_pe[rows].double() @ kpe.T) * spec.sm_scale
            seen = (
                kv_len - scores.shape[0] + 1 + torch.arange(scores.shape[0]) if spec.causal else torch.tensor([kv_len])
            )
            scores = scores.masked_fill(torch.arange(kv_len) >= seen[:, None, None], -math.inf)
            if kv_len == 0:
                out[rows] = 0
                lse[rows] = -math.inf
                continue
            result, base_e = self.attend(scores.flatten(0, 1), ckv)
            out[rows] = result.view(out[rows].shape)
            lse[rows] = base_e.view(lse[rows].shape) / (1.0 if spec.lse_base == "e" else math.log(2.0))


class SaysP(RoundsP):
    name = "says_p"
    bf16_probabilities = ALL


class RoundsPieces(SaysP):
    """Rounds the results of pieces of a context, too, and does not say so."""

    name = "rounds_pieces"

    @property
    def attend(self) -> Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
        return pieces


class SaysPieces(RoundsPieces):
    name = "says_pieces"
    bf16_partials = ALL


PATHS = {made.name: f"{__name__}:{made.__name__}" for made in (RoundsP, SaysP, RoundsPieces, SaysPieces)}
