"""Engines that wait between two steps: what happens meanwhile is decided by the test, however fast or busy the machine is.

Requests still arrive, are refused and leave while an engine is held; none of them gets a token.

For `uncast serve` as a process: `python -P tests/server/hold.py FILE ARGUMENTS...` is `uncast ARGUMENTS...`, held `at` the
count that FILE says, while there is one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from uncast.engine.core import Engine

_POLL_S = 0.01


def at(engine: Engine, count: int) -> bool:
    """Whether to hold: until so many requests are there, and again once as many run (each has its first token by then if the
    prompts are short), also after some have left."""
    stats = engine.stats()
    return stats.running >= count or stats.running + stats.swapped + stats.waiting < count


@contextmanager
def hold(engine: Engine, when: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """The engine runs no step before which `when`, called in its thread, is true."""
    step = engine.step

    def held() -> Any:
        if when():
            time.sleep(_POLL_S)
            return []
        return step()

    engine.step = held  # type: ignore[method-assign]
    try:
        yield
    finally:
        if engine.step is held:  # unless the test has put something else there
            engine.step = step  # type: ignore[method-assign]


def hold_by_file(file: Path) -> None:
    """Holds every engine of this process while the file is there."""
    step = Engine.step

    def held(engine: Engine) -> Any:
        try:
            count = int(file.read_text())
        except FileNotFoundError:
            return step(engine)
        if at(engine, count):
            time.sleep(_POLL_S)
            return []
        return step(engine)

    Engine.step = held  # type: ignore[method-assign]


if __name__ == "__main__":
    from uncast.cli.main import main

    hold_by_file(Path(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
