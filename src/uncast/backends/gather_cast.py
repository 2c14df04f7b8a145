"""`gather_cast:<inner>`: copies the live pages to BF16, then runs a backend that knows only 16-bit caches.

The way out most servers take from the founding bug: bytes grow with live tokens, not with the pool, but every live row is
still read, written and read again. On a GPU one fused kernel (`kernels.gather_rows`) fills the scratch; a page that several
requests share is copied once, so the scratch never has more pages than the pool, and it is used again by every layer and plan.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from uncast.attention.backend import Capability
from uncast.attention.problem import Problem, ProblemError, ProblemSpec
from uncast.backends._pages import tight_csr
from uncast.backends._recast import RecastBackend, bf16_row_bytes, cast_rows, inner_spec, recast_capability
from uncast.latent.codec import Scale

SPARE, SHRINK = 8, 4
"""A scratch has room for an eighth more pages than needed, so that a growing batch keeps it for a while; one that is this many
times larger than needed is given back."""


class GatherCastBackend(RecastBackend):
    """An inner backend over a BF16 copy of the live pages."""

    wrapper = "gather_cast"

    def capability(self, spec: ProblemSpec) -> Capability:
        return recast_capability(self.name, self.inner.capability, spec)

    def plan(self, problem: Problem) -> None:
        indptr, indices = tight_csr(problem)
        self._pages, packed = torch.unique(indices, return_inverse=True)
        total = max(1, self._pages.shape[0])
        self._problem, self._copy = problem, self._reserve(total, problem)
        self.inner.plan(
            replace(
                problem, spec=inner_spec(problem.spec), kv_indptr=indptr, kv_indices=packed.to(torch.int32),
                num_pages=total, pages_per_request=None,
            )
        )  # fmt: skip

    def _reserve(self, pages: int, problem: Problem) -> torch.Tensor:
        """uint8 [pages, page_size, bf16 row bytes]: the start of the scratch, which is made anew only when it does not fit."""
        spec, device = problem.spec, problem.kv_indices.device
        shape = (spec.page_size, bf16_row_bytes(spec))
        size = pages * shape[0] * shape[1]
        held = 0 if self._scratch is None else self._scratch.numel()
        if self._scratch is None or self._scratch.device != device or not size <= held <= SHRINK * size:
            self._scratch = torch.empty(size + size // SPARE, dtype=torch.uint8, device=device)
        return self._scratch[:size].view(pages, *shape)

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
        layout = self._problem.spec.layout
        if cache.is_cuda:
            self._gather(cache, ckv_scale, kpe_scale)
        else:
            rows = cache.index_select(0, self._pages).view(-1, layout.row_bytes)
            cast_rows(rows, layout, ckv_scale, kpe_scale, self._copy.view(-1, self._copy.shape[-1]))
        self.inner.run(
            q_nope, q_pe, self._copy, ckv_scale=None, kpe_scale=None, out=out, lse=lse, indices=indices
        )  # fmt: skip

    def _gather(self, cache: torch.Tensor, ckv_scale: Scale, kpe_scale: Scale) -> None:
        from uncast.kernels.gather_rows import gather_rows

        spec = self._problem.spec
        if cache.data_ptr() % 16:
            raise ProblemError("the cache must start at a 16-byte boundary")
        with torch.cuda.device(cache.device):
            gather_rows(
                cache, self._pages, self._copy, spec.layout, arch=spec.arch, ckv_scale=ckv_scale, kpe_scale=kpe_scale
            )

    def bytes_read(self, problem: Problem) -> int:
        copied = _live_rows(problem) * problem.spec.layout.row_bytes
        return copied + self.inner.bytes_read(replace(problem, spec=inner_spec(problem.spec)))

    def bytes_written(self, problem: Problem) -> int:
        return _live_rows(problem) * bf16_row_bytes(problem.spec)


def _live_rows(problem: Problem) -> int:
    """Rows of live pages, the unused ends of last pages included; of a page that requests share once."""
    return len(set(tight_csr(problem)[1].tolist())) * problem.spec.page_size
