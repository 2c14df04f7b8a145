"""A model whose logits are not numbers ends the request with an error; nobody takes token 0 for an answer."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.engine.workload import alone, make_engine, tokens_of
from uncast.engine.generate import Generation, stream
from uncast.engine.request import NOT_FINITE, GenerationError, Request
from uncast.engine.runner import ModelRunner
from uncast.engine.sampler import SamplingParams
from uncast.engine.tokenizer import Tokenizer
from uncast.models.decoder import MLADecoder

WAYS = [
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(logprobs=2),
    SamplingParams(repetition_penalty=2.0),
]


def broken(model: MLADecoder, value: float) -> MLADecoder:
    """One number of the final norm is wrong."""
    norm = model.final_norm.clone()
    norm[3] = value
    return MLADecoder(model.config, model.embed, model.layers, norm, model.lm_head)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("deterministic", [False, True])
def test_every_way_to_choose_ends_with_an_error(
    model: MLADecoder, tokenizer: Tokenizer, value: float, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # NaN is not equal to itself, so the check of the tiles' bits would refuse this model before any request.
    monkeypatch.setattr(ModelRunner, "_check_fixed_rows", lambda self: None)
    engine = make_engine(broken(model, value), tokenizer, pages=20, prefix_cache=False, deterministic=deterministic)
    for params in WAYS:
        (output,) = alone(engine, Request([1, 2, 3], params, 5))
        assert (output.finish_reason, output.error) == ("error", NOT_FINITE)
        assert output.token_ids == () and output.text == "" and output.completion_tokens == 0
    stats = engine.stats()
    assert stats.finished_total["error"] == len(WAYS)
    assert stats.pool_pages_free + stats.pool_pages_cached == stats.pool_pages
    engine.check_integrity()


@pytest.mark.parametrize("values", [[math.nan, 1.0], [1.0, math.nan], [math.inf, 1.0], [-math.inf, -math.inf]])
def test_one_bad_row_does_not_touch_its_company(
    model: MLADecoder, tokenizer: Tokenizer, values: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever place of the row is bad; the other request gets the tokens that it gets alone."""
    expected = tokens_of(
        alone(make_engine(model, tokenizer, pages=20, prefix_cache=False), Request([4, 5], max_tokens=6))
    )
    engine = make_engine(model, tokenizer, pages=20)
    good, bad = Request([4, 5], max_tokens=6, request_id="good"), Request([4, 6], max_tokens=6, request_id="bad")
    step = engine.runner.step

    def spoiled(chunks: Any, **options: Any) -> torch.Tensor:
        logits = step(chunks, **options).clone()
        for row, (sequence, _) in enumerate(chunks):
            if sequence.tokens[1] == 6 and len(sequence.tokens) == 4:
                logits[row] = values[1] if math.isinf(values[1]) else logits[row]
                logits[row, 0], logits[row, -1] = values
        return logits

    monkeypatch.setattr(engine.runner, "step", spoiled)
    engine.add(good)
    engine.add(bad)
    outputs: dict[str, list[Any]] = {"good": [], "bad": []}
    while engine.has_work:
        for output in engine.step():
            outputs[output.request_id].append(output)
    assert tokens_of(outputs["good"]) == expected and outputs["good"][-1].error is None
    assert [o.finish_reason for o in outputs["bad"]] == [None, None, "error"]


def test_the_stream_raises_after_its_text(model: MLADecoder, tokenizer: Tokenizer) -> None:
    runner = ModelRunner(broken(model, math.nan), num_pages=4)
    result = Generation(prompt_tokens=1)
    with pytest.raises(GenerationError, match="logits are not finite"):
        list(stream(runner, tokenizer, [1], SamplingParams(), max_tokens=3, result=result))
    assert result.finish_reason == "error" and runner.pool.num_free == 4


def test_finite_logits_of_any_size_are_fine(model: MLADecoder, tokenizer: Tokenizer) -> None:
    large = MLADecoder(replace(model.config), model.embed, model.layers, model.final_norm * 1e20, model.lm_head)
    for params in WAYS:
        assert (
            alone(make_engine(large, tokenizer, pages=20, prefix_cache=False), Request([1, 2], params, 3))[-1].error
            is None
        )
