"""Structured output, tools and reasoning over HTTP, as OpenAI's client asks for them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from tests.server.live import LIMIT_S, MODEL, LiveServer, live_server, make_engine
from tests.tiny_model import build_model_folder
from uncast.engine import grammar
from uncast.server.tool_formats import FORMATS

pytest.importorskip("llguidance")
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
PLACE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "unit": {"enum": ["km", "mile <"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "near": {"$ref": "#/$defs/near"},
    },
    "required": ["unit", "age", "near"],
    "additionalProperties": False,
    "$defs": {"near": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
}
TOOL = {"type": "function", "function": {"name": "look_up", "description": "d", "parameters": PLACE}}
OTHER = {
    "type": "function",
    "function": {"name": "now", "parameters": {"type": "object", "additionalProperties": False}},
}
TEMPLATE = (
    "{% if tools %}<tools>{% for t in tools %}{{ t | tojson(ensure_ascii=False) }}{% endfor %}</tools>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value>{% endfor %}"
    "</tool_call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{{ '<think>' if thinking else '</think>' }}{% endif %}"
)
CHAT = [{"role": "user", "content": "the latent"}]


@pytest.fixture(autouse=True)
def _time_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stalls while a grammar is compiled must not make it too complex."""
    monkeypatch.setattr(grammar, "MAX_SECONDS", 600)


@pytest.fixture(scope="module")
def tools_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = build_model_folder(
        tmp_path_factory.mktemp("tools"), max_position_embeddings=1024, vocab_size=282, eos_token_id=0
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


@pytest.fixture(scope="module")
def live(tools_folder: Path) -> Iterator[LiveServer]:
    with live_server(tools_folder, make_engine(tools_folder, pool_tokens=8192)) as server:
        yield server
        server.wait_idle()


@pytest.fixture(scope="module")
def client(live: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def chat(client: openai.OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(**{"model": MODEL, "messages": CHAT, "max_tokens": 200, "seed": 1, **options})


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}


def test_a_schema_is_followed_by_every_choice_streamed_or_not(tools_folder: Path) -> None:
    options = {"response_format": schema_format(PERSON), "n": 3, "logprobs": True}
    texts = ["", "", ""]
    # Deterministic: the choices run in steps together or not, as they happen to arrive.
    with (
        live_server(tools_folder, make_engine(tools_folder, deterministic=True)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        whole = chat(client, **options)
        for chunk in chat(client, stream=True, **options):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
    for choice in whole.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), PERSON)
    assert texts == [choice.message.content for choice in whole.choices]


def test_length_says_that_the_json_is_incomplete(client: openai.OpenAI) -> None:
    answer = chat(client, response_format=schema_format(PERSON), max_tokens=3).choices[0]
    assert answer.finish_reason == "length" and answer.message.content.startswith("{")


@pytest.mark.parametrize(
    ("given", "fits"),
    [
        ({"regex": "[ab]{3}"}, lambda text: len(text) == 3 and set(text) <= {"a", "b"}),
        ({"choice": ["yes", "no"]}, lambda text: text in ("yes", "no")),
        ({"grammar": 'start: "<" /[a-z]{2}/ ">"'}, lambda text: len(text) == 4 and text[0] + text[3] == "<>"),
        ({"json": PERSON}, lambda text: jsonschema.validate(json.loads(text), PERSON) is None),
        ({"json": json.dumps(PERSON)}, lambda text: jsonschema.validate(json.loads(text), PERSON) is None),
    ],
)
def test_structured_outputs(client: openai.OpenAI, given: dict[str, Any], fits: Any) -> None:
    extra = {"extra_body": {"structured_outputs": given}}
    assert fits(chat(client, **extra).choices[0].message.content)
    assert fits(client.completions.create(model=MODEL, prompt="a", max_tokens=200, **extra).choices[0].text)


def test_required_and_named_tools_are_called(client: openai.OpenAI) -> None:
    named = {"type": "function", "function": {"name": "look_up"}}
    answer = chat(client, tools=[TOOL, OTHER], tool_choice=named).choices[0]
    assert answer.finish_reason == "tool_calls" and answer.message.content is None
    (call,) = answer.message.tool_calls
    assert call.function.name == "look_up" and call.id.startswith("call_")
    jsonschema.validate(json.loads(call.function.arguments), PLACE)
    streamed: list[Any] = []
    reasons = []
    for chunk in chat(client, tools=[TOOL, OTHER], tool_choice=named, stream=True):
        for choice in chunk.choices:
            streamed += choice.delta.tool_calls or []
            reasons.append(choice.finish_reason)
    assert [one.function.arguments for one in streamed] == [call.function.arguments] and streamed[0].index == 0
    assert reasons[-1] == "tool_calls"
    several = chat(client, tools=[OTHER], tool_choice="required", max_tokens=60).choices[0].message.tool_calls
    assert several and all(one.function.name == "now" and one.function.arguments == "{}" for one in several)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_calls_through_its_grammar(tools_folder: Path, name: str) -> None:
    with (
        live_server(tools_folder, make_engine(tools_folder), tool_parser=name) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        for seed in range(3):
            choice = {"type": "function", "function": {"name": "look_up"}}
            answer = chat(client, tools=[TOOL, OTHER], tool_choice=choice, max_tokens=400, seed=seed).choices[0]
            assert answer.finish_reason == "tool_calls"
            (call,) = answer.message.tool_calls
            jsonschema.validate(json.loads(call.function.arguments), PLACE)


def test_the_template_sees_tools_and_earlier_calls(client: openai.OpenAI, live: LiveServer) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": '{"a": 1}'}}
    turns = [
        *CHAT,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "noon"},
    ]
    answer = chat(client, messages=turns, tools=[OTHER], max_tokens=4)
    tokenizer = live.state.served.tokenizer
    text = (
        f"<tools>{json.dumps(OTHER)}</tools><user>the latent<assistant><tool_call>now<arg_key>a</arg_key><arg_value>1"
    )
    text += "</arg_value></tool_call><tool>noon<assistant></think>"
    assert answer.usage.prompt_tokens == len(tokenizer.encode(text))
    plain = chat(client, messages=turns, tools=[OTHER], tool_choice="none", max_tokens=4)
    assert plain.usage.prompt_tokens < answer.usage.prompt_tokens


def test_a_schema_after_reasoning(client: openai.OpenAI, live: LiveServer) -> None:
    bias = {"extra_body": {"chat_template_kwargs": {"thinking": True}}, "max_tokens": 900}
    answer = chat(client, response_format=schema_format(PERSON), **bias).choices[0]
    thought = answer.message.reasoning_content
    assert thought
    if answer.finish_reason == "stop":
        jsonschema.validate(json.loads(answer.message.content), PERSON)
    else:
        assert not answer.message.content


def refused(live: LiveServer, **fields: Any) -> dict[str, Any]:
    body = {"messages": CHAT, "max_tokens": 5, **fields}
    response = httpx.post(f"{live.url}/v1/chat/completions", json=body, timeout=LIMIT_S)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    assert "\n" not in error["message"] and "Traceback" not in error["message"]
    return error


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": schema_format({"type": "strin"})}, "response_format"),
        ({"response_format": schema_format({"$ref": "#/nowhere"})}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [OTHER], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs.messages"),
    ],
)
def test_what_cannot_be_done_is_a_400_that_names_the_field(
    live: LiveServer, fields: dict[str, Any], param: str
) -> None:
    assert refused(live, **fields)["param"] == param


def test_tools_need_a_known_format(server: LiveServer) -> None:
    assert refused(server, tools=[OTHER])["code"] == "tools_not_supported"


def test_a_client_that_leaves_a_structured_stream_leaves_nothing_behind(live: LiveServer) -> None:
    body = {"messages": CHAT, "max_tokens": 800, "stream": True, "response_format": {"type": "json_object"}}
    for _ in range(3):
        with httpx.stream("POST", f"{live.url}/v1/chat/completions", json=body, timeout=LIMIT_S) as response:
            next(response.iter_lines())
    live.wait_idle()
