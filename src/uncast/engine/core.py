"""The engine's core: continuous batching over the paged pool, synchronous and single-threaded."""

from __future__ import annotations

from dataclasses import dataclass

from uncast.engine.request import Request, RequestOutput
from uncast.engine.runner import ModelRunner
from uncast.engine.stats import EngineStats
from uncast.engine.tokenizer import Tokenizer


@dataclass(frozen=True)
class EngineConfig:
    """Limits of an engine.

    Attributes:
        max_running: admitted requests at most, swapped-out ones included.
        max_waiting: requests in the queue at most; `AsyncEngine.submit` raises `QueueFull` beyond.
        max_step_tokens: tokens of one forward step; decodes come first, prefill chunks share the rest.
        prefix_cache: keep full pages of finished requests for later prompts that begin with the same tokens.
    """

    max_running: int = 64
    max_waiting: int = 256
    max_step_tokens: int = 256
    prefix_cache: bool = True

    def __post_init__(self) -> None:
        """Raises `ValueError` naming the field."""
        for name in ("max_running", "max_waiting", "max_step_tokens"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} is {value}: at least 1 is needed")
        if self.max_step_tokens < self.max_running:
            raise ValueError(
                f"max_step_tokens is {self.max_step_tokens}: it must be at least max_running, {self.max_running}"
            )


class Engine:
    """Requests in, outputs out, one `step` at a time. Not thread-safe; see `AsyncEngine`."""

    config: EngineConfig
    runner: ModelRunner
    tokenizer: Tokenizer

    def __init__(self, runner: ModelRunner, tokenizer: Tokenizer, config: EngineConfig | None = None) -> None: ...

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        raise NotImplementedError

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        raise NotImplementedError

    def check(self, request: Request) -> None:
        """Raises `RequestError` if the request can never run on this model and pool."""
        raise NotImplementedError

    def add(self, request: Request) -> None:
        """Queues a request."""
        raise NotImplementedError

    def abort(self, request_id: str) -> list[RequestOutput]:
        """Ends a request in any state and gives its pages back; empty if there is none of that id."""
        raise NotImplementedError

    def step(self) -> list[RequestOutput]:
        """Schedules and runs one forward step."""
        raise NotImplementedError

    def check_integrity(self) -> None:
        """Raises `PoolError` unless requests and prefix cache together explain every page of the pool."""
        raise NotImplementedError

    def stats(self) -> EngineStats:
        """A snapshot of the counters."""
        raise NotImplementedError
