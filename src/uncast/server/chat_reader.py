"""One choice's text, as it arrives, into reasoning, content and tool calls."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, field

from uncast.server.marks import ThinkingReader, first_of, held_back
from uncast.server.tool_formats import ToolFormat, Tools


@dataclass(frozen=True)
class Call:
    """A tool call; `arguments` is the text of a JSON object."""

    id: str
    name: str
    arguments: str


@dataclass
class Piece:
    """What became certain: texts to be added, and calls that are complete."""

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)


class ToolReader:
    """Finds tool calls in an answer. A call is given out when it is complete; a malformed or unfinished one is content, as is a
    call of a tool that was not offered. Blanks beside calls and the marks around them are dropped."""

    def __init__(self, form: ToolFormat, tools: Tools) -> None:
        self._form, self._tools = form, tools
        self._held, self._blank, self._after = "", "", False

    def push(self, text: str) -> Piece:
        """What became certain with this text."""
        self._held += text
        piece = Piece()
        while self._step(piece):
            pass
        return piece

    def flush(self) -> Piece:
        """What is left at the end of the text."""
        held, self._held = self._held, ""
        content = self._shown(held)
        return Piece(content=content if self._after else content + self._take_blank())

    def _step(self, piece: Piece) -> bool:
        """Takes text, a mark or a call from the held text; False when that needs more text."""
        marks = (self._form.begin, *self._form.around)
        found = first_of(self._held, marks)
        if found is None:
            keep = held_back(self._held, marks)
            piece.content += self._shown(self._held[: len(self._held) - keep])
            self._held = self._held[len(self._held) - keep :]
            return False
        place, mark = found
        piece.content += self._shown(self._held[:place])
        self._held = self._held[place:]
        if mark != self._form.begin:
            self._held, self._blank, self._after = self._held[len(mark) :], "", True
            return True
        end = self._held.find(self._form.end, len(mark))
        if end < 0:
            return False
        raw, self._held = self._held[: end + len(self._form.end)], self._held[end + len(self._form.end) :]
        call = self._form.read(raw[len(mark) : end], self._tools)
        if call is None:
            piece.content += self._shown(raw)
        else:
            self._blank, self._after = "", True
            arguments = json.dumps(call[1], ensure_ascii=False)
            piece.calls.append(Call(f"call_{uuid.uuid4().hex[:24]}", call[0], arguments))
        return True

    def _shown(self, text: str) -> str:
        """Text for the content, without blanks at its end: they wait for what comes."""
        body = text.rstrip()
        if not body:
            self._blank += text
            return ""
        blank = "" if self._after else self._take_blank()
        shown, self._blank, self._after = body.lstrip() if self._after else body, text[len(body) :], False
        return blank + shown

    def _take_blank(self) -> str:
        blank, self._blank = self._blank, ""
        return blank


class ChatReader:
    """Reasoning first, tool calls in what comes after it; either may be off."""

    def __init__(self, thinking: ThinkingReader | None, tools: ToolReader | None) -> None:
        self._thinking, self._tools = thinking, tools
        self.called = False

    def push(self, text: str, *, last: bool = False) -> Piece:
        """What became certain; everything that is left with the `last` text."""
        reasoning, content = ("", text) if self._thinking is None else self._thinking.push(text)
        if last and self._thinking is not None:
            more = self._thinking.flush()
            reasoning, content = reasoning + more[0], content + more[1]
        piece = Piece(content=content) if self._tools is None else self._tools.push(content)
        if last and self._tools is not None:
            piece.content += self._tools.flush().content
        piece.reasoning = reasoning
        self.called = self.called or bool(piece.calls)
        return piece
