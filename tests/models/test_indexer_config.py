"""Indexers as the models' own repositories write them in config.json, and one sentence for what is not supported."""

from __future__ import annotations

from typing import Any

import pytest

from tests.models.test_config import COMMON, V3
from uncast.models.config import ConfigError, ModelConfig

GLM5: dict[str, Any] = {
    **COMMON,
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "eos_token_id": [154820, 154827, 154829],
    "first_k_dense_replace": 3,
    "hidden_size": 6144,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_topk": 2048,
    "indexer_rope_interleave": True,
    "intermediate_size": 12288,
    "max_position_embeddings": 202752,
    "moe_intermediate_size": 2048,
    "n_group": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 78,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "rms_norm_eps": 1e-05,
    "rope_interleave": True,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 256,
    "vocab_size": 154880,
}
GLM52 = {
    **GLM5,
    "head_dim": 192,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "layer_types": ["deepseek_sparse_attention"] * 78,
    "max_position_embeddings": 1048576,
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
}
V32 = {**V3, "model_type": "deepseek_v32", "index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048}


def test_sparse_families_as_their_repositories_write_them() -> None:
    glm5, glm52, v32 = (ModelConfig.from_hf(raw) for raw in (GLM5, GLM52, V32))
    assert glm5.indexer is not None and glm52.indexer is not None and v32.indexer is not None
    for config, heads, interleaved, full in (
        (glm5.indexer, 32, True, 78),
        (glm52.indexer, 32, True, 21),
        (v32.indexer, 64, False, 61),
    ):
        assert (config.num_heads, config.head_dim, config.topk) == (heads, 128, 2048)
        assert config.interleaved is interleaved and len(config.full_layers) == full
    assert glm52.indexer.full_layers == (0, 1, 2, *range(6, 78, 4))
    assert glm5.sm_scale == 0.0625 and glm52.rope.dim == 64 and v32.rope.interleaved
    assert ModelConfig.from_hf({**V3, "index_topk": 2048}).indexer is None


def test_every_way_to_say_which_layers_choose() -> None:
    def kinds(**fields: Any) -> str:
        indexer = ModelConfig.from_hf({**GLM5, "num_hidden_layers": 6, **fields}).indexer
        assert indexer is not None
        return "".join(kind[0] for kind in indexer.kinds)

    assert kinds() == "ffffff" and kinds(index_topk_freq=2) == "ffsfsf"
    assert kinds(index_topk_pattern="FSSFSSFF") == "fssfss"
    assert kinds(index_topk_pattern=["full", *["shared"] * 5]) == "fsssss"
    assert kinds(indexer_types=["full", "shared"] * 4, index_topk_pattern="FFFFFF") == "fsfsfs"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"q_lora_rank": None}, "has no q_lora_rank, from which the indexer makes its queries"),
        ({"index_topk": 0}, "index_topk = 0: a positive integer is needed"),
        ({"index_topk": None}, "has no index_topk"),
        ({"index_n_heads": "32"}, "index_n_heads = '32': a positive integer"),
        ({"index_head_dim": 32}, "index_head_dim = 32: at least qk_rope_head_dim, 64, is needed"),
        ({"layer_types": ["full_attention"] * 78}, "78 of indexed_attention or deepseek_sparse_attention are needed"),
        ({"indexer_types": ["shared"] * 78}, "gives the first layer no indexer"),
        ({"indexer_types": ["full"] * 77}, "78 of full or shared are needed"),
        ({"index_topk_pattern": "FX" * 39}, "78 letters F or S are needed"),
        ({"index_topk_pattern": "F"}, "78 letters F or S are needed"),
        ({"indexer_rope_interleave": "yes"}, "true or false is needed"),
    ],
)
def test_one_sentence_for_an_indexer_that_is_not_supported(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ModelConfig.from_hf({**GLM5, **fields})
