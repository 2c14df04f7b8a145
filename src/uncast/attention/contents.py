"""Checks of metadata's values: what shapes cannot tell, so that no length or page number reads another request's rows.

On a CPU they cost microseconds and are always done, at `plan` and again at every `run` (the caller may have refilled the
buffers). On a GPU the values have to come to the host, so they are done only in the debug mode, `plan(validate=True)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from uncast.attention.problem import Problem, ProblemError


def check_query_starts(starts: Sequence[int]) -> None:
    """`qo_indptr` as a list: raises `ProblemError` unless it starts at 0 and does not decrease."""
    if starts[0] != 0 or any(b < a for a, b in pairwise(starts)):
        raise ProblemError("qo_indptr must start at 0 and not decrease")


def check_contents(problem: Problem, num_pages: int | None = None) -> None:
    """Query starts, lengths and the page numbers of live pages; entries past a request's live pages may hold anything.

    Args:
        num_pages: pages of the pool; None takes what was planned, and if that is None, too, only signs are checked.

    Raises:
        ProblemError: naming the first value that is wrong.
    """
    _check_queries(problem, problem.qo_indptr.tolist())
    live = _check_lengths(problem, problem.kv_indptr.tolist(), problem.kv_len_arr.tolist())
    if not live:
        return
    low, high = (int(bound) for bound in torch.aminmax(live[0] if len(live) == 1 else torch.cat(live)))
    known = problem.num_pages if num_pages is None else num_pages
    if low < 0 or (known is not None and high >= known):
        bad, top = (low, known) if low < 0 else (high, known)
        pool = "page numbers cannot be negative" if top is None else f"the pool has {top} pages, numbered from 0"
        raise ProblemError(f"a live page of kv_indices or block_tables is {bad}: {pool}")


def check_slots(slot_mapping: torch.Tensor, num_slots: int) -> None:
    """Raises `ProblemError` if a slot lies past the pool's `num_slots` rows; negative slots are skipped by a writer."""
    if slot_mapping.numel() and (top := int(slot_mapping.max())) >= num_slots:
        raise ProblemError(f"slot_mapping holds {top}: the cache has {num_slots} slots, numbered from 0")


def check_indices(problem: Problem, indices: torch.Tensor) -> None:
    """Raises `ProblemError` if a query row selects a token that it must not see; rows past `qo_indptr[-1]` do not count."""
    if indices.numel() == 0:
        return
    starts, lengths = problem.qo_indptr.tolist(), problem.kv_len_arr.tolist()
    limits = visible_rows(starts, lengths, problem.spec.causal)
    over = indices[: limits.shape[0]].amax(-1).cpu() >= limits
    if bool(over.any()):
        row = int(over.nonzero()[0])
        raise ProblemError(
            f"query row {row} selects token {int(indices[row].max())}: it may see {int(limits[row])} tokens, numbered from 0"
        )


def visible_rows(starts: Sequence[int], lengths: Sequence[int], causal: bool) -> torch.Tensor:
    """int64 [starts[-1]] on the host: how many of its request's tokens each query row may see."""
    rows = [torch.zeros(0, dtype=torch.int64)]
    for (first, last), kv_len in zip(pairwise(starts), lengths, strict=True):
        step = torch.arange(first - last + 1, 1) if causal else torch.zeros(last - first, dtype=torch.int64)
        rows.append((kv_len + step).clamp_min(0))
    return torch.cat(rows)


def _check_queries(problem: Problem, starts: list[int]) -> None:
    check_query_starts(starts)
    end, longest = starts[-1], max((b - a for a, b in pairwise(starts)), default=0)
    # A captured graph's buffers may be larger than the batch; where there are no graphs, a surplus row is a mistake.
    if end > problem.total_q or (problem.spec.device == "cpu" and end != problem.total_q):
        raise ProblemError(f"total_q is {problem.total_q}, but qo_indptr ends at {end}")
    if longest > problem.spec.max_q_len:
        raise ProblemError(f"max_q_len is {problem.spec.max_q_len}, but a request has {longest} query rows")


def _check_lengths(problem: Problem, starts: list[int], lengths: list[int]) -> list[torch.Tensor]:
    """Returns the live page numbers of each request that has any."""
    page_size, width, entries = problem.spec.page_size, problem.pages_per_request, problem.kv_indices.shape[0]
    if starts[0] < 0 or any(b < a for a, b in pairwise(starts)):
        raise ProblemError("kv_indptr must not be negative and not decrease")
    if width is None and starts[-1] > entries:
        raise ProblemError(f"kv_indptr ends at {starts[-1]}, but kv_indices has {entries} entries")
    live = []
    for request, length in enumerate(lengths):
        pages = starts[request + 1] - starts[request] if width is None else width
        if not 0 <= length <= pages * page_size:
            raise ProblemError(
                f"request {request} has {length} cached tokens: its {pages} pages of {page_size} hold 0 to "
                f"{pages * page_size}"
            )
        if length > problem.max_kv_len:
            raise ProblemError(f"max_kv_len is {problem.max_kv_len}, but request {request} has {length} cached tokens")
        if length:
            live.append(problem.kv_indices[starts[request] : starts[request] + -(-length // page_size)])
    return live
