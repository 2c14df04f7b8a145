"""Load on an OpenAI endpoint (uncast, SGLang, vLLM, any other): requests in a closed or an open loop.

    endpoint = Endpoint("http://127.0.0.1:8000", discover("http://127.0.0.1:8000").model, extra={"ignore_eos": True})
    result = measure(endpoint, token_prompts(64, 256, 64, vocab_size=4096, seed=0), Closed(8))
    serving_row(result, server="sglang", ...)            # of `uncast.bench.serve_report`

A closed loop sends the next request when an earlier one ends: a slow server is asked less, so its percentiles do not show what
users would wait who come by themselves (coordinated omission). An open loop sends at times that were drawn before, and
latencies count from those times, also where this client was late.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx

from uncast.bench.serve_request import Answer, Endpoint, Prompt, ask, printable

__all__ = ["Answer", "Closed", "Endpoint", "Load", "LoadResult", "Open", "Prompt", "ServerError", "discover", "measure"]

TICK_S = 0.01
KEEP_ALIVE_S = 4.0
"""uvicorn, which all three servers use, closes an idle connection after 5 s."""
LEAST_FAILURES_IN_A_ROW = 16
"""After so many (or two for each request at a time) a load ends: the server is gone."""


class ServerError(RuntimeError):
    """A server that cannot be measured; one sentence."""


@dataclass(frozen=True)
class Closed:
    """`concurrency` requests at a time."""

    concurrency: int

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ValueError(f"concurrency is {self.concurrency}: at least 1 is needed")

    def __str__(self) -> str:
        return f"concurrency {self.concurrency}"


@dataclass(frozen=True)
class Open:
    """Poisson arrivals at `rate` requests per second; `inf` sends all at once."""

    rate: float

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise ValueError(f"request_rate is {self.rate:g}: a number above 0, or inf, is needed")

    def __str__(self) -> str:
        return "all at once" if math.isinf(self.rate) else f"rate {self.rate:g}/s"

    def arrivals(self, count: int, seed: int) -> list[float]:
        """Seconds from the start at which requests are due; the first at 0."""
        rng, at, times = random.Random(seed), 0.0, []
        for _ in range(count):
            times.append(at)
            at += 0.0 if math.isinf(self.rate) else rng.expovariate(self.rate)
        return times


Load = Closed | Open


@dataclass(frozen=True)
class LoadResult:
    """One load, measured.

    Attributes:
        began, ended: `time.perf_counter` of the first request's due time and of the last answer's end.
        answers: in the order in which they were due; failed ones, too.
        not_sent: requests that were left out after too many failures in a row.
        lag_s: how late this client's own timers were, every 10 ms: what its own work adds to every figure.
    """

    endpoint: Endpoint
    load: Load
    began: float
    ended: float
    answers: Sequence[Answer]
    not_sent: int
    lag_s: Sequence[float]

    @property
    def complete(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.failure is None]

    @property
    def failures(self) -> dict[str, int]:
        """Kind of failure -> how many, most frequent first."""
        kinds = [answer.failure for answer in self.answers if answer.failure is not None]
        return dict(sorted(((kind, kinds.count(kind)) for kind in set(kinds)), key=lambda pair: (-pair[1], pair[0])))

    @property
    def good(self) -> bool:
        """Whether every request was answered."""
        return len(self.complete) == len(self.answers) and not self.not_sent


@dataclass(frozen=True)
class Server:
    """What `/v1/models` says: the first model, and who owns it ("vllm", "sglang", "uncast", ...)."""

    model: str
    owner: str


def base_url(text: str) -> str:
    """An address without a trailing slash or /v1.

    Raises:
        ValueError: it is no http or https address.
    """
    try:
        url = httpx.URL(text)
        fine = url.scheme in ("http", "https") and url.host and 0 < (url.port or 80) < 2**16
    except (httpx.InvalidURL, ValueError):
        fine = False
    if not fine or url.query or url.fragment:
        raise ValueError(f"url is {text!r:.200}: an address such as http://127.0.0.1:8000 is needed")
    return str(url).rstrip("/").removesuffix("/v1")


def discover(url: str, api_key: str | None = None, *, timeout_s: float = 30.0) -> Server:
    """Asks which model is served.

    Raises:
        ServerError: there is no answer, or one that names no model.
    """
    headers = Endpoint(url, "", api_key=api_key).headers

    async def get() -> httpx.Response:
        async with asyncio.timeout(timeout_s), httpx.AsyncClient(trust_env=False, timeout=None) as client:
            return await client.get(f"{url}/v1/models", headers=headers)

    try:
        response = asyncio.run(get())
    except TimeoutError:
        raise ServerError(f"{url} does not answer within {timeout_s:g} s") from None
    except httpx.HTTPError as error:
        raise ServerError(f"{url} does not answer: {printable(str(error)) or type(error).__name__}") from None
    if response.status_code != 200:
        said = printable(response.text)[:200] or "nothing"
        raise ServerError(f"{url}/v1/models answered {response.status_code}: {said}")
    try:
        first = json.loads(response.content)["data"][0]
        if not isinstance(first["id"], str) or not first["id"]:
            raise ValueError("a model without a name")
        return Server(first["id"], printable(str(first.get("owned_by") or "unknown")))
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        raise ServerError(f"{url}/v1/models does not list a model: is it an OpenAI endpoint?") from None


def measure(
    endpoint: Endpoint,
    prompts: Sequence[Prompt],
    load: Load,
    *,
    warm_up: Sequence[Prompt] = (),
    seed: int = 0,
    progress: Callable[[int], None] = lambda done: None,
) -> LoadResult:
    """Sends every prompt once.

    Args:
        warm_up: sent before, and not counted; an open loop sends them at once.
        seed: of the arrivals.
        progress: told how many requests are done.

    Raises:
        ServerError: every request of the warm-up failed.
    """
    return asyncio.run(run_load(endpoint, prompts, load, warm_up=warm_up, seed=seed, progress=progress))


async def run_load(
    endpoint: Endpoint,
    prompts: Sequence[Prompt],
    load: Load,
    *,
    warm_up: Sequence[Prompt] = (),
    seed: int = 0,
    progress: Callable[[int], None] = lambda done: None,
) -> LoadResult:
    """As `measure`, in a running event loop."""
    if not prompts:
        raise ValueError("there is no prompt to send")
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEP_ALIVE_S)
    async with httpx.AsyncClient(limits=limits, timeout=None, trust_env=False) as client:
        if warm_up:
            width = load.concurrency if isinstance(load, Closed) else len(warm_up)
            _check(await _Run(client, endpoint, width).closed(warm_up), endpoint.url)
        width = load.concurrency if isinstance(load, Closed) else len(prompts)
        run = _Run(client, endpoint, width, progress)
        lag: list[float] = []
        ticker, began = asyncio.create_task(_tick(lag)), time.perf_counter()
        try:
            if isinstance(load, Closed):
                answers = await run.closed(prompts)
            else:
                answers = await run.open(prompts, load.arrivals(len(prompts), seed))
        finally:
            ticker.cancel()
    ended = max((answer.end for answer in answers), default=began)
    return LoadResult(endpoint, load, began, ended, answers, len(prompts) - len(answers), lag)


def _check(answers: Sequence[Answer], url: str) -> None:
    if all(answer.failure is not None for answer in answers):
        first = answers[0]
        raise ServerError(f"{url} answers no request: {first.failure}" + (f": {first.detail}" if first.detail else ""))


async def _tick(lag: list[float]) -> None:
    while True:
        due = time.perf_counter() + TICK_S
        await asyncio.sleep(TICK_S)
        lag.append(max(0.0, time.perf_counter() - due))


class _Run:
    """The requests of one load, until all are answered or the server is given up."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        endpoint: Endpoint,
        width: int,
        progress: Callable[[int], None] = lambda done: None,
    ) -> None:
        self._client, self._endpoint, self._width, self._progress = client, endpoint, width, progress
        self._limit, self._in_a_row, self._done = max(LEAST_FAILURES_IN_A_ROW, 2 * width), 0, 0

    @property
    def _given_up(self) -> bool:
        return self._in_a_row >= self._limit

    async def _one(self, prompt: Prompt, due: float) -> Answer:
        answer = await ask(self._client, self._endpoint, prompt, due)
        self._in_a_row = 0 if answer.failure is None else self._in_a_row + 1
        self._done += 1
        self._progress(self._done)
        return answer

    async def closed(self, prompts: Sequence[Prompt]) -> list[Answer]:
        waiting, answers = iter(prompts), list[Answer]()

        async def worker() -> None:
            for prompt in waiting:
                answers.append(await self._one(prompt, time.perf_counter()))
                if self._given_up:
                    return

        async with asyncio.TaskGroup() as group:
            for _ in range(min(self._width, len(prompts))):
                group.create_task(worker())
        return sorted(answers, key=lambda answer: answer.due)

    async def open(self, prompts: Sequence[Prompt], arrivals: Sequence[float]) -> list[Answer]:
        began, tasks = time.perf_counter(), list[asyncio.Task[Answer]]()
        async with asyncio.TaskGroup() as group:
            for prompt, at in zip(prompts, arrivals, strict=True):
                await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
                if self._given_up:
                    break
                tasks.append(group.create_task(self._one(prompt, began + at)))
        return [task.result() for task in tasks]
