"""Counters of an engine, as `/metrics` shows them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class EngineStats:
    """A snapshot. "total" fields only grow while the engine lives.

    Attributes:
        waiting, max_waiting: requests in the queue, and how many it holds.
        running, swapped: admitted requests with rows in the pool, and with their pages in host memory.
        draining: no new request is accepted.
        pool_pages, pool_pages_free, pool_pages_cached: pages of the pool; on the free list; held by the prefix cache alone,
            so that they can be evicted at once. The others belong to running requests.
        page_size: rows per page.
        requests_total: accepted requests.
        finished_total: finished requests by finish_reason ("stop", "length", "abort", "error").
        prompt_tokens_total, completion_tokens_total: tokens of admitted prompts, and tokens generated.
        prefix_query_tokens_total, prefix_hit_tokens_total: prompt tokens looked up in the prefix cache, and found there.
        preemptions_total, swap_bytes_total: requests swapped out, and bytes copied out and back.
        steps_total, step_seconds_total: forward steps and the time they took.
        cache_bytes_needed_total: cache bytes that attention had to read once per request and step, over all layers.
        cache_bytes_read_total, cache_bytes_written_total: what the backend read of the cache and copies, and wrote of copies.
        speculating: requests that are admitted now will draft.
        draft_tokens_total, draft_tokens_accepted_total: tokens that the MTP layer drafted, and those that became text.
        saturated_total, subnormal_total, nan_total: values seen by the cache writer.
    """

    waiting: int
    max_waiting: int
    running: int
    swapped: int
    draining: bool
    pool_pages: int
    pool_pages_free: int
    pool_pages_cached: int
    page_size: int
    requests_total: int
    finished_total: Mapping[str, int]
    prompt_tokens_total: int
    completion_tokens_total: int
    prefix_query_tokens_total: int
    prefix_hit_tokens_total: int
    preemptions_total: int
    swap_bytes_total: int
    steps_total: int
    step_seconds_total: float
    cache_bytes_needed_total: int
    cache_bytes_read_total: int
    cache_bytes_written_total: int
    speculating: bool
    draft_tokens_total: int
    draft_tokens_accepted_total: int
    saturated_total: int
    subnormal_total: int
    nan_total: int
