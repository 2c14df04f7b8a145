"""Outside of deterministic mode: up to 16 rows a pass, a row has the bits that it has alone, so drafts change no greedy text.

On a GPU that is the default. Here the same code runs on a CPU: products of few rows as whole tiles, each row a request of its
own for attention. What only a GPU shows is in `test_few_rows_gpu.py`.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.engine.test_speculation import TEXT
from tests.engine.workload import RecordingEngine, make_engine
from uncast.backends.torch_cpu import TorchCpuBackend
from uncast.engine.core import EngineConfig
from uncast.engine.request import Request
from uncast.engine.runner import ModelRunner, RunnerError, Sequence
from uncast.engine.tokenizer import Tokenizer
from uncast.kernels import row_tile
from uncast.models.decoder import MLADecoder


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_tile, "DEVICES", ("cuda", "cpu"))
    monkeypatch.setattr(TorchCpuBackend, "splits_alone", True)


def requests_of(words: Tokenizer, count: int, new: int) -> list[Request]:
    return [
        Request(
            words.encode(TEXT[700 * i : 700 * i + 100 + 9 * i]),
            max_tokens=new - 5 * i,
            ignore_eos=True,
            request_id=f"{i}",
        )
        for i in range(count)
    ]


def said(engine: RecordingEngine, requests: list[Request]) -> dict[str, tuple[list[int], torch.Tensor]]:
    """By request its tokens and the logits that they were chosen from."""
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
    return {name: (found, torch.stack(engine.logits[name])) for name, found in tokens.items()}


def assert_same(
    found: dict[str, tuple[list[int], torch.Tensor]], plain: dict[str, tuple[list[int], torch.Tensor]]
) -> None:
    for name, (tokens, logits) in plain.items():
        assert found[name][0] == tokens and torch.equal(found[name][1], logits), name


@pytest.fixture
def plain(glm: MLADecoder, words: Tokenizer) -> dict[str, tuple[list[int], torch.Tensor]]:
    """Without drafts, in static buffers, one request."""
    return said(make_engine(glm, words, pages=40, static=True, max_step_tokens=64), requests_of(words, 1, 40))


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("drafts", [0, 1, 2, 3, 8])
def test_one_request_with_drafts_has_the_logits_of_one_without(
    glm: MLADecoder, words: Tokenizer, plain: dict[str, tuple[list[int], torch.Tensor]], drafts: int, static: bool
) -> None:
    """In static buffers and eagerly, with fewer drafts at the end; without drafts the eager steps are those of static ones."""
    engine = make_engine(glm, words, pages=40, speculate=drafts, static=static, max_step_tokens=64)
    assert_same(said(engine, requests_of(words, 1, 40)), plain)
    assert not drafts or engine.stats().draft_tokens_accepted_total


@pytest.mark.parametrize("static", [True, False])
def test_nan_behind_the_rows_of_a_tile_comes_into_nothing(
    glm: MLADecoder, words: Tokenizer, plain: dict[str, tuple[list[int], torch.Tensor]], static: bool
) -> None:
    """Not into a logit, nor into what is counted of the rows that are written."""
    torch.use_deterministic_algorithms(True)  # fills what is allocated uninitialised with NaN
    try:
        assert bool(row_tile.whole_tile(row_tile.new_rows(glm.embed, 2, 4)).isnan().all())
        engine = make_engine(glm, words, pages=40, speculate=3, static=static, max_step_tokens=64)
        assert_same(said(engine, requests_of(words, 1, 40)), plain)
    finally:
        torch.use_deterministic_algorithms(False)
    assert engine.runner.counters[2] == 0


def test_automatic_drafts_and_their_pauses_change_nothing(
    glm: MLADecoder, words: Tokenizer, plain: dict[str, tuple[list[int], torch.Tensor]]
) -> None:
    runner = ModelRunner(glm, num_pages=40, page_size=8, drafts=True)
    assert runner.alone and runner.capture(2, drafts=[1, 2, 3]) is None
    engine = RecordingEngine(runner, words, EngineConfig(max_running=2, max_step_tokens=64, speculate=None))
    engine.logits = defaultdict(list)
    engine.keep_logits_of_flights()
    counts = iter([0, 0, 2, 3, 0, 1, 1, 0, 3] * 9)
    assert engine.speculation is not None
    engine.speculation.count = lambda requests: next(counts)  # type: ignore[method-assign]
    assert_same(said(engine, requests_of(words, 1, 40)), plain)
    assert engine.stats().draft_tokens_total


def test_a_request_that_the_host_chooses_for(glm: MLADecoder, words: Tokenizer) -> None:
    """Log-probabilities: neither is a step a flight."""
    (request,) = requests_of(words, 1, 30)
    request = replace(request, params=replace(request.params, logprobs=1))
    found = [
        said(make_engine(glm, words, pages=40, speculate=drafts, static=static, max_step_tokens=64), [request])
        for drafts, static in ((0, True), (2, True), (2, False))
    ]
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])


def test_the_probe_covers_the_plans_of_few_rows(glm: MLADecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that is wrong only where rows are to be split as alone is found before anything is served."""
    runner, run = ModelRunner(glm, num_pages=4, page_size=8), TorchCpuBackend.run
    runner.probe(1)

    def wrong(backend: TorchCpuBackend, *given: Any, **more: Any) -> None:
        run(backend, *given, **more)
        if backend._problem.alone_rows:
            more["out"] *= 1.1

    monkeypatch.setattr(TorchCpuBackend, "run", wrong)
    runner.probe(8)
    with pytest.raises(RunnerError, match=r"torch_cpu .*error"):
        runner.probe(1)
    runner.alone = False
    runner.probe(1)


@pytest.mark.parametrize(("requests", "drafts"), [(5, 2), (4, 3), (8, 1), (2, 7)])
def test_several_requests_of_16_rows_in_all(glm: MLADecoder, words: Tokenizer, requests: int, drafts: int) -> None:
    """Read in one step, so that their prompts are computed alike; they end one after the other."""
    crowd = requests_of(words, requests, 45)
    found = []
    for count in (0, drafts):
        engine = make_engine(glm, words, pages=120, speculate=count, static=True, max_step_tokens=600)
        found.append(said(engine, crowd))
    assert_same(found[1], found[0])


@pytest.mark.parametrize("static", [True, False])
def test_a_verification_leaves_the_rows_that_decode_leaves(glm: MLADecoder, static: bool) -> None:
    """Every layer's cache rows, bit for bit, of four requests of four rows; and logits."""
    new = [[17, 900, 33, 4], [8, 8, 1500, 77], [2000, 5, 6, 7], [1, 3, 2, 60]]
    sides = []
    for drafts in (0, 3):
        runner = ModelRunner(glm, num_pages=60, page_size=8, drafts=True)
        if static:
            assert runner.capture(4, drafts=[3]) is None
        sequences = [
            Sequence([5 + 31 * i + place for place in range(20 + i)] + tokens[:1]) for i, tokens in enumerate(new)
        ]
        for sequence in sequences:
            runner.ensure_pages(sequence, len(sequence.tokens) + 10)
        runner.step([(sequence, len(sequence.tokens) - 1) for sequence in sequences])
        logits = []
        if drafts:
            for sequence, tokens in zip(sequences, new, strict=True):
                sequence.drafts = tokens[1:]
            found = runner.step([(sequence, 4) for sequence in sequences]).clone()
            assert (runner.verified == 4) == static
            logits = list(found.view(4, 4, -1).unbind(1))
        for place in range(0 if drafts else 4):
            for sequence, tokens in zip(sequences, new, strict=True):
                sequence.tokens += tokens[place : place + 1] if place else []
            logits.append(runner.step([(sequence, 1) for sequence in sequences]).clone())
        sides.append((torch.stack(logits), runner.pool.storage[: glm.config.num_layers].clone()))
    assert torch.equal(sides[0][0], sides[1][0]) and torch.equal(sides[0][1], sides[1][1])
