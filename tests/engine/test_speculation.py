"""Speculation changes no text: drafts are verified one by one, and what was not accepted is never seen again."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch

from tests.engine.workload import PAGE, alone, make_engine, random_requests, run_all, tokens_of
from uncast.checkpoints.bundled import BUNDLED
from uncast.engine.core import Engine, EngineConfig
from uncast.engine.request import Request
from uncast.engine.runner import ModelRunner, RunnerError
from uncast.engine.sampler import SamplingParams
from uncast.engine.tokenizer import Tokenizer
from uncast.models.decoder import MLADecoder

TEXT = (BUNDLED["tiny-glm"] / "heldout.txt").read_text(encoding="utf-8")


def heldout_requests(tokenizer: Tokenizer, rng: random.Random, count: int, *, new: int = 28) -> list[Request]:
    """Prompts of held-out text, many with a common beginning; every kind of sampling."""
    stems = [tokenizer.encode(TEXT[start : start + 160]) for start in (0, 4000)]
    requests = []
    for index in range(count):
        start = rng.randrange(len(TEXT) - 200)
        tail = tokenizer.encode(TEXT[start : start + rng.randint(10, 60)])
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.0, 0.7, 1.2]),
            top_p=rng.choice([1.0, 0.9]),
            top_k=rng.choice([0, 20]),
            min_p=rng.choice([0.0, 0.05]),
            seed=index,
            frequency_penalty=rng.choice([0.0, 0.5]),
            repetition_penalty=rng.choice([1.0, 1.2]),
            logit_bias=rng.choice([{}, {300: 3.0}]),
            logprobs=rng.choice([None, 2]),
        )
        prompt = [*rng.choice([[], *stems])[: rng.randint(1, 40)], *tail]
        stop = rng.choice([(), ("the",), (" and", ".")])
        requests.append(Request(prompt, params, rng.randint(6, new), stop, request_id=f"r{index}"))
    return requests


def facts(outputs: list) -> tuple:  # type: ignore[type-arg]
    """What a client sees, whatever steps it came in."""
    logprobs = [logprob for output in outputs for logprob in output.logprobs]
    last = outputs[-1]
    return tokens_of(outputs), "".join(o.text for o in outputs), logprobs, last.finish_reason, last.matched_stop


@pytest.mark.parametrize(
    ("drafts", "seed", "max_step_tokens", "static"), [(1, 0, 32, False), (2, 1, 20, True), (3, 2, 64, True)]
)
def test_a_crowd_with_drafts_equals_solo_runs_without_bit_for_bit(
    glm: MLADecoder, words: Tokenizer, drafts: int, seed: int, max_step_tokens: int, static: bool
) -> None:
    """Deterministic mode: preempted, aborted and prefix-sharing requests of every kind, chunks cut anywhere; verified in eager
    steps and in static buffers."""
    rng = random.Random(seed)
    requests = heldout_requests(words, rng, 14)
    crowd = make_engine(glm, words, pages=15, deterministic=True, max_step_tokens=max_step_tokens, speculate=drafts,
                        static=static)  # fmt: skip
    outputs = run_all(crowd, requests, rng=rng, abort_share=0.04)
    stats = crowd.stats()
    assert stats.preemptions_total > 0 and stats.prefix_hit_tokens_total > 0
    assert 0 < stats.draft_tokens_accepted_total < stats.draft_tokens_total
    assert stats.pool_pages_free + stats.pool_pages_cached == 15
    single = make_engine(glm, words, pages=15, deterministic=True, prefix_cache=False)
    whole = 0
    for request in requests:
        name, expected = request.request_id, alone(single, request)
        got, count = outputs[name], len(tokens_of(outputs[name]))
        assert all(
            torch.equal(a, b) for a, b in zip(crowd.logits[name][:count], single.logits[name][:count], strict=True)
        )
        if got[-1].finish_reason == "abort":
            assert tokens_of(got) == tokens_of(expected)[:count]
        else:
            assert facts(got) == facts(expected)
            whole += 1
    assert whole > 8


def test_greedy_text_is_the_same_in_both_modes(glm: MLADecoder, words: Tokenizer) -> None:
    """benchmarks/speculation.py does this for 200 prompts."""
    prompts = [words.encode(TEXT[start : start + 80]) for start in range(0, 18_000, 6_000)]
    for deterministic in (False, True):
        texts = []
        for drafts in (0, 3):
            engine = make_engine(
                glm, words, pages=60, deterministic=deterministic, speculate=drafts, kv_layout="fp32", max_running=1,
                static=drafts > 0,
            )  # fmt: skip
            found = run_all(engine, [Request(p, max_tokens=20, request_id=f"{i}") for i, p in enumerate(prompts)])
            texts.append([tokens_of(found[name]) for name in sorted(found)])
        assert texts[0] == texts[1]
        assert engine.stats().steps_total < 0.75 * sum(map(len, texts[0]))


def test_drafts_in_static_buffers_are_the_eager_ones(glm: MLADecoder, words: Tokenizer) -> None:
    """The same guesses, so the same ones are accepted, in as many steps; requests of which some draft no more."""
    rng, sides = random.Random(8), []
    requests = [replace(r, params=SamplingParams(), stop=(), ignore_eos=True) for r in heldout_requests(words, rng, 5)]
    for static in (False, True):
        engine = make_engine(glm, words, pages=80, speculate=3, static=static, max_step_tokens=64)
        for request in requests:
            engine.add(request)
        tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
        while engine.has_work:
            for output in engine.step():
                tokens[output.request_id] += output.token_ids
        found = engine.stats()
        assert (engine.runner.decode_steps is not None) == static and found.draft_tokens_accepted_total > 20
        assert (engine.ahead.launched_early > 5) == static
        sides.append((found.draft_tokens_total, found.draft_tokens_accepted_total, found.steps_total, tokens))
    assert sides[0] == sides[1]


@pytest.mark.parametrize("static", [False, True])
def test_one_request_with_drafts_reads_each_row_once(glm: MLADecoder, words: Tokenizer, static: bool) -> None:
    """Every pass of a draft chain is counted with its own length."""
    engine = make_engine(glm, words, pages=20, speculate=3, static=static, max_step_tokens=64)
    run_all(engine, [Request(words.encode(TEXT[:120]), SamplingParams(), 20, ignore_eos=True, request_id="one")])
    found = engine.stats()
    assert found.draft_tokens_total > 20
    assert found.cache_bytes_read_total == found.cache_bytes_needed_total > 0


def test_sampled_tokens_follow_the_model_and_their_seed(glm: MLADecoder, words: Tokenizer) -> None:
    """Of many seeds, the first three new tokens are as frequent as the model's own probabilities say, and each seed gives what
    it gives without drafts."""
    prompt = words.encode("It was the")
    runner = ModelRunner(glm, kv_layout="fp32", num_pages=120, page_size=PAGE, drafts=True)
    plain = ModelRunner(glm, kv_layout="fp32", num_pages=120, page_size=PAGE)
    params = SamplingParams(temperature=1.0, top_k=4)
    first = _top(plain, prompt, params)
    expected = {(a, b, c): p * q * r for a, p in first.items() for b, q in _top(plain, [*prompt, a], params).items()
                for c, r in _top(plain, [*prompt, a, b], params).items()}  # fmt: skip
    count = 300
    requests = [
        Request(prompt, replace(params, seed=seed), 3, request_id=str(seed), ignore_eos=True) for seed in range(count)
    ]
    results = []
    for engine in (
        Engine(runner, words, EngineConfig(speculate=2, max_running=16)),
        Engine(plain, words, EngineConfig(max_running=16)),
    ):
        found: dict[str, list[int]] = {}
        for request in requests:
            engine.add(request)
        while engine.has_work:
            for output in engine.step():
                found.setdefault(output.request_id, []).extend(output.token_ids)
        results.append(found)
        if engine.speculation is not None:
            assert engine.speculation.accepted > 100
    assert results[0] == results[1]
    seen = Counter(tuple(tokens) for tokens in results[0].values())
    assert set(seen) <= set(expected)
    common = {key: p * count for key, p in expected.items() if p * count >= 5}
    rest = count - sum(common.values())
    chi2 = sum((seen[key] - mean) ** 2 / mean for key, mean in common.items())
    chi2 += (count - sum(seen[key] for key in common) - rest) ** 2 / max(rest, 1e-9)
    degrees = len(common)
    assert degrees > 8 and chi2 < degrees + 4 * (2 * degrees) ** 0.5


def _top(runner: ModelRunner, tokens: list[int], params: SamplingParams) -> dict[int, float]:
    """The distribution after these tokens."""
    from uncast.engine.sequence import Sequence

    sequence = Sequence(list(tokens))
    runner.ensure_pages(sequence, len(tokens))
    values, ids = runner.step([(sequence, len(tokens))])[0].topk(params.top_k)
    runner.free(sequence)
    return dict(zip(ids.tolist(), values.double().softmax(-1).tolist(), strict=True))


@pytest.mark.parametrize("static", [False, True])
def test_rows_of_the_mtp_layer_are_those_of_a_prefill(glm: MLADecoder, words: Tokenizer, static: bool) -> None:
    """However tokens came about (drafted, rejected, chunked, from the prefix cache, swapped out and back), the cache of every
    layer holds what one prefill of the same tokens writes, bit for bit in deterministic mode."""
    rng = random.Random(5)
    engine = make_engine(glm, words, pages=20, deterministic=True, speculate=3, max_step_tokens=24, static=static)
    requests = [replace(r, stop=(), max_tokens=24, ignore_eos=True) for r in heldout_requests(words, rng, 8)]
    for request in requests:
        engine.add(request)
    compared = 0
    fresh = ModelRunner(glm, kv_layout="fp8_ds_mla", num_pages=30, page_size=PAGE, deterministic=True, drafts=True)
    steps = 0
    while engine.has_work:
        engine.step()
        steps += 1
        for active in engine.scheduler.running if steps % 9 == 0 else ():
            if active.can_draft:
                rows = _rows(engine.runner, active.sequence)
                assert torch.equal(rows, _rows(fresh, _prefilled(fresh, active.sequence.tokens)))
                compared += 1
    assert compared > 4 and engine.stats().preemptions_total > 0


def _prefilled(runner: ModelRunner, tokens: list[int]):  # type: ignore[no-untyped-def]
    from uncast.engine.drafter import Drafter
    from uncast.engine.sequence import MTPState, Sequence

    for page in range(runner.pool.num_pages):
        if runner.pool.refcount(page):
            runner.pool.release([page])
    sequence = Sequence(list(tokens), mtp=MTPState())
    runner.ensure_pages(sequence, len(tokens))
    runner.step([(sequence, len(tokens) - 1)])
    assert sequence.mtp is not None
    sequence.mtp.behind.append(runner.hidden[0])
    Drafter(runner).keep_up([sequence])
    return sequence


def _rows(runner: ModelRunner, sequence) -> torch.Tensor:  # type: ignore[no-untyped-def]
    return runner.pool.storage[:, sequence.pages].flatten(1, 2)[:, : sequence.cached]


def test_a_page_is_found_only_with_the_token_after_it(glm: MLADecoder, words: Tokenizer) -> None:
    prompt = words.encode(TEXT[:200])[: 3 * PAGE + 1]
    engine = make_engine(glm, words, pages=40, speculate=2)
    other = (prompt[-1] + 1) % 4000
    for last, hits in ((prompt[-1], 0), (prompt[-1], 3 * PAGE), (other, 2 * PAGE), (other, 3 * PAGE)):
        (outputs,) = run_all(engine, [Request([*prompt[:-1], last], max_tokens=2, ignore_eos=True)]).values()
        assert outputs[0].cached_tokens == hits


def test_a_model_without_an_mtp_layer_cannot_draft(model: MLADecoder) -> None:
    with pytest.raises(RunnerError, match="speculation needs an MTP layer"):
        ModelRunner(model, num_pages=2, page_size=PAGE, drafts=True)


def test_random_requests_without_speculation_are_untouched(model: MLADecoder, tokenizer: Tokenizer) -> None:
    engine = make_engine(model, tokenizer, pages=12)
    run_all(engine, random_requests(random.Random(3), 3))
    assert engine.speculation is None and engine.stats().draft_tokens_total == 0
