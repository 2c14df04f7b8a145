"""Choosing tokens: filters keep what they say, draws follow the distribution, seeds repeat."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import pytest
import torch

from uncast.engine.sampler import Draw, Penalties, SamplingError, SamplingParams, sample, sample_rows

PROBABILITIES = torch.tensor([0.05, 0.4, 0.3, 0.2, 0.05])
LOGITS = PROBABILITIES.log()


def draws(params: SamplingParams, count: int = 4000) -> Counter[int]:
    generator = params.generator()
    return Counter(sample(LOGITS, params, generator) for _ in range(count))


def test_greedy_takes_the_best() -> None:
    assert draws(SamplingParams(temperature=0.0), 5) == {1: 5}


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"top_k": 2}, {1, 2}),
        ({"top_p": 0.4}, {1}),
        ({"top_p": 0.41}, {1, 2}),
        ({"min_p": 0.49}, {1, 2, 3}),
        ({"top_k": 3, "top_p": 0.5}, {1, 2}),
        ({"top_k": 100, "min_p": 1.0}, {1}),
    ],
)
def test_filters_keep_the_right_tokens_in_proportion(filters: dict[str, Any], kept: set[int]) -> None:
    counts = draws(SamplingParams(temperature=1.0, seed=1, **filters))
    assert set(counts) == kept
    total = float(PROBABILITIES[list(kept)].sum())
    for token in kept:
        assert abs(counts[token] / 4000 - float(PROBABILITIES[token]) / total) < 0.03


def test_temperature_sharpens() -> None:
    cold, hot = draws(SamplingParams(temperature=0.5, seed=2)), draws(SamplingParams(temperature=3.0, seed=2))
    assert cold[1] > 4000 * 0.5 and hot[1] < 4000 * 0.3


def test_seeds_repeat_and_differ() -> None:
    def first(seed: int) -> list[int]:
        params = SamplingParams(temperature=1.0, seed=seed)
        generator = params.generator()
        return [sample(LOGITS, params, generator) for _ in range(40)]

    assert first(7) == first(7) != first(8)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", 2.0),
        ("seed", -3),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("nan")),
        ("logprobs", 21),
        ("logprobs", -1),
        ("temperature", "1"),
        ("temperature", None),
        ("temperature", True),
        ("top_k", 1.5),
        ("top_k", True),
        ("top_p", None),
        ("seed", 1.5),
        ("seed", 2**63),
        ("logprobs", 1.5),
    ],
)
def test_values_out_of_range_name_the_field(field: str, value: object) -> None:
    with pytest.raises(SamplingError, match=f"{field} is {value}: allowed is"):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


def test_biases_out_of_range_name_token_and_value() -> None:
    with pytest.raises(SamplingError, match="logit_bias is 101 for token 7: allowed is -100 to 100"):
        SamplingParams(logit_bias={7: 101})
    with pytest.raises(SamplingError, match="logit_bias is for token -7: allowed is token ids of 0 or more"):
        SamplingParams(logit_bias={-7: 1})


@pytest.mark.parametrize("temperature", [1e-3, 1e-45, 1e-300, 1e-308, 5e-324])
@pytest.mark.parametrize("logits", [[1.0, 5.0, 2.0], [-1.0, -5.0, -2.0], [0.0, 3e38, -3e38]])
def test_a_tiny_temperature_is_greedy(temperature: float, logits: list[float]) -> None:
    params = SamplingParams(temperature=temperature, seed=1, top_k=2**70)
    values = torch.tensor(logits)
    assert {sample(values, params, params.generator()) for _ in range(20)} == {int(values.argmax())}


def test_a_tiny_repetition_penalty_leaves_the_logits_finite() -> None:
    params = SamplingParams(repetition_penalty=1e-300, temperature=1.0, seed=0)
    changed = Penalties(params, [0, 1, 2], 4).apply(torch.tensor([2.0, -2.0, 0.0, 1.0]))
    assert changed.isfinite().all() and sample(changed, params, params.generator()) == 0


def test_penalties_without_effect_are_inactive() -> None:
    assert not Penalties(SamplingParams(), [1], 5).active
    for params in (SamplingParams(presence_penalty=0.1), SamplingParams(logit_bias={1: 0.5})):
        assert Penalties(params, [1], 5).active


def test_repetition_counts_the_prompt_and_the_others_do_not() -> None:
    logits = torch.tensor([2.0, -2.0, 1.0])
    repeated = Penalties(SamplingParams(repetition_penalty=2.0), [0, 1], 3).apply(logits)
    assert repeated.tolist() == [1.0, -4.0, 1.0]
    counted = Penalties(SamplingParams(presence_penalty=0.5, frequency_penalty=0.25), [0, 1], 3)
    for token in (2, 2):
        counted.count(token)
    assert counted.apply(logits).tolist() == [2.0, -2.0, 0.0]
    assert logits.tolist() == [2.0, -2.0, 1.0]


def test_many_rows_draw_what_each_draws_alone() -> None:
    """Random parameters and logits with ties, tiny probabilities and infinities; a temperature of 0 keeps what was chosen."""
    rng = random.Random(0)
    for vocab in (2, 37, 600):
        values = torch.randn(400, vocab, generator=torch.Generator().manual_seed(vocab)) * 4
        values[::3] = values[::3].bfloat16().float()  # ties
        values[::7, 1] = -math.inf
        values[::50, 0] = 1e30
        params = [
            SamplingParams(
                temperature=rng.choice([0.0, 1e-300, 0.3, 1.0, 100.0]), top_k=rng.choice([0, 1, 5, 2**70]),
                top_p=rng.choice([1.0, 1e-9, 0.5, 0.95]), min_p=rng.choice([0.0, 0.1, 1.0]), seed=row,
            )
            for row in range(400)
        ]  # fmt: skip
        expected = [sample(row, of, of.generator()) for row, of in zip(values, params, strict=True)]
        draws = [Draw.of(of, of.generator()) if of.temperature else Draw() for of in params]
        packed = torch.tensor([draw.packed() for draw in draws], dtype=torch.float64).T
        assert sample_rows(values, packed, values.argmax(-1)).tolist() == expected


def test_rows_that_are_not_numbers_draw_a_token_that_exists() -> None:
    packed = torch.tensor([Draw(1.0, 0, 0.9, 0.1, 0.5).packed()] * 3, dtype=torch.float64).T
    values = torch.tensor([[math.nan, 1.0], [math.inf, math.inf], [-math.inf, -math.inf]])
    tokens = sample_rows(values, packed, torch.zeros(3, dtype=torch.int64))
    assert set(tokens.tolist()) <= {0, 1}
