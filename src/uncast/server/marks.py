"""Reading marked text as it arrives: however it is cut into pieces, the result is the same."""

from __future__ import annotations

from collections.abc import Sequence


def held_back(text: str, marks: Sequence[str]) -> int:
    """How many characters at the end may be the beginning of a mark."""
    longest = 0
    for mark in marks:
        for size in range(min(len(mark) - 1, len(text)), longest, -1):
            if text.endswith(mark[:size]):
                longest = size
                break
    return longest


def first_of(text: str, marks: Sequence[str]) -> tuple[int, str] | None:
    """Where the first mark is, and which; of two that begin together the longer."""
    found = [(text.find(mark), -len(mark), mark) for mark in marks if mark in text]
    return (min(found)[0], min(found)[2]) if found else None


class ThinkingReader:
    """Separates reasoning, up to `</think>`, from the answer. Blanks around both are dropped where there is reasoning.

    Attributes:
        inside: True within the reasoning, False after it, None while the text may still open with `<think>`.
    """

    BEGIN, END = "<think>", "</think>"

    def __init__(self, inside: bool | None) -> None:
        self.inside = inside
        self._held, self._trim = "", inside is True

    def push(self, text: str) -> tuple[str, str]:
        """The reasoning and the answer that became certain."""
        self._held += text
        if self.inside is None and not self._decide():
            return "", ""
        reasoning = self._reason() if self.inside else ""
        return (reasoning, "") if self.inside else (reasoning, self._rest())

    def flush(self) -> tuple[str, str]:
        """The same at the end of the text."""
        held, self._held = self._held, ""
        if self.inside:
            return (held.strip() if self._trim else held.rstrip()), ""
        return "", held.lstrip() if self._trim else held

    def _decide(self) -> bool:
        start = self._held.lstrip()
        if start.startswith(self.BEGIN):
            self._held, self.inside, self._trim = start[len(self.BEGIN) :], True, True
        elif not self.BEGIN.startswith(start):
            self.inside = False
        return self.inside is not None

    def _reason(self) -> str:
        if self._trim:
            self._held = self._held.lstrip()
            while self._held.startswith(self.BEGIN):  # a model that opens what its prompt has opened
                self._held = self._held[len(self.BEGIN) :].lstrip()
            if self._held and self.BEGIN.startswith(self._held):
                return ""
        before, mark, after = self._held.partition(self.END)
        if mark:
            self.inside, self._held, self._trim = False, after, True
            return before.rstrip()
        keep = held_back(self._held, (self.END,))
        shown = self._held[: len(self._held) - keep].rstrip()
        self._held = self._held[len(shown) :]
        self._trim = self._trim and not shown
        return shown

    def _rest(self) -> str:
        text, self._held = self._held, ""
        if self._trim:
            text = text.lstrip()
            self._trim = not text
        return text
