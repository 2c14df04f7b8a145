"""Errors of cache layouts on a trained model that was rescaled without changing what it computes (see tests/rescaled.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.fixtures import build_hf
from tests.rescaled import SOURCE, build_rescaled

from uncast.bench.kv_advice import advice
from uncast.bench.kv_error import (
    Contender,
    ContenderError,
    KVErrorMeter,
    LayerError,
    LayerScales,
    NotFinite,
    calibrated,
)
from uncast.checkpoints.kv_scales import apply_kv_scales
from uncast.checkpoints.load import load_model
from uncast.engine.runner import ModelRunner, Sequence
from uncast.engine.tokenizer import Tokenizer
from uncast.latent.codec import decode_rows
from uncast.models.decoder import MLADecoder

DS_MLA = Contender("fp8_ds_mla", "fp8_ds_mla", None, "none")
FLAT = Contender("fp8_e4m3", "fp8_e4m3", (LayerScales(),) * 6, "1")


@pytest.fixture(scope="module")
def rescaled(tmp_path_factory: pytest.TempPathFactory) -> MLADecoder:
    return load_model(build_rescaled(tmp_path_factory.mktemp("rescaled")))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """The first 4,000 characters of the model's held-out text."""
    text, tokenizer = (SOURCE / "heldout.txt").read_text(encoding="utf-8"), Tokenizer(SOURCE)
    return [tokenizer.encode(text[start : start + 1000]) for start in range(0, 4000, 1000)]


@pytest.fixture(scope="module")
def meter(rescaled: MLADecoder) -> KVErrorMeter:
    return KVErrorMeter(rescaled, ["fp8_ds_mla", "fp8_e4m3"], max_tokens=400)


def engine_logits(model: MLADecoder, layout: str, prompt: list[int]) -> tuple[torch.Tensor, ModelRunner]:
    """What the engine computes with this cache, absorbed as the meter does it."""
    absorbed = MLADecoder(model.config, model.embed, model.layers, model.final_norm, model.lm_head, prefill="absorbed")
    runner, sequence = ModelRunner(absorbed, kv_layout=layout, num_pages=8), Sequence(list(prompt))
    runner.ensure_pages(sequence, len(prompt))
    return runner.step([(sequence, len(prompt))], every_token=True), runner


def divergence(reference: torch.Tensor, logits: torch.Tensor) -> float:
    expected, found = reference.double().log_softmax(-1), logits.double().log_softmax(-1)
    return float((expected.exp() * (expected - found)).sum(-1).mean())


def test_a_rescale_that_changes_nothing_tells_layouts_apart(meter: KVErrorMeter, prompts: list[list[int]]) -> None:
    fitted = Contender("fp8_e4m3 calibrated", "fp8_e4m3", calibrated(meter.largest(prompts)), "calibrated")
    ds_mla, flat, better = meter.measure(prompts, [DS_MLA, FLAT, fitted], per_layer_kl=False)
    assert ds_mla.kl <= 2e-4
    assert flat.kl > 1e-3
    assert better.kl < flat.kl / 10
    assert ds_mla.top1_changed < 0.02 < flat.top1_changed
    assert all(layer.saturated == 0 for layer in better.layers)
    assert all(layer.saturated > 0 and layer.subnormal > layer.values / 2 for layer in flat.layers)
    words = advice([ds_mla, flat, better], 1152)
    assert words[0].startswith("use fp8_ds_mla: 656 B a row (43 % less than bf16)")
    assert any("numbers exceed 448 times their scale" in sentence for sentence in words)
    assert "calibrated scales lower the KL of fp8_e4m3" in words[-1]


def test_the_rescaled_model_computes_what_the_bundled_one_does(rescaled: MLADecoder, prompts: list[list[int]]) -> None:
    plain, _ = engine_logits(load_model(SOURCE), "fp32", prompts[0][:64])
    again, _ = engine_logits(rescaled, "fp32", prompts[0][:64])
    assert float((plain - again).abs().max()) < 1e-3 * float(plain.abs().max())


def test_figures_are_those_of_the_engine(rescaled: MLADecoder, meter: KVErrorMeter, prompts: list[list[int]]) -> None:
    """KL and counters of the stack, against an engine that has nothing but that layout; scales as `--kv-scales` sets them."""
    prompt = prompts[1][:100]
    fitted = Contender("calibrated", "fp8_e4m3", calibrated(meter.largest([prompt])), "calibrated")
    results = meter.measure([prompt], [DS_MLA, FLAT, fitted], per_layer_kl=True)
    reference, _ = engine_logits(rescaled, "bf16", prompt)
    for result in results:
        scales = result.contender.scales
        if scales is not None:
            apply_kv_scales(rescaled, [(scale.ckv, scale.kpe) for scale in scales])
        logits, runner = engine_logits(rescaled, result.contender.kv_layout, prompt)
        assert result.kl == pytest.approx(divergence(reference, logits), rel=1e-6)
        # The engine counts rows of the stack, the meter rows of the reference: only the first layer's are the same.
        assert sum(layer.saturated for layer in result.layers) == pytest.approx(int(runner.counters[0]), rel=0.02)
    apply_kv_scales(rescaled, [(1.0, 1.0)] * 6)


def test_one_layer_is_isolated(rescaled: MLADecoder, meter: KVErrorMeter, prompts: list[list[int]]) -> None:
    """A layer's own KL is that of a stack whose other layers store BF16, and a stack of BF16 alone is the engine's."""
    prompt = prompts[2][:80]
    (result,) = meter.measure([prompt], [FLAT])
    first, last = result.layers[0], result.layers[-1]
    assert first.attention_error == first.attention_error_stack > 0.1
    assert last.attention_error != last.attention_error_stack
    assert all(layer.kl is not None and layer.kl > 0 for layer in result.layers)
    reference = meter._logits(prompt)
    meter.attention.assigned = [None] * 5 + [FLAT]
    assert last.kl == pytest.approx(divergence(reference, meter._logits(prompt)), rel=1e-6)
    meter.attention.assigned = [None] * 6
    assert torch.equal(meter._logits(prompt), engine_logits(rescaled, "bf16", prompt)[0])


def test_calibration_sees_the_rows_that_are_stored(
    rescaled: MLADecoder, meter: KVErrorMeter, prompts: list[list[int]]
) -> None:
    prompt = prompts[3][:64]
    (found, *_) = meter.largest([prompt])
    _, runner = engine_logits(rescaled, "bf16", prompt)
    ckv, kpe = decode_rows(runner.pool.layer(0)[0, :64], runner.pool.layout)
    assert found == (pytest.approx(float(ckv.abs().max()), rel=2**-8), pytest.approx(float(kpe.abs().max()), rel=2**-8))


def test_scales_keep_the_headroom_and_are_powers_of_two() -> None:
    assert calibrated([(448.0, 224.0), (0.0, 3409.0)]) == (LayerScales(2.0, 1.0), LayerScales(1.0, 16.0))
    assert calibrated([(448.0, 449.0)], headroom=1.0) == (LayerScales(1.0, 2.0),)


def test_a_layout_that_is_exact_has_no_error(rescaled: MLADecoder, prompts: list[list[int]]) -> None:
    """fp32 rows differ from BF16 ones by BF16's own rounding, and count nothing."""
    meter = KVErrorMeter(rescaled, ["fp32"], max_tokens=64)
    (result,) = meter.measure([prompts[0][:64]], [Contender("fp32", "fp32", None, "none")], per_layer_kl=False)
    assert 0 < result.kl < 2e-5 and all(layer.attention_error < 4e-3 and layer.values == 0 for layer in result.layers)
    assert all(layer.kl is None for layer in result.layers)


def test_sparse_attention_is_measured_over_the_tokens_that_it_selects(tmp_path: Path) -> None:
    """A random glm_moe_dsa, prompts longer than its topk: KL as of an engine whose rows alone are FP8, index keys BF16."""
    build_hf("glm_moe_dsa_52", tmp_path, sharpen=4.0)
    model = load_model(tmp_path)
    prompt = torch.randint(0, 512, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    meter = KVErrorMeter(model, ["fp8_ds_mla"], max_tokens=60)
    (result,) = meter.measure([prompt], [DS_MLA])

    def logits(layout: str) -> torch.Tensor:
        runner, sequence = ModelRunner(model, kv_layout=layout, num_pages=1, index_layout_name="bf16"), Sequence(prompt)
        runner.ensure_pages(sequence, 60)
        return runner.step([(sequence, 60)], every_token=True)

    assert result.kl > 1e-6
    assert result.kl == pytest.approx(divergence(logits("bf16"), logits("fp8_ds_mla")), rel=1e-6)
    assert all(layer.attention_error > 1e-3 and layer.kl is not None and layer.kl > 0 for layer in result.layers)


def test_logits_that_are_not_finite_are_an_error(rescaled: MLADecoder) -> None:
    broken = MLADecoder(
        rescaled.config, rescaled.embed, rescaled.layers, rescaled.final_norm * float("nan"), rescaled.lm_head
    )
    with pytest.raises(NotFinite, match="log-probabilities are not finite with fp8_ds_mla or bf16"):
        KVErrorMeter(broken, ["fp8_ds_mla"], max_tokens=8).measure([[1, 2, 3]], [DS_MLA])


def test_advice_without_a_close_layout_is_to_stay() -> None:
    result = ContenderError(FLAT, 576, kl=0.2, layers=[LayerError(0.1), LayerError(0.3)])
    first, second = advice([result], 1152)
    assert first.startswith("stay with bf16: no layout keeps KL under 1e-03")
    assert second.endswith("the largest attention error is 30.0 %, in layer 1")
