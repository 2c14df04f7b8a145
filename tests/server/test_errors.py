"""What a client hears about bad requests: OpenAI's error format, the field by name, never a traceback or a 5xx."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.hold import at, hold
from tests.server.live import LIMIT_S, LiveServer, live_server, make_engine, post, request, wait_until
from uncast.server.responses import ErrorBody

COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = {"prompt": "a", "max_tokens": 2}
MESSAGES = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error, checked against the format."""
    error: dict[str, Any] = ErrorBody.model_validate_json(response.content).error.model_dump()
    assert "Traceback" not in error["message"] and "\n" not in error["message"]
    return error


@pytest.mark.parametrize(
    ("extra", "param", "words"),
    [
        ({"prompt": None}, "prompt", "allowed is a string, up to 128 strings, token ids"),
        ({"prompt": []}, "prompt", "no list empty"),
        ({"prompt": [[1], []]}, "prompt.1", "no list empty"),
        ({"prompt": [1, "x"]}, "prompt.1", "not 'x'"),
        ({"prompt": ["x", 1]}, "prompt.1", "not 1"),
        ({"prompt": [282]}, "prompt", "has token 282: the vocabulary has ids 0 to 281"),
        ({"prompt": [10**30]}, "prompt.0", "not 1000"),
        ({"prompt": [True]}, "prompt.0", "not true"),
        ({"prompt": ""}, "prompt", "prompt is empty"),
        ({"prompt": ["a", ""]}, "prompt.1", "prompt.1 is empty"),
        ({"prompt": ["a"] * 129}, "prompt", "up to 128 strings"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1, not 0"),
        ({"max_tokens": "2"}, "max_tokens", "valid integer, not '2'"),
        ({"max_tokens": 1.5}, "max_tokens", "valid integer, not 1.5"),
        ({"max_tokens": 10**400}, "max_tokens", "less than or equal to"),
        ({"temperature": -0.1}, "temperature", "greater than or equal to 0"),
        ({"temperature": True}, "temperature", "valid number, not true"),
        ({"top_p": 0}, "top_p", "greater than 0, not 0"),
        ({"top_k": -2}, "top_k", "greater than or equal to -1"),
        ({"min_p": 1.01}, "min_p", "less than or equal to 1"),
        ({"repetition_penalty": 0}, "repetition_penalty", "greater than or equal to 0.01"),
        ({"presence_penalty": 2.1}, "presence_penalty", "less than or equal to 2"),
        ({"frequency_penalty": -2.1}, "frequency_penalty", "greater than or equal to -2"),
        ({"n": 129}, "n", "less than or equal to 128"),
        ({"n": 128}, "n", "are 128 choices: this server queues at most 64"),
        ({"seed": 2**63}, "seed", "less than or equal to"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop", "up to 4 of them"),
        ({"stop": ["a", ""]}, "stop.1", "1 to 1000 characters"),
        ({"stop": "x" * 1001}, "stop", "1 to 1000 characters"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x", "should be a token id, without leading zeros, not 'x'"),
        ({"logit_bias": {"100": 1, "0100": 2}}, "logit_bias.0100", "without leading zeros, not '0100'"),
        ({"logit_bias": {"-1": 1}}, "logit_bias.-1", "should be a token id"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5", "less than or equal to 100"),
        ({"logit_bias": {"282": 1}}, "logit_bias", "has token 282"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "1025 entries are more than the 1024"),
        ({"logprobs": 6}, "logprobs", "less than or equal to 5"),
        ({"stream": "yes"}, "stream", "valid boolean, not 'yes'"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown field 'stream_options.x'"),
        ({"stream_options": {}}, "stream_options", "only allowed with stream"),
        ({"echo": True, "logprobs": 0}, "echo", "not supported together with logprobs"),
        ({"metadata": []}, "metadata", "should be an object"),
        ({"best_of": 2}, "best_of", "unknown field 'best_of'"),
        ({"a\nb\u202e": 2}, "a\\nb\\u202e", "unknown field 'a\\nb\\u202e'"),
        ({"x" * 1000: 2}, "x" * 200, "..."),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_completion_fields_are_named(server: LiveServer, extra: dict[str, Any], param: str, words: str) -> None:
    response = post(server.url + COMPLETE, {**PROMPT, **extra})
    error = error_of(response)
    assert response.status_code == 400 and error["type"] == "invalid_request_error"
    assert error["param"] == param and words in error["message"], error


@pytest.mark.parametrize(
    ("extra", "param", "words"),
    [
        ({"messages": None}, "messages", "valid list"),
        ({"messages": []}, "messages", "messages: should not be empty"),
        ({"messages": [3]}, "messages.0", "should be an object, not 3"),
        ({"messages": [{"content": "a"}]}, "messages.0.role", "'messages.0.role' is missing"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages.0.role", "not 'robot'"),
        ({"messages": [{"role": ["user"], "content": "a"}]}, "messages.0.role", "not ['user']"),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "'messages.0.content' is missing"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content", "a string or a list of text parts"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content", "a string or a list of text parts"),
        ({"messages": [{"role": "user", "content": "a", "x": 1}]}, "messages.0.x", "unknown field"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages.0.content.0.type",
            "should be 'text', not 'image_url'",
        ),
        ({"top_logprobs": 2}, "top_logprobs", "only allowed with logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
        ({"max_completion_tokens": 3}, "max_tokens", "differ: give one of them"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "should be 'text'"),
        ({"functions": []}, "functions", "unknown field 'functions'"),
        ({"echo": True}, "echo", "unknown field 'echo'"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_chat_fields_are_named(server: LiveServer, extra: dict[str, Any], param: str, words: str) -> None:
    response = post(server.url + CHAT, {**MESSAGES, **extra})
    error = error_of(response)
    assert response.status_code == 400 and error["param"] == param and words in error["message"], error


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"{", b"[]", b"null", b'"a"', b"1" * 5000, b'{"prompt": NaN}', b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b'{"prompt": "\\udc00\\ud800"}', b'{"a":' * 5000, b"[" * 100_000,
        b"\xef\xbb\xbf{}", '{"prompt": "a"}'.encode("utf-16"), b"prompt=a", b"\x00",
    ],
    ids=lambda raw: repr(raw[:30]),
)  # fmt: skip
def test_what_is_not_a_json_object_is_refused(server: LiveServer, raw: bytes) -> None:
    for path in (COMPLETE, CHAT):
        response = request("POST", server.url + path, content=raw, headers={"Content-Type": "application/json"})
        assert response.status_code == 400 and error_of(response)["code"] == "invalid_json"


def test_a_number_too_large_for_a_float_names_its_field(server: LiveServer) -> None:
    raw = b'{"prompt": "a", "temperature": 1e999}'
    response = request("POST", server.url + COMPLETE, content=raw, headers={"Content-Type": "application/json"})
    assert response.status_code == 400 and error_of(response)["param"] == "temperature"


@pytest.mark.parametrize("given", ["text/plain", "application/x-www-form-urlencoded", "", "application/jsonx"])
def test_the_content_type_must_be_json(server: LiveServer, given: str) -> None:
    headers = {"Content-Type": given} if given else {}
    response = request("POST", server.url + COMPLETE, content=json.dumps(PROMPT), headers=headers)
    assert response.status_code == 415 and error_of(response)["code"] == "content_type"
    fine = request(
        "POST",
        server.url + COMPLETE,
        content=json.dumps(PROMPT),
        headers={"Content-Type": "Application/JSON; charset=utf-8"},
    )
    assert fine.status_code == 200


def test_the_context_limit(server: LiveServer) -> None:
    fits = post(server.url + COMPLETE, {"prompt": [5] * 90, "max_tokens": 6})
    assert fits.status_code == 200
    for body, param in (
        ({"prompt": [5] * 90, "max_tokens": 7}, "max_tokens"),
        ({"prompt": [5] * 90}, "max_tokens"),
        ({"prompt": [5] * 96, "max_tokens": 1}, "prompt"),
        ({"prompt": [[5], [5] * 5000], "max_tokens": 1}, "prompt.1"),
    ):
        response = post(server.url + COMPLETE, body)
        error = error_of(response)
        assert response.status_code == 400 and error["code"] == "context_length_exceeded" and error["param"] == param
        assert "the model's context of 96" in error["message"]
    long = {"messages": [{"role": "user", "content": "a" * 3000}]}
    error = error_of(post(server.url + CHAT, long))
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")


def test_messages_that_the_template_refuses(folder: Path, server: LiveServer) -> None:
    plain = server.engine.engine.tokenizer
    assert "unknown role" in str(plain.template)
    without = post(server.url + CHAT, {"messages": [{"role": "assistant", "content": ""}], "max_tokens": 1})
    assert without.status_code == 200
    try:
        template, plain.template = plain.template, "{{ raise_exception('no, thank you') }}"
        response = post(server.url + CHAT, MESSAGES)
    finally:
        plain.template = template
    error = error_of(response)
    assert response.status_code == 400 and error["param"] == "messages" and "no, thank you" in error["message"]


def test_unknown_models_paths_and_methods(server: LiveServer) -> None:
    response = post(server.url + COMPLETE, {**PROMPT, "model": "gpt-4"})
    assert response.status_code == 404 and error_of(response)["code"] == "model_not_found"
    for path in ("/v1/embeddings", "/", "/v1/completions/", "/v1/%ff%00"):
        response = request("GET", server.url + path)
        assert response.status_code == 404 and "there is no" in error_of(response)["message"]
    response = request("GET", server.url + COMPLETE)
    assert response.status_code == 405 and response.headers["allow"] == "POST"
    assert "GET is not allowed here" in error_of(response)["message"]


@pytest.fixture(scope="module")
def small(folder: Path) -> Iterator[LiveServer]:
    """Bodies of up to 2000 bytes, and a key."""
    with live_server(folder, max_body_bytes=2000, api_key="sesame") as live:
        yield live


def test_the_body_limit(small: LiveServer) -> None:
    headers = {"Authorization": "Bearer sesame", "Content-Type": "application/json"}

    def send(content: Any) -> httpx.Response:
        return request("POST", small.url + COMPLETE, content=content, headers=headers)

    body = json.dumps({**PROMPT, "user": ""})
    assert send(json.dumps({**PROMPT, "user": "u" * (2000 - len(body))})).status_code == 200
    for content in (
        json.dumps({**PROMPT, "user": "u" * (2001 - len(body))}),
        b"x" * (20 << 20),
        iter([b"x" * 900] * 3),
    ):
        response = send(content)
        assert response.status_code == 413 and error_of(response)["message"] == "the body is larger than 2000 bytes"


def test_the_api_key(small: LiveServer) -> None:
    for headers in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "sesame"},
        {"Authorization": "Basic sesame"},
        {"Authorization": "Bearer Sesame"},
        {"Authorization": "Bearer"},
        {"Authorization": b"Bearer \xff"},
    ):
        for method, path in (("GET", "/v1/models"), ("POST", COMPLETE), ("POST", CHAT), ("POST", "/start_profile")):
            response = request(method, small.url + path, headers=headers)
            assert response.status_code == 401 and error_of(response)["type"] == "authentication_error"
            assert response.headers["www-authenticate"] == "Bearer"
    for path in ("/health", "/ready", "/metrics", "/openapi.json"):
        assert request("GET", small.url + path).status_code == 200
    for scheme in ("Bearer", "bearer", "BEARER"):
        headers = {"Authorization": f"{scheme} sesame"}
        assert request("GET", small.url + "/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize("given", ["gzip", "br, gzip", "identity, gzip"])
def test_a_compressed_body_is_refused(server: LiveServer, given: str) -> None:
    content = gzip.compress(json.dumps(PROMPT).encode())
    headers = {"Content-Type": "application/json", "Content-Encoding": given}
    error = error_of(refused := request("POST", server.url + COMPLETE, content=content, headers=headers))
    assert refused.status_code == 415 and error["code"] == "content_encoding"
    assert error["message"] == f"the content encoding is {given!r}: send the body uncompressed"
    plain = {**headers, "Content-Encoding": "Identity"}
    assert request("POST", server.url + COMPLETE, content=json.dumps(PROMPT), headers=plain).status_code == 200


def test_a_full_queue_gives_429_and_runs_none_of_the_choices(long_folder: Path) -> None:
    engine = make_engine(long_folder, max_running=1, max_waiting=3)
    with live_server(long_folder, engine) as live, httpx.Client(base_url=live.url, timeout=LIMIT_S) as client:
        running = {"prompt": "a", "max_tokens": 3000, "ignore_eos": True, "stream": True}
        held = hold(engine.engine, lambda: at(engine.engine, 1))
        with held, client.stream("POST", COMPLETE, json=running) as first:
            assert first.status_code == 200
            wait_until(lambda: live.stats().running == 1)
            with client.stream("POST", COMPLETE, json={**running, "n": 2}):
                wait_until(lambda: live.stats().waiting == 2)
                for stream in (False, True):
                    response = client.post(COMPLETE, json={"prompt": "a", "n": 2, "stream": stream})
                    assert response.status_code == 429 and int(response.headers["retry-after"]) >= 1
                    assert error_of(response)["code"] == "queue_full"
                wait_until(lambda: live.stats().waiting == 2)
        live.wait_idle()
        assert client.post(COMPLETE, json=PROMPT).status_code == 200


def test_profiling_needs_a_folder(server: LiveServer) -> None:
    for path in ("/start_profile", "/stop_profile"):
        response = request("POST", server.url + path)
        assert response.status_code == 409, response.text
    assert "without --profile-dir" in error_of(request("POST", server.url + "/start_profile"))["message"]
