"""Decode steps in static buffers, the next one started early: nothing that a client or the cache sees may change.

On a CPU these are the steps of a GPU but for the graph: the same buffers, padding, sources and order.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from tests.engine.workload import PAGE, alone, make_engine, random_requests, run_all, tokens_of
from tests.fixtures import build_hf
from uncast.checkpoints.load import load_model
from uncast.engine.request import Request
from uncast.engine.runner import ModelRunner, Sequence
from uncast.engine.sampler import SamplingParams
from uncast.engine.tokenizer import Tokenizer
from uncast.models.decoder import MLADecoder


def device_requests(rng: random.Random, count: int, *, new: int = 24, share: float = 1.0) -> list[Request]:
    """Random requests of which this share is chosen on the device; some with stop strings."""
    requests = []
    for request in random_requests(rng, count, longest=48, new=new):
        params = request.params
        if rng.random() < share:
            params = replace(params, frequency_penalty=0.0, logprobs=None, top_k=rng.choice([0, 9]),
                             top_p=rng.choice([1.0, 0.8]), min_p=rng.choice([0.0, 0.02]))  # fmt: skip
        requests.append(replace(request, params=params, stop=rng.choice([(), (), ("a", "x")])))
    return requests


def facts(outputs: list) -> tuple:  # type: ignore[type-arg]
    """What a client sees."""
    last = outputs[-1]
    text = "".join(output.text for output in outputs)
    return tokens_of(outputs), text, last.finish_reason, last.matched_stop, last.completion_tokens


@pytest.mark.parametrize(("seed", "share", "pages"), [(0, 1.0, 14), (1, 1.0, 60), (2, 0.7, 14), (3, 0.9, 20)])
def test_a_crowd_equals_solo_runs_bit_for_bit(
    model: MLADecoder, tokenizer: Tokenizer, seed: int, share: float, pages: int
) -> None:
    """Deterministic mode, where rows cannot tell who is beside them: lookahead, aborts, preemption, prefix cache, stop strings,
    with and without requests that need the host. Solo runs are eager."""
    rng = random.Random(seed)
    requests = device_requests(rng, 14, share=share)
    crowd = make_engine(model, tokenizer, pages=pages, deterministic=True, static=True)
    outputs = run_all(crowd, requests, rng=rng, abort_share=0.05)
    stats = crowd.stats()
    assert crowd.ahead.launched_early > 5 and stats.prefix_hit_tokens_total > 0
    assert pages > 20 or stats.preemptions_total > 0
    assert stats.pool_pages_free + stats.pool_pages_cached == pages
    single = make_engine(model, tokenizer, pages=pages, deterministic=True, prefix_cache=False)
    whole = 0
    for request in requests:
        name, expected = request.request_id, alone(single, request)
        got, count = outputs[name], len(tokens_of(outputs[name]))
        for ours, theirs in zip(crowd.logits[name][:count], single.logits[name][:count], strict=True):
            assert torch.equal(ours, theirs)
        if got[-1].finish_reason == "abort":
            assert tokens_of(got) == tokens_of(expected)[:count]
        else:
            assert facts(got) == facts(expected)
            whole += 1
    assert whole > 8


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> MLADecoder:
    """Selects 16 tokens, so that some steps are dense and some sparse."""
    folder = tmp_path_factory.mktemp("sparse")
    build_hf("glm_moe_dsa", folder, num_hidden_layers=2)
    return load_model(folder)


@pytest.mark.parametrize("layout", ["fp8_ds_mla", "fp8_e4m3", "bf16", "sparse"])
def test_a_step_is_the_eager_one_bit_for_bit(model: MLADecoder, sparse: MLADecoder, layout: str) -> None:
    """The default mode, with a bucket for every size: logits, cache bytes, counters and byte counts of steps of 1 to 6 requests
    that come and go."""
    sides = []
    for static in (False, True):
        rng = random.Random(1)
        if layout == "sparse":
            runner = ModelRunner(sparse, num_pages=60, page_size=PAGE)
        else:
            runner = ModelRunner(model, kv_layout=layout, num_pages=60, page_size=PAGE)
        if static:
            assert runner.capture(6) is None
        sequences = [Sequence([rng.randrange(512) for _ in range(3 + 7 * index)]) for index in range(6)]
        for sequence in sequences:
            runner.ensure_pages(sequence, 60)
            runner.step([(sequence, len(sequence.tokens))])
        found = []
        for _ in range(20):
            chosen = rng.sample(sequences, rng.randint(1, 6)) if rng.random() < 0.8 else sequences[:1]
            for sequence in chosen:
                sequence.tokens.append(rng.randrange(512))
            logits = runner.step([(sequence, 1) for sequence in chosen]).clone()
            found.append((logits, runner.last_step_bytes()))
        sides.append((found, runner.pool.storage.clone(), runner.counters.tolist()))
    (eager, cache, counters), (ours, our_cache, our_counters) = sides
    for (logits, size), (our_logits, our_size) in zip(eager, ours, strict=True):
        assert torch.equal(logits, our_logits) and size == our_size
    assert torch.equal(cache, our_cache) and counters == our_counters


def test_rows_of_no_one_are_nowhere(model: MLADecoder) -> None:
    """A batch of 3 in a bucket of 8: the cache beyond their rows, counters and bytes are as without padding."""
    runner = ModelRunner(model, num_pages=12, page_size=PAGE, kv_layout="fp8_e4m3")
    sequences = [Sequence([5, 6, 7, index]) for index in range(3)]
    for sequence in sequences:
        runner.ensure_pages(sequence, 5)
        runner.step([(sequence, 3)])
    runner.counters.zero_()
    plain = runner.step([(sequence, 1) for sequence in sequences])
    counted = runner.counters.tolist()
    for sequence in sequences:
        sequence.cached = 3
    runner.counters.zero_()
    runner.pool.storage[:, 3:] = 0xAB
    assert runner.capture(8, buckets=(8,)) is None
    assert runner.decode_steps is not None and runner.decode_steps.decode.sizes == [8]
    logits = runner.step([(sequence, 1) for sequence in sequences])
    assert logits.shape == (3, 512)
    torch.testing.assert_close(logits, plain, rtol=1e-4, atol=1e-4)
    assert bool((runner.pool.storage[:, 3:] == 0xAB).all())
    assert runner.last_step_bytes().needed == runner.last_step_bytes().read == 3 * 4 * 576 * 2
    assert sum(counted) > 0  # a few values may round to the other side of a limit in a batch of another size
    assert all(abs(ours - alone) <= 3 for ours, alone in zip(runner.counters.tolist(), counted, strict=True))


def test_more_pages_than_a_context_has_change_no_one_elses(model: MLADecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Block tables are as wide as the context; a request that is longer runs eagerly."""
    monkeypatch.setattr(model, "config", replace(model.config, max_position_embeddings=2 * PAGE))
    found = []
    for static in (False, True):
        runner = ModelRunner(model, num_pages=40, page_size=PAGE)
        assert not static or runner.capture(3) is None
        sequences = [Sequence([5 + index] * (2 * PAGE)) for index in range(3)]
        for sequence in sequences:
            runner.ensure_pages(sequence, 5 * PAGE)
            runner.step([(sequence, 2 * PAGE - 1)])
        found.append(runner.step([(sequence, 1) for sequence in sequences]).clone())
        for sequence in sequences:
            sequence.tokens.append(9)
        found.append(runner.step([(sequence, 1) for sequence in sequences]).clone())
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])


@pytest.mark.parametrize("deterministic", [False, True])
def test_tokens_are_fed_from_the_step_before(model: MLADecoder, deterministic: bool) -> None:
    """Two launches before anything is read; rows move to other places, and one request leaves."""
    runner = ModelRunner(model, num_pages=40, page_size=PAGE, deterministic=deterministic)
    assert runner.capture(20) is None
    count = 18
    prompts = [[index, 3, 4] for index in range(count)]
    stepped = [Sequence(list(prompt)) for prompt in prompts]
    flown = [Sequence(list(prompt)) for prompt in prompts]
    for sequence in (*stepped, *flown):
        runner.ensure_pages(sequence, 8)
        runner.step([(sequence, 2)])
    first = runner.launch(flown, [-1] * count)
    order = [row for row in range(count - 1, -1, -1) if row != 7]
    second = runner.launch([flown[row] for row in order], order)
    tokens = runner.step([(sequence, 1) for sequence in stepped]).argmax(-1).tolist()
    assert first.read() == (tokens, [True] * count)
    for sequence, token in zip(stepped, tokens, strict=True):
        sequence.tokens.append(token)
    expected = runner.step([(stepped[row], 1) for row in order]).argmax(-1).tolist()
    assert second.read() == (expected, [True] * len(order))


def test_the_next_step_starts_before_the_last_one_is_taken(model: MLADecoder, tokenizer: Tokenizer) -> None:
    """One decode step a token and no wasted one where the end is known; a stop string wastes one row and no page."""
    engine = make_engine(model, tokenizer, pages=20, static=True, prefix_cache=False)
    prompt = tokenizer.encode("the latent cache")
    outputs = run_all(engine, [Request(prompt, max_tokens=40, request_id="r")])["r"]
    assert len(tokens_of(outputs)) == 40 and engine.stats().steps_total == 40
    assert engine.ahead.launched_early == 38  # the prompt's step and the first decode are not known before
    text = "".join(output.text for output in outputs)
    stopped = run_all(engine, [Request(prompt, max_tokens=40, stop=[text[8:11]], request_id="s")])["s"]
    assert stopped[-1].finish_reason == "stop" and "".join(o.text for o in stopped) == text[: text.index(text[8:11])]
    assert engine.stats().steps_total == 40 + len(stopped) + 1
    assert engine.ahead.current is None and engine.stats().pool_pages_free == 20


def test_pages_of_a_finished_request_wait_for_the_step_under_way(model: MLADecoder, tokenizer: Tokenizer) -> None:
    engine = make_engine(model, tokenizer, pages=20, static=True, prefix_cache=False)
    prompt = tokenizer.encode("the latent cache")
    text = "".join(o.text for o in run_all(engine, [Request(prompt, max_tokens=40)]).popitem()[1])
    engine.add(Request(prompt, max_tokens=40, stop=[text[8:11]], request_id="s"))
    engine.add(Request([9, 9, 9], max_tokens=60, ignore_eos=True, request_id="other"))
    finished = False
    while not finished:
        finished = any(output.request_id == "s" and output.finished for output in engine.step())
    assert engine.ahead.current is not None and len(engine.ahead.owners()) == 1 and engine.ahead.owners()[0]
    held = 20 - engine.stats().pool_pages_free
    engine.check_integrity()
    engine.step()
    assert engine.ahead.owners() == [] and 20 - engine.stats().pool_pages_free < held
    engine.check_integrity()
    (output,) = engine.abort("other")
    assert output.finish_reason == "abort" and engine.stats().pool_pages_free == 20
    while engine.has_work:
        assert engine.step() == []
    engine.check_integrity()


def test_a_request_that_could_come_in_does(model: MLADecoder, tokenizer: Tokenizer) -> None:
    """A newcomer is part of the step after the one under way."""
    engine = make_engine(model, tokenizer, pages=20, static=True)
    engine.add(Request([5, 6, 7], max_tokens=30, request_id="old"))
    for _ in range(4):
        engine.step()
    engine.add(Request([1, 2, 3], max_tokens=3, request_id="new"))
    seen = [[output.request_id for output in engine.step()] for _ in range(3)]
    assert seen == [["old"], ["old", "new"], ["old", "new"]]


def test_mixed_needs_go_to_the_host_and_back(model: MLADecoder, tokenizer: Tokenizer) -> None:
    """While one request wants log-probabilities, steps wait; afterwards they fly."""
    engine = make_engine(model, tokenizer, pages=20, static=True)
    engine.add(Request([5, 6, 7], SamplingParams(logprobs=1), 4, request_id="logprobs"))
    engine.add(Request([8, 6, 7], SamplingParams(temperature=1.0, seed=1), 20, request_id="sampled"))
    flights = []
    while engine.has_work:
        engine.step()
        flights.append(engine.ahead.current is not None)
    assert not any(flights[:4]) and all(flights[4:-1])
    single = make_engine(model, tokenizer, pages=20, prefix_cache=False)
    expected = alone(single, Request([8, 6, 7], SamplingParams(temperature=1.0, seed=1), 20, request_id="sampled"))
    assert len(tokens_of(expected)) == 20
