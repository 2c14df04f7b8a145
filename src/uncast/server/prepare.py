"""From a checked body to engine requests: prompts to token ids, defaults, and the limits of the served model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from uncast.engine.grammar import Grammar
from uncast.engine.request import Request, RequestError
from uncast.engine.sampler import SamplingError, SamplingParams
from uncast.engine.tokenizer import TemplateError
from uncast.server.errors import ApiError, bad_request
from uncast.server.requests import (
    AnyMessage,
    AssistantTurn,
    ChatRequest,
    CompletionRequest,
    SamplingBody,
    ToolResult,
)
from uncast.server.state import Served

_INLINE_CHARS = 2000
_SEED_SPACE = 2**63
_TAKEN = ("messages", "tools", "add_generation_prompt")
DEFAULT_COMPLETION_TOKENS = 16

T = TypeVar("T")


@dataclass(frozen=True)
class Prompt:
    """One prompt of a request.

    Attributes:
        ids: its tokens.
        text: what `echo` shows.
        param: the field it came from.
    """

    ids: list[int]
    text: str
    param: str


async def completion_prompts(body: CompletionRequest, served: Served) -> list[Prompt]:
    """The prompts of a completion request; token ids become text only if `echo` needs it."""
    given = body.prompt
    if isinstance(given, str):
        return [await _from_text(given, served, "prompt")]
    items: list[str | list[int]] = []
    flat: list[int] = []
    for item in given:
        if isinstance(item, int):
            flat.append(item)
        else:
            items.append(item)
    if flat:
        return [_from_ids(flat, served, "prompt", echo=bool(body.echo))]
    prompts = []
    for index, item in enumerate(items):
        param = f"prompt.{index}"
        if isinstance(item, str):
            prompts.append(await _from_text(item, served, param))
        else:
            prompts.append(_from_ids(item, served, param, echo=bool(body.echo)))
    return prompts


async def chat_prompt(body: ChatRequest, served: Served, *, tools: bool = False) -> Prompt:
    """The conversation, rendered by the model's template.

    Args:
        tools: whether the template sees the body's tools.

    Raises:
        ApiError: 400 naming `messages` or `chat_template_kwargs`.
    """
    messages = [_message(message) for message in body.messages]
    chars = sum(len(message["content"]) for message in messages)
    variables: dict[str, Any] = dict(body.chat_template_kwargs or {})
    taken = next((name for name in variables if name in _TAKEN or name.endswith("_token")), None)
    if taken is not None:
        param = f"chat_template_kwargs.{taken}"
        raise bad_request(f"{param} is set by the server", param, "invalid_combination")
    if tools:
        variables["tools"] = [tool.model_dump(exclude_unset=True) for tool in body.tools or ()]
        chars += _INLINE_CHARS
    try:
        text = await _aside(lambda: _render(served, messages, variables), chars)
        ids = await _aside(lambda: served.tokenizer.encode(text, add_special_tokens=False), chars)
    except TemplateError as error:
        raise bad_request(str(error), "messages", "chat_template") from None
    if not ids:
        raise bad_request("messages: they render to an empty prompt", "messages", "empty_prompt")
    return Prompt(ids, text, "messages")


def _render(served: Served, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
    """The rendered conversation. Arguments of earlier calls are objects for most templates; DeepSeek's add them to a text."""
    try:
        return served.tokenizer.render(_with_objects(messages), **{"add_generation_prompt": True, **variables})
    except TemplateError:
        if not any("tool_calls" in message for message in messages):
            raise
        return served.tokenizer.render(messages, **{"add_generation_prompt": True, **variables})


def _with_objects(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    def parsed(call: dict[str, Any]) -> dict[str, Any]:
        arguments = json.loads(call["function"]["arguments"])
        return {**call, "function": {**call["function"], "arguments": arguments}}

    return [
        {**message, "tool_calls": [parsed(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def _message(message: AnyMessage) -> dict[str, Any]:
    parts = message.content or ""
    content = parts if isinstance(parts, str) else "".join(part.text for part in parts)
    rendered: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": content,
    }
    if message.name is not None:
        rendered["name"] = message.name
    if isinstance(message, ToolResult):
        rendered["tool_call_id"] = message.tool_call_id
    if isinstance(message, AssistantTurn):
        if message.reasoning_content is not None:
            rendered["reasoning_content"] = message.reasoning_content
        if message.tool_calls:
            rendered["tool_calls"] = [call.model_dump() for call in message.tool_calls]
    return rendered


def check_calls(body: ChatRequest) -> None:
    """Raises `ApiError` 400 on arguments of earlier calls that are not a JSON object."""
    for index, message in enumerate(body.messages):
        for number, call in enumerate((message.tool_calls or ()) if isinstance(message, AssistantTurn) else ()):
            try:
                fine = isinstance(json.loads(call.function.arguments), dict)
            except (ValueError, RecursionError):
                fine = False
            if not fine:
                param = f"messages.{index}.tool_calls.{number}.function.arguments"
                raise bad_request(f"{param}: should be the text of a JSON object", param, "invalid_json")


async def _from_text(text: str, served: Served, param: str) -> Prompt:
    ids = await _aside(lambda: served.tokenizer.encode(text), len(text))
    if not ids:
        raise bad_request(f"{param} is empty: at least one token is needed", param, "empty_prompt")
    return Prompt(ids, text, param)


def _from_ids(ids: list[int], served: Served, param: str, *, echo: bool) -> Prompt:
    top = max(ids)
    if top >= served.vocab_size:
        raise bad_request(
            f"{param} has token {top}: the vocabulary has ids 0 to {served.vocab_size - 1}", param, "unknown_token"
        )
    return Prompt(ids, served.tokenizer.decode(ids) if echo else "", param)


async def _aside(work: Callable[[], T], chars: int) -> T:
    """Runs long work in a thread, so that other requests go on."""
    return work() if chars <= _INLINE_CHARS else await asyncio.to_thread(work)


def check_model(name: str | None, served_name: str) -> None:
    """Raises `ApiError` 404 if `name` is not the served model."""
    if name is not None and name != served_name:
        raise ApiError(
            404,
            f"the model {name[:200]!r} does not exist: this server has {served_name!r}",
            param="model",
            code="model_not_found",
        )


def check_together(body: SamplingBody) -> None:
    """Raises `ApiError` 400 on fields that are valid alone but not together."""
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options is only allowed with stream", "stream_options", "invalid_combination")
    if isinstance(body, CompletionRequest) and body.echo and body.logprobs is not None:
        raise bad_request(
            "echo is not supported together with logprobs: log-probabilities of prompts are not computed",
            "echo",
            "invalid_combination",
        )
    if isinstance(body, ChatRequest):
        if body.top_logprobs is not None and not body.logprobs:
            raise bad_request("top_logprobs is only allowed with logprobs", "top_logprobs", "invalid_combination")
        if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
            raise bad_request(
                "max_tokens and max_completion_tokens differ: give one of them", "max_tokens", "invalid_combination"
            )


def engine_requests(
    body: SamplingBody,
    prompts: Sequence[Prompt],
    served: Served,
    *,
    request_id: str,
    defaults: Mapping[str, float],
    logprobs: int | None,
    grammar: Grammar | None = None,
    shown: Sequence[str] = (),
) -> list[Request]:
    """One engine request per choice: prompt 0's `n` first, then prompt 1's.

    Args:
        grammar: of every answer.
        shown: special tokens that are part of the text.

    Raises:
        ApiError: 400 naming the field.
    """
    for token in body.logit_bias or ():
        if int(token) >= served.vocab_size:
            raise bad_request(
                f"logit_bias has token {token}: the vocabulary has ids 0 to {served.vocab_size - 1}",
                "logit_bias",
                "unknown_token",
            )
    n = body.n or 1
    count = n * len(prompts)
    if count > served.max_waiting:
        raise bad_request(
            f"{len(prompts)} prompts with n={n} are {count} choices: this server queues at most {served.max_waiting}",
            "n",
            "too_many_choices",
        )
    stop = [body.stop] if isinstance(body.stop, str) else list(body.stop or ())
    requests: list[Request] = []
    for prompt in prompts:
        budget = _max_tokens(body, prompt, served)
        for choice in range(n):
            index = len(requests)
            try:
                request = Request(
                    prompt=prompt.ids,
                    params=_params(body, choice, defaults, logprobs),
                    max_tokens=budget,
                    stop=stop,
                    ignore_eos=bool(body.ignore_eos),
                    grammar=grammar,
                    shown_special=shown,
                    request_id=f"{request_id}-{index}",
                )
                request.check_fits(vocab_size=served.vocab_size, context=served.context, pool_rows=served.pool_rows)
            except (RequestError, SamplingError) as error:
                raise bad_request(str(error), str(error).split(" ", 1)[0], "invalid_value") from None
            requests.append(request)
    return requests


def _max_tokens(body: SamplingBody, prompt: Prompt, served: Served) -> int:
    """New tokens at most; checked against the context and the pool."""
    field, asked = "max_tokens", body.max_tokens
    if isinstance(body, ChatRequest):
        if body.max_completion_tokens is not None:
            field, asked = "max_completion_tokens", body.max_completion_tokens
    elif asked is None:
        asked = DEFAULT_COMPLETION_TOKENS
    limit = "the model's context" if served.context <= served.pool_rows else "the server's KV pool"
    room = served.max_total - len(prompt.ids)
    if room < 1:
        raise bad_request(
            f"{prompt.param} has {len(prompt.ids)} tokens: {limit} of {served.max_total} has no room for an answer",
            prompt.param,
            "context_length_exceeded",
        )
    if asked is None:
        return room
    if asked > room:
        raise bad_request(
            f"{len(prompt.ids)} prompt tokens and {field} of {asked} exceed {limit} of {served.max_total} tokens",
            field,
            "context_length_exceeded",
        )
    return asked


def _params(body: SamplingBody, choice: int, defaults: Mapping[str, float], logprobs: int | None) -> SamplingParams:
    def pick(name: str, off: float) -> float:
        given = getattr(body, name)
        return float(defaults.get(name, off) if given is None else given)

    return SamplingParams(
        temperature=pick("temperature", 1.0),
        top_k=max(0, int(pick("top_k", 0))),
        top_p=pick("top_p", 1.0),
        min_p=pick("min_p", 0.0),
        seed=None if body.seed is None else (body.seed + choice) % _SEED_SPACE,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        logit_bias={int(token): bias for token, bias in (body.logit_bias or {}).items()},
        logprobs=logprobs,
    )
