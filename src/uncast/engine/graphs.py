"""CUDA graphs of a runner's steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

_WARM_RUNS = 2


@dataclass(frozen=True)
class Replay:
    """A captured call. `call` is kept for the buffers that only it refers to and that the graph reads and writes."""

    graph: Any
    call: Callable[[], None]

    def __call__(self) -> None:
        self.graph.replay()


def captured(call: Callable[[], None], pool: Any) -> Replay:
    """`call` as the replay of a CUDA graph; it runs a few times before, so that everything is compiled, loaded and (a process
    group's connections) made.

    Threads' other calls into CUDA go on meanwhile: a process group's watchdog queries events.
    """
    stream = _capture_stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_RUNS):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        call()
    return Replay(graph, call)


def release(call: Callable[[], None]) -> None:
    """Destroys the graph behind `call`, if there is one. NCCL does not end a group while a graph holds some of it."""
    if isinstance(call, Replay):
        call.graph.reset()


@cache
def _capture_stream(device: int) -> Any:
    """One for all captures of a device: cuBLAS keeps a workspace for every stream that it has seen."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
