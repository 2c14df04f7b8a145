"""Sparse attention of whole models against transformers, where selections matter. `test_parity` runs these families, too.

A failure here is the indexer: its projections, norm, rope, head weights, the tokens chosen, or which layer's choice is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fixtures import build_hf
from tests.models.helpers import HF_LATENT_EPS, Chunk, fp32_pool, ragged_step, relative, step
from uncast.backends.lightning_indexer import select_tokens
from uncast.checkpoints.load import load_model
from uncast.latent.pool import PagedPool
from uncast.models import indexer as indexer_module
from uncast.models.decoder import MLADecoder
from uncast.models.indexer import IndexerWeights
from uncast.models.rope import Rope

pytestmark = pytest.mark.filterwarnings("ignore::uncast.attention.ClaimedCapabilityWarning")

TOKENS, TOPK, TOLERANCE = 72, 16, 1e-5
FAMILIES = ("glm_moe_dsa", "glm_moe_dsa_52", "deepseek_v32")
Pair = tuple[MLADecoder, Any]


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp(request.param)
    reference = build_hf(request.param, folder, sharpen=3.0, num_hidden_layers=5)
    return load_model(folder, latent_norm_eps=HF_LATENT_EPS), reference


def ids(count: int = TOKENS, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 512, (count,), generator=torch.Generator().manual_seed(seed))


def expected(reference: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = reference(tokens[None]).logits[0]
    return logits


def prefill(model: MLADecoder, tokens: torch.Tensor) -> torch.Tensor:
    return step(model, fp32_pool(model.config, 13), list(range(12, -1, -1)), tokens, start=0)


def selections(model: MLADecoder, pool: PagedPool) -> list[torch.Tensor]:
    """What each full layer's queries choose in a prefill."""
    chosen: list[torch.Tensor] = []

    def seen(*args: Any) -> torch.Tensor:
        chosen.append(select_tokens(*args))
        return chosen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(indexer_module, "select_tokens", seen)
        step(model, pool, list(range(12)), ids(), start=0)
    return chosen


def altered(model: MLADecoder, change: Callable[[IndexerWeights], IndexerWeights]) -> MLADecoder:
    layers = [
        replace(layer, attention=replace(layer.attention, indexer=change(layer.attention.indexer)))
        if layer.attention.indexer is not None
        else layer
        for layer in model.layers
    ]
    return MLADecoder(model.config, model.embed, layers, model.final_norm, model.lm_head)


def test_which_layers_choose(pair: Pair) -> None:
    model, reference = pair
    indexer = model.config.indexer
    assert indexer is not None
    shared = getattr(reference.config, "indexer_types", None) or ["full"] * 5
    assert list(indexer.kinds) == list(shared)
    own = [layer.attention.indexer for layer in model.layers]
    assert [weights is not None for weights in own] == [kind == "full" for kind in indexer.kinds]
    assert [weights.layer for weights in own if weights is not None] == list(range(len(indexer.full_layers)))


def test_long_prompts_match_in_one_step_and_token_by_token(pair: Pair) -> None:
    model, reference = pair
    tokens = ids()
    wanted = expected(reference, tokens)
    assert relative(prefill(model, tokens), wanted) <= TOLERANCE
    pool, pages = fp32_pool(model.config, 13), [1, 7, 0, 3, 5, 2, 12, 4, 11, 9, 10, 6]
    parts = [step(model, pool, pages, tokens[:48], start=0)]
    parts += [step(model, pool, pages, tokens[i : i + 1], start=i) for i in range(48, TOKENS)]
    assert relative(torch.cat(parts), wanted) <= TOLERANCE


def test_selections_are_those_of_transformers(pair: Pair) -> None:
    """Sets of tokens, layer by layer and query by query."""
    model, reference = pair
    theirs: list[torch.Tensor] = []
    hooks = [
        module.register_forward_hook(lambda _module, _args, output: theirs.append(output[0]))
        for name, module in reference.named_modules()
        if name.endswith("indexer")
    ]
    expected(reference, ids())
    for hook in hooks:
        hook.remove()
    ours = selections(model, fp32_pool(model.config, 12))
    assert len(ours) == len(theirs) > 0
    for mine, other in zip(ours, theirs, strict=True):
        for position in range(TOPK, TOKENS):
            assert set(mine[position].tolist()) == set(other[position].tolist())


def test_ragged_batches_of_prefills_and_decodes(pair: Pair) -> None:
    """Lengths around topk, and decodes of long requests beside chunks of others."""
    model, reference = pair
    lengths, pool = [TOPK - 1, TOPK, TOPK + 1, 60, 33], fp32_pool(model.config, 40)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(2)).tolist()
    texts = [ids(length, seed) for seed, length in enumerate(lengths, start=3)]
    pages = [[order.pop() for _ in range(-(-length // 8))] for length in lengths]
    steps = [{0: 14, 1: 16, 2: 3, 3: 50}, {3: 1, 2: 14, 4: 20, 0: 1}, {4: 13, 3: 8}, {3: 1}]
    done, got = [0] * 5, [[] for _ in texts]  # type: ignore[var-annotated]
    for counts in steps:
        chunks = [Chunk(pages[r], texts[r][done[r] : done[r] + n], done[r]) for r, n in counts.items()]
        for request, logits in zip(counts, ragged_step(model, pool, chunks), strict=True):
            got[request].append(logits)
            done[request] += len(logits)
    assert done == lengths
    for text, parts in zip(texts, got, strict=True):
        assert relative(torch.cat(parts), expected(reference, text)) <= TOLERANCE


def test_a_context_within_topk_is_dense_either_way(pair: Pair) -> None:
    model, reference = pair
    tokens = ids(TOPK)
    chunk = [Chunk([0, 1], tokens, 0)]
    for sparse in (False, True):
        logits = ragged_step(model, fp32_pool(model.config, 2), chunk, sparse=sparse)[0]
        assert relative(logits, expected(reference, tokens)) <= TOLERANCE


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("no rope", lambda w: replace(w, k=torch.cat([w.k[64:], w.k[:64]]))),
        ("k norm's bias", lambda w: replace(w, k_norm_bias=w.k_norm_bias + 0.5)),
        ("head weights", lambda w: replace(w, weights=-w.weights)),
        ("queries", lambda w: replace(w, q_b=w.q_b.flip(0))),
    ],
)
def test_a_wrong_indexer_would_be_seen(
    name: str, change: Callable[[IndexerWeights], IndexerWeights], pair: Pair
) -> None:
    model, reference = pair
    assert relative(prefill(altered(model, change), ids()), expected(reference, ids())) > 10 * TOLERANCE, name


def test_the_other_familys_rope_would_be_seen(pair: Pair) -> None:
    model, reference = pair
    other = altered(model, lambda w: w)
    assert other.indexer is not None
    config = other.indexer.rope.config
    other.indexer.rope = Rope(replace(config, interleaved=not config.interleaved))
    assert relative(prefill(other, ids()), expected(reference, ids())) > 10 * TOLERANCE


@pytest.mark.parametrize("topk", [1, 7, 4096])
def test_any_topk_matches(topk: int, tmp_path: Path) -> None:
    reference = build_hf("glm_moe_dsa_52", tmp_path, sharpen=3.0, index_topk=topk)
    model = load_model(tmp_path, latent_norm_eps=HF_LATENT_EPS)
    tokens = ids(50)
    assert relative(prefill(model, tokens), expected(reference, tokens)) <= TOLERANCE


@pytest.mark.parametrize(("keys", "share"), [("bf16", 0.99), ("fp8", 0.9)])
def test_rounded_keys_choose_nearly_the_same(keys: str, share: float, pair: Pair) -> None:
    """In the first layer, whose inputs are the same."""
    model, _ = pair
    exact, rounded = (selections(model, fp32_pool(model.config, 12, keys=name))[0] for name in ("fp32", keys))
    same = [len(set(a) & set(b)) for a, b in zip(exact[TOPK:].tolist(), rounded[TOPK:].tolist(), strict=True)]
    assert share <= sum(same) / len(same) / TOPK <= 1.0
