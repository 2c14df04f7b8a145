"""Stop strings: never shown, not even in part, however the text is cut into pieces."""

from __future__ import annotations

import random

import pytest

from uncast.engine.stop import StopMatcher


def run(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    matcher, shown = StopMatcher(stops), ""
    for piece in pieces:
        text, stopped = matcher.push(piece)
        shown += text
        if stopped:
            return shown, True
    return shown + matcher.flush(), False


def test_a_stop_string_over_several_pieces_is_cut_out() -> None:
    assert run(["END"], ["abcE", "N", "Dxyz"]) == ("abc", True)
    assert run(["END"], ["abcE", "N", "d"]) == ("abcENd", False)


def test_the_first_complete_of_several_wins() -> None:
    assert run(["cd", "b"], ["abcd"]) == ("a", True)
    assert run(["abcd", "c"], ["xabcd"]) == ("xab", True)
    assert run(["bc", "abc"], ["xabcd"]) == ("x", True)
    matcher = StopMatcher(["cd", "b"])
    assert matcher.matched is None
    matcher.push("abcd")
    assert matcher.matched == "b"


def test_nothing_is_shown_that_a_stop_string_takes_back() -> None:
    matcher = StopMatcher(["aab"])
    assert [matcher.push(c) for c in "aaab"] == [("", False), ("", False), ("a", False), ("", True)]


def test_every_cut_of_the_text_gives_the_same_result() -> None:
    rng = random.Random(0)
    for _ in range(500):
        text = "".join(rng.choice("ab") for _ in range(20))
        stops = ["".join(rng.choice("ab") for _ in range(rng.randint(1, 5))) for _ in range(2)]
        expected = run(stops, list(text))
        assert expected[1] == any(stop in text for stop in stops)
        assert not any(stop in expected[0] for stop in stops)
        cuts = sorted(rng.sample(range(21), 5))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, 20], strict=True)]
        assert run(stops, pieces) == expected


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        StopMatcher([""])
