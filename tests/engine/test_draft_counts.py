"""How many tokens are drafted: what was asked for, or what a clock says helps."""

from __future__ import annotations

import random

import pytest

from uncast.engine.speculation import (
    FIRST_PAUSE,
    STEPS_BETWEEN_TRIALS,
    TRIAL_STEPS,
    Speculation,
    SpeculationError,
    parse_speculate,
)


@pytest.mark.parametrize(("text", "count"), [("auto", None), ("off", 0), ("0", 0), ("3", 3), ("8", 8)])
def test_what_may_be_asked_for(text: str, count: int | None) -> None:
    assert parse_speculate(text) == count


@pytest.mark.parametrize("text", ["9", "-1", "on", "", "1.5", "²", "AUTO", "9" * 50])
def test_what_may_not(text: str) -> None:
    with pytest.raises(SpeculationError, match="allowed are auto, off and 0 to 8 drafts"):
        parse_speculate(text)


def play(speculation: Speculation, steps: int, *, accept: float, cost: float, requests: int = 1) -> list[int]:
    """Steps of a machine on which a draft costs `cost` of a step and is accepted with probability `accept`, with noise."""
    rng, counts = random.Random(7), []
    for _ in range(steps):
        count = speculation.count(requests)
        counts.append(count)
        for _ in range(requests if count else 0):
            kept = 0
            while kept < count and rng.random() < accept:
                kept += 1
            speculation.verified(count, kept)
        slow = 5.0 if rng.random() < 0.1 else 1.0
        speculation.rest()
        speculation.observe(requests, count, slow * (1.0 + cost * count))
    return counts


def test_auto_drafts_as_many_as_pay() -> None:
    for accept, cost, allowed in ((0.9, 0.1, {2, 3}), (0.6, 0.3, {1, 2}), (0.95, 0.01, {3})):
        speculation, said = Speculation(None), list[str]()
        speculation.say = said.append
        counts = play(speculation, 10 * STEPS_BETWEEN_TRIALS, accept=accept, cost=cost)
        assert counts[: TRIAL_STEPS + 1] == [0] * TRIAL_STEPS + [1] and speculation.keeps_up
        used = counts[len(counts) // 2 :]
        assert sum(count in allowed for count in used) > 0.8 * len(used)
        assert "drafts a step" in said[0] and "tokens/s" in said[0]
        assert speculation.describe().startswith("auto, ")


def test_auto_stops_where_drafts_do_not_pay_and_tries_again_later() -> None:
    speculation, said = Speculation(None), list[str]()
    speculation.say = said.append
    counts = play(speculation, 12 * FIRST_PAUSE, accept=0.1, cost=0.5)
    assert sum(count > 0 for count in counts) < 0.05 * len(counts)
    assert any(counts[FIRST_PAUSE:]), "it never tried again"
    assert len(said) == 1 and "off, as drafts do not help" in said[0], "one sentence for one outcome"
    assert speculation.describe() == "auto, off: it does not help here" and not speculation.keeps_up


def test_batch_sizes_are_judged_apart() -> None:
    speculation = Speculation(None)
    play(speculation, 4 * TRIAL_STEPS + 1, accept=0.9, cost=0.1)
    assert speculation.count(1) > 0
    assert speculation.count(64) == 0, "not measured yet: the trial begins without drafts"


def test_a_fixed_number_is_kept() -> None:
    speculation = Speculation(2)
    assert set(play(speculation, 100, accept=0.0, cost=1.0)) == {2} and speculation.keeps_up
    assert speculation.describe() == "2 drafts" and Speculation(0).describe() == "off"
    with pytest.raises(SpeculationError):
        Speculation(9)
