"""One runner over several processes: rank 0's tells the others what to run, theirs run it.

Rank 0 alone knows requests, pages and text. A follower needs a step's rows and nothing else, for every rank's cache holds the
same bytes on the same pages; only pages that come back from rank 0's host memory have to be sent.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import torch

from uncast.engine.batch import Batch
from uncast.engine.crew import Capture, Crew, Launch, Step, Stop, TakePages
from uncast.engine.runner import ModelRunner, Sequence
from uncast.engine.sampler import Draw
from uncast.engine.static_step import BUCKETS, Staged, StaticStep, StepRequest
from uncast.latent.pool import PagedPool
from uncast.models.decoder import MLADecoder
from uncast.models.parallel import ParallelError
from uncast.verify.guard import allow_swap


class LeadingRunner(ModelRunner):
    """Rank 0's. Made after every rank has made its own; see `ModelRunner` for the arguments."""

    def __init__(self, model: MLADecoder, crew: Crew, **options: Any) -> None:
        self._crew: Crew | None = None  # until the warm-up is over, which every rank does by itself
        super().__init__(model, **options)
        self._crew = crew
        self._tell = self._launched
        self.pool.after_copy_in = self._send_pages

    def _forward(self, batch: Batch, pool: PagedPool) -> tuple[torch.Tensor, torch.Tensor]:
        if self._crew is not None:
            b = batch
            self._crew.tell(Step(b.ids, b.positions, b.slots, b.tables, b.kv_lens, b.ends, b.wanted))
        return super()._forward(batch, pool)

    def capture(
        self, max_requests: int, *, drafts: Seq[int] = (), graphs: bool | None = None, buckets: Seq[int] = BUCKETS
    ) -> str | None:
        """As `ModelRunner.capture`, on every rank; steps that verify drafts are not among those that rank 0 sends."""
        assert self._crew is not None
        if any(drafts):
            raise ParallelError("speculation runs in one process")
        reason = self.capture_refusal()
        if reason is None:
            self._crew.tell(Capture(max_requests, graphs, list(buckets)))
            super().capture(max_requests, graphs=graphs, buckets=buckets)
        return reason

    def _launched(self, staged: Staged) -> None:
        assert self._crew is not None
        self._crew.tell(Launch(staged.rows, staged.places, staged.values, staged.requests, staged.topk))

    def _run_static(
        self,
        step: StaticStep,
        requests: Seq[StepRequest],
        chunks: Seq[tuple[Sequence, int]],
        draws: Seq[tuple[int, Draw]] = (),
    ) -> int:
        assert self._crew is not None
        rows = super()._run_static(step, requests, chunks, draws)
        _note(self, self._crew)
        return rows

    def _send_pages(self, pages: Seq[int]) -> None:
        assert self._crew is not None
        self._crew.tell(TakePages(list(pages)))
        _share_pages(self.pool, pages, self._crew)


def follow(runner: ModelRunner, crew: Crew) -> None:
    """Runs rank 0's steps until it stops."""
    while not isinstance(message := crew.receive(), Stop):
        if isinstance(message, Launch):
            assert runner.decode_steps is not None
            runner.decode_steps.decode.replay(
                Staged(message.rows, message.places, message.values, message.requests, message.topk)
            )
            _note(runner, crew)
        elif isinstance(message, Step):
            runner.run_batch(Batch(**{name: getattr(message, name) for name in message.__struct_fields__}))
        elif isinstance(message, Capture):
            reason = runner.capture(message.max_requests, graphs=message.graphs, buckets=message.buckets)
            if reason is not None:
                raise ParallelError(f"rank {crew.parallel.rank} cannot do what rank 0 does: {reason}")
        elif isinstance(message, TakePages):
            _share_pages(runner.pool, message.pages, crew)


def _note(runner: ModelRunner, crew: Crew) -> None:
    """Lets the crew watch a launched step; on a CPU it is over."""
    if runner.model.device.type == "cuda":
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        crew.pace(event)


def _share_pages(pool: PagedPool, pages: Seq[int], crew: Crew) -> None:
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
    else:
        runner = LeadingRunner(model, crew, num_pages=num_pages, **options)
    crew.at_end.append(runner.release_steps)
    crew.wait_ready()
    return runner
