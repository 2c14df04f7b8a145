"""From engine outputs to OpenAI's answers and stream chunks, in both forms of the API."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel

from uncast.engine.request import RequestOutput
from uncast.engine.request import TokenLogprob as EngineLogprob
from uncast.server.chat_reader import Call, ChatReader, Piece
from uncast.server.prepare import Prompt
from uncast.server.responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChunkChoice,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Delta,
    FinishReason,
    Function,
    PromptTokensDetails,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    TopLogprob,
    Usage,
)
from uncast.server.tokens import TextOffsets, TokenTexts

_FLOOR = -9999.0
"""Shown for a probability of 0: JSON has no infinity."""


class Writer(ABC):
    """Writes one API request's answer, whole or in chunks.

    Attributes:
        request_id, created, model: the answer's head.
        include_usage: end a stream with the usage.
    """

    def __init__(
        self,
        *,
        request_id: str,
        created: int,
        model: str,
        prompts: Sequence[Prompt],
        n: int,
        texts: TokenTexts,
        logprobs: bool,
        include_usage: bool,
    ) -> None:
        self.request_id, self.created, self.model = request_id, created, model
        self._prompts, self._n, self._texts, self._logprobs = prompts, n, texts, logprobs
        self.include_usage = include_usage
        self._last: dict[int, RequestOutput] = {}

    def note(self, index: int, output: RequestOutput) -> None:
        """Counts an output in `usage`."""
        self._last[index] = output

    def usage(self) -> Usage:
        """Tokens so far; each prompt counts once, whatever n is."""
        prompt = sum(len(prompt.ids) for prompt in self._prompts)
        completion = sum(output.completion_tokens for output in self._last.values())
        cached = sum(output.cached_tokens for index, output in self._last.items() if index % self._n == 0)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
        )

    @abstractmethod
    def whole(self, outputs: Sequence[Sequence[RequestOutput]]) -> BaseModel:
        """The answer from all outputs of each choice."""

    @abstractmethod
    def opening(self) -> Iterator[BaseModel]:
        """Chunks before the first output."""

    @abstractmethod
    def chunk(self, index: int, output: RequestOutput) -> BaseModel | None:
        """The chunk of an output; None if it holds nothing to show."""

    @abstractmethod
    def closing(self) -> BaseModel:
        """The chunk with the usage and without choices."""


def _nothing(output: RequestOutput) -> bool:
    return not (output.text or output.logprobs or output.finished)


def _call(call: Call) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": Function(name=call.name, arguments=call.arguments)}


def _message(piece: Piece) -> AssistantMessage:
    """A message; fields that say nothing are left out, as by servers without tools."""
    more: dict[str, Any] = {}
    if piece.reasoning:
        more["reasoning_content"] = piece.reasoning
    if piece.calls:
        more["tool_calls"] = [ToolCall(**_call(call)) for call in piece.calls]
    content = None if piece.calls and not piece.content else piece.content
    return AssistantMessage(role="assistant", content=content, refusal=None, **more)


def _reason(output: RequestOutput) -> FinishReason | None:
    if output.finish_reason is None:
        return None
    return "stop" if output.finish_reason == "stop" else "length"


class CompletionWriter(Writer):
    """`text_completion` objects."""

    def __init__(self, *, echo: bool, top: int, **head: Any) -> None:
        super().__init__(**head)
        self._echo, self._top = echo, top
        self._offsets = [TextOffsets() for _ in range(self._n * len(self._prompts))]

    def whole(self, outputs: Sequence[Sequence[RequestOutput]]) -> Completion:
        choices = []
        for index, parts in enumerate(outputs):
            self.note(index, parts[-1])
            text = "".join(part.text for part in parts)
            logprobs = self._logprobs_of(index, [entry for part in parts for entry in part.logprobs])
            choices.append(self._choice(index, self._echoed(index) + text, logprobs, _reason(parts[-1])))
        return self._completion(choices, self.usage())

    def opening(self) -> Iterator[Completion]:
        if self._echo:
            for index in range(self._n * len(self._prompts)):
                yield self._chunk([self._choice(index, self._echoed(index), None, None)])

    def chunk(self, index: int, output: RequestOutput) -> Completion | None:
        self.note(index, output)
        if _nothing(output):
            return None
        logprobs = self._logprobs_of(index, output.logprobs) if output.logprobs else None
        return self._chunk([self._choice(index, output.text, logprobs, _reason(output))])

    def closing(self) -> Completion:
        return self._completion([], self.usage())

    def _echoed(self, index: int) -> str:
        return self._prompts[index // self._n].text if self._echo else ""

    def _choice(
        self, index: int, text: str, logprobs: CompletionLogprobs | None, reason: FinishReason | None
    ) -> CompletionChoice:
        return CompletionChoice(index=index, text=text, logprobs=logprobs, finish_reason=reason)

    def _chunk(self, choices: list[CompletionChoice]) -> Completion:
        chunk = self._completion(choices, None)
        if not self.include_usage:
            chunk.model_fields_set.discard("usage")
        return chunk

    def _completion(self, choices: list[CompletionChoice], usage: Usage | None) -> Completion:
        return Completion(
            id=self.request_id,
            object="text_completion",
            created=self.created,
            model=self.model,
            choices=choices,
            usage=usage,
        )

    def _logprobs_of(self, index: int, entries: Sequence[EngineLogprob]) -> CompletionLogprobs | None:
        if not self._logprobs:
            return None
        texts = self._texts
        return CompletionLogprobs(
            tokens=[texts.text(entry.token_id) for entry in entries],
            token_logprobs=[_finite(entry.logprob) for entry in entries],
            top_logprobs=[self._best(entry) for entry in entries] if self._top else None,
            text_offset=[self._offsets[index].push(texts.raw(entry.token_id)) for entry in entries],
        )

    def _best(self, entry: EngineLogprob) -> dict[str, float]:
        pairs = [*entry.top[: self._top], (entry.token_id, entry.logprob)]
        return {self._texts.text(token): _finite(logprob) for token, logprob in pairs}


class ChatWriter(Writer):
    """`chat.completion` and `chat.completion.chunk` objects."""

    def __init__(self, *, readers: Sequence[ChatReader], **head: Any) -> None:
        """Args: readers: of each choice's text."""
        super().__init__(**head)
        self._readers, self._calls = readers, [0] * len(readers)

    def whole(self, outputs: Sequence[Sequence[RequestOutput]]) -> ChatCompletion:
        choices = []
        for index, parts in enumerate(outputs):
            self.note(index, parts[-1])
            piece = self._readers[index].push("".join(part.text for part in parts), last=True)
            choices.append(
                ChatChoice(
                    index=index,
                    message=_message(piece),
                    logprobs=self._logprobs_of([entry for part in parts for entry in part.logprobs]),
                    finish_reason=self._reason(index, parts[-1]) or "length",
                )
            )
        return ChatCompletion(
            id=self.request_id,
            object="chat.completion",
            created=self.created,
            model=self.model,
            choices=choices,
            usage=self.usage(),
        )

    def opening(self) -> Iterator[ChatChunk]:
        for index in range(self._n):
            delta = Delta(role="assistant", content="")
            yield self._chunk([ChunkChoice(index=index, delta=delta, logprobs=None, finish_reason=None)])

    def chunk(self, index: int, output: RequestOutput) -> ChatChunk | None:
        self.note(index, output)
        piece = self._readers[index].push(output.text, last=output.finished)
        if not (piece or output.logprobs or output.finished):
            return None
        logprobs = self._logprobs_of(output.logprobs) if output.logprobs else None
        reason = self._reason(index, output)
        return self._chunk(
            [ChunkChoice(index=index, delta=self._delta(index, piece), logprobs=logprobs, finish_reason=reason)]
        )

    def _delta(self, index: int, piece: Piece) -> Delta:
        fields: dict[str, Any] = {}
        if piece.reasoning:
            fields["reasoning_content"] = piece.reasoning
        if piece.content or not piece:
            fields["content"] = piece.content
        if piece.calls:
            first = self._calls[index]
            self._calls[index] += len(piece.calls)
            fields["tool_calls"] = [
                ToolCallDelta(index=first + place, **_call(call)) for place, call in enumerate(piece.calls)
            ]
        return Delta(**fields)

    def _reason(self, index: int, output: RequestOutput) -> FinishReason | None:
        reason = _reason(output)
        return "tool_calls" if reason == "stop" and self._readers[index].called else reason

    def closing(self) -> ChatChunk:
        return self._head([], self.usage())

    def _chunk(self, choices: list[ChunkChoice]) -> ChatChunk:
        chunk = self._head(choices, None)
        if not self.include_usage:
            chunk.model_fields_set.discard("usage")
        return chunk

    def _head(self, choices: list[ChunkChoice], usage: Usage | None) -> ChatChunk:
        return ChatChunk(
            id=self.request_id,
            object="chat.completion.chunk",
            created=self.created,
            model=self.model,
            choices=choices,
            usage=usage,
        )

    def _logprobs_of(self, entries: Sequence[EngineLogprob]) -> ChatLogprobs | None:
        if not self._logprobs:
            return None
        content = [
            TokenLogprob(
                token=self._texts.text(entry.token_id),
                logprob=_finite(entry.logprob),
                bytes=list(self._texts.raw(entry.token_id)),
                top_logprobs=[self._top(token, logprob) for token, logprob in entry.top],
            )
            for entry in entries
        ]
        return ChatLogprobs(content=content, refusal=None)

    def _top(self, token: int, logprob: float) -> TopLogprob:
        return TopLogprob(token=self._texts.text(token), logprob=_finite(logprob), bytes=list(self._texts.raw(token)))


def _finite(logprob: float) -> float:
    return logprob if logprob > _FLOOR else _FLOOR
