"""Warm-up: every path that a request can take is run once before anyone sends one.

    probe      attention of the largest chunk, of one query, of a verified draft: against the oracle, on a small batch
    capture    decode and verify steps as CUDA graphs
    prefill    chunks by themselves, over a prefix, over cached pages, of many requests in one step
    decode     alone, in batches of every size that is compiled or captured for itself, beside a chunk, sampled
    long       one query and one chunk at the end of the longest context, where attention and indexer need the most memory
    draft      chains of every length and the steps that verify them, alone and in a full batch

Requests run in engines of their own over the real runner and its pool, so that scheduler, drafter and sampler are the real ones
while counters, prefix cache and metrics of the engine that will serve stay as they are. All pages are free afterwards.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from uncast.attention import ProblemError, Refused
from uncast.engine.core import Engine
from uncast.engine.drafted_step import DraftedStep
from uncast.engine.request import NOT_FINITE, GenerationError, Request, SamplingParams
from uncast.engine.runner import RunnerError, Sequence
from uncast.engine.speculation import AUTO_COUNTS
from uncast.engine.static_step import StaticStep
from uncast.kernels.row_tile import ROW_TILE

SHORT = 3
"""Tokens of a short chunk."""
CPU_BATCH = 4
"""Requests of a large batch where no code depends on how many there are."""
SAMPLED = {
    "device": SamplingParams(1.0, 20, 0.9, 0.01, seed=0),
    "host": SamplingParams(1.0, 20, 0.9, 0.01, seed=0, repetition_penalty=1.1, logprobs=1),
}
_SENTENCES = (GenerationError, ProblemError, Refused, RunnerError)


class WarmUpError(RuntimeError):
    """A path does not work with this model on this machine; one sentence that names it."""


@dataclass
class WarmUp:
    """What a warm-up did.

    Attributes:
        probes: numbers of queries that attention was probed with.
        steps: forward steps.
        note: why decode steps of this engine are not CUDA graphs, where a GPU could have them; else None.
    """

    probes: int = 0
    steps: int = 0
    note: str | None = None


def warm_up(engine: Engine, *, every_size: bool | None = None) -> WarmUp:
    """Runs every path of an engine that has no requests yet.

    Args:
        every_size: batches and chunks of every size that may have code of its own, and the longest context; None: on a GPU.

    Raises:
        WarmUpError: naming the first path that fails.
    """
    counters = engine.runner.counters.clone()
    paths = _Paths(engine, engine.runner.model.device.type != "cpu" if every_size is None else every_size)
    try:
        paths.run()
    finally:
        engine.runner.counters.copy_(counters)
    return paths.done


def sizes(most: int, *, every: bool) -> list[int]:
    """Sizes from 1 to `most`, ascending: powers of two and `most`, or the ends."""
    powers = itertools.takewhile(lambda size: size < most, (1 << bit for bit in itertools.count()))
    return [*powers, most] if every else sorted({1, most})


@contextmanager
def _path(name: str) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise WarmUpError(
            f"warm-up: {name} does not fit into the memory beside the KV pool: ask for a pool of fewer tokens, or for "
            "steps of fewer (max_step_tokens)"
        ) from None
    except Exception as error:
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        what = said if isinstance(error, _SENTENCES) else f"{type(error).__name__}: {said}"
        raise WarmUpError(f"warm-up: {name} failed: {what}") from error


class _Paths:
    def __init__(self, engine: Engine, every: bool) -> None:
        self.engine, self.runner, self.config = engine, engine.runner, engine.config
        self.done = WarmUp()
        model, pool = self.runner.model, self.runner.pool
        self._every = every
        self._vocab = model.config.vocab_size
        self._longest = min(pool.num_pages * pool.page_size, model.config.max_position_embeddings)
        # In deterministic mode every pass is a tile, whatever the chunk.
        chunk = 2 * ROW_TILE if self.runner.deterministic else self.config.max_step_tokens
        self._chunk = min(chunk, self.config.max_step_tokens, self._longest)
        self._batch = self.config.max_running if self._every else min(self.config.max_running, CPU_BATCH)
        self._numbers = itertools.count()

    def run(self) -> None:
        indexer = self.runner.model.config.indexer
        counts = self._draft_counts()
        for queries in sorted({1, *(count + 1 for count in counts), self._chunk}):
            with _path(f"attention of up to {queries} queries"):
                self.runner.probe(queries)
                self.done.probes += 1
        if self.runner.model.device.type == "cuda":
            with _path("decode steps as CUDA graphs"):
                self.done.note = self.runner.capture(self.config.max_running, drafts=counts)
        if self._longest > 1:
            with self._scratch() as scratch:
                self._prefill(scratch)
                self._decode(scratch)
        sparse = indexer is not None and indexer.topk < self._longest
        if self._every or sparse:
            end = self._longest if self._every or indexer is None else indexer.topk + SHORT
            self._long(min(end, self._longest))
        for count in counts if self._longest > 1 else ():
            with self._scratch(count) as scratch:
                self._draft(scratch, count)

    def _draft_counts(self) -> list[int]:
        speculation = self.engine.speculation
        if speculation is None:
            return []
        return [count for count in (AUTO_COUNTS if speculation.fixed is None else [speculation.fixed]) if count]

    @contextmanager
    def _scratch(self, count: int = 0) -> Iterator[Engine]:
        """An engine over the real pool that drafts so many tokens; its pages are free afterwards."""
        scratch = Engine(self.runner, self.engine.tokenizer, replace(self.config, speculate=count))
        yield scratch
        if scratch.prefix_cache is not None:
            scratch.prefix_cache.evict(len(scratch.prefix_cache))
        self.runner.pool.check_integrity([])

    def _prefill(self, scratch: Engine) -> None:
        chunk, many = self._chunk, min(self._batch, self.config.max_step_tokens // SHORT)
        for size in sizes(chunk, every=self._every)[:-1] if self._every else ():
            with _path(f"a prompt of {size} tokens"):
                self._finish(scratch, [self._request(size)])
        over_prefix = self._request(max((2 if self._every else 1) * chunk, self.runner.page_size) + SHORT)
        with _path(f"a prompt of {len(over_prefix.prompt)} tokens in chunks of up to {chunk}"):
            self._finish(scratch, [over_prefix])
        with _path("a prompt whose beginning is cached"):
            self._finish(scratch, [replace(over_prefix, request_id=self._name())])
        if many > 1:
            with _path(f"prompts of {many} requests in one step"):
                self._finish(scratch, [self._request(SHORT) for _ in range(many)])

    def _decode(self, scratch: Engine) -> None:
        steps = self.runner.decode_steps
        for size in self._batches(None if steps is None else steps.decode):
            with _path(f"decode of {size} requests"):
                self._finish(scratch, [self._request(1, max_tokens=4) for _ in range(size)])
        beside = min(self._batch, self.config.max_running - 1)
        for size in sorted({min(1, beside), beside if self._every else 0} - {0}):
            with _path(f"a prompt beside {size} requests that decode"):
                for _ in range(size):
                    scratch.add(self._request(1, max_tokens=3))
                self._step(scratch)
                self._finish(scratch, [self._request(self._chunk if self._every else SHORT)])
        for what, params in SAMPLED.items():
            with _path(f"a token sampled on the {what}"):
                self._finish(scratch, [replace(self._request(1, max_tokens=3), params=params)])

    def _batches(self, step: StaticStep | DraftedStep | None) -> list[int]:
        """Batch sizes, those that `step` has a graph for among them."""
        captured = () if step is None else (size for size in step.sizes if size <= self._batch)
        return sorted({*sizes(self._batch, every=self._every), *captured})

    def _long(self, end: int) -> None:
        """One query and one chunk that end at row `end`. What the rows hold does not matter, so that no prompt has to run."""
        pool, sequence = self.runner.pool, Sequence([0] * end)
        self.runner.ensure_pages(sequence, end)
        for queries in sorted({1, min(end, self._chunk)}):
            with _path(f"{queries} queries of a request of {end} tokens"):
                sequence.cached = end - queries
                logits = self.runner.step([(sequence, queries)])
                self.done.steps += 1
                if not bool(logits.amax(-1).isfinite().all()):
                    raise GenerationError(NOT_FINITE)
        self.runner.free(sequence)
        pool.check_integrity([])

    def _draft(self, scratch: Engine, count: int) -> None:
        steps = self.runner.decode_steps
        for size in self._batches(None if steps is None else steps.verify.get(count)):
            with _path(f"{count} drafts of {size} requests"):
                requests = [self._request(1, max_tokens=count + 2) for _ in range(size)]
                for request in requests:
                    scratch.add(request)
                for _ in range(2):  # the prompts, and the MTP layer's rows for them; drafts and their verification
                    self._step(scratch)
                    if not all(bool(state.isfinite().all()) for state in self._draft_states(scratch)):
                        raise GenerationError("the MTP layer's outputs are not finite: its weights are damaged")
                for request in requests:
                    scratch.abort(request.request_id)

    def _draft_states(self, scratch: Engine) -> Iterator[torch.Tensor]:
        for active in scratch.scheduler.running:
            if active.sequence.mtp is not None and active.sequence.mtp.hidden is not None:
                yield active.sequence.mtp.hidden

    def _request(self, prompt_tokens: int, max_tokens: int = 2) -> Request:
        """A prompt that begins like no other here, as long as the context allows."""
        prompt_tokens = min(prompt_tokens, self._longest - 1)
        first = next(self._numbers)
        prompt = [(first + 31 * place) % self._vocab for place in range(prompt_tokens)]
        new = min(max_tokens, self._longest - prompt_tokens)
        return Request(prompt, max_tokens=new, ignore_eos=True, request_id=self._name())

    def _name(self) -> str:
        return f"warm-up-{next(self._numbers)}"

    def _finish(self, scratch: Engine, requests: list[Request]) -> None:
        for request in requests:
            scratch.add(request)
        while scratch.has_work:
            self._step(scratch)

    def _step(self, scratch: Engine) -> None:
        self.done.steps += 1
        for output in scratch.step():
            if output.error is not None:
                raise GenerationError(output.error)
