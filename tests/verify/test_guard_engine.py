"""Every path of the engine under the guard: as it is stored nothing is copied, and `pool_cast` is caught on each of them.

A failure of `reads_as_stored` is a path that casts or copies the cache; one of `catches_pool_cast` is a path that the guard, or
this test, does not reach.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import uncast
from tests.tiny_model import build_model_folder
from uncast.checkpoints.load import load_model
from uncast.engine import swap
from uncast.engine.core import Engine, EngineConfig
from uncast.engine.generate import Generation, stream
from uncast.engine.request import Request
from uncast.engine.runner import ModelRunner, Sequence
from uncast.engine.sampler import SamplingParams
from uncast.engine.tokenizer import Tokenizer
from uncast.latent.layouts import row_layout
from uncast.latent.pool import PagedPool
from uncast.models.decoder import MLADecoder
from uncast.verify.guard import DEFAULT_LIMIT_BYTES

PAGES, PAGE = 17, 128
"""2176 rows: their BF16 copy, 2.5 MB a layer, is above the guard's default limit of 2 MiB."""
NATIVE, CAST = "torch_cpu", "pool_cast:torch_cpu"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def model(folder: Path) -> MLADecoder:
    return load_model(folder)


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> MLADecoder:
    """Sparse attention: a layer that selects, and one that uses its selection."""
    return load_model(build_model_folder(tmp_path_factory.mktemp("sparse"), "glm_moe_dsa_52", index_topk_pattern="FS"))


@dataclass
class Walk:
    """An engine that a path is walked on: `prepare` runs outside the guard, what it returns runs inside."""

    model: MLADecoder
    tokenizer: Tokenizer
    backend: str
    deterministic: bool = False

    def engine(self, *, max_step_tokens: int = 256) -> Engine:
        return Engine(self.runner(), self.tokenizer, EngineConfig(max_step_tokens=max_step_tokens))

    def runner(self) -> ModelRunner:
        return ModelRunner(
            self.model,
            kv_layout="fp8_ds_mla",
            attention_backend=self.backend,
            num_pages=PAGES,
            page_size=PAGE,
            deterministic=self.deterministic,
        )


def ask(length: int, max_tokens: int = 8, first: int = 7) -> Request:
    return Request([(first + 31 * i) % 512 for i in range(length)], max_tokens=max_tokens, ignore_eos=True)


def prefill(walk: Walk) -> Callable[[], object]:
    engine = walk.engine()
    engine.add(ask(200))
    return engine.step


def chunked_prefill(walk: Walk) -> Callable[[], object]:
    engine = walk.engine(max_step_tokens=150)
    engine.add(ask(400))
    engine.step()

    def second_and_third() -> None:
        engine.step()
        assert engine.scheduler.running[0].prefilling
        engine.step()
        assert not engine.scheduler.running[0].prefilling

    return second_and_third


def decode(walk: Walk) -> Callable[[], object]:
    engine = walk.engine()
    engine.add(ask(150))
    engine.step()
    return engine.step


def mixed_batch(walk: Walk) -> Callable[[], object]:
    engine = walk.engine()
    engine.add(ask(130))
    engine.step()
    engine.add(ask(40, first=3))
    engine.add(ask(90, first=5))

    def step() -> None:
        engine.step()
        assert [active.sequence.cached for active in engine.scheduler.running] == [131, 40, 90]

    return step


def prefix_hit(walk: Walk) -> Callable[[], object]:
    engine = walk.engine()
    engine.add(ask(300))
    while engine.has_work:
        engine.step()

    def hit() -> None:
        engine.add(ask(300))
        engine.step()
        assert engine.stats().prefix_hit_tokens_total == 2 * PAGE

    return hit


def preemption(walk: Walk) -> Callable[[], object]:
    """One request a page; the oldest then needs a second one, and the youngest is swapped out and later back in."""
    engine = walk.engine()
    engine.add(ask(PAGE - 1))
    for index in range(1, PAGES):
        engine.add(ask(2, first=index))
    engine.step()
    engine.step()

    def swap_out_and_in() -> None:
        assert not engine.scheduler.preemptions
        engine.step()
        assert engine.scheduler.preemptions and engine.scheduler.swapped
        while engine.has_work:
            engine.step()
        assert engine.stats().swap_bytes_total >= 2 * 2 * PAGE * 656

    return swap_out_and_in


def every_token(walk: Walk) -> Callable[[], object]:
    """A step that wants the logits of several tokens of a request, as verifying a draft does."""
    runner, sequence = walk.runner(), Sequence(list(range(100)))
    runner.ensure_pages(sequence, 100)
    runner.step([(sequence, 95)])
    return lambda: runner.step([(sequence, 4)], every_token=True)


def streaming(walk: Walk) -> Callable[[], object]:
    runner = walk.runner()
    prompt = list(ask(140).prompt)
    pieces = stream(
        runner, walk.tokenizer, prompt, SamplingParams(), max_tokens=5, result=Generation(prompt_tokens=len(prompt))
    )
    return lambda: list(pieces)


def static_decode(walk: Walk) -> Callable[[], object]:
    """Decode steps in static buffers; on a GPU what is captured for them."""
    engine = walk.engine()
    for index in range(3):
        engine.add(ask(60, first=index))
    engine.step()

    def capture_and_step() -> None:
        reason = engine.runner.capture(4, buckets=(4,))
        if reason is not None:
            pytest.skip(reason)
        engine.step()
        engine.step()

    return capture_and_step


PATHS = [prefill, chunked_prefill, decode, mixed_batch, prefix_hit, preemption, every_token, streaming, static_decode]


@pytest.mark.parametrize("kind", ["absorbed", "unabsorbed", "deterministic"])
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.__name__)
def test_every_path_reads_as_stored(
    path: Callable[[Walk], Callable[[], object]], kind: str, model: MLADecoder, folder: Path
) -> None:
    prefill = "auto" if kind == "deterministic" else kind
    model = MLADecoder(model.config, model.embed, model.layers, model.final_norm, model.lm_head, prefill)
    walk = Walk(model, Tokenizer(folder), NATIVE, kind == "deterministic")
    act, pool = _prepared(path, walk)
    with uncast.guard(watch=[pool]):
        act()


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.__name__)
def test_every_path_of_sparse_attention_reads_as_stored(
    path: Callable[[Walk], Callable[[], object]], sparse: MLADecoder, folder: Path
) -> None:
    act, pool = _prepared(path, Walk(sparse, Tokenizer(folder), NATIVE))
    assert len(pool.storages) == 2
    with uncast.guard(watch=[pool]):
        act()


@pytest.mark.parametrize("attention", ["dense", "sparse"])
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.__name__)
def test_every_path_catches_pool_cast(
    path: Callable[[Walk], Callable[[], object]], attention: str, model: MLADecoder, sparse: MLADecoder, folder: Path
) -> None:
    act, pool = _prepared(path, Walk(model if attention == "dense" else sparse, Tokenizer(folder), CAST))
    caught = pytest.raises(uncast.CastError, match=r"backends/_recast\.py:\d+.*backends/pool_cast\.py:\d+")
    with caught, uncast.guard(watch=[pool]):
        act()


def test_swapping_many_pages_out_is_allowed_by_name_only(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = PagedPool(row_layout("fp8_ds_mla"), num_layers=2, num_pages=PAGES, page_size=PAGE)
    pool.storage.random_()
    before = pool.storage.clone()
    with uncast.guard(watch=[pool]):
        host = swap.copy_out(pool, range(PAGES))
        swap.copy_in(pool, host, range(PAGES - 1, -1, -1))
    assert host.nbytes > DEFAULT_LIMIT_BYTES and torch.equal(pool.storage, before.flip(1))
    monkeypatch.setattr(swap, "allow_swap", nullcontext)
    with pytest.raises(uncast.CastError, match=r"engine/swap\.py:\d+"), uncast.guard(watch=[pool]):
        swap.copy_out(pool, range(PAGES))


def _prepared(path: Callable[[Walk], Callable[[], object]], walk: Walk) -> tuple[Callable[[], object], PagedPool]:
    """What the path does, and the pool of the one runner that it made."""
    runners: list[ModelRunner] = []
    make = walk.runner

    def remember() -> ModelRunner:
        runners.append(make())
        return runners[-1]

    walk.runner = remember  # type: ignore[method-assign]
    act = path(walk)
    assert len(runners) == 1
    return act, runners[0].pool
