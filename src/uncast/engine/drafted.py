"""What goes into a step that verifies drafts (see `drafted_step`), and what comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from uncast.engine.on_its_way import OnItsWay
from uncast.engine.static_step import KNOWN


@dataclass(frozen=True)
class DraftedRequest:
    """One request of a step.

    Attributes:
        pages: of its rows; those that the step's tokens have none for are not accepted.
        tokens: the token to run and its drafts; read only if `source` is `KNOWN`.
        start: the row of the first of them; read only then.
        most: drafts that may be accepted.
        source: the request's place in the step before, which left its tokens on the device, else `KNOWN`.
    """

    pages: Sequence[int]
    tokens: Sequence[int]
    start: int
    most: int
    source: int = KNOWN


@dataclass(frozen=True)
class Verified:
    """What a step says of one request: tokens chosen at each of its rows and whether their logits were finite, how many drafts
    were accepted, and the drafts after the last token."""

    tokens: list[int]
    finite: list[bool]
    accepted: int
    drafts: list[int]


class Report(OnItsWay):
    """What a step found, on its way to the host."""

    def __init__(self, results: torch.Tensor, requests: int, drafts: int) -> None:
        """results: int64 [requests at least, 3 * drafts + 3]."""
        super().__init__(results)
        self._requests, self._q_len = requests, 1 + drafts

    def read(self) -> list[Verified]:
        """By request; waits for it."""
        q = self._q_len
        return [
            Verified(row[:q], [bool(value) for value in row[q : 2 * q]], row[2 * q], row[2 * q + 1 :])
            for row in self._lists()[: self._requests]
        ]
