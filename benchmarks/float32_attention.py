"""A backend for comparisons: attention in float32 by torch's products, on any device, over any layout; it is slow."""

from __future__ import annotations

import math

import torch

from uncast.attention import registry
from uncast.attention.backend import Backend, Capability
from uncast.attention.problem import Problem, ProblemSpec
from uncast.latent.codec import Scale, decode_rows

NAME = "torch_float32"
QUERIES = 128
"""Of a request that are scored at once."""


class Float32Attention(Backend):
    """Each request by itself: its live rows are decoded, all scores of a few queries are held."""

    name = NAME

    def capability(self, spec: ProblemSpec) -> Capability:
        if spec.topk:
            return Capability.refused(f"{NAME} has no sparse attention")
        return Capability.claimed()

    def plan(self, problem: Problem) -> None:
        self._problem = problem

    def run(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        cache: torch.Tensor,
        *,
        ckv_scale: Scale,
        kpe_scale: Scale,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        indices: torch.Tensor | None = None,
    ) -> None:
        problem, spec = self._problem, self._problem.spec
        layout, size = spec.layout, spec.page_size
        ends, starts, lengths = (x.tolist() for x in (problem.qo_indptr, problem.kv_indptr, problem.kv_len_arr))
        out.zero_()
        if lse is not None:
            lse.fill_(-math.inf)
        for request, length in enumerate(lengths):
            pages = problem.kv_indices[starts[request] :][: -(-length // size)].long()
            rows = cache.view(torch.uint8)[pages].flatten(0, 1)[:length]
            ckv, kpe = decode_rows(rows, layout, ckv_scale=ckv_scale, kpe_scale=kpe_scale)
            keys, last = torch.cat([ckv, kpe], -1), ends[request + 1]
            places = torch.arange(length, device=cache.device)
            for first in range(ends[request], last, QUERIES):
                mine = slice(first, min(first + QUERIES, last))
                query = torch.cat([q_nope[mine].float(), q_pe[mine].float()], -1)
                scores = query.flatten(0, 1) @ keys.T * spec.sm_scale
                scores = scores.view(*query.shape[:2], length)
                seen = torch.arange(mine.start - last, mine.stop - last, device=cache.device) + length
                if spec.causal:
                    scores.masked_fill_((places > seen[:, None])[:, None], -math.inf)
                live = (seen >= 0 if spec.causal else seen * 0 + length > 0)[:, None]
                top = scores.logsumexp(-1) if length else torch.full_like(scores[..., :0].sum(-1), -math.inf)
                weights = (scores - top[..., None]).exp()
                values = (weights.flatten(0, 1) @ ckv).view(*query.shape[:2], -1)
                out[mine] = values.masked_fill(~live[..., None], 0.0)
                if lse is not None:
                    lse[mine] = top.masked_fill(~live, -math.inf) * (1.0 if spec.lse_base == "e" else 1 / math.log(2.0))


registry.register(NAME, f"{__name__}:Float32Attention")
