"""From bytes on the wire to a checked body. Whatever arrives, the outcome is a body or an `ApiError` that names the fault."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json
from starlette.requests import Request

from uncast.server.errors import ApiError, bad_request
from uncast.server.stream import ClientGone

_DISCARD_BYTES = 64 << 20
_DISCARD_SECONDS = 2.0
_ALLOWED = {
    "prompt": "a string, up to 128 strings, token ids, or up to 128 lists of token ids (no list empty)",
    "stop": "a string of 1 to 1000 characters, or up to 4 of them",
    "content": "a string or a list of text parts",
    "tool_choice": "'none', 'auto', 'required' or an object that names a function",
    "json": "a JSON schema, as an object or as a string",
}
"""Fields of several types: what is allowed, said once instead of per type."""

_SAID = {
    "too_short": "should not be empty",
    "string_pattern_mismatch": "should be a token id, without leading zeros",
}
"""Kinds of fault that pydantic words for programmers; the only pattern is that of `logit_bias` keys."""

B = TypeVar("B", bound=BaseModel)


async def read_body(request: Request, limit: int) -> bytes:
    """The body, of at most `limit` bytes. More is read on for a moment and dropped, so that a client that is still sending
    gets to see the answer instead of a reset.

    Raises:
        ApiError: 413.
        ClientGone: the client left before the end.
    """
    declared = request.headers.get("content-length", "")
    too_large = declared.isdecimal() and int(declared) > limit
    received, seen, deadline = bytearray(), 0, None
    more = True
    while more and seen <= limit + _DISCARD_BYTES:
        if too_large and deadline is None:
            deadline = asyncio.get_running_loop().time() + _DISCARD_SECONDS
        try:
            async with asyncio.timeout_at(deadline):
                message = await request.receive()
        except TimeoutError:
            break
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        seen += len(part)
        too_large = too_large or seen > limit
        if not too_large:
            received += part
        more = message.get("more_body", False)
    if too_large:
        raise ApiError(413, f"the body is larger than {limit} bytes", code="body_too_large")
    return bytes(received)


def check_content_type(request: Request) -> None:
    """Raises `ApiError` 415 unless the body is declared as JSON, as it is."""
    encoding = request.headers.get("content-encoding", "").strip()
    if encoding.lower() not in ("", "identity"):
        raise ApiError(
            415, f"the content encoding is {_shown(encoding)}: send the body uncompressed", code="content_encoding"
        )
    given = request.headers.get("content-type", "")
    if given.partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, f"the content type is {_shown(given)}: application/json is needed", code="content_type")


def parse(raw: bytes, model: type[B]) -> B:
    """A checked body.

    Raises:
        ApiError: 400 naming the field.
    """
    try:
        data = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise bad_request(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(data, dict):
        raise bad_request(f"the body is a JSON {_kind(data)}: an object is needed", code="invalid_json")
    unknown = next((name for name in data if name not in model.model_fields), None)
    if unknown is not None:
        raise _unknown_field(unknown)
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise _fault(error.errors(include_url=False, include_context=False), data) from None


def _fault(errors: Sequence[ErrorDetails], data: Mapping[str, Any]) -> ApiError:
    """One error for the first field at fault; of several types that a field may have, the one that came furthest."""
    top = errors[0]["loc"][0] if errors[0]["loc"] else ""
    same = [error for error in errors if error["loc"] and error["loc"][0] == top]
    if errors[0]["type"].startswith("union_tag"):
        return _bad_kind(_path(errors[0], data), errors[0]["input"])
    path, error = max(((_path(e, data), e) for e in same), key=lambda pair: _progress(*pair))
    name = ".".join(str(step) for step in path)
    if error["type"] == "extra_forbidden":
        return _unknown_field(name)
    param = _printable(name)
    if error["type"] == "missing":
        return bad_request(f"the field {_shown(param)} is missing", param, "missing_field")
    field = next((step for step in reversed(path) if isinstance(step, str)), "")
    if field in _ALLOWED and len({e["loc"] for e in same}) > 1:
        said = f"allowed is {_ALLOWED[field]}"
    elif error["type"] in _SAID:
        said = _SAID[error["type"]]
    elif error["type"] in ("model_type", "dict_type", "model_attributes_type"):
        said = "should be an object"
    else:
        said = error["msg"].removeprefix("Input ").removeprefix("Value error, ")
        said = said[0].lower() + said[1:]
    given = f", not {_shown(error['input'])}" if isinstance(error["input"], bool | int | float | str) else ""
    return bad_request(f"{param}: {said}{given}", param, "invalid_value")


def _bad_kind(path: Sequence[int | str], value: Any) -> ApiError:
    """A message's role, and a response format's type, decide which other fields it has."""
    name, allowed = ("role", "'system', 'developer', 'user', 'assistant' or 'tool'")
    if path and path[0] == "response_format":
        name, allowed = ("type", "'text', 'json_object' or 'json_schema'")
    param = ".".join(str(step) for step in (*path, name))
    if not isinstance(value, dict) or name not in value:
        return bad_request(f"the field {param!r} is missing", param, "missing_field")
    return bad_request(f"{param}: should be {allowed}, not {_shown(value[name])}", param, "invalid_value")


def _progress(path: Sequence[int | str], error: ErrorDetails) -> tuple[bool, int, list[int]]:
    """How far validation came: past the type, deep, late in a list."""
    return not error["type"].endswith("_type"), len(path), [step for step in path if isinstance(step, int)]


def _unknown_field(name: str) -> ApiError:
    return bad_request(f"unknown field {_shown(name)}", _printable(name), "unknown_field")


def _path(error: ErrorDetails, data: Any) -> list[int | str]:
    """The steps of the error's `loc` that lead through `data`; pydantic mixes names of types and validators in."""
    path: list[int | str] = []
    loc = error["loc"]
    for index, step in enumerate(loc):
        if (isinstance(data, dict) and isinstance(step, str) and step in data) or (
            isinstance(data, list) and isinstance(step, int) and 0 <= step < len(data)
        ):
            data = data[step]  # type: ignore[index]
            path.append(step)
        elif error["type"] == "missing" and index == len(loc) - 1:
            path.append(step)
    return path


def _shown(value: object) -> str:
    """A value for a message: quoted, cut, on one line."""
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _printable(text: str) -> str:
    text = text[:200]
    return text if text.isprintable() else repr(text)[1:-1]


def _kind(value: object) -> str:
    kinds = {list: "array", str: "string", bool: "boolean", type(None): "null"}
    return kinds.get(type(value), "number")
