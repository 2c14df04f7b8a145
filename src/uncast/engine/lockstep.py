"""One runner over several processes: rank 0's tells the others what to run, theirs run it.

Rank 0 alone knows requests, pages and text. A follower needs a step's rows and nothing else, for every rank's cache holds the
same bytes on the same pages; only pages that come back from rank 0's host memory have to be sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from uncast.engine.batch import Batch
from uncast.engine.crew import Crew, Step, Stop, TakePages
from uncast.engine.runner import ModelRunner
from uncast.latent.pool import PagedPool
from uncast.models.decoder import MLADecoder
from uncast.verify.guard import allow_swap


class LeadingRunner(ModelRunner):
    """Rank 0's. Made after every rank has made its own; see `ModelRunner` for the arguments."""

    def __init__(self, model: MLADecoder, crew: Crew, **options: Any) -> None:
        self._crew: Crew | None = None  # until the warm-up is over, which every rank does by itself
        super().__init__(model, **options)
        self._crew = crew
        self.pool.after_copy_in = self._send_pages

    def _forward(self, batch: Batch, pool: PagedPool) -> tuple[torch.Tensor, torch.Tensor]:
        if self._crew is not None:
            b = batch
            self._crew.tell(Step(b.ids, b.positions, b.slots, b.tables, b.kv_lens, b.ends, b.wanted))
        return super()._forward(batch, pool)

    def _send_pages(self, pages: Sequence[int]) -> None:
        assert self._crew is not None
        self._crew.tell(TakePages(list(pages)))
        _share_pages(self.pool, pages, self._crew)


def follow(runner: ModelRunner, crew: Crew) -> None:
    """Runs rank 0's steps until it stops."""
    while not isinstance(message := crew.receive(), Stop):
        if isinstance(message, Step):
            runner.run_batch(Batch(**{name: getattr(message, name) for name in message.__struct_fields__}))
        elif isinstance(message, TakePages):
            _share_pages(runner.pool, message.pages, crew)


def _share_pages(pool: PagedPool, pages: Sequence[int], crew: Crew) -> None:
    """Rank 0's bytes of these pages into every rank's pool, a page at a time."""
    with allow_swap():
        for storage in pool.storages:
            for page in pages:
                held = storage[:, page].contiguous()
                crew.parallel.from_first(held)
                if not crew.leads:
                    storage[:, page].copy_(held)


def make_runner(model: MLADecoder, crew: Crew | None, pages: Callable[[], int], **options: Any) -> ModelRunner:
    """A runner for this process, alone or in its crew; `pages` gives the pool's size as far as this process is concerned.

    In a crew every rank has to call it with the same options; the smallest pool that any rank asks for is everyone's.
    """
    if crew is None:
        return ModelRunner(model, num_pages=pages(), **options)
    crew.wait_ready()
    num_pages = crew.parallel.least(pages(), model.device)
    if not crew.leads:
        runner = ModelRunner(model, num_pages=num_pages, **options)
        crew.wait_ready()
        return runner
    leading = LeadingRunner(model, crew, num_pages=num_pages, **options)
    crew.wait_ready()
    return leading
