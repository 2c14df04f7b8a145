"""Sparse attention through the engine: chunks, decodes, prefix hits and preemption of a model with an index cache.

A failure here is a key that did not go where its row went, or a step whose selection depends on its company.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import uncast
from tests.engine.workload import PAGE, alone, make_engine, random_requests, run_all, tokens_of
from tests.fixtures import build_hf
from tests.models.helpers import HF_LATENT_EPS, relative
from tests.tiny_model import build_model_folder
from uncast.attention import Refused
from uncast.checkpoints.load import load_model
from uncast.engine import swap
from uncast.engine.request import Request
from uncast.engine.runner import ModelRunner, Sequence
from uncast.engine.step_bytes import token_bytes
from uncast.engine.tokenizer import Tokenizer
from uncast.latent.index_keys import index_layout
from uncast.latent.layouts import LayoutError, row_layout
from uncast.latent.pool import PagedPool
from uncast.models.decoder import MLADecoder

TOPK = 16
ROW, KEY, LAYERS, FULL = 656, 132, 4, 3
"""Bytes of a row and of a key, layers, and layers with an indexer: full, full, full, shared."""


@pytest.fixture(scope="module")
def sparse_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model_folder(tmp_path_factory.mktemp("sparse"), "glm_moe_dsa_52", num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def sparse(sparse_folder: Path) -> MLADecoder:
    return load_model(sparse_folder)


@pytest.mark.parametrize("family", ["glm_moe_dsa", "glm_moe_dsa_52", "deepseek_v32"])
def test_logits_of_the_runner_match_transformers(family: str, tmp_path: Path) -> None:
    """Prompts longer than topk, in chunks, and then decodes, three requests of different lengths in one batch."""
    reference = build_hf(family, tmp_path, sharpen=3.0)
    runner = ModelRunner(
        load_model(tmp_path, latent_norm_eps=HF_LATENT_EPS), kv_layout="fp32", num_pages=30, page_size=PAGE
    )
    assert runner.pool.index_layout == index_layout("fp32")
    texts = [[(i * k * 7 + 3) % 512 for i in range(length)] for k, length in ((1, 70), (2, 17), (3, 5))]
    sequences = [Sequence(list(text)) for text in texts]
    got: list[list[torch.Tensor]] = [[], [], []]
    for counts in ((30, 9, 1), (37, 5, 1), (1, 1, 1), (1, 1, 1), (1, 1, 1)):
        for sequence, count in zip(sequences, counts, strict=True):
            runner.ensure_pages(sequence, sequence.cached + count)
        logits = runner.step(list(zip(sequences, counts, strict=True)), every_token=True)
        for rows, part in zip(got, logits.split(list(counts)), strict=True):
            rows.append(part)
    for text, rows in zip(texts, got, strict=True):
        with torch.no_grad():
            assert relative(torch.cat(rows), reference(torch.tensor([text])).logits[0]) <= 1e-5


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_crowded_pool_gives_the_tokens_of_solo_runs(
    sparse: MLADecoder, sparse_folder: Path, prefix_cache: bool
) -> None:
    """Layout fp32, so that no rounding hides or makes a difference between batches."""
    rng, tokenizer = random.Random(0), Tokenizer(sparse_folder)
    requests = random_requests(rng, 8, longest=44, new=20)
    engine = make_engine(sparse, tokenizer, pages=10, prefix_cache=prefix_cache, kv_layout="fp32")
    outputs = run_all(engine, requests, rng=rng)
    stats = engine.stats()
    assert stats.preemptions_total > 0 and sum(stats.finished_total.values()) == 8
    assert (stats.prefix_hit_tokens_total > 0) == prefix_cache
    single = make_engine(sparse, tokenizer, pages=10, prefix_cache=False, kv_layout="fp32")
    for request in requests:
        assert tokens_of(outputs[request.request_id]) == tokens_of(alone(single, request))


@pytest.mark.parametrize(("layout", "seed", "max_step_tokens"), [("fp8_ds_mla", 0, 9)])
def test_deterministic_mode_is_bit_equal_in_a_crowd(
    sparse: MLADecoder, sparse_folder: Path, layout: str, seed: int, max_step_tokens: int
) -> None:
    rng, tokenizer = random.Random(seed), Tokenizer(sparse_folder)
    requests = random_requests(rng, 6, longest=40, new=12)
    options: dict[str, Any] = {
        "deterministic": True,
        "kv_layout": layout,
        "max_step_tokens": max_step_tokens,
        "pages": 8,
    }
    crowd = make_engine(sparse, tokenizer, **options)
    outputs = run_all(crowd, requests, rng=rng)
    assert crowd.stats().preemptions_total > 0 and crowd.stats().prefix_hit_tokens_total > 0
    single = make_engine(sparse, tokenizer, prefix_cache=False, **options)
    for request in requests:
        name = request.request_id
        assert tokens_of(outputs[name]) == tokens_of(alone(single, request))
        assert all(torch.equal(a, b) for a, b in zip(crowd.logits[name], single.logits[name], strict=True))


def test_prefill_and_decode_leave_the_same_rows_and_keys(sparse: MLADecoder) -> None:
    tokens, caches = [i * 31 % 512 for i in range(56)], []
    for cuts in ([56], [1] * 56, [16, 3, 37]):
        runner = ModelRunner(sparse, num_pages=7, page_size=PAGE, deterministic=True)
        sequence = Sequence(list(tokens))
        runner.ensure_pages(sequence, 56)
        logits = [runner.step([(sequence, count)]) for count in cuts][-1]
        caches.append([logits, *(storage[:, sequence.pages] for storage in runner.pool.storages)])
    assert len(caches[0]) == 3 and bool(caches[0][2].any(-1).all())
    assert all(torch.equal(a, b) for other in caches[1:] for a, b in zip(caches[0], other, strict=True))


def test_prefix_hits_bring_their_keys(sparse: MLADecoder, sparse_folder: Path) -> None:
    engine = make_engine(sparse, Tokenizer(sparse_folder), pages=30, deterministic=True)
    request = Request(list(range(100, 100 + 5 * PAGE)), max_tokens=20, request_id="a")
    (missed,) = run_all(engine, [request]).values()
    (found,) = run_all(engine, [request]).values()
    assert missed[0].cached_tokens == 0 and found[0].cached_tokens == 4 * PAGE
    assert tokens_of(found) == tokens_of(missed)
    first, again = engine.logits["a"][:20], engine.logits["a"][20:]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_pages_with_the_same_rows_and_other_keys_are_not_the_same(sparse: MLADecoder, sparse_folder: Path) -> None:
    engine = make_engine(sparse, Tokenizer(sparse_folder), pages=8)
    assert engine.prefix_cache is not None
    pool = engine.runner.pool
    assert pool.index_storage is not None
    pages, key = pool.allocate(3), tuple(range(PAGE))
    node = engine.prefix_cache.extend(engine.prefix_cache.root, key, pages[0])
    assert node is not None and engine.prefix_cache.extend(engine.prefix_cache.root, key, pages[1]) is node
    pool.index_storage[2, pages[2], 1, 5] = 1
    assert engine.prefix_cache.extend(engine.prefix_cache.root, key, pages[2]) is None


def test_keys_are_swapped_with_their_rows() -> None:
    pool = PagedPool(
        row_layout("fp8_ds_mla"),
        num_layers=3,
        num_pages=6,
        page_size=8,
        index_layout=index_layout("fp8"),
        num_index_layers=2,
    )
    for storage in pool.storages:
        storage.random_()
    before = [storage.clone() for storage in pool.storages]
    host = swap.copy_out(pool, [4, 1])
    assert host.num_pages == 2 and host.nbytes == 2 * 8 * (3 * ROW + 2 * KEY)
    swap.copy_in(pool, host, [0, 5])
    for storage, old in zip(pool.storages, before, strict=True):
        assert torch.equal(storage[:, [0, 5]], old[:, [4, 1]]) and torch.equal(storage[:, 1:5], old[:, 1:5])
    with pytest.raises(ValueError, match="2 pages were copied out and cannot go into 1"):
        swap.copy_in(pool, host, [0])


def test_the_guard_watches_the_keys() -> None:
    pool = PagedPool(
        row_layout("fp8_ds_mla"),
        num_layers=1,
        num_pages=9,
        page_size=64,
        index_layout=index_layout("fp8"),
        num_index_layers=4,
    )
    assert pool.index_storage is not None
    with pytest.raises(uncast.CastError), uncast.guard(watch=[pool], limit_bytes=4096):
        pool.index_storage[0].to(torch.float32)


def test_bytes_of_dense_and_sparse_steps(sparse: MLADecoder) -> None:
    """Of a step within topk tokens every row and no key; beyond, topk rows a query and every key."""
    runner = ModelRunner(sparse, num_pages=20, page_size=PAGE)
    sequence, other = Sequence(list(range(1, 61))), Sequence([9] * 3)
    for each in (sequence, other):
        runner.ensure_pages(each, len(each.tokens))
    runner.step([(sequence, TOPK), (other, 1)])
    step = runner.last_step_bytes()
    assert step.needed == step.read == (TOPK + 1) * ROW * LAYERS and step.written == 0
    runner.step([(sequence, 1), (other, 1)])
    step = runner.last_step_bytes()
    assert step.needed == step.read == (TOPK + 2) * ROW * LAYERS + 17 * KEY * FULL
    runner.step([(sequence, 40), (other, 1)])
    step = runner.last_step_bytes()
    assert step.needed == (57 + 3) * ROW * LAYERS + 57 * KEY * FULL
    assert step.read == (40 * TOPK + 3) * ROW * LAYERS + 57 * KEY * FULL


@pytest.mark.parametrize("topk", [1, 100])
def test_the_smallest_and_a_large_topk(topk: int, tmp_path: Path) -> None:
    folder = build_model_folder(tmp_path, "deepseek_v32", index_topk=topk)
    model, tokenizer, rng = load_model(folder), Tokenizer(folder), random.Random(topk)
    requests = [Request([5], max_tokens=30, request_id="one"), *random_requests(rng, 3, longest=30, new=10)]
    engine = make_engine(model, tokenizer, pages=12, deterministic=True)
    outputs = run_all(engine, requests, rng=rng)
    single = make_engine(model, tokenizer, pages=12, prefix_cache=False, deterministic=True)
    for request in requests:
        assert tokens_of(outputs[request.request_id]) == tokens_of(alone(single, request))


def test_a_topk_beyond_every_context_is_dense(tmp_path: Path) -> None:
    """Nothing is as wide as topk, neither of the pool's rows nor of the model's positions."""
    model = load_model(build_model_folder(tmp_path, "deepseek_v32", index_topk=2**31 - 1))
    for deterministic in (False, True):
        runner = ModelRunner(model, num_pages=4, page_size=PAGE, deterministic=deterministic)
        sequence = Sequence(list(range(30)))
        runner.ensure_pages(sequence, 30)
        runner.step([(sequence, 30)])
        assert runner.last_step_bytes().needed == 30 * ROW * 2


def test_layouts_of_the_index_cache(sparse: MLADecoder) -> None:
    for rows, keys in (("fp8_ds_mla", "fp8"), ("fp8_e4m3", "fp8"), ("bf16", "bf16"), ("fp32", "fp32")):
        runner = ModelRunner(sparse, kv_layout=rows, num_pages=2, page_size=PAGE)
        assert runner.pool.index_storage is not None and runner.pool.index_layout == index_layout(keys)
        assert runner.pool.index_storage.shape == (FULL, 2, PAGE, index_layout(keys).row_bytes)
        stored = sum(storage.nbytes for storage in runner.pool.storages)
        assert stored == 2 * PAGE * token_bytes(sparse.config, runner.pool.layout)
    runner = ModelRunner(sparse, num_pages=2, page_size=PAGE, index_layout_name="fp32")
    assert runner.pool.index_layout == index_layout("fp32") and runner.pool.layout.name == "fp8_ds_mla"
    with pytest.raises(LayoutError, match="unknown index cache layout 'e5m2'"):
        ModelRunner(sparse, num_pages=2, index_layout_name="e5m2")


def test_a_backend_without_sparse_attention_is_refused_at_start(sparse: MLADecoder) -> None:
    with pytest.raises(Refused, match="native"):
        ModelRunner(sparse, num_pages=2, attention_backend="native")
