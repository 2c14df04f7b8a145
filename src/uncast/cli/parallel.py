"""`generate` and `serve` under `torchrun`: who leads, who follows."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from uncast.engine.crew import Crew, join_crew, leave_crew
from uncast.engine.lockstep import follow, make_runner
from uncast.models.config import ModelConfig
from uncast.models.decoder import MLADecoder
from uncast.models.parallel import ParallelError, check_shares

__all__ = ["ParallelError", "follow_rank_0", "join", "leave_crew", "make_runner"]


def join(config: ModelConfig) -> Crew | None:
    """The crew that `torchrun` started, None for a process on its own.

    Raises:
        ParallelError: see `join_crew`; or the model cannot be shared by so many.
    """
    crew = join_crew()
    if crew is not None:
        check_shares(config, crew.parallel.world)
    return crew


def follow_rank_0(crew: Crew, load: Callable[[], MLADecoder], pages: Callable[[], int], **options: Any) -> int:
    """A follower's whole work: loads its part and runs rank 0's steps until that has finished. Returns the exit code.

    Signals of the launcher are left to rank 0, which drains first; when it ends, however it does, this process ends too.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    follow(make_runner(load(), crew, pages, **options), crew)
    leave_crew(crew)
    return 0
