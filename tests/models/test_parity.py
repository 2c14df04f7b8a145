"""Logits against transformers' own classes. A failure here is model math: norms, rope, router, absorption."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.fixtures import FAMILIES, build_hf
from tests.models.helpers import HF_LATENT_EPS, step
from uncast.checkpoints.load import load_model
from uncast.latent.layouts import row_layout
from uncast.latent.pool import PagedPool

TOKENS = 41


@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_and_decode_match_transformers(family: str, tmp_path: Path) -> None:
    reference = build_hf(family, tmp_path)
    model = load_model(tmp_path, latent_norm_eps=HF_LATENT_EPS)
    ids = torch.randint(0, model.config.vocab_size, (TOKENS,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = reference(ids[None]).logits[0]

    layout = row_layout("fp32", model.config.kv_lora_rank, model.config.qk_rope_head_dim)
    pool = PagedPool(layout, num_layers=model.config.num_layers, num_pages=8, page_size=8)
    prefill = step(model, pool, list(range(7, 1, -1)), ids, start=0)
    assert relative(prefill, expected) <= 1e-5

    pages = [1, 7, 0, 3, 5, 2]
    token_by_token = torch.cat([step(model, pool, pages, ids[i : i + 1], start=i) for i in range(TOKENS)])
    assert relative(token_by_token, expected) <= 1e-5


def test_the_latent_norm_eps_is_the_configs_by_default(tmp_path: Path) -> None:
    build_hf("glm4_moe_lite", tmp_path, rms_norm_eps=1e-3)
    assert load_model(tmp_path).config.latent_norm_eps == 1e-3
    assert load_model(tmp_path, latent_norm_eps=HF_LATENT_EPS).config.latent_norm_eps == HF_LATENT_EPS


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).norm() / expected.norm())
