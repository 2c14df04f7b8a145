"""Who runs in the next step: decodes first, then prefill chunks, then new requests; preemption when the pool runs out.

A request is in exactly one place:

    waiting --admit--> running --finish--> gone
                       |     ^
              swap out v     | swap in, before anyone is admitted
                       swapped

`waiting` and `swapped` own no pages. The oldest running request can always go on: all other pages can be taken from younger
requests (swapped out, youngest first) and from the prefix cache (evicted), and no request is longer than the pool.
"""

from __future__ import annotations

import bisect
from collections import deque

from uncast.engine.active import ActiveRequest
from uncast.engine.prefix_cache import PrefixCache
from uncast.engine.sequence import MTPState
from uncast.engine.swap import copy_in, copy_out
from uncast.latent.pool import OutOfPages, PagedPool


def _arrival(active: ActiveRequest) -> int:
    return active.arrival


class Scheduler:
    """Requests and their pages.

    Attributes:
        waiting, running, swapped: see the module; the last two in order of arrival.
        preemptions, swap_bytes: requests swapped out, and bytes copied out and back.
        prefix_query_tokens, prefix_hit_tokens: prompt tokens looked up in the prefix cache, and found.
        keeps_up: requests that are admitted from now on have their rows in the MTP layer kept up, so that they can draft.
    """

    def __init__(
        self, pool: PagedPool, *, max_running: int, max_step_tokens: int, prefix_cache: PrefixCache | None
    ) -> None:
        self.pool, self.cache = pool, prefix_cache
        self.max_running, self.max_step_tokens = max_running, max_step_tokens
        self.waiting: deque[ActiveRequest] = deque()
        self.running: list[ActiveRequest] = []
        self.swapped: list[ActiveRequest] = []
        self.preemptions = self.swap_bytes = 0
        self.prefix_query_tokens = self.prefix_hit_tokens = 0
        self.keeps_up = False

    def schedule(self) -> list[tuple[ActiveRequest, int]]:
        """Requests of the next step and how many of their tokens run; their pages are there."""
        self._swap_in()
        chunks: dict[ActiveRequest, int] = {}
        for active in list(self.running):
            # `active` may have been swapped out for an older one in this very loop.
            if not active.prefilling and active.host is None and self._reserve(active):
                chunks[active] = 1
        budget = self.max_step_tokens - len(chunks)
        for active in self.running:
            if active.prefilling and budget:
                chunks[active] = min(active.remaining, budget)
                budget -= chunks[active]
        while budget and self.waiting and self._admit(self.waiting[0]):
            active = self.waiting.popleft()
            chunks[active] = min(active.remaining, budget)
            budget -= chunks[active]
        return list(chunks.items())

    def reserve_drafts(self, chunks: list[tuple[ActiveRequest, int]], count: int) -> list[tuple[ActiveRequest, int]]:
        """Which of a step's requests may draft, and how many tokens, `count` at most; pages for their rows are there.

        Drafts take what is left of the step's tokens, pages that no request has, and no more than the request may generate.
        """
        left = self.max_step_tokens - sum(tokens for _, tokens in chunks)
        found = []
        for active, _ in chunks:
            wanted = min(count, left, active.request.max_tokens - active.generated - 1)
            if wanted < 1 or not active.can_draft:
                continue
            sequence, size = active.sequence, self.pool.page_size
            missing = self.pool.pages_for(sequence.cached + 1 + wanted) - len(sequence.pages)
            try:
                sequence.pages += self._allocate(max(0, missing))
            except OutOfPages:
                wanted = len(sequence.pages) * size - sequence.cached - 1
            if wanted:
                found.append((active, wanted))
                left -= wanted
        return found

    def keep_full_pages(self, active: ActiveRequest) -> None:
        """Puts pages that are full by now into the prefix tree, in order, so that a request owns its whole path there."""
        if self.cache is None or active.node is None:
            return
        sequence, size = active.sequence, self.pool.page_size
        full, drafts = min(sequence.cached, len(sequence.tokens)), sequence.mtp is not None
        if self.cache.lookahead:
            full = min(full, len(sequence.tokens) - 1 if sequence.mtp is None else sequence.mtp.cached)
        for index in range(active.shared, full // size):
            page = sequence.pages[index]
            active.node = self.cache.extend(active.node, self.cache.key(sequence.tokens, index), page, drafts=drafts)
            if active.node is None:
                return
            if active.node.page != page:
                sequence.pages[index] = self.cache.exchange(active.node, page)
            active.shared = index + 1

    def reserve_next(self, actives: list[ActiveRequest], drafted: int = 0) -> bool:
        """Pages for one more row of each of these running requests, for a step that is planned while the one before it runs.

        Only where the next step would run these requests and no other ones: nobody else runs, or can come in; False otherwise,
        and where pages are short. Then nothing has changed, and the step is left to `schedule`.

        Args:
            drafted: rows of each request in either step if both verify drafts; `cached` counts none of them yet.
        """
        if any(active.prefilling for active in self.running) or self._can_swap_in() or self._can_admit():
            return False
        rows = 2 * drafted if drafted else 1
        missing = [
            max(0, self.pool.pages_for(active.sequence.cached + rows) - len(active.sequence.pages))
            for active in actives
        ]
        try:
            pages = self._allocate(sum(missing))
        except OutOfPages:
            return False
        for active, count in zip(actives, missing, strict=True):
            active.sequence.pages += pages[:count]
            del pages[:count]
        return True

    def remove(self, active: ActiveRequest) -> None:
        """Takes a finished or aborted request out, wherever it is, and gives up its pages (the prefix tree keeps its own)."""
        self.withdraw(active)
        self.give_up_pages(active)

    def withdraw(self, active: ActiveRequest) -> None:
        """As `remove`, but the request keeps its pages until `give_up_pages`: a step that is under way writes there."""
        for place in (self.running, self.swapped, self.waiting):
            if active in place:
                place.remove(active)
        active.host = None

    def pages_in_use(self) -> int:
        """Pages that running requests own, shared ones counted once."""
        return len(self._owned())

    def _reserve(self, active: ActiveRequest) -> bool:
        """A page for the row that a decode step writes; swaps out younger requests for it, or `active` itself if it is the
        youngest (then False)."""
        sequence = active.sequence
        if sequence.cached < len(sequence.pages) * self.pool.page_size:
            return True
        while True:
            try:
                sequence.pages += self._allocate(1)
                return True
            except OutOfPages:
                victim = self.running[-1]
                self._swap_out(victim)
                if victim is active:
                    return False

    def _admit(self, active: ActiveRequest) -> bool:
        """Gives the first waiting request the pages of its whole prompt and of the first new row, found or fresh."""
        sequence, prompt = active.sequence, len(active.request.prompt)
        found = self._pages_to_admit(active)
        if found is None:
            return False
        wanted = self.pool.pages_for(prompt + 1) - len(found)
        sequence.pages = found + self._allocate(wanted)
        active.shared = len(found)
        sequence.cached = active.cached_tokens = active.shared * self.pool.page_size
        if self.keeps_up and (active.node is None or active.node.drafts):
            sequence.mtp = MTPState(sequence.cached)
        self.prefix_query_tokens += prompt if self.cache is not None else 0
        self.prefix_hit_tokens += active.cached_tokens
        self.running.append(active)
        return True

    def _pages_to_admit(self, active: ActiveRequest) -> list[int] | None:
        """The cached pages of a waiting request's prompt, which the caller then owns; None if it cannot be admitted now."""
        if self.swapped or len(self.running) >= self.max_running:
            return None
        prompt, found = len(active.request.prompt), list[int]()
        if self.cache is not None:
            # The last prompt token always runs: its logits choose the first new token.
            found, active.node = self.cache.match(active.sequence.tokens, prompt - 1)
        if self.pool.pages_for(prompt + 1) - len(found) > self.pool.num_pages - len(self._owned().union(found)):
            self.pool.release(found)
            return None
        return found

    def _can_admit(self) -> bool:
        found = self._pages_to_admit(self.waiting[0]) if self.waiting else None
        self.pool.release(found or [])
        return found is not None

    def _allocate(self, count: int) -> list[int]:
        """Raises `OutOfPages` if even the prefix cache has not enough to give."""
        missing = count - self.pool.num_free
        if missing > 0 and self.cache is not None:
            self.cache.evict(missing)
        return self.pool.allocate(count)

    def _owned(self) -> set[int]:
        """Pages of running requests; every other page is free or can be evicted from the prefix cache."""
        return {page for active in list(self.running) for page in list(active.sequence.pages)}

    def _swap_out(self, active: ActiveRequest) -> None:
        sequence = active.sequence
        active.host = copy_out(self.pool, sequence.pages[: self.pool.pages_for(sequence.cached)])
        self.give_up_pages(active)
        self.running.remove(active)
        bisect.insort(self.swapped, active, key=_arrival)
        self.preemptions += 1
        self.swap_bytes += active.host.nbytes

    def _swap_in(self) -> None:
        """Oldest first, each with the pages that it needs for its next row, plus one to spare while others run."""
        while self._can_swap_in():
            active = self.swapped[0]
            assert active.host is not None
            sequence = active.sequence
            sequence.pages = self._allocate(self._pages_to_swap_in(active))
            copy_in(self.pool, active.host, sequence.pages[: active.host.num_pages])
            self.swap_bytes += active.host.nbytes
            active.host = None
            self.swapped.pop(0)
            bisect.insort(self.running, active, key=_arrival)
            # Where the prefix tree still has the same rows, one copy is enough.
            active.node = None if self.cache is None else self.cache.root
            self.keep_full_pages(active)

    def _can_swap_in(self) -> bool:
        if not self.swapped:
            return False
        spare = 1 if self.running else 0
        return self._pages_to_swap_in(self.swapped[0]) + spare <= self.pool.num_pages - self.pages_in_use()

    def _pages_to_swap_in(self, active: ActiveRequest) -> int:
        return self.pool.pages_for(max(active.sequence.cached, len(active.request.prompt)) + 1)

    def give_up_pages(self, active: ActiveRequest) -> None:
        """Gives up the request's pages; the prefix tree keeps its own."""
        pages, active.sequence.pages = active.sequence.pages, []
        self.pool.release(pages)
        active.node, active.shared = None, 0
