"""Numbers of a step on their way from the device to the host."""

from __future__ import annotations

from typing import Any

import torch


class OnItsWay:
    """A copy of `results` that began when this was made; nothing waits for it before `wait`."""

    def __init__(self, results: torch.Tensor) -> None:
        """results: int64; the step after may overwrite it."""
        self._event: Any = None
        if results.is_cuda:
            self._host = torch.empty(results.shape, dtype=results.dtype, pin_memory=True)
            self._host.copy_(results, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        else:
            self._host = results.clone()

    def wait(self) -> None:
        """Returns when the step is over on the device."""
        if self._event is not None:
            self._event.synchronize()

    def _lists(self) -> list[list[int]]:
        self.wait()
        found: list[list[int]] = self._host.tolist()
        return found
