"""Configs as the models' own repositories write them (before transformers 5), and one sentence for what is not supported."""

from __future__ import annotations

import math
from typing import Any

import pytest

from uncast.models.config import ConfigError, ModelConfig
from uncast.models.rope import RopeError

COMMON: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "use_cache": True,
}
YARN = {"type": "yarn", "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
V2_LITE: dict[str, Any] = {
    **COMMON,
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "aux_loss_alpha": 0.001,
    "eos_token_id": 100001,
    "tie_word_embeddings": False,
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {**YARN, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707},
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
    "v_head_dim": 128,
    "vocab_size": 102400,
}
V2 = {
    **V2_LITE,
    "hidden_size": 5120,
    "n_group": 8,
    "n_routed_experts": 160,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "routed_scaling_factor": 16.0,
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
}
V3: dict[str, Any] = {
    **V2_LITE,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "eos_token_id": 1,
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    "rope_scaling": {**YARN, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}
KIMI_K2 = {
    **V3,
    "model_type": "kimi_k2",
    "eos_token_id": [163585, 163586],
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_scaling": {**YARN, "factor": 32.0, "beta_fast": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
    "vocab_size": 163840,
}
GLM_FLASH: dict[str, Any] = {
    **COMMON,
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "model_type": "glm4_moe_lite",
    "eos_token_id": [154820, 154827, 154829],
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "max_position_embeddings": 202752,
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 20,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 47,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 1.0,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.8,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 256,
    "vocab_size": 154880,
}
MINICPM3: dict[str, Any] = {
    **COMMON,
    "model_type": "minicpm3",
    "dim_model_base": 256,
    "eos_token_id": [2, 73440],
    "hidden_size": 2560,
    "intermediate_size": 6400,
    "kv_lora_rank": 256,
    "max_position_embeddings": 32768,
    "num_attention_heads": 40,
    "num_hidden_layers": 62,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "type": "longrope",
        "long_factor": [1.5] * 16,
        "short_factor": [1.1] * 16,
        "original_max_position_embeddings": 32768,
    },
    "rope_theta": 10000.0,
    "scale_depth": 1.4,
    "scale_emb": 12,
    "vocab_size": 73448,
}


@pytest.mark.parametrize(
    ("raw", "sm_scale", "dense", "layers"),
    [
        (V2_LITE, 0.114721, 1, 27),
        (V2, 0.114721, 1, 27),
        (V3, 0.135234, 3, 61),
        (KIMI_K2, 0.130861, 1, 61),
        (GLM_FLASH, 0.0625, 1, 47),
        (MINICPM3, 0.102062, 62, 62),
    ],
    ids=["V2-Lite", "V2", "V3", "Kimi-K2", "GLM-4.7-Flash", "MiniCPM3"],
)
def test_softmax_scale_and_dense_layers(raw: dict[str, Any], sm_scale: float, dense: int, layers: int) -> None:
    """The softmax scales are those that transformers' modules run with."""
    config = ModelConfig.from_hf(raw)
    assert config.sm_scale == pytest.approx(sm_scale, abs=5e-7)
    assert config.rope.cos_factor == pytest.approx(1.0)
    assert config.mlp_kinds == ("dense",) * dense + ("sparse",) * (layers - dense)
    assert config.latent_norm_eps == config.rms_norm_eps


def test_routers() -> None:
    def router(raw: dict[str, Any]) -> tuple[Any, ...]:
        moe = ModelConfig.from_hf(raw).moe
        assert moe is not None
        return moe.scoring, moe.num_groups, moe.top_groups, moe.normalize, moe.scale, moe.num_shared, moe.top_k

    assert router(V2_LITE) == ("softmax", 1, 1, False, 1.0, 2, 6)
    assert router(V2) == ("softmax", 8, 3, False, 16.0, 2, 6)
    assert router({**V2, "topk_method": "greedy"}) == ("softmax", 1, 1, False, 16.0, 2, 6), "greedy ignores groups"
    assert router(V3) == ("sigmoid", 8, 4, True, 2.5, 1, 8)
    assert router({**V3, "norm_topk_prob": False})[3] is False
    assert router(KIMI_K2) == ("sigmoid", 1, 1, True, 2.827, 1, 8)
    assert router(GLM_FLASH) == ("sigmoid", 1, 1, True, 1.8, 1, 4)
    assert ModelConfig.from_hf(MINICPM3).moe is None


def test_shapes_and_end_tokens() -> None:
    lite, kimi, glm = (ModelConfig.from_hf(raw) for raw in (V2_LITE, KIMI_K2, GLM_FLASH))
    assert lite.q_lora_rank is None and lite.rope.interleaved and lite.rope.factor == 40.0
    assert kimi.stop_token_ids == (163585, 163586) and (kimi.rope.beta_fast, kimi.rope.beta_slow) == (1.0, 1.0)
    assert glm.stop_token_ids == (154820, 154827, 154829) and glm.rope.theta == 1e6 and glm.rope.factor == 1.0
    alternate = ModelConfig.from_hf({**V2_LITE, "moe_layer_freq": 2, "num_hidden_layers": 6})
    assert alternate.mlp_kinds == ("dense", "dense", "sparse", "dense", "sparse", "dense")


def test_kimis_equal_betas_make_the_ramp_a_step() -> None:
    """Every frequency is either kept or divided by the factor; none is between, and none is NaN."""
    rope = ModelConfig.from_hf(KIMI_K2).rope
    plain = [50000.0 ** (-2 * i / 64) for i in range(32)]
    ratios = [p / f for p, f in zip(plain, rope.inverse_frequencies().tolist(), strict=True)]
    step = next(i for i, ratio in enumerate(ratios) if ratio > 2)
    assert ratios == pytest.approx([1.0] * step + [32.0] * (32 - step), rel=1e-5)
    assert 2 * math.pi * 1.0 / plain[step - 2] < 4096 < 2 * math.pi / plain[step]


def test_minicpm3_scales_and_longrope() -> None:
    config = ModelConfig.from_hf(MINICPM3)
    assert (config.embed_scale, config.logit_scale) == (12.0, 0.1), "scale_emb, dim_model_base / hidden_size"
    assert config.residual_scale == pytest.approx(1.4 / math.sqrt(62))
    assert config.v_head_dim == 64 and config.tie_word_embeddings and not config.rope.interleaved
    assert config.rope.inverse_frequencies()[0].item() == pytest.approx(1 / 1.1)
    longer = ModelConfig.from_hf({**MINICPM3, "max_position_embeddings": 131072})
    assert longer.max_position_embeddings == 32768
    assert longer.rope.cos_factor == pytest.approx(math.sqrt(1 + math.log(4) / math.log(32768)))


@pytest.mark.parametrize(
    ("raw", "changes", "sentence"),
    [
        (V2_LITE, {"norm_topk_prob": True}, "norm_topk_prob = True with softmax routing: only False is supported"),
        (
            V2_LITE,
            {"topk_method": "best"},
            "topk_method = 'best': greedy, group_limited_greedy, noaux_tc are supported",
        ),
        (V2_LITE, {"topk_method": "noaux_tc"}, "softmax with greedy or group_limited_greedy is supported"),
        (V3, {"scoring_func": "softmax"}, "sigmoid with noaux_tc is supported"),
        (V3, {"n_group": 256}, "at least 2 a group"),
        (V3, {"n_group": 7}, "n_group 7 and topk_group 4 for 256 experts"),
        (V3, {"first_k_dense_replace": None}, "has no first_k_dense_replace"),
        (V3, {"first_k_dense_replace": -1}, "first_k_dense_replace = -1: a non-negative integer is needed"),
        (V3, {"moe_layer_freq": 0}, "moe_layer_freq = 0: a positive integer is needed"),
        (V3, {"mlp_layer_types": ["dense"]}, "61 of dense or sparse or moe are needed"),
        (MINICPM3, {"scale_emb": None}, "has no scale_emb"),
        (MINICPM3, {"scale_depth": "1.4"}, "scale_depth = '1.4': a positive number up to 1e\\+06 is needed"),
    ],
)
def test_refusals_are_one_sentence(raw: dict[str, Any], changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        ModelConfig.from_hf({**raw, **changes})


@pytest.mark.parametrize(
    ("rope", "sentence"),
    [
        ({"type": "dynamic", "factor": 2.0}, "rope type 'dynamic' is not supported: default, yarn and longrope are"),
        ({"type": "yarn", "factor": 2.0}, "yarn rope has no original_max_position_embeddings"),
        ({**YARN, "factor": 2.0, "truncate": False}, "truncate = False: only True is supported"),
        ({"type": "longrope", "short_factor": [1.0] * 32}, "longrope rope has no original_max_position_embeddings"),
        (
            {**YARN, "type": "longrope", "short_factor": [1.0] * 3},
            "a list of 32 numbers above 0, up to 1e\\+06, is needed",
        ),
    ],
)
def test_rope_refusals_are_one_sentence(rope: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RopeError, match=sentence):
        ModelConfig.from_hf({**V3, "rope_scaling": rope})


GARBAGE: tuple[Any, ...] = (
    "x", [], [1], [[1]], {}, {"a": 1}, -1, 0, 0.5, True, 10**30, 10**4000, float("nan"), float("inf"), -2.5, 1e300, "\ud800",
)  # fmt: skip


@pytest.mark.parametrize("raw", [V2_LITE, V3, KIMI_K2, GLM_FLASH, MINICPM3], ids=["V2-Lite", "V3", "K2", "GLM", "CPM3"])
def test_any_value_of_any_field_is_accepted_or_one_sentence(raw: dict[str, Any]) -> None:
    """Whatever stands in a field, also in a nested one: a configuration with finite frequencies, or one short sentence."""
    extra = ("rope_parameters", "rope_interleave", "mlp_layer_types", "moe_layer_freq", "tie_word_embeddings")
    cases = [{**raw, name: value} for name in {*raw, *extra} for value in GARBAGE]
    for key in ("rope_scaling", "rope_parameters"):
        inner = dict(raw.get("rope_scaling") or {"rope_type": "default", "rope_theta": 1e4})
        names = {*inner, "rope_theta", "rope_type", "attention_factor", "factor", "mscale", "truncate"}
        cases += [{**raw, key: {**inner, name: value}} for name in names for value in GARBAGE]
    for case in cases:
        try:
            config = ModelConfig.from_hf(case)
        except ConfigError as error:
            assert len(str(error)) < 400 and "\n" not in str(error)
        else:
            assert config.rope.inverse_frequencies().isfinite().all()
            assert 0 < config.sm_scale < 1e3 and 0 < config.rope.cos_factor < 1e4 and config.rope.softmax_factor < 1e6


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"rms_norm_eps": 1e30}, "rms_norm_eps = 1e\\+30: a positive number up to 1 is needed"),
        (
            {"routed_scaling_factor": float("inf")},
            "routed_scaling_factor = inf: a positive number up to 1e\\+06 is needed",
        ),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings = 'no': true or false is needed"),
        ({"norm_topk_prob": "false"}, "norm_topk_prob = 'false': true or false is needed"),
        ({"rope_interleave": 0}, "rope_interleave = 0: true or false is needed"),
        ({"eos_token_id": True}, "eos_token_id = True: an integer or a list of them from 0 to 129279 is needed"),
        ({"eos_token_id": [1, 10**9]}, "an integer or a list of them from 0 to 129279 is needed"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim = 63: an even number is needed"),
        ({"mlp_layer_types": [["dense"]] * 61}, "61 of dense or sparse or moe are needed"),
        (
            {"mlp_layer_types": ["dense"] * 61, "moe_layer_freq": "x"},
            "moe_layer_freq = 'x': a positive integer is needed",
        ),
        ({"rope_scaling": "x"}, "config.json has rope_scaling = 'x': a JSON object is needed"),
        ({"rope_theta": [1]}, r"config.json has rope_theta = \[1\]: a number of at least 1 up to 1e\+15 is needed"),
        ({"rope_scaling": {**YARN, "factor": -2}}, "yarn rope has factor = -2: a number of at least 1 up to 1e\\+06"),
    ],
)
def test_senseless_values_are_one_sentence(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        ModelConfig.from_hf({**V3, **changes})
