"""What the handlers share: settings, the served model, and where the server is in its life."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path

from uncast.engine.async_engine import AsyncEngine
from uncast.engine.grammar import GrammarCompiler
from uncast.engine.tokenizer import Tokenizer
from uncast.server.chat_format import ChatFormat
from uncast.server.errors import ApiError, draining
from uncast.server.metrics import Metrics
from uncast.server.profiler import Profiler
from uncast.server.start import StartClock
from uncast.server.tokens import TokenTexts


@dataclass(frozen=True)
class ServerConfig:
    """Settings of a server.

    Attributes:
        model_name: as /v1/models lists it.
        max_body_bytes: larger bodies get 413.
        api_key: if set, /v1/* and the profiler need `Authorization: Bearer KEY`.
        grace_s: seconds that running requests get after SIGTERM.
        profile_dir: where /stop_profile writes traces; None refuses profiling.
        sampling_defaults: temperature, top_p, top_k, min_p of a request that does not give them.
        tool_parser, reasoning_parser: names of formats, "none", or "auto": as the chat template shows.
    """

    model_name: str
    max_body_bytes: int = 4 << 20
    api_key: str | None = None
    grace_s: float = 30.0
    profile_dir: Path | None = None
    sampling_defaults: dict[str, float] = field(default_factory=dict)
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"

    def __post_init__(self) -> None:
        """Raises `ValueError` naming the field."""
        if self.max_body_bytes < 1:
            raise ValueError(f"max_body_bytes is {self.max_body_bytes}: at least 1 is needed")
        if not 0 <= self.grace_s < float("inf"):
            raise ValueError(f"grace_seconds is {self.grace_s}: allowed is 0 or more")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable() and self.api_key):
            raise ValueError("the API key must be printable ASCII and not empty")


@dataclass
class Served:
    """The model that is served.

    Attributes:
        vocab_size, context: of the model, in tokens.
        pool_rows: tokens that the KV pool holds.
        max_waiting: requests that the queue holds.
        format: how its answers are read.
        grammars: compiles for its tokens.
    """

    engine: AsyncEngine
    tokenizer: Tokenizer
    vocab_size: int
    context: int
    pool_rows: int
    max_waiting: int
    grammars: GrammarCompiler
    format: ChatFormat = field(default_factory=ChatFormat)
    texts: TokenTexts = field(init=False)

    def __post_init__(self) -> None:
        self.texts = TokenTexts(self.tokenizer)

    @classmethod
    def of(cls, engine: AsyncEngine, config: ServerConfig | None = None) -> Served:
        """What an engine serves, read as the config says."""
        core = engine.engine
        model, pool = core.runner.model.config, core.runner.pool
        return cls(
            engine=engine,
            tokenizer=core.tokenizer,
            vocab_size=model.vocab_size,
            context=model.max_position_embeddings,
            pool_rows=pool.num_pages * core.runner.page_size,
            max_waiting=core.config.max_waiting,
            grammars=GrammarCompiler(core.tokenizer, model.vocab_size, model.stop_token_ids),
            format=ChatFormat.of(
                core.tokenizer,
                "auto" if config is None else config.tool_parser,
                "auto" if config is None else config.reasoning_parser,
            ),
        )

    @property
    def max_total(self) -> int:
        """Tokens of the longest request, prompt and answer together."""
        return min(self.context, self.pool_rows)


class ServerState:
    """A server's life: ready, draining; or failed.

    Attributes:
        start: how long the start took.
        closing: set when a drain begins; new requests are refused then.
        expired: set when the grace time of a drain is over; streams end then.
    """

    def __init__(self, config: ServerConfig, served: Served, start: StartClock | None = None) -> None:
        self.config, self.served = config, served
        self.start = StartClock(0.0) if start is None else start
        self.created = int(time.time())
        self.closing = asyncio.Event()
        self.expired = asyncio.Event()
        self.metrics = Metrics(served.engine.stats, self.start)
        self.profiler = Profiler(config.profile_dir)

    @property
    def draining(self) -> bool:
        return self.closing.is_set()

    @property
    def phase(self) -> str:
        """ "ready", "draining" or "failed"."""
        if self.served.engine.failure is not None:
            return "failed"
        return "draining" if self.draining or self.served.engine.draining else "ready"

    def require_ready(self) -> Served:
        """The served model.

        Raises:
            ApiError: 503 while draining, or after a failure of the engine.
        """
        phase = self.phase
        if phase == "ready":
            return self.served
        if phase == "draining":
            raise draining()
        raise ApiError(503, str(self.served.engine.failure), code="engine_failed")
