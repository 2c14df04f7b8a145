"""`generate` and `serve` under `torchrun`: rank 0 does the command's work, the others run its steps."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from uncast.engine.crew import join_crew, leave_crew
from uncast.engine.lockstep import follow, make_runner
from uncast.engine.runner import ModelRunner
from uncast.models.config import ModelConfig
from uncast.models.decoder import MLADecoder
from uncast.models.parallel import Parallel, ParallelError, check_shares

__all__ = ["ParallelError", "Team"]


class Team:
    """This process's part in the command, alone or as `torchrun` started it.

    Attributes:
        crew: None for a process by itself.
    """

    def __init__(
        self,
        config: ModelConfig,
        load: Callable[[Parallel | None], MLADecoder],
        pages: Callable[[], int],
        **options: Any,
    ) -> None:
        """Joins the crew.

        Args:
            load: loads the model, or this rank's part of it.
            pages: the pool's pages as far as this process is concerned; asked for when the model is loaded.
            options: of `ModelRunner`.

        Raises:
            ParallelError: see `join_crew`; or the model cannot be shared by so many, or `drafts` among the options.
        """
        self._load, self._pages, self._options = load, pages, options
        self.crew = join_crew()
        if self.crew is not None:
            check_shares(config, self.crew.parallel.world)
            if options.get("drafts"):  # draft steps are not among those that rank 0 sends
                raise ParallelError(
                    "speculation runs in one process: start it without torchrun, or without speculation"
                )

    @property
    def follows(self) -> bool:
        return self.crew is not None and not self.crew.leads

    def runner(self) -> ModelRunner:
        """Loads the model and makes this process's runner; every rank has to call it."""
        model = self._load(None if self.crew is None else self.crew.parallel)
        return make_runner(model, self.crew, self._pages, **self._options)

    def follow(self) -> int:
        """A follower's whole work. Returns the exit code.

        Signals of the launcher are left to rank 0, which drains first; when it ends, however it does, this process ends too.
        """
        assert self.crew is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        follow(self.runner(), self.crew)
        leave_crew(self.crew)
        return 0

    def leave(self) -> None:
        """Rank 0's end: lets the followers end; nothing for a process by itself."""
        if self.crew is not None:
            leave_crew(self.crew)
