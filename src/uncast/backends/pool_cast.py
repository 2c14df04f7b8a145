"""`pool_cast:<inner>`: the founding bug, kept as a baseline. Casts the whole pool to BF16 on every call.

What SGLang's `fa3` and `flashinfer` MLA backends do with an FP8 cache: bytes grow with the pool, not with what is live.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from uncast.attention.backend import Capability
from uncast.attention.problem import Problem, ProblemError, ProblemSpec
from uncast.backends._recast import RecastBackend, bf16_row_bytes, cast_rows, inner_spec, recast_capability
from uncast.latent.codec import Scale


class PoolCastBackend(RecastBackend):
    """An inner backend over a BF16 copy of all pages, live or not."""

    wrapper = "pool_cast"

    def capability(self, spec: ProblemSpec) -> Capability:
        return recast_capability(self.name, self.inner.capability, spec)

    def plan(self, problem: Problem) -> None:
        self._problem = problem
        self.inner.plan(replace(problem, spec=inner_spec(problem.spec)))

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
        spec = self._problem.spec
        copy = torch.empty((*cache.shape[:2], bf16_row_bytes(spec)), dtype=torch.uint8, device=cache.device)
        cast_rows(cache.view(-1, cache.shape[-1]), spec.layout, ckv_scale, kpe_scale, copy.view(-1, copy.shape[-1]))
        self.inner.run(q_nope, q_pe, copy, ckv_scale=None, kpe_scale=None, out=out, lse=lse, indices=indices)

    def bytes_read(self, problem: Problem) -> int:
        live = self.inner.bytes_read(replace(problem, spec=inner_spec(problem.spec)))
        return _pool_rows(problem) * problem.spec.layout.row_bytes + live

    def bytes_written(self, problem: Problem) -> int:
        return _pool_rows(problem) * bf16_row_bytes(problem.spec)


def _pool_rows(problem: Problem) -> int:
    if problem.num_pages is None:
        raise ProblemError("pool_cast moves the whole pool: give num_pages to plan() for its byte counts")
    return problem.num_pages * problem.spec.page_size
