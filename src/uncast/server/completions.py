"""POST /v1/completions and /v1/chat/completions."""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from uncast.engine.request import Request as EngineRequest
from uncast.server.answers import ChatWriter, CompletionWriter, Writer
from uncast.server.body import B, check_content_type, parse, read_body
from uncast.server.errors import ApiError, aborted, draining
from uncast.server.generation import Generation, gather
from uncast.server.prepare import (
    Prompt,
    chat_prompt,
    check_calls,
    check_model,
    check_together,
    completion_prompts,
    engine_requests,
)
from uncast.server.requests import ChatRequest, CompletionRequest, SamplingBody
from uncast.server.state import Served, ServerState
from uncast.server.stream import EventStream, before, while_connected
from uncast.server.structured import answer_grammar, offered_tools

_DONE = "[DONE]"


async def complete(request: Request) -> Response:
    """The handler of /v1/completions."""
    state: ServerState = request.app.state.server
    served = state.require_ready()
    body = await _body(request, state, CompletionRequest)
    prompts = await completion_prompts(body, served)
    request_id = f"cmpl-{uuid.uuid4().hex}"
    head = _head(body, prompts, state, served, request_id, body.logprobs is not None)
    writer = CompletionWriter(echo=bool(body.echo), top=body.logprobs or 0, **head)
    requests = engine_requests(
        body,
        prompts,
        served,
        request_id=request_id,
        defaults=state.config.sampling_defaults,
        logprobs=body.logprobs,
        grammar=await answer_grammar(body, served),
    )
    return await _answer(request, state, served, body, requests, writer)


async def chat(request: Request) -> Response:
    """The handler of /v1/chat/completions."""
    state: ServerState = request.app.state.server
    served = state.require_ready()
    body = await _body(request, state, ChatRequest)
    check_calls(body)
    tools = offered_tools(body, served)
    prompt = await chat_prompt(body, served, tools=tools is not None)
    prompts = [prompt]
    request_id = f"chatcmpl-{uuid.uuid4().hex}"
    readers = [served.format.reader(prompt.text, tools) for _ in range(body.n or 1)]
    inside = served.format.begins_inside(prompt.text) if served.format.reasoning else False
    writer = ChatWriter(readers=readers, **_head(body, prompts, state, served, request_id, bool(body.logprobs)))
    requests = engine_requests(
        body,
        prompts,
        served,
        request_id=request_id,
        defaults=state.config.sampling_defaults,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        grammar=await answer_grammar(body, served, tools, inside=inside),
        shown=served.format.shown(tools),
    )
    return await _answer(request, state, served, body, requests, writer)


async def _body(request: Request, state: ServerState, model: type[B]) -> B:
    raw = await before(state.closing, read_body(request, state.config.max_body_bytes), draining())
    check_content_type(request)
    body = parse(raw, model)
    assert isinstance(body, SamplingBody)
    check_model(body.model, state.config.model_name)
    check_together(body)
    return body


def _head(
    body: SamplingBody, prompts: Sequence[Prompt], state: ServerState, served: Served, request_id: str, logprobs: bool
) -> dict[str, Any]:
    options = body.stream_options
    return {
        "request_id": request_id,
        "created": int(time.time()),
        "model": state.config.model_name,
        "prompts": prompts,
        "n": body.n or 1,
        "texts": served.texts,
        "logprobs": logprobs,
        "include_usage": options is not None and bool(options.include_usage),
    }


async def _answer(
    request: Request,
    state: ServerState,
    served: Served,
    body: SamplingBody,
    requests: Sequence[EngineRequest],
    writer: Writer,
) -> Response:
    state.require_ready()  # again: reading the body took time
    generation = Generation(served.engine, requests, state.metrics)
    if body.stream:
        last = (json.dumps(aborted().body()), _DONE)
        return EventStream(generation, _events(generation, writer), expired=state.expired, last=last)
    async with generation:
        outputs = await while_connected(request.receive, gather(generation))
    return Response(_dump(writer.whole(outputs)), media_type="application/json")


async def _events(generation: Generation, writer: Writer) -> AsyncGenerator[str, None]:
    for chunk in writer.opening():
        yield _dump(chunk)
    try:
        async with contextlib.aclosing(generation.outputs()) as outputs:
            async for index, output in outputs:
                chunk_or_none = writer.chunk(index, output)
                if chunk_or_none is not None:
                    yield _dump(chunk_or_none)
    except ApiError as error:
        yield json.dumps(error.body())
    else:
        if writer.include_usage:
            yield _dump(writer.closing())
    yield _DONE


def _dump(answer: BaseModel) -> str:
    return answer.model_dump_json(exclude_unset=True)
