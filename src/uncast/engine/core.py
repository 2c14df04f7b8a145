"""The engine's core: continuous batching over the paged pool, synchronous and single-threaded."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from uncast.engine.active import ActiveRequest
from uncast.engine.drafted import Verified
from uncast.engine.drafting import Drafting
from uncast.engine.grammar import GrammarError
from uncast.engine.lookahead import DraftedFlight, Flight, Lookahead
from uncast.engine.prefix_cache import PrefixCache
from uncast.engine.request import NOT_FINITE, Request, RequestError, RequestOutput, TokenLogprob
from uncast.engine.runner import ModelRunner, StepBytes
from uncast.engine.scheduler import Scheduler
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
        speculate: tokens that the MTP layer drafts per request and step; None measures what helps. Has effect on a runner with
            `drafts` only.
    """

    max_running: int = 64
    max_waiting: int = 256
    max_step_tokens: int = 256
    prefix_cache: bool = True
    speculate: int | None = None

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
    """Requests in, outputs out, one `step` at a time. Not thread-safe; see `AsyncEngine`.

    Attributes:
        config, runner, tokenizer: as given; the engine takes the runner's whole pool for itself.
        scheduler: who waits, runs and is swapped out.
        speculation: draft counts and what came of them; None if the runner does not draft.
        ahead: decode steps that the device runs meanwhile; none before `ModelRunner.capture`.
        last_step_bytes: cache bytes of the step whose outputs came last; None before it.
    """

    def __init__(self, runner: ModelRunner, tokenizer: Tokenizer, config: EngineConfig | None = None) -> None:
        self.config = EngineConfig() if config is None else config
        self.runner, self.tokenizer = runner, tokenizer
        self.prefix_cache = PrefixCache(runner.pool, lookahead=runner.drafts) if self.config.prefix_cache else None
        self.scheduler = Scheduler(
            runner.pool,
            max_running=self.config.max_running,
            max_step_tokens=self.config.max_step_tokens,
            prefix_cache=self.prefix_cache,
        )
        self.ahead = Lookahead(runner, self.scheduler)
        self._drafting = Drafting(runner, self.scheduler, self.config.speculate)
        self.speculation = self._drafting.speculation
        self.last_step_bytes: StepBytes | None = None
        self._active: dict[str, ActiveRequest] = {}
        self._finished = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self._requests = self._prompt_tokens = self._completion_tokens = self._steps = 0
        self._step_seconds = 0.0
        self._bytes = StepBytes(0, 0, 0, 0)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self.scheduler.waiting)

    @property
    def has_work(self) -> bool:
        """Whether any request is not finished, or a step is under way."""
        return bool(self._active) or self.ahead.current is not None

    def check(self, request: Request) -> None:
        """Raises `RequestError` if the request can never run on this model and pool. Safe from any thread."""
        config, pool = self.runner.model.config, self.runner.pool
        request.check_fits(
            vocab_size=config.vocab_size,
            context=config.max_position_embeddings,
            pool_rows=pool.num_pages * pool.page_size,
        )

    def add(self, request: Request) -> None:
        """Queues a request, whatever the length of the queue.

        Raises:
            RequestError: see `check`; or its id is in use.
        """
        self.check(request)
        if request.request_id in self._active:
            raise RequestError(f"request_id {request.request_id!r} is in use")
        config = self.runner.model.config
        ends = frozenset(request.stop_token_ids).union(() if request.ignore_eos else config.stop_token_ids)
        active = ActiveRequest(request, self._requests, self.tokenizer, ends, config.vocab_size)
        self._requests += 1
        self._active[request.request_id] = active
        self.scheduler.waiting.append(active)

    def abort(self, request_id: str) -> list[RequestOutput]:
        """Ends a request in any state and gives its pages back; no output if there is none of that id."""
        active = self._active.get(request_id)
        if active is None:
            return []
        output = active.aborted()
        self._finish(active, output, at_once=True)
        return [output]

    def step(self) -> list[RequestOutput]:
        """Takes the tokens of one forward step, which it schedules and starts unless that step is under way. Before it waits
        for them, it starts the step after it where that one is known (see `lookahead`).

        Returns:
            One output for each request that got a token or failed.
        """
        if not self.has_work:
            return []
        began = time.perf_counter()
        flight, self.ahead.current = self.ahead.current, None
        if flight is None:
            self._drafting.begin()
            chunks = self.scheduler.schedule()
            self._prompt_tokens += sum(count for active, count in chunks if active.prefilling)
            wanted = self._drafting.wanted([active for active, _ in chunks if not active.prefilling])
            flight = self._drafting.launch(self.ahead, chunks, wanted)
            if flight is None:
                return self._step_at_once(chunks, wanted, began)
        drafts, decoding = flight.drafts, len(flight.actives)
        if self._drafting.wanted(flight.actives) == drafts:
            self.ahead.launch_after(flight, self._is_alive)
        if isinstance(flight, DraftedFlight):
            outputs, size = self._take_drafted(flight)
        else:
            outputs, size = self._take_flight(flight), flight.bytes
        seconds = time.perf_counter() - began
        self._count(size, seconds)
        # a flight runs the same rows of every request, whether it has drafts or not
        self._drafting.observe(decoding, decoding if drafts else 0, drafts, seconds)
        return outputs

    def _step_at_once(self, chunks: list[tuple[ActiveRequest, int]], wanted: int, began: float) -> list[RequestOutput]:
        """Runs a scheduled step and chooses from its logits."""
        decoding = sum(not active.prefilling for active, _ in chunks)
        drafting = self._drafting.draft(chunks, wanted)
        logits = self.runner.step([(active.sequence, count + len(active.sequence.drafts)) for active, count in chunks])
        if self.speculation is None:  # with drafts only what was accepted is kept, and with the token after it
            for active, _ in chunks:
                self.scheduler.keep_full_pages(active)
        outputs = self._choose([active for active, _ in chunks], logits)
        chosen = time.perf_counter()
        self._drafting.keep_up(chunks)
        self._finish_all(outputs)
        self._count(self.runner.last_step_bytes(), time.perf_counter() - began)
        seconds = (time.perf_counter() if wanted else chosen) - began
        self._drafting.observe(decoding, drafting, wanted, seconds, only_decodes=decoding == len(chunks))
        return outputs

    def _take_flight(self, flight: Flight) -> list[RequestOutput]:
        """Waits for a step under way and takes its tokens; those of requests that are over are nobody's."""
        tokens, finite = flight.chosen.read()
        outputs = []
        for row, (active, token, is_finite) in enumerate(zip(flight.actives, tokens, finite, strict=True)):
            if self._is_alive(active):
                self._drafting.fall_behind(active, flight.hidden, row)
                self.scheduler.keep_full_pages(active)
                outputs.append(self._accept(active, token) if is_finite else active.failed(NOT_FINITE))
        self.ahead.land(flight)
        self._finish_all(outputs)
        return outputs

    def _take_drafted(self, flight: DraftedFlight) -> tuple[list[RequestOutput], StepBytes]:
        """The same of a step that verified drafts, and its cache bytes; requests that are over count where they were."""
        found = flight.report.read()
        starts, outputs = [active.sequence.cached for active in flight.actives], list[RequestOutput]()
        for row, (active, verified) in enumerate(zip(flight.actives, found, strict=True)):
            if self._is_alive(active):
                left = min(active.request.max_tokens - active.generated, flight.room[row] - starts[row]) - 1
                outputs += self._take_verified(active, verified, min(flight.most[row], left))
        self.ahead.land(flight)
        self._finish_all(outputs)
        return outputs, self.runner.drafted_bytes(flight.drafts, starts, [of.accepted for of in found], flight.before)

    def _take_verified(self, active: ActiveRequest, verified: Verified, drafted: int) -> list[RequestOutput]:
        """Tokens of a request whose drafts were verified, so many of which count; the next drafts are the request's then."""
        outputs, sequence, taken = list[RequestOutput](), active.sequence, 0
        for taken, token in enumerate(verified.tokens[: 1 + verified.accepted]):
            active.draw()
            finite = verified.finite[taken]
            outputs.append(self._accept(active, token) if finite else active.failed(NOT_FINITE))
            sequence.cached += 1
            if outputs[-1].finished:
                break
        self._drafting.verified(drafted, taken)
        self._drafting.keep_drafts(active, verified.drafts)
        self.scheduler.keep_full_pages(active)
        return outputs

    def _is_alive(self, active: ActiveRequest) -> bool:
        return self._active.get(active.request.request_id) is active

    def check_integrity(self) -> None:
        """Raises `PoolError` unless running requests and the prefix cache together explain every page of the pool."""
        owners = [active.sequence.pages for active in self.scheduler.running] + self.ahead.owners()
        if self.prefix_cache is not None:
            owners.append(self.prefix_cache.pages())
        self.runner.pool.check_integrity(owners)

    def stats(self) -> EngineStats:
        """A snapshot of the counters. Safe from any thread."""
        scheduler, pool = self.scheduler, self.runner.pool
        free, in_use = pool.num_free, scheduler.pages_in_use()
        saturated, subnormal, nan = self.runner.counters.tolist()
        return EngineStats(
            waiting=self.num_waiting,
            max_waiting=self.config.max_waiting,
            running=len(scheduler.running),
            swapped=len(scheduler.swapped),
            draining=False,
            pool_pages=pool.num_pages,
            pool_pages_free=free,
            pool_pages_cached=max(0, pool.num_pages - free - in_use),
            page_size=pool.page_size,
            requests_total=self._requests,
            finished_total=dict(self._finished),
            prompt_tokens_total=self._prompt_tokens + scheduler.prefix_hit_tokens,
            completion_tokens_total=self._completion_tokens,
            prefix_query_tokens_total=scheduler.prefix_query_tokens,
            prefix_hit_tokens_total=scheduler.prefix_hit_tokens,
            preemptions_total=scheduler.preemptions,
            swap_bytes_total=scheduler.swap_bytes,
            steps_total=self._steps,
            step_seconds_total=self._step_seconds,
            cache_bytes_needed_total=self._bytes.needed,
            cache_bytes_read_total=self._bytes.read,
            cache_bytes_written_total=self._bytes.written,
            speculating=self.speculation is not None and self.speculation.keeps_up,
            draft_tokens_total=0 if self.speculation is None else self.speculation.drafted,
            draft_tokens_accepted_total=0 if self.speculation is None else self.speculation.accepted,
            saturated_total=saturated,
            subnormal_total=subnormal,
            nan_total=nan,
        )

    def _choose(self, actives: list[ActiveRequest], logits: torch.Tensor) -> list[RequestOutput]:
        """Samples from a step's logits [rows, vocab], each request by its own parameters and random numbers.

        A request has a row for its last token and one for each draft. A draft stays if it is what the request chooses at its
        place anyway; the first other choice takes its place and ends the request's rows. So drafts change no choice and no
        random number. (For a fixed guess this is rejection sampling: it is accepted with its probability.)

        A row whose largest logit is not finite (any NaN, any +inf, or nothing but -inf) ends its request with an error.
        """
        largest, place = logits.max(-1)
        best, finite = place.tolist(), largest.isfinite().tolist()
        rows = logits if all(active.takes_best for active in actives) else logits.cpu()
        outputs: list[RequestOutput] = []
        first = 0
        for active in actives:
            sequence = active.sequence
            drafts, sequence.drafts = sequence.drafts, []
            sequence.cached -= len(drafts)
            if not active.remaining:  # else the chunk ends before its prompt does and has nothing to choose
                for index in range(first, first + 1 + len(drafts)):
                    outputs.append(self._take(active, best[index], finite[index], rows[index]))
                    draft = index - first
                    if outputs[-1].finished or draft == len(drafts) or sequence.tokens[-1] != drafts[draft]:
                        break
                    sequence.cached += 1
                self._drafting.verified(len(drafts), index - first)
            first += 1 + len(drafts)
        return outputs

    def _take(self, active: ActiveRequest, best: int, finite: bool, logits: torch.Tensor) -> RequestOutput:
        """The output of the next token from one row of logits [vocab], whose likeliest token is `best`; they are on the host
        unless every request takes its best."""
        if not finite:
            return active.failed(NOT_FINITE)
        if active.takes_best:
            choice: tuple[int, TokenLogprob | None] = (best, None)
        else:
            try:
                choice = active.choose(logits)
            except GrammarError as error:
                return active.failed(str(error), grammar=True)
        return self._accept(active, *choice)

    def _accept(self, active: ActiveRequest, token: int, logprob: TokenLogprob | None = None) -> RequestOutput:
        output = active.accept(token, logprob)
        self._completion_tokens += len(output.token_ids)
        return output

    def _finish_all(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            if output.finished:
                self._finish(self._active[output.request_id], output)

    def _finish(self, active: ActiveRequest, output: RequestOutput, *, at_once: bool = False) -> None:
        assert output.finish_reason is not None
        self.ahead.part(active, at_once=at_once)
        del self._active[active.request.request_id]
        self._finished[output.finish_reason] += 1

    def _count(self, now: StepBytes, seconds: float) -> None:
        self._steps += 1
        self._step_seconds += seconds
        self.last_step_bytes, total = now, self._bytes
        self._bytes = StepBytes(
            total.needed + now.needed,
            total.read + now.read,
            total.written + now.written,
            total.pool_cast + now.pool_cast,
        )
