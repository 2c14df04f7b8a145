"""A sequence's spans of tokens and slots are those of its positions one by one."""

from __future__ import annotations

import random

from uncast.engine.sequence import Sequence


def test_spans_are_their_positions() -> None:
    rng = random.Random(1)
    for _ in range(2000):
        page_size, tokens, drafts = rng.choice([1, 2, 4, 8, 64]), rng.randrange(60), rng.randrange(4)
        pages = rng.sample(range(500), -(-(tokens + drafts + 1) // page_size))
        sequence = Sequence(list(range(tokens)), pages, drafts=list(range(100, 100 + drafts)))
        start = rng.randrange(tokens + drafts + 1)
        end = rng.randrange(start, tokens + drafts + 1)
        assert sequence.span(start, end) == [sequence.token(place) for place in range(start, end)]
        assert sequence.slots(start, end, page_size) == [sequence.slot(place, page_size) for place in range(start, end)]
