"""Steps that verify drafts and make the next ones on the device: what runs in one; it says what the eager engine says."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.engine.test_speculation import TEXT, facts, heldout_requests
from tests.engine.workload import PAGE, alone, make_engine, run_all, tokens_of
from uncast.engine.core import Engine, EngineConfig
from uncast.engine.drafted import DraftedRequest
from uncast.engine.drafted_step import DraftedStep
from uncast.engine.request import Request
from uncast.engine.runner import ModelRunner
from uncast.engine.sampler import SamplingParams
from uncast.engine.speculation import Speculation
from uncast.engine.tokenizer import Tokenizer
from uncast.models.decoder import MLADecoder


def request_of(words: Tokenizer, tokens: int = 30, params: SamplingParams | None = None, **options: Any) -> Request:
    return Request(words.encode(TEXT[:120]), params or SamplingParams(), tokens, ignore_eos=True, **options)


class Counted:
    """Counts what runs in a step: parts of static steps, each a graph's replay on a GPU, and passes outside of them."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs: Counter[str] = Counter()
        steps = engine.runner.decode_steps
        assert steps is not None
        for step in steps.verify.values():
            for name, calls in (("verify", step._verify), ("draft", step._draft)):
                for size, call in calls.items():
                    calls[size] = self._counting(name, call)
        for part in steps.decode._all:
            part.run = {topk: self._counting("decode", call) for topk, call in part.run.items()}
        for name in ("_forward", "draft_forward"):
            monkeypatch.setattr(engine.runner, name, self._counting("eager", getattr(engine.runner, name)))
        if steps.draft is not None:
            monkeypatch.setattr(steps.draft, "run", self._counting("chain", steps.draft.run))

    def _counting(self, name: str, call: Any) -> Any:
        def counted(*args: Any, **options: Any) -> Any:
            self.runs[name] += 1
            return call(*args, **options)

        return counted


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("requests", "drafts"), [(1, 1), (1, 2), (4, 3)])
def test_a_step_is_two_replays_and_no_eager_pass(
    glm: MLADecoder, words: Tokenizer, monkeypatch: pytest.MonkeyPatch, deterministic: bool, requests: int, drafts: int
) -> None:
    """From the step after the prompts on, whatever is accepted, while every request has drafts left to accept; each step but
    the first is under way before the one before it is taken."""
    engine = make_engine(glm, words, pages=60, deterministic=deterministic, speculate=drafts, static=True,
                         max_step_tokens=200)  # fmt: skip
    counted = Counted(engine, monkeypatch)
    for index in range(requests):
        prompt = words.encode(TEXT[500 * index : 500 * index + 100])
        engine.add(Request(prompt, max_tokens=40, ignore_eos=True, request_id=f"{index}"))
    engine.step()
    assert counted.runs.pop("eager") > 0 and not counted.runs
    engine.step()  # starts the step after it, too; the eager pass gave one draft, a chain the others
    assert counted.runs == Counter(verify=2, draft=2, **({"chain": 1} if drafts > 1 else {}))
    for taken in range(3):
        counted.runs.clear()
        outputs = engine.step()
        assert counted.runs == Counter(verify=1, draft=1)
        assert engine.ahead.launched_early == taken + 2 and len(outputs) >= requests
    while engine.has_work:
        engine.step()
    assert set(counted.runs) == {"verify", "draft"}


def test_a_step_for_which_the_host_chooses_is_two_replays(
    glm: MLADecoder, words: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probabilities and penalties: nothing starts early, and nothing is launched pass by pass."""
    engine = make_engine(glm, words, pages=60, speculate=2, static=True, max_step_tokens=64)
    counted = Counted(engine, monkeypatch)
    params = SamplingParams(temperature=0.5, seed=3, logprobs=2, repetition_penalty=1.1)
    engine.add(request_of(words, params=params, request_id="one"))
    engine.step()
    engine.step()
    for _ in range(3):
        counted.runs.clear()
        engine.step()
        assert counted.runs == Counter(verify=1, draft=1) and engine.ahead.current is None


def test_tokens_and_drafts_are_left_to_the_next_step(glm: MLADecoder, words: Tokenizer) -> None:
    """Requests change places and one leaves before the host has read anything; tokens are those of steps taken one by one, from
    eager ones."""
    rng = random.Random(4)
    engine = make_engine(glm, words, pages=80, speculate=2, static=True, deterministic=True, max_step_tokens=64)
    requests = [
        replace(request, params=SamplingParams(), stop=(), ignore_eos=True, max_tokens=new)
        for request, new in zip(heldout_requests(words, rng, 6), (9, 30, 14, 31, 20, 25), strict=True)
    ]
    single = make_engine(glm, words, pages=80, deterministic=True, prefix_cache=False)
    outputs = run_all(engine, requests, rng=rng)
    assert engine.ahead.launched_early > 8
    for request in requests:
        assert facts(outputs[request.request_id]) == facts(alone(single, request))


def test_requests_without_the_mtp_layers_rows_run_along(
    glm: MLADecoder, words: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those that were admitted while nothing was drafted: one token a step, and their company drafts on."""
    engine = make_engine(glm, words, pages=60, speculate=2, static=True, deterministic=True, max_step_tokens=64)
    assert engine.speculation is not None
    single = make_engine(glm, words, pages=60, deterministic=True, prefix_cache=False)
    drafting = Request(words.encode(TEXT[300:420]), max_tokens=40, ignore_eos=True, request_id="drafts")
    requests = [request_of(words, 24, request_id="plain"), drafting]
    engine.add(requests[0])
    monkeypatch.setattr(Speculation, "keeps_up", False)
    outputs: dict[str, list[Any]] = {"plain": engine.step(), "drafts": []}
    monkeypatch.undo()
    engine.add(requests[1])
    lengths = list[Counter[str]]()
    while engine.has_work:
        found = engine.step()
        lengths.append(Counter(output.request_id for output in found))
        for output in found:
            outputs[output.request_id].append(output)
    assert all(length["plain"] <= 1 for length in lengths) and max(length["drafts"] for length in lengths) == 3
    assert sum(length["plain"] and length["drafts"] for length in lengths) > 8
    for request in requests:
        assert facts(outputs[request.request_id]) == facts(alone(single, request))


@pytest.mark.parametrize("deterministic", [False, True])
def test_nothing_is_written_where_there_is_no_page(glm: MLADecoder, deterministic: bool) -> None:
    """Drafts beyond a request's pages are not accepted, even if they are what is chosen; rows of no one are nowhere."""
    runner = ModelRunner(glm, num_pages=6, page_size=PAGE, drafts=True, deterministic=deterministic)
    assert runner.capture(5, drafts=[3]) is None and runner.decode_steps is not None
    step: DraftedStep = runner.decode_steps.verify[3]
    start = PAGE - 2
    runner.pool.storage.fill_(0)
    chosen = [7, 0, 0, 0]
    for place in range(3):  # what would be chosen, so that every draft is right
        step.verify([DraftedRequest([4], chosen, start, 3)])
        chosen[place + 1] = int(step.logits[place].argmax())
    step.verify([DraftedRequest([4, 5], chosen, start, 3)])
    runner.pool.storage.fill_(0)
    step.verify([DraftedRequest([4], chosen, start, 3), DraftedRequest([2], [9, 0, 0, 0], 3, 0)])
    # a longer request was there before: what attention hides is not read from its page
    assert set(step._tables[0, :2].tolist()) == {4} and set(step._tables[1, :2].tolist()) == {2}
    first, second = step.draft(2).read()
    assert first.accepted == 1 and second.accepted == 0 and all(first.finite)
    written = runner.pool.storage.view(runner.pool.num_layers, -1, runner.pool.layout.row_bytes).ne(0).any(-1)
    rows = written.nonzero().tolist()
    expected = {4 * PAGE + start, 4 * PAGE + start + 1, *(2 * PAGE + row for row in range(3, 7))}
    model = {row for layer, row in rows if layer < glm.config.num_layers}
    assert model == expected
    assert {row for layer, row in rows if layer == glm.config.num_layers} == expected


def test_sampled_tokens_use_one_random_number_each(glm: MLADecoder, words: Tokenizer) -> None:
    """In steps for which the device draws, too: a seed gives the text that it gives without drafts, and a request that goes
    from the device to the host's sampler and back has not lost one."""
    params = SamplingParams(temperature=1.0, top_k=6, seed=11)
    plain = make_engine(glm, words, pages=60, deterministic=True, prefix_cache=False)
    expected = tokens_of(alone(plain, request_of(words, 40, params, request_id="s")))
    engine = make_engine(glm, words, pages=60, deterministic=True, speculate=2, static=True, max_step_tokens=64)
    engine.add(request_of(words, 40, params, request_id="s"))
    engine.add(request_of(words, 12, SamplingParams(logprobs=1), request_id="host"))
    found = list[int]()
    while engine.has_work:
        found += [token for output in engine.step() if output.request_id == "s" for token in output.token_ids]
    assert found == expected and engine.stats().draft_tokens_accepted_total > 5


class Clock:
    """A machine on which a static step of the model takes `decode` seconds, `verify` with drafts, and anything else nothing."""

    def __init__(self, decode: float, verify: float) -> None:
        self.now, self.decode, self.verify = 0.0, decode, verify

    def perf_counter(self) -> float:
        return self.now

    def times(self, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
        """Makes the runner's flights take so long, and the engine see it."""
        monkeypatch.setattr("uncast.engine.core.time", self)
        for name, seconds in (("launch", self.decode), ("launch_drafted", self.verify)):
            monkeypatch.setattr(runner, name, self._timed(getattr(runner, name), seconds))

    def _timed(self, call: Any, seconds: float) -> Any:
        def run(*args: Any) -> Any:
            self.now += seconds
            return call(*args)

        return run


@pytest.mark.parametrize(("verify", "helps"), [(1.1, True), (3.5, False)])
def test_auto_decides_by_the_time_of_flights(
    glm: MLADecoder, words: Tokenizer, monkeypatch: pytest.MonkeyPatch, verify: float, helps: bool
) -> None:
    """On a machine where a verification takes so many times a decode step: drafts where they pay, else none; steps without any
    start early as in an engine without drafts, and the MTP layer catches up after a trial of them."""
    clock = Clock(1.0, verify)
    runner = ModelRunner(glm, kv_layout="fp32", num_pages=60, page_size=PAGE, drafts=True)
    assert runner.capture(1, drafts=[1, 2, 3]) is None and runner.decode_steps is not None
    clock.times(runner, monkeypatch)
    engine = Engine(runner, words, EngineConfig(max_running=1, prefix_cache=False, speculate=None))
    texts = list[list[int]]()
    for index in range(10):
        engine.add(request_of(words, 60, request_id=f"{index}"))
        texts.append([])
        while engine.has_work:
            texts[-1] += [token for output in engine.step() for token in output.token_ids]
    assert engine.speculation is not None and engine.speculation.drafted > 20
    assert engine.speculation.keeps_up == helps
    assert all(text == texts[0] for text in texts)
    stats = engine.stats()
    if helps:
        assert stats.steps_total < 0.7 * stats.completion_tokens_total and "drafts" in engine.speculation.describe()
    else:
        engine.add(request_of(words, 60, request_id="after"))
        before = engine.ahead.launched_early
        while engine.has_work:
            engine.step()
        assert engine.ahead.launched_early - before == 58, (
            "as without drafts: all but the prompt's step and the one after it"
        )
    plain = make_engine(glm, words, pages=60, kv_layout="fp32", prefix_cache=False)
    assert texts[0] == tokens_of(alone(plain, request_of(words, 60, request_id="plain")))
    assert torch.isfinite(runner.decode_steps.decode.logits).all()


def test_auto_decides_beside_a_request_that_cannot_draft(
    glm: MLADecoder, words: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one that was admitted during a pause: a flight takes as long whoever drafts, so that a trial ends, and drafts
    that do not help with it."""
    clock = Clock(1.0, 3.5)
    runner = ModelRunner(glm, kv_layout="fp32", num_pages=80, page_size=PAGE, drafts=True)
    assert runner.capture(2, drafts=[1, 2, 3]) is None
    clock.times(runner, monkeypatch)
    engine = Engine(runner, words, EngineConfig(max_running=2, prefix_cache=False, speculate=None))
    engine.add(request_of(words, 250, request_id="plain"))
    with monkeypatch.context() as patch:
        patch.setattr(Speculation, "keeps_up", False)
        engine.step()
    engine.add(request_of(words, 250, request_id="drafts"))
    for _ in range(80):
        engine.step()
    assert engine.speculation is not None and engine.speculation.drafted > 20
    assert not engine.speculation.keeps_up and engine.has_work
    assert all(active.sequence.mtp is None for active in engine.scheduler.running)
