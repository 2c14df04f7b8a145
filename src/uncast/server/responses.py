"""Response bodies of the OpenAI API."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

FinishReason = Literal["stop", "length", "tool_calls"]


class Answer(BaseModel):
    """Base of all response bodies."""

    model_config = ConfigDict(extra="forbid")


class PromptTokensDetails(Answer):
    cached_tokens: int = Field(ge=0, description="prompt tokens whose rows came from the prefix cache")


class Usage(Answer):
    prompt_tokens: int = Field(ge=0)
    completion_tokens: int = Field(ge=0)
    total_tokens: int = Field(ge=0)
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(Answer):
    """One entry per generated token in each list."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int] = Field(description="where the token's text begins, in characters of the choice's text")


class CompletionChoice(Answer):
    index: int = Field(ge=0)
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class Completion(Answer):
    """Answer of /v1/completions, and each of its stream chunks."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TopLogprob(Answer):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer):
    content: list[TokenLogprob]
    refusal: None = None


class Function(Answer):
    name: str
    arguments: str = Field(description="the text of a JSON object")


class ToolCall(Answer):
    id: str
    type: Literal["function"]
    function: Function


class AssistantMessage(Answer):
    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning_content: str | None = Field(None, description="extension: what the model thought before it answered")
    tool_calls: list[ToolCall] | None = None


class ChatChoice(Answer):
    index: int = Field(ge=0)
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(Answer):
    """Answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ToolCallDelta(ToolCall):
    index: int = Field(ge=0)


class Delta(Answer):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChunkChoice(Answer):
    index: int = Field(ge=0)
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatChunk(Answer):
    """One event of a streamed /v1/chat/completions."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None


class ModelCard(Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int = Field(description="extension: the model's context in tokens")


class ModelList(Answer):
    object: Literal["list"]
    data: list[ModelCard]


class Status(Answer):
    """Answer of /health and /ready."""

    status: Literal["ok", "ready", "draining", "failed"]


class ProfileStatus(Answer):
    """Answer of /start_profile and /stop_profile."""

    status: Literal["started", "written"]
    path: str = Field(description="the trace file, of the server's own file system")


class ErrorDetail(Answer):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Answer):
    """Every answer with a status of 400 or more."""

    error: ErrorDetail
