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


def common_q_len(problem: Problem) -> int | None:
    """Query rows of every request where that is one number (1 without requests), else None. Syncs with a GPU."""
    lengths = set((problem.qo_indptr[1:] - problem.qo_indptr[:-1]).tolist())
    return None if len(lengths) > 1 else int(max(lengths, default=1))


def block_table(problem: Problem, multiple: int = 1) -> torch.Tensor:
    """int32 [batch, longest], unused entries 0 (a page that exists, since some kernels prefetch it).

    Args:
        multiple: the width is one of it.
    """
    counts, starts = live_pages(problem), problem.kv_indptr.tolist()
    width = -(-max([1, *counts]) // multiple) * multiple
    table = torch.zeros((len(counts), width), dtype=torch.int32, device=problem.kv_indices.device)
    for request, count in enumerate(counts):
        table[request, :count] = problem.kv_indices[starts[request] : starts[request] + count]
    return table
