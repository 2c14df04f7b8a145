"""Random requests, and engines that record what they computed."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from uncast.engine.active import ActiveRequest
from uncast.engine.core import Engine, EngineConfig
from uncast.engine.drafted import Report
from uncast.engine.lookahead import DraftedFlight, Flight
from uncast.engine.request import Request, RequestOutput
from uncast.engine.runner import ModelRunner, StepBytes
from uncast.engine.sampler import SamplingParams
from uncast.engine.static_step import BUCKETS, Chosen
from uncast.engine.tokenizer import Tokenizer
from uncast.models.decoder import MLADecoder

PAGE = 8


class RecordingEngine(Engine):
    """Keeps every row of logits that a token was chosen from, by request, on the CPU."""

    logits: defaultdict[str, list[torch.Tensor]]

    def _take(self, active: ActiveRequest, best: int, finite: bool, logits: torch.Tensor) -> RequestOutput:
        self.logits[active.request.request_id].append(logits.clone().cpu())
        return super()._take(active, best, finite, logits)

    def _take_flight(self, flight: Flight) -> list[RequestOutput]:
        rows = self.flown.pop(id(flight.chosen))
        for active, row in zip(flight.actives, rows, strict=True):
            if self._is_alive(active):
                self.logits[active.request.request_id].append(row.cpu())
        return super()._take_flight(flight)

    def _take_drafted(self, flight: DraftedFlight) -> tuple[list[RequestOutput], StepBytes]:
        rows, before = self.flown.pop(id(flight.report)), dict(enumerate(active.generated for active in flight.actives))
        alive = [self._is_alive(active) for active in flight.actives]
        found = super()._take_drafted(flight)
        for row, active in enumerate(flight.actives):
            taken = sum(output.request_id == active.request.request_id for output in found[0]) if alive[row] else 0
            assert active.generated - before[row] <= taken
            first = row * (1 + flight.drafts)
            self.logits[active.request.request_id] += list(rows[first : first + taken])
        return found

    def keep_logits_of_flights(self) -> None:
        """From now on; the step after overwrites them."""
        self.flown: dict[int, torch.Tensor] = {}
        launch = self.runner.launch

        def launch_and_keep(*args: Any) -> Chosen:
            chosen = launch(*args)
            assert self.runner.decode_steps is not None
            self.flown[id(chosen)] = self.runner.decode_steps.decode.logits[: len(args[0])].clone()
            return chosen

        launch_drafted = self.runner.launch_drafted

        def launch_drafted_and_keep(drafts: int, requests: Any, *args: Any) -> Report:
            report = launch_drafted(drafts, requests, *args)
            assert self.runner.decode_steps is not None
            logits = self.runner.decode_steps.verify[drafts].logits
            self.flown[id(report)] = logits[: len(requests) * (1 + drafts)].clone()
            return report

        self.runner.launch = launch_and_keep  # type: ignore[method-assign]
        self.runner.launch_drafted = launch_drafted_and_keep  # type: ignore[method-assign]


def make_engine(
    model: MLADecoder,
    tokenizer: Tokenizer,
    *,
    pages: int,
    deterministic: bool = False,
    kv_layout: str = "fp8_ds_mla",
    max_running: int = 8,
    max_step_tokens: int = 32,
    prefix_cache: bool = True,
    speculate: int = 0,
    static: bool = False,
    buckets: Sequence[int] = BUCKETS,
) -> RecordingEngine:
    runner = ModelRunner(
        model, kv_layout=kv_layout, num_pages=pages, page_size=PAGE, deterministic=deterministic, drafts=speculate > 0
    )
    config = EngineConfig(
        max_running=max_running, max_step_tokens=max_step_tokens, prefix_cache=prefix_cache, speculate=speculate
    )
    if static:
        drafts = [speculate] if speculate else []
        assert runner.capture(max_running, drafts=drafts, buckets=buckets) is None
    engine = RecordingEngine(runner, tokenizer, config)
    engine.logits = defaultdict(list)
    engine.keep_logits_of_flights()
    return engine


def random_requests(rng: random.Random, count: int, *, longest: int = 60, new: int = 24) -> list[Request]:
    """Prompts of which many begin alike; greedy and sampled, with and without penalties."""
    stems = [[rng.randrange(512) for _ in range(longest)] for _ in range(3)]
    requests = []
    for index in range(count):
        stem = rng.choice(stems)[: rng.randint(0, longest - 1)]
        tail = [rng.randrange(512) for _ in range(rng.randint(1, longest - len(stem)))]
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.0, 1.0]),
            seed=index,
            frequency_penalty=rng.choice([0.0, 0.5]),
            logprobs=rng.choice([None, 2]),
        )
        requests.append(Request([*stem, *tail], params, rng.randint(1, new), request_id=f"r{index}"))
    return requests


def run_all(
    engine: Engine, requests: list[Request], *, rng: random.Random | None = None, abort_share: float = 0.0
) -> dict[str, list[RequestOutput]]:
    """Feeds requests in bursts, aborts some in whatever state they are, and checks the pool after every step."""
    rng = rng or random.Random(0)
    outputs: dict[str, list[RequestOutput]] = {request.request_id: [] for request in requests}
    todo = list(reversed(requests))
    while todo or engine.has_work:
        for _ in range(rng.choice([0, 1, 1, 4])):
            if todo:
                engine.add(todo.pop())
        for output in engine.step():
            outputs[output.request_id].append(output)
        if rng.random() < abort_share:
            for output in engine.abort(rng.choice(requests).request_id):
                outputs[output.request_id].append(output)
        engine.check_integrity()
    return outputs


def alone(engine: Engine, request: Request) -> list[RequestOutput]:
    """The request by itself on an engine whose prefix cache is off."""
    assert engine.prefix_cache is None
    return run_all(engine, [replace(request)])[request.request_id]


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]
