"""`uncast probe` for which a busy machine is none: `python -m tests.verify.patient OPTIONS`.

The time limit holds for the backend that hangs, from when it does; every other answer is waited for.
"""

from __future__ import annotations

import sys
from typing import Any

from uncast.verify import probe_crew

LONG_S = 600.0


class Patient(probe_crew.Worker):
    _hangs = False

    def ask(self, task: str, payload: Any, seconds: float) -> Any:
        self._hangs = task == "probe" and payload.backend == "hang"
        return super().ask(task, payload, seconds if self._hangs else LONG_S)

    def _wait(self, seconds: float) -> Any:
        while self._hangs and self._phase != "run":
            _, self._phase = self._pipe.recv()
        return super()._wait(seconds)


if __name__ == "__main__":
    from uncast.cli.main import main

    probe_crew.Worker = Patient  # type: ignore[misc]
    sys.exit(main(["probe", *sys.argv[1:]]))
