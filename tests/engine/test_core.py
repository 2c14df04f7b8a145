"""The engine's core under random workloads: pages always explained, tokens as alone, everyone finishes."""

from __future__ import annotations

import gc
import random
import tracemalloc

import pytest
import torch

from tests.engine.workload import PAGE, alone, make_engine, random_requests, run_all, tokens_of
from uncast.engine.active import ActiveRequest
from uncast.engine.core import EngineConfig
from uncast.engine.request import Request, RequestError, RequestOutput
from uncast.engine.sampler import SamplingParams
from uncast.engine.sequence import Sequence
from uncast.engine.tokenizer import Tokenizer
from uncast.models.decoder import MLADecoder


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("seed", [0, 1])
def test_random_workload_in_a_tiny_pool(model: MLADecoder, tokenizer: Tokenizer, seed: int, prefix_cache: bool) -> None:
    """Preemption is forced; every request ends as it does alone, and the pool is whole after every step."""
    rng = random.Random(seed)
    requests = random_requests(rng, 16, longest=50, new=24)
    engine = make_engine(model, tokenizer, pages=11, prefix_cache=prefix_cache)
    outputs = run_all(engine, requests, rng=rng)
    stats = engine.stats()
    assert stats.preemptions_total > 0 and stats.finished_total["length"] == 16
    assert (stats.prefix_hit_tokens_total > 0) == prefix_cache
    assert stats.pool_pages_free + stats.pool_pages_cached == 11
    single = make_engine(model, tokenizer, pages=11, prefix_cache=False)
    for request in requests:
        expected = alone(single, request)
        assert tokens_of(outputs[request.request_id]) == tokens_of(expected)
        assert "".join(o.text for o in outputs[request.request_id]) == "".join(o.text for o in expected)


@pytest.mark.parametrize("seed", [2, 3])
def test_aborts_in_any_state_leave_nothing_behind(model: MLADecoder, tokenizer: Tokenizer, seed: int) -> None:
    rng = random.Random(seed)
    requests = random_requests(rng, 40)
    engine = make_engine(model, tokenizer, pages=16)
    outputs = run_all(engine, requests, rng=rng, abort_share=0.5)
    stats = engine.stats()
    assert stats.finished_total["abort"] > 5 and stats.finished_total["length"] > 5 and stats.preemptions_total > 0
    assert sum(stats.finished_total.values()) == 40
    assert all(sum(o.finished for o in outs) == 1 and outs[-1].finished for outs in outputs.values())
    assert stats.pool_pages_free + stats.pool_pages_cached == 16
    assert engine.abort("r0") == [] and engine.abort("nobody") == []


def test_preempted_pages_come_back_byte_for_byte(model: MLADecoder, tokenizer: Tokenizer) -> None:
    """What the cache holds for a request at its end does not depend on having been swapped out and back."""
    engine = make_engine(model, tokenizer, pages=10, max_running=2, prefix_cache=False, deterministic=True)
    requests = [Request([3 * i + k for i in range(20)], max_tokens=40, request_id=f"r{k}") for k in range(2)]
    rows: dict[str, torch.Tensor] = {}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for active in engine.scheduler.running:
            pool, sequence = engine.runner.pool, active.sequence
            taken = pool.storage[:, sequence.pages].flatten(1, 2)[:, : sequence.cached]
            seen = rows.get(active.request.request_id)
            if seen is not None:
                assert torch.equal(taken[:, : seen.shape[1]], seen)
            rows[active.request.request_id] = taken.clone()
        engine.step()
    assert engine.stats().preemptions_total > 0 and engine.stats().swap_bytes_total > 0


@pytest.mark.parametrize("deterministic", [False, True])
def test_prefix_hits_give_the_tokens_of_misses(model: MLADecoder, tokenizer: Tokenizer, deterministic: bool) -> None:
    prompt = list(range(100, 100 + 5 * PAGE))
    for length, hits in ((5 * PAGE, 4 * PAGE), (5 * PAGE - 1, 4 * PAGE), (4 * PAGE + 1, 4 * PAGE), (PAGE, 0)):
        engine = make_engine(model, tokenizer, pages=30, deterministic=deterministic)
        first = run_all(engine, [Request(prompt[:length], max_tokens=20)])
        again = run_all(engine, [Request(prompt[:length], max_tokens=20)])
        (missed,), (found,) = first.values(), again.values()
        assert missed[0].cached_tokens == 0 and found[0].cached_tokens == hits
        assert tokens_of(found) == tokens_of(missed)
    turn = Request([*prompt[:PAGE], *tokens_of(found), 5, 6, 7], max_tokens=8)
    (second,) = run_all(engine, [turn]).values()
    assert second[0].cached_tokens == (PAGE + 19) // PAGE * PAGE
    (expected,) = run_all(make_engine(model, tokenizer, pages=30, deterministic=deterministic), [turn]).values()
    assert tokens_of(second) == tokens_of(expected)


def test_a_seed_gives_the_same_tokens_in_every_company(model: MLADecoder, tokenizer: Tokenizer) -> None:
    request = Request([1, 2, 3], SamplingParams(temperature=1.5, seed=11), 20, request_id="me")
    expected = tokens_of(alone(make_engine(model, tokenizer, pages=40, prefix_cache=False), request))
    for seed in range(2):
        rng = random.Random(seed)
        engine = make_engine(model, tokenizer, pages=40)
        company = random_requests(rng, 6)
        outputs = run_all(engine, [*company[:3], request, *company[3:]], rng=rng)
        assert tokens_of(outputs["me"]) == expected
    other = Request([1, 2, 3], SamplingParams(temperature=1.5, seed=12), 20)
    assert tokens_of(alone(make_engine(model, tokenizer, pages=40, prefix_cache=False), other)) != expected


def test_decodes_come_first_and_chunks_share_what_is_left(model: MLADecoder, tokenizer: Tokenizer) -> None:
    engine = make_engine(model, tokenizer, pages=40, max_step_tokens=16, max_running=4)
    engine.add(Request([1, 2], max_tokens=10, request_id="short"))
    engine.step()
    engine.add(Request(list(range(40)), max_tokens=2, request_id="long"))
    progress = []
    for _ in range(3):
        assert [o.request_id for o in engine.step()][:1] == ["short"]
        progress.append(engine.scheduler.running[1].sequence.cached)
    assert progress == [15, 30, 40]


def test_end_tokens_stop_ids_and_ignore_eos(model: MLADecoder, tokenizer: Tokenizer) -> None:
    engine = make_engine(model, tokenizer, pages=20, prefix_cache=False)
    free = alone(engine, Request([9, 8, 7], max_tokens=12))
    tokens = tokens_of(free)
    assert free[-1].finish_reason == "length" and free[-1].completion_tokens == 12
    third = next(t for i, t in enumerate(tokens) if i >= 2 and t not in tokens[:i])
    at = tokens.index(third)
    cut = alone(engine, Request([9, 8, 7], max_tokens=12, stop_token_ids=[third]))
    assert tokens_of(cut) == tokens[:at] and (cut[-1].finish_reason, cut[-1].matched_stop) == ("stop", third)
    assert cut[-1].token_ids == () and cut[-1].completion_tokens == at

    from dataclasses import replace

    ending = make_engine(model, tokenizer, pages=20, prefix_cache=False)
    ending.runner.model.config = replace(model.config, stop_token_ids=(third,))
    try:
        assert tokens_of(alone(ending, Request([9, 8, 7], max_tokens=12))) == tokens[:at]
        kept = alone(ending, Request([9, 8, 7], max_tokens=12, ignore_eos=True))
        assert tokens_of(kept) == tokens and kept[-1].finish_reason == "length"
    finally:
        ending.runner.model.config = replace(model.config, stop_token_ids=())


def test_stop_strings_cut_the_text_and_are_named(model: MLADecoder, tokenizer: Tokenizer) -> None:
    engine = make_engine(model, tokenizer, pages=20, prefix_cache=False)
    prompt = tokenizer.encode("the latent cache")
    text = "".join(o.text for o in alone(engine, Request(prompt, max_tokens=40)))
    stop = text[8:11]
    outputs = alone(engine, Request(prompt, max_tokens=40, stop=["\0never", stop]))
    assert "".join(o.text for o in outputs) == text[: text.index(stop)]
    assert (outputs[-1].finish_reason, outputs[-1].matched_stop) == ("stop", stop)


def test_logprobs_are_the_models_distribution(model: MLADecoder, tokenizer: Tokenizer) -> None:
    engine = make_engine(model, tokenizer, pages=20, prefix_cache=False)
    biased = SamplingParams(logprobs=3, logit_bias={5: 100.0})
    outputs = alone(engine, Request([4, 5, 6], biased, 4, request_id="r"))
    assert tokens_of(outputs) == [5, 5, 5, 5]
    for output, row in zip(outputs, engine.logits["r"], strict=True):
        (entry,), expected = output.logprobs, row.double().log_softmax(-1)
        assert entry.token_id == 5 and entry.logprob == float(expected[5])
        assert [token for token, _ in entry.top] == expected.topk(3).indices.tolist()
        assert [value for _, value in entry.top] == expected.topk(3).values.tolist()
    (one,) = alone(engine, Request([4], SamplingParams(logprobs=0), 1))
    assert one.logprobs[0].top == () and one.logprobs[0].token_id == one.token_ids[0]


def test_penalties_follow_their_formula(model: MLADecoder, tokenizer: Tokenizer) -> None:
    params = SamplingParams(presence_penalty=0.7, frequency_penalty=0.3, repetition_penalty=1.2, logit_bias={3: 1.0})
    engine = make_engine(model, tokenizer, pages=20, prefix_cache=False)
    prompt = [7, 7, 8]
    tokens = tokens_of(alone(engine, Request(prompt, params, 12, request_id="r")))
    for step, row in enumerate(engine.logits["r"]):
        done, changed = tokens[:step], row.clone()
        for token in {*prompt, *done}:
            changed[token] = row[token] / 1.2 if row[token] > 0 else row[token] * 1.2
        for token in set(done):
            changed[token] -= 0.7 + 0.3 * done.count(token)
        changed[3] += 1.0
        assert tokens[step] == int(changed.argmax())


def test_bytes_are_counted(model: MLADecoder, tokenizer: Tokenizer) -> None:
    engine = make_engine(model, tokenizer, pages=20)
    run_all(engine, [Request(list(range(10)), max_tokens=3)])
    stats = engine.stats()
    assert stats.cache_bytes_needed_total == stats.cache_bytes_read_total == (10 + 11 + 12) * 656 * 2
    assert stats.cache_bytes_written_total == 0 and stats.steps_total == 3 and stats.step_seconds_total > 0
    assert (stats.prompt_tokens_total, stats.completion_tokens_total) == (10, 3)


def test_requests_that_cannot_run_are_refused(model: MLADecoder, tokenizer: Tokenizer) -> None:
    engine = make_engine(model, tokenizer, pages=4)
    cases = [
        (Request([1] * 30, max_tokens=3), "exceed the KV pool of 32 tokens"),
        (Request([1], max_tokens=10**9), "exceed the model's context"),
        (Request([512]), "prompt has token 512: the vocabulary has ids 0 to 511"),
        (Request([1], stop_token_ids=[512]), "stop_token_ids has token 512"),
        (Request([1], SamplingParams(logit_bias={600: 1.0})), "logit_bias has token 600"),
    ]
    for request, sentence in cases:
        with pytest.raises(RequestError, match=sentence):
            engine.add(request)
    engine.add(Request([1], request_id="twice"))
    with pytest.raises(RequestError, match="'twice' is in use"):
        engine.add(Request([1], request_id="twice"))


def test_limits_are_checked() -> None:
    with pytest.raises(ValueError, match="max_waiting is 0: at least 1"):
        EngineConfig(max_waiting=0)
    with pytest.raises(ValueError, match="max_step_tokens is 8: it must be at least max_running, 9"):
        EngineConfig(max_running=9, max_step_tokens=8)


def test_memory_stays_flat_over_many_requests(model: MLADecoder, tokenizer: Tokenizer) -> None:
    """Nothing is kept of a finished request but its pages in the (bounded) prefix cache."""
    rng = random.Random(5)
    engine = make_engine(model, tokenizer, pages=16)

    def batch() -> tuple[int, int, int]:
        run_all(engine, random_requests(rng, 12, longest=40, new=4), rng=rng, abort_share=0.2)
        engine.logits.clear()
        gc.collect()
        alive = [type(thing) for thing in gc.get_objects()]
        of_requests = sum(
            alive.count(kind) for kind in (Request, SamplingParams, ActiveRequest, Sequence, RequestOutput)
        )
        return of_requests, alive.count(torch.Tensor), tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        for _ in range(2):
            things, tensors, size = batch()
        for _ in range(4):
            things_after, tensors_after, size_after = batch()
    finally:
        tracemalloc.stop()
    assert things_after <= things and tensors_after <= tensors
    assert size_after - size < 100_000, "48 requests: what else there is of them is less than 2 KB each"


@pytest.mark.parametrize("end", ["length", "end token"])
def test_a_stop_string_that_the_last_bytes_complete_is_a_stop(tokenizer: Tokenizer, end: str) -> None:
    """Half a character is held back until the end, where it is U+FFFD; that can complete a stop string."""
    letter, half, last = tokenizer.encode("a")[0], tokenizer.encode("\u00e9")[0], 511
    assert tokenizer.decode([letter, half]) == "a\ufffd"
    for stop, text, reason, matched in (
        ("a\ufffd", "", "stop", "a\ufffd"),
        ("\ufffd", "a", "stop", "\ufffd"),
        ("\ufffdb", "a\ufffd", "length" if end == "length" else "stop", None if end == "length" else last),
    ):
        request = Request([1], max_tokens=2 if end == "length" else 9, stop=[stop])
        active = ActiveRequest(request, 0, tokenizer, frozenset([last]), 512)
        outputs = [active.accept(token, None) for token in (letter, half, last)[: 2 if end == "length" else 3]]
        assert "".join(output.text for output in outputs) == text
        assert (outputs[-1].finish_reason, outputs[-1].matched_stop) == (reason, matched)
        assert all(output.finish_reason is None for output in outputs[:-1])
