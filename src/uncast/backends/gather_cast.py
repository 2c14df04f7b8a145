"""`gather_cast:<inner>`: copies the live pages to BF16, then runs a backend that knows only 16-bit caches.

The way out most servers take from the founding bug: bytes grow with live tokens, not with the pool, but every live row is
still read, written and read again.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from uncast.attention.backend import Backend, Capability
from uncast.attention.problem import Problem, ProblemSpec
from uncast.backends._recast import bf16_row_bytes, cast_rows, inner_spec, recast_capability
from uncast.latent.codec import Scale


class GatherCastBackend(Backend):
    """An inner backend over a BF16 copy of the live pages, packed in request order."""

    copy_layout = "bf16"

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.name = f"gather_cast:{inner.name}"
        self.requires, self.uniform_q_len, self.lossy = inner.requires, inner.uniform_q_len, inner.lossy

    def capability(self, spec: ProblemSpec) -> Capability:
        return recast_capability(self.name, self.inner.capability, spec)

    def plan(self, problem: Problem) -> None:
        spec = problem.spec
        live = (problem.kv_len_arr + (spec.page_size - 1)) // spec.page_size
        starts, counts = problem.kv_indptr.tolist(), live.tolist()
        ranges = [problem.kv_indices[a : a + n] for a, n in zip(starts[:-1], counts, strict=True)]
        device = problem.kv_indices.device
        self._pages = torch.cat(ranges) if ranges else problem.kv_indices[:0]
        total = self._pages.shape[0]
        self._scratch = torch.empty((total, spec.page_size, bf16_row_bytes(spec)), dtype=torch.uint8, device=device)
        indptr = torch.zeros(len(counts) + 1, dtype=torch.int32, device=device)
        indptr[1:] = live.cumsum(0)
        packed = torch.arange(total, dtype=torch.int32, device=device)
        self._problem = problem
        self.inner.plan(
            replace(
                problem,
                spec=inner_spec(spec),
                kv_indptr=indptr,
                kv_indices=packed,
                num_pages=total,
                pages_per_request=None,
            )
        )

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
    ) -> None:
        layout = self._problem.spec.layout
        rows = cache.index_select(0, self._pages).view(-1, layout.row_bytes)
        cast_rows(rows, layout, ckv_scale, kpe_scale, self._scratch.view(-1, self._scratch.shape[-1]))
        self.inner.run(q_nope, q_pe, self._scratch, ckv_scale=None, kpe_scale=None, out=out, lse=lse)

    def bytes_read(self, problem: Problem) -> int:
        return _live_rows(problem) * problem.spec.layout.row_bytes + self.inner.bytes_read(
            replace(problem, spec=inner_spec(problem.spec))
        )

    def bytes_written(self, problem: Problem) -> int:
        return _live_rows(problem) * bf16_row_bytes(problem.spec)


def _live_rows(problem: Problem) -> int:
    """Rows of live pages, the unused ends of last pages included."""
    page_size = problem.spec.page_size
    return int(((problem.kv_len_arr + (page_size - 1)) // page_size).sum()) * page_size
