"""The OpenAPI 3.1 document, made from the models that check the bodies, with the served model's limits filled in."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from uncast.server.metrics import CONTENT_TYPE
from uncast.server.requests import MAX_TOKENS, ChatRequest, CompletionRequest
from uncast.server.responses import (
    ChatChunk,
    ChatCompletion,
    Completion,
    ErrorBody,
    ModelCard,
    ModelList,
    ProfileStatus,
    Status,
)
from uncast.server.state import ServerState
from uncast.version import __version__

_ERRORS = {
    400: "The body is malformed; `param` names the field at fault.",
    401: "The API key is missing or wrong.",
    404: "There is no such model.",
    409: "Not possible in the profiler's present state.",
    413: "The body is too large.",
    415: "The body is not declared as JSON.",
    429: "The queue is full.",
    500: "The trace cannot be written.",
    503: "The server is shutting down, or its engine failed.",
}
_BODIES: tuple[type[BaseModel], ...] = (CompletionRequest, ChatRequest)
_ANSWERS: tuple[type[BaseModel], ...] = (
    Completion, ChatCompletion, ChatChunk, ErrorBody, ModelCard, ModelList, ProfileStatus, Status,
)  # fmt: skip


def document(state: ServerState) -> dict[str, Any]:
    """The document with the served model's limits; `securitySchemes` only with an API key."""
    wanted: list[tuple[type[BaseModel], Any]] = [(model, "validation") for model in _BODIES]
    wanted += [(model, "serialization") for model in _ANSWERS]
    _, schemas = models_json_schema(wanted, ref_template="#/components/schemas/{model}")
    components: dict[str, Any] = {"schemas": schemas["$defs"]}
    _limit(components["schemas"], vocab_size=state.served.vocab_size, total=state.served.max_total)
    locked = state.config.api_key is not None
    if locked:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "uncast",
            "version": __version__,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": _paths(locked),
        "components": components,
    }


def _limit(schemas: dict[str, Any], *, vocab_size: int, total: int) -> None:
    """Token ids below the vocabulary's size; new tokens so that one prompt token fits beside them."""
    for name in ("CompletionRequest", "ChatRequest"):
        fields = schemas[name]["properties"]
        for field in ("max_tokens", "max_completion_tokens"):
            if field in fields:
                _set_maximum(fields[field], total - 1)
    _set_maximum(schemas["CompletionRequest"]["properties"]["prompt"], vocab_size - 1)


def _set_maximum(schema: Any, maximum: int) -> None:
    if isinstance(schema, dict):
        if schema.get("maximum") == MAX_TOKENS:
            schema["maximum"] = maximum
        for value in schema.values():
            _set_maximum(value, maximum)
    elif isinstance(schema, list):
        for value in schema:
            _set_maximum(value, maximum)


def _paths(locked: bool) -> dict[str, Any]:
    def operation(
        name: str, summary: str, content: dict[str, Any], *errors: int, key: bool = False, **more: Any
    ) -> dict[str, Any]:
        answers: dict[str, Any] = {"200": {"description": "Success.", "content": content}}
        for status in sorted({*errors, *((401,) if key and locked else ())}):
            answers[str(status)] = _error(status)
        security: dict[str, Any] = {"security": [{"key": []}]} if key and locked else {}
        return {"operationId": name, "summary": summary, "responses": answers, **security, **more}

    def generation(name: str, summary: str, body: str, answer: str, chunk: str) -> dict[str, Any]:
        # OpenAPI 3.1 has no schema for single events: 3.2 will call it itemSchema.
        content = {**_json(answer), "text/event-stream": {"x-event-schema": _ref(chunk)}}
        request = {"requestBody": {"required": True, "content": _json(body)}}
        return operation(name, summary, content, 400, 404, 413, 415, 429, 503, key=True, **request)

    model = {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    ready = operation("ready", "Whether requests are accepted", _json("Status"))
    health = operation("health", "Whether the process lives and its engine has not failed", _json("Status"))
    for probe in (ready, health):
        probe["responses"]["503"] = {"description": "No.", "content": _json("Status")}
    text = {CONTENT_TYPE.partition(";")[0]: {"schema": {"type": "string"}}}
    return {
        "/health": {"get": health},
        "/ready": {"get": ready},
        "/metrics": {"get": operation("metrics", "Prometheus metrics", text)},
        "/openapi.json": {
            "get": operation("openapi", "This document", {"application/json": {"schema": {"type": "object"}}})
        },
        "/v1/models": {"get": operation("models", "The served model", _json("ModelList"), 503, key=True)},
        "/v1/models/{model}": {
            "get": operation("model", "One model", _json("ModelCard"), 404, 503, key=True, parameters=[model])
        },
        "/v1/completions": {
            "post": generation("complete", "Continue a text", "CompletionRequest", "Completion", "Completion")
        },
        "/v1/chat/completions": {
            "post": generation("chat", "Answer a conversation", "ChatRequest", "ChatCompletion", "ChatChunk")
        },
        "/start_profile": {
            "post": operation("start_profile", "Start a torch trace", _json("ProfileStatus"), 409, key=True)
        },
        "/stop_profile": {
            "post": operation("stop_profile", "End the trace and write it", _json("ProfileStatus"), 409, 500, key=True)
        },
    }


def _json(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": _ref(name)}}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _error(status: int) -> dict[str, Any]:
    answer: dict[str, Any] = {"description": _ERRORS[status], "content": _json("ErrorBody")}
    if status == 429:
        answer["headers"] = {"Retry-After": {"required": True, "schema": {"type": "integer", "minimum": 1}}}
    return answer
