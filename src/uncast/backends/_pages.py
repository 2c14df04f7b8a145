"""Page lists in the forms that other libraries take, built on the host at plan time."""

from __future__ import annotations

import math

import torch

from uncast.attention import Refused
from uncast.attention.contents import visible_rows
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


def common_q_len(problem: Problem, name: str) -> int:
    """Query rows of every request (1 without requests), for a backend that takes one number of them. Syncs with a GPU.

    Raises:
        Refused: requests have different numbers of rows, or `total_q` is more than they have; one sentence about `name`.
    """
    lengths = set((problem.qo_indptr[1:] - problem.qo_indptr[:-1]).tolist())
    q_len = int(max(lengths, default=1))
    if len(lengths) > 1:
        raise Refused(
            f"{name} needs the same number of queries in every request of a batch: plan requests of one q_len together, or "
            "use native"
        )
    if problem.total_q != q_len * problem.batch_size:
        raise Refused(
            f"{name} needs all {problem.total_q} query rows to belong to a request, not {q_len * problem.batch_size}: give "
            "the exact total_q, or use native"
        )
    return q_len


def is_idle(problem: Problem) -> bool:
    """Whether no query row sees a cached row, so that a library would be given an empty problem. Syncs with a GPU."""
    visible = visible_rows(problem.qo_indptr.tolist(), problem.kv_len_arr.tolist(), problem.spec.causal)
    return not bool((visible > 0).any())


def unseen_rows(problem: Problem) -> torch.Tensor | None:
    """bool [total_q]: query rows that see no cached row, for which output 0 and LSE -inf are promised; None if all see one."""
    visible = visible_rows(problem.qo_indptr.tolist(), problem.kv_len_arr.tolist(), problem.spec.causal)
    if bool((visible > 0).all()):
        return None
    unseen = torch.zeros(problem.total_q, dtype=torch.bool)
    unseen[: visible.shape[0]] = visible.cpu() <= 0
    return unseen.to(problem.kv_len_arr.device)


def clear_unseen(unseen: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Overwrites what a library left in rows of `unseen_rows`."""
    if unseen is None:
        return
    out.masked_fill_(unseen[:, None, None], 0.0)
    if lse is not None:
        lse.masked_fill_(unseen[:, None], -math.inf)


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
