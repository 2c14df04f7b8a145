"""The warm-up runs every path that requests take, leaves nothing behind, and names the path that fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_model import build_model_folder
from uncast.checkpoints.bundled import BUNDLED
from uncast.checkpoints.load import load_model
from uncast.engine.core import Engine, EngineConfig
from uncast.engine.prefix_cache import PrefixCache
from uncast.engine.runner import ModelRunner
from uncast.engine.tokenizer import Tokenizer
from uncast.engine.warm_up import WarmUpError, sizes, warm_up
from uncast.models.decoder import MLADecoder

TINY = BUNDLED["tiny-glm"]


@pytest.fixture(scope="module")
def model() -> MLADecoder:
    """With an MTP layer."""
    return load_model(TINY, mtp=True)


@pytest.fixture(scope="module")
def sparse_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model_folder(tmp_path_factory.mktemp("sparse") / "model", "glm_moe_dsa_52", vocab_size=480)


def engine_of(
    model: MLADecoder, folder: Path = TINY, *, pages: int = 40, page_size: int = 16, **options: Any
) -> Engine:
    config = EngineConfig(
        options.pop("running", 5), 8, options.pop("step_tokens", 40), True, options.pop("count", None)
    )
    return Engine(ModelRunner(model, num_pages=pages, page_size=page_size, **options), Tokenizer(folder), config)


class Spy:
    """What attention was planned for: (queries of the longest request, longest context, requests, topk)."""

    def __init__(self, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: set[tuple[int, int, int, int]] = set()
        self.probed: list[int] = []
        plan, probe = runner._plan, runner.probe

        def planned(*args: Any, **options: Any) -> Any:
            made = plan(*args, **options)
            spec = made.problem.spec
            lengths = made.problem.kv_len_arr
            self.seen.add((spec.max_q_len, int(lengths.max()), lengths.shape[0], spec.topk))
            return made

        monkeypatch.setattr(runner, "_plan", planned)
        monkeypatch.setattr(runner, "probe", lambda queries: (self.probed.append(queries), probe(queries)))


def check_untouched(engine: Engine, before: Any) -> None:
    assert engine.stats() == before
    assert engine.runner.pool.num_free == engine.runner.pool.num_pages
    assert engine.prefix_cache is not None and len(engine.prefix_cache) == 0
    engine.check_integrity()


@pytest.mark.parametrize("every", [False, True])
def test_dense_paths(model: MLADecoder, every: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(model)
    engine.runner.counters.copy_(torch.tensor([3, 2, 1]))
    spy, before = Spy(engine.runner, monkeypatch), engine.stats()
    done = warm_up(engine, every_size=every)
    check_untouched(engine, before)
    assert spy.probed == [1, 40] and done.probes == 2
    queries = {seen[0] for seen in spy.seen}
    assert {1, 3, 40} <= queries, "a short chunk, a long one, decode"
    assert any(q == 40 and kv == 40 for q, kv, _, _ in spy.seen), "a chunk by itself"
    assert any(1 < q < kv for q, kv, _, _ in spy.seen), "over a prefix"
    decoded = {requests for q, _, requests, _ in spy.seen if q == 1}
    assert {1, 4} <= decoded and (5 in decoded) == every, "on a CPU no code depends on the batch"
    beside = 39 if every else 3
    assert any(q == beside and requests == 2 for q, _, requests, _ in spy.seen), "beside a request that decodes"
    assert any(q > 3 and requests == 5 for q, _, requests, _ in spy.seen) == every, "beside many"
    assert any(kv == 640 for _, kv, _, _ in spy.seen) == every, "the longest context"
    assert engine.runner.counters.tolist() == [3, 2, 1]


@pytest.mark.parametrize("count", [None, 4])
def test_draft_paths(model: MLADecoder, count: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(model, drafts=True, count=count)
    spy, before = Spy(engine.runner, monkeypatch), engine.stats()
    chained: list[int] = []
    chain = engine.runner.draft_chain

    def record(batch: Any, hidden: Any, slots: Any) -> Any:
        chained.append(len(slots))
        return chain(batch, hidden, slots)

    monkeypatch.setattr(engine.runner, "draft_chain", record)
    warm_up(engine)
    check_untouched(engine, before)
    wanted = [1, 2, 3] if count is None else [count]
    assert set(chained) == {drafts - 1 for drafts in wanted if drafts > 1}
    for drafts in wanted:
        verified = {requests for q, _, requests, _ in spy.seen if q == drafts + 1}
        assert {1, 4} <= verified, f"{drafts} drafts alone and in a batch"
        assert drafts + 1 in spy.probed


@pytest.mark.parametrize(("count", "deterministic"), [(0, False), (0, True), (2, False), (2, True)])
def test_every_static_step_runs(
    model: MLADecoder, count: int, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU they are called, on a GPU replayed; a warm-up on a GPU makes them itself."""
    engine = engine_of(model, drafts=count > 0, count=count, deterministic=deterministic)
    before = engine.stats()
    assert engine.runner.capture(5, drafts=[count], buckets=(1, 2, 3)) is None
    ran: dict[int, set[int]] = {}
    steps = engine.runner.decode_steps
    assert steps is not None
    static = {1: steps.decode, **{drafts + 1: step for drafts, step in steps.verify.items()}}
    for queries, step in static.items():
        name = "run" if queries == 1 else "verify"
        call = getattr(step, name)

        def record(requests: Any, *rest: Any, run: Any = call, queries: int = queries) -> Any:
            ran.setdefault(queries, set()).add(len(requests))
            return run(requests, *rest)

        monkeypatch.setattr(step, name, record)
    warm_up(engine, every_size=True)
    check_untouched(engine, before)
    for queries, step in static.items():
        wanted = {1, 2, 4, 5} if deterministic else set(step.sizes)
        assert wanted <= ran[queries], f"{queries} queries of a request"
    assert (engine.runner.hidden != []) == (count > 0)


def test_deterministic_tiles(model: MLADecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(model, deterministic=True, drafts=True, count=2)
    spy, before = Spy(engine.runner, monkeypatch), engine.stats()
    warm_up(engine)
    check_untouched(engine, before)
    assert {(q, requests) for q, _, requests, _ in spy.seen} == {(1, 16)}


@pytest.mark.parametrize("deterministic", [False, True])
def test_sparse_paths(sparse_folder: Path, deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(sparse_folder)
    assert model.config.indexer is not None
    topk = model.config.indexer.topk
    engine = engine_of(model, sparse_folder, deterministic=deterministic)
    spy, before = Spy(engine.runner, monkeypatch), engine.stats()
    warm_up(engine)
    check_untouched(engine, before)
    selected = {q for q, kv, _, k in spy.seen if k == topk < kv}
    assert 1 in selected and (deterministic or max(selected) > 1), "decode and extend beyond what is selected"
    assert deterministic or any(k == 0 for _, _, _, k in spy.seen)


@pytest.mark.parametrize(("pages", "page_size"), [(1, 4), (2, 1), (1, 1)])
def test_a_pool_with_room_for_hardly_anything(model: MLADecoder, pages: int, page_size: int) -> None:
    engine = engine_of(model, pages=pages, page_size=page_size, drafts=True, count=2)
    before = engine.stats()
    for every in (False, True):
        warm_up(engine, every_size=every)
        check_untouched(engine, before)


@pytest.mark.parametrize("page_size", [16, 64])
def test_a_prompt_finds_its_beginning_cached(
    model: MLADecoder, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hits: list[int] = []
    match = PrefixCache.match

    def record(cache: PrefixCache, *args: Any) -> Any:
        pages, node = match(cache, *args)
        hits.append(len(pages))
        return pages, node

    monkeypatch.setattr(PrefixCache, "match", record)
    warm_up(engine_of(model, page_size=page_size, deterministic=True))
    assert [found for found in hits if found] == [2 if page_size == 16 else 1]


def test_one_request_at_a_time(model: MLADecoder) -> None:
    engine = engine_of(model, running=1)
    before = engine.stats()
    warm_up(engine, every_size=True)
    check_untouched(engine, before)


def test_after_it_the_engine_serves_what_it_serves_without(model: MLADecoder) -> None:
    from uncast.engine.request import Request

    def text(engine: Engine) -> list[int]:
        engine.add(Request(list(range(30)), max_tokens=20, ignore_eos=True))
        found: list[int] = []
        while engine.has_work:
            for output in engine.step():
                found += output.token_ids
        return found

    warm, cold = engine_of(model), engine_of(model)
    warm_up(warm)
    assert text(warm) == text(cold)


def raising(error: Exception) -> Callable[..., Any]:
    def step(*_: Any, **__: Any) -> Any:
        raise error

    return step


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried"),
            "the KV pool: ask for a pool of fewer tokens, or for steps",
        ),
        (KeyError("width\nof what"), "failed: KeyError: 'width"),
    ],
)
def test_what_fails_is_named_in_one_sentence(
    model: MLADecoder, error: Exception, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(model)
    before = engine.runner.counters.clone()
    monkeypatch.setattr(engine.runner, "step", raising(error))
    with pytest.raises(WarmUpError, match=r"^warm-up: a prompt of 43 tokens in chunks of up to 40 ") as caught:
        warm_up(engine)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)
    assert torch.equal(engine.runner.counters, before)


def test_drafts_of_a_damaged_mtp_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would cost speed only, so that nobody would notice."""
    model = load_model(TINY, mtp=True)
    assert model.mtp is not None
    model.mtp.norm = model.mtp.norm * float("nan")
    with pytest.raises(WarmUpError, match=r"^warm-up: 1 drafts of 1 requests failed: the MTP layer's outputs are not"):
        warm_up(engine_of(model, drafts=True))


def test_sizes() -> None:
    assert sizes(64, every=True) == [1, 2, 4, 8, 16, 32, 64] and sizes(5, every=True) == [1, 2, 4, 5]
    assert sizes(1, every=True) == sizes(1, every=False) == [1] and sizes(5, every=False) == [1, 5]
