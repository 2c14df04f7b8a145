"""An engine whose thread takes a step only when the test lets it: no outcome depends on a machine's speed."""

from __future__ import annotations

import math
import threading
from typing import Any

from uncast.engine.core import Engine
from uncast.engine.request import RequestOutput

LIMIT_S = 300.0
"""Longer than any machine stalls; nothing waits for it unless a test fails."""


class SteppedEngine(Engine):
    """Its steps wait for `allow`. Requests that come and go meanwhile are taken after the step that waits."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._allowed, self._turn = 0.0, threading.Condition()

    def allow(self, steps: float = math.inf) -> None:
        """Lets the engine take so many steps more; all of them if left out."""
        with self._turn:
            self._allowed += steps
            self._turn.notify_all()

    def step(self) -> list[RequestOutput]:
        """As the engine's, once it may be taken."""
        with self._turn:
            assert self._turn.wait_for(lambda: self._allowed > 0, LIMIT_S), "the test lets the engine take no step"
            self._allowed -= 1
        return super().step()
