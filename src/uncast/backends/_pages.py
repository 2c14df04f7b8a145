"""Page lists in the forms that other libraries take, built on the host at plan time."""

from __future__ import annotations

import torch

from uncast.attention.problem import Problem


def live_pages(problem: Problem) -> list[int]:
    """Pages in use by each request."""
    return [-(-int(n) // problem.spec.page_size) for n in problem.kv_len_arr.tolist()]


def tight_csr(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """kv_indptr [batch + 1] and kv_indices without the unused entries of a padded table."""
    counts, starts = live_pages(problem), problem.kv_indptr.tolist()
    indptr = torch.tensor([0, *torch.tensor(counts, dtype=torch.int64).cumsum(0).tolist()], dtype=torch.int32)
    parts = [problem.kv_indices[a : a + n] for a, n in zip(starts, counts, strict=False)]
    indices = torch.cat(parts) if parts else problem.kv_indices[:0]
    return indptr.to(problem.kv_indices.device), indices.contiguous()


def block_table(problem: Problem) -> torch.Tensor:
    """int32 [batch, longest], unused entries 0 (a page that exists, since some kernels prefetch it)."""
    counts, starts = live_pages(problem), problem.kv_indptr.tolist()
    table = torch.zeros((len(counts), max([1, *counts])), dtype=torch.int32, device=problem.kv_indices.device)
    for request, count in enumerate(counts):
        table[request, :count] = problem.kv_indices[starts[request] : starts[request] + count]
    return table
