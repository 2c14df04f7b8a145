"""Logits against transformers' own classes. A failure here is model math: norms, rope, router, absorption."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fixtures import FAMILIES, build_hf
from tests.models.helpers import HF_LATENT_EPS, Chunk, fp32_pool, ragged_step, relative, step
from uncast.checkpoints.load import load_model
from uncast.latent.pool import PagedPool
from uncast.models.config import ModelConfig
from uncast.models.decoder import MLADecoder

pytestmark = pytest.mark.filterwarnings("ignore::uncast.attention.ClaimedCapabilityWarning")

TOKENS = 41
TOLERANCE = 1e-5
SHARPEN = {"minicpm3": 1.0}
"""Others 3: the largest at which embeddings perturbed by 1e-7 move transformers' own logits by less than 2e-6."""


@dataclass
class Pair:
    """A model of ours and transformers' own, with the same weights."""

    ours: MLADecoder
    reference: Any

    def pool(self, num_pages: int, page_size: int = 8) -> PagedPool:
        return fp32_pool(self.ours.config, num_pages, page_size)

    def ids(self, count: int, seed: int = 1) -> torch.Tensor:
        return torch.randint(0, self.ours.config.vocab_size, (count,), generator=torch.Generator().manual_seed(seed))

    def expected(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = self.reference(ids[None]).logits[0]
        return logits


def with_config(model: MLADecoder, config: ModelConfig, prefill: str = "auto") -> MLADecoder:
    return MLADecoder(config, model.embed, model.layers, model.final_norm, model.lm_head, prefill)


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Built in shards, as real checkpoints are."""
    folder = tmp_path_factory.mktemp(request.param)
    reference = build_hf(request.param, folder, max_shard_size="8MB", sharpen=SHARPEN.get(request.param, 3.0))
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 1
    return Pair(load_model(folder, latent_norm_eps=HF_LATENT_EPS), reference)


def test_prefill_and_decode_match_transformers(pair: Pair) -> None:
    ids, pool = pair.ids(TOKENS), pair.pool(8)
    expected = pair.expected(ids)
    prefill = step(pair.ours, pool, list(range(7, 1, -1)), ids, start=0)
    assert relative(prefill, expected) <= TOLERANCE

    pages = [1, 7, 0, 3, 5, 2]
    token_by_token = torch.cat([step(pair.ours, pool, pages, ids[i : i + 1], start=i) for i in range(TOKENS)])
    assert relative(token_by_token, expected) <= TOLERANCE


def test_a_slightly_wrong_scale_or_frequency_would_be_seen(pair: Pair) -> None:
    ids = pair.ids(TOKENS)
    config = pair.ours.config
    rope = replace(config.rope, theta=config.rope.theta * 1.01)
    for wrong in (replace(config, sm_scale=config.sm_scale * 1.01), replace(config, rope=rope)):
        got = step(with_config(pair.ours, wrong), pair.pool(6), list(range(6)), ids, start=0)
        assert relative(got, pair.expected(ids)) > 10 * TOLERANCE


@pytest.mark.parametrize("prefill", ["absorbed", "unabsorbed"])
def test_ragged_batches_match_transformers(prefill: str, pair: Pair) -> None:
    """Five requests of different lengths: whole prompts and chunks of prompts and decodes share steps."""
    lengths, pool = [29, 1, 17, 9, 23], pair.pool(24)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(2)).tolist()
    texts = [pair.ids(length, seed) for seed, length in enumerate(lengths, start=3)]
    pages = [[order.pop() for _ in range(-(-length // 8))] for length in lengths]
    got: list[list[torch.Tensor]] = [[] for _ in texts]
    model = with_config(pair.ours, pair.ours.config, prefill)
    steps = [
        {0: 13, 1: 1, 2: 1},
        {0: 1, 2: 9, 3: 4, 4: 22},
        {4: 1, 0: 14, 3: 1, 2: 1},
        {3: 4, 2: 6, 0: 1},
    ]
    done = [0] * len(texts)
    for counts in steps:
        chunks = [Chunk(pages[r], texts[r][done[r] : done[r] + n], done[r]) for r, n in counts.items()]
        for request, logits in zip(counts, ragged_step(model, pool, chunks), strict=True):
            got[request].append(logits)
            done[request] += len(logits)
    assert done == lengths
    for text, parts in zip(texts, got, strict=True):
        assert relative(torch.cat(parts), pair.expected(text)) <= TOLERANCE


def test_long_positions_match_transformers(pair: Pair) -> None:
    """Beyond yarn's original length of 4096: only the positions are long, the cache holds what is asked for."""
    ids, start = pair.ids(TOKENS), 70_000
    with torch.no_grad():
        expected = pair.reference(ids[None], position_ids=torch.arange(start, start + TOKENS)[None]).logits[0]
    rope, angles = pair.ours.rope, pair.ours.rope.angles
    rope.angles = lambda positions: angles(positions + start)  # type: ignore[method-assign]
    try:
        got = step(pair.ours, pair.pool(6), list(range(6)), ids, start=0)
    finally:
        rope.angles = angles  # type: ignore[method-assign]
    assert relative(got, expected) <= TOLERANCE


@pytest.mark.parametrize("context", [64, 256])
def test_longrope_matches_transformers_within_its_original_length(context: int, tmp_path: Path) -> None:
    longrope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + 0.07 * i for i in range(16)],
        "long_factor": [2.0 + 0.3 * i for i in range(16)],
        "original_max_position_embeddings": 64,
    }
    reference = build_hf("minicpm3", tmp_path, rope_parameters=longrope, max_position_embeddings=context)
    pair = Pair(load_model(tmp_path, latent_norm_eps=HF_LATENT_EPS), reference)
    assert pair.ours.config.max_position_embeddings == 64
    ids = pair.ids(64)
    assert relative(step(pair.ours, pair.pool(8), list(range(8)), ids, start=0), pair.expected(ids)) <= TOLERANCE


def test_the_latent_norm_eps_is_the_configs_by_default(tmp_path: Path) -> None:
    build_hf("glm4_moe_lite", tmp_path, rms_norm_eps=1e-3)
    assert load_model(tmp_path).config.latent_norm_eps == 1e-3
    assert load_model(tmp_path, latent_norm_eps=HF_LATENT_EPS).config.latent_norm_eps == HF_LATENT_EPS
