"""How many tokens to draft: a number, or what is measured to give the most tokens per second.

`auto` tries every count in turn while all of a step's requests decode, keeps what gives the most tokens per second (by the
share of accepted drafts and the time of a step) at about this many requests, and tries the others again from time to time.
Where drafting does not help it stops, the upkeep of the MTP layer's rows included, and tries again after a pause that doubles;
requests that were admitted meanwhile do not draft.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

MAX_DRAFTS = 8
"""Of `--speculate N`."""
AUTO_COUNTS = (0, 1, 2, 3)
TRIAL_STEPS, WARM_STEPS, WINDOW = 12, 2, 24
STEPS_BETWEEN_TRIALS = 400
FIRST_PAUSE, LONGEST_PAUSE = 500, 16_000
"""In steps."""
MEMORY = 1000
"""Drafts at one place after which earlier ones count half."""
LEAST_GAIN = 1.03
"""A draft count must be this much faster than none: measurements vary."""


class SpeculationError(ValueError):
    """A number of drafts that cannot be, or a model that cannot draft; one sentence."""


def parse_speculate(text: str) -> int | None:
    """`auto` (None), `off` (0) or a number.

    Raises:
        SpeculationError: anything else.
    """
    if text == "auto":
        return None
    count = 0 if text == "off" else int(text) if text.isascii() and text.isdigit() and len(text) < 4 else -1
    if not 0 <= count <= MAX_DRAFTS:
        raise SpeculationError(f"speculate is {text!r:.80}: allowed are auto, off and 0 to {MAX_DRAFTS} drafts")
    return count


@dataclass
class _Arm:
    """One draft count at about one batch size: seconds of its last steps."""

    steps: int = 0
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def add(self, seconds: float) -> None:
        self.steps += 1
        if self.steps > WARM_STEPS:
            self.seconds.append(seconds)

    def rate(self, tokens: float) -> float:
        """Per second, at so many a step. Of the steps' seconds the lower quartile counts: other work on the machine only adds
        to them. 0 if not known."""
        return tokens / sorted(self.seconds)[len(self.seconds) // 4] if self.seconds else 0.0


class _Acceptance:
    """How often the draft at each place was accepted where all before it were; old steps count less and less."""

    def __init__(self) -> None:
        self._tried, self._kept = [0.0] * MAX_DRAFTS, [0.0] * MAX_DRAFTS

    def add(self, drafted: int, accepted: int) -> None:
        for place in range(min(drafted, accepted + 1)):
            if self._tried[place] >= MEMORY:
                self._tried[place] /= 2
                self._kept[place] /= 2
            self._tried[place] += 1
            self._kept[place] += place < accepted

    def tokens(self, count: int) -> float:
        """Tokens of a step with `count` drafts: 1 + a1 + a1 a2 + ..."""
        total, all_kept = 1.0, 1.0
        for tried, kept in zip(self._tried[:count], self._kept[:count], strict=True):
            all_kept *= kept / tried if tried else 0.0
            total += all_kept
        return total


@dataclass
class _Batch:
    """What is known at about one batch size."""

    acceptance: _Acceptance
    arms: dict[int, _Arm] = field(default_factory=lambda: {count: _Arm() for count in AUTO_COUNTS})
    trying: list[int] = field(default_factory=lambda: list(AUTO_COUNTS))
    left: int = TRIAL_STEPS
    steps: int = 0

    def rate(self, count: int) -> float:
        """Of one request."""
        return self.arms[count].rate(self.acceptance.tokens(count))

    @property
    def best(self) -> int:
        count = max(self.arms, key=self.rate)
        return count if self.rate(count) > LEAST_GAIN * self.rate(0) else 0

    def choose(self) -> int:
        return self.trying[0] if self.trying else self.best

    def add(self, count: int, seconds: float) -> bool:
        """Takes a measurement; whether a trial is over with it."""
        self.arms[count].add(seconds)
        self.steps += 1
        if self.trying and count == self.trying[0]:
            self.left -= 1
            if self.left <= 0:
                self.trying.pop(0)
                self.left = TRIAL_STEPS
                return not self.trying
        elif not self.trying and self.steps >= STEPS_BETWEEN_TRIALS:
            self.steps, self.trying = 0, [other for other in AUTO_COUNTS if other != self.best]
        return False


class Speculation:
    """Draft counts of an engine.

    Attributes:
        fixed: the number of drafts; None measures.
        drafted, accepted: tokens so far.
        say: told in a sentence whenever measuring changes the number of drafts.
    """

    def __init__(self, fixed: int | None) -> None:
        if fixed is not None and not 0 <= fixed <= MAX_DRAFTS:
            raise SpeculationError(f"speculate is {fixed}: allowed are auto, off and 0 to {MAX_DRAFTS} drafts")
        self.fixed = fixed
        self.drafted = self.accepted = 0
        self.say: Callable[[str], None] = lambda sentence: None
        self._said: dict[int, int] = {}
        self._acceptance = _Acceptance()
        self._batches: dict[int, _Batch] = {}
        self._pause = FIRST_PAUSE
        self._resting = 0

    @property
    def keeps_up(self) -> bool:
        """Whether requests that are admitted now are to be able to draft."""
        return self._resting == 0 if self.fixed is None else self.fixed > 0

    @property
    def acceptance(self) -> float:
        """Share of the drafts that were accepted; 0 without any."""
        return self.accepted / self.drafted if self.drafted else 0.0

    def count(self, requests: int) -> int:
        """Drafts per request in a step of so many decoding requests."""
        if self.fixed is not None:
            return self.fixed
        return 0 if self._resting else self._batch(requests).choose()

    def verified(self, drafted: int, accepted: int) -> None:
        """What became of one request's drafts in a step."""
        self.drafted += drafted
        self.accepted += accepted
        self._acceptance.add(drafted, accepted)

    def observe(self, requests: int, count: int, seconds: float) -> None:
        """A step in which `requests` decoded with `count` drafts each took so many seconds, which are without the MTP layer's
        upkeep if `count` is 0."""
        if self.fixed is None and not self._resting and self._batch(requests).add(count, seconds):
            self._conclude(requests)

    def rest(self) -> None:
        """A step without drafts while resting."""
        if self._resting:
            self._resting -= 1
            if not self._resting:
                self._batches.clear()

    def describe(self) -> str:
        """What is done now, in words."""
        if self.fixed is not None:
            return f"{self.fixed} drafts" if self.fixed else "off"
        if self._resting:
            return "auto, off: it does not help here"
        best = {batch.best for batch in self._batches.values() if not batch.trying}
        return f"auto, {' or '.join(map(str, sorted(best)))} drafts" if best else "auto, still measuring"

    def _batch(self, requests: int) -> _Batch:
        return self._batches.setdefault(max(1, requests).bit_length(), _Batch(self._acceptance))

    def _conclude(self, requests: int) -> None:
        batch, size = self._batch(requests), max(1, requests).bit_length()
        if batch.best:
            self._pause = FIRST_PAUSE
        else:
            self._resting, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)
        if self._said.get(size) != batch.best:
            self._said[size] = batch.best
            where = f"speculation where about {requests} requests decode"
            rates = ", ".join(f"{batch.rate(count):.0f} with {count}" for count in batch.arms)
            what = f"{batch.best} drafts a step" if batch.best else "off, as drafts do not help"
            self.say(f"{where}: {what} (tokens/s of a request: {rates}; accepted {self.acceptance:.0%})")
