"""Reasoning and tool calls in a text: the same however it is cut into pieces; what is malformed is content."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from uncast.server.chat_format import ChatFormat
from uncast.server.chat_reader import ChatReader, ToolReader
from uncast.server.marks import ThinkingReader
from uncast.server.tool_formats import FORMATS, format_of

TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "where": {"type": "object"}},
        "required": ["city"],
    },
    "now": {},
}
CALLS = {
    "glm45": [
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Zürich\n2</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
        "<tool_call>now\n</tool_call>",
    ],
    "glm47": [
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Zürich\n2</arg_value>"
        "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>",
        "<tool_call>now</tool_call>",
    ],
    "deepseek_v3": [
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"  # noqa: RUF001
        '{"city": "Zürich\\n2", "days": 3}\n```<｜tool▁call▁end｜>',  # noqa: RUF001
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",  # noqa: RUF001
    ],
    "deepseek_v31": [
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"  # noqa: RUF001
        '{"city": "Zürich\\n2", "days": 3}<｜tool▁call▁end｜>',  # noqa: RUF001
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",  # noqa: RUF001
    ],
    "deepseek_v32": [
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">Zürich\n2'  # noqa: RUF001
        '</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>',  # noqa: RUF001
        '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',  # noqa: RUF001
    ],
}
WANTED = [("get_weather", {"city": "Zürich\n2", "days": 3}), ("now", {})]
Read = tuple[str, str, list[tuple[str, Any]]]


def read(name: str | None, inside: bool | None, pieces: list[str]) -> Read:
    """Reasoning, content and calls of a text that arrives in pieces."""
    tools = None if name is None else ToolReader(FORMATS[name], TOOLS)
    reader = ChatReader(ThinkingReader(inside), tools)
    found = [reader.push(piece) for piece in pieces] + [reader.push("", last=True)]
    calls = [(call.name, json.loads(call.arguments)) for piece in found for call in piece.calls]
    assert reader.called == bool(calls)
    return "".join(piece.reasoning for piece in found), "".join(piece.content for piece in found), calls


@pytest.mark.parametrize("name", FORMATS)
def test_calls_are_read(name: str) -> None:
    first, second = CALLS[name]
    assert read(name, False, [first + "\n" + second]) == ("", "", WANTED)
    assert read(name, False, [f"I look.\n\n{first}{second}\n"]) == ("", "I look.", WANTED)
    assert read(name, True, [f"\nhm\n</think>\n\nSo:{first}{second}"]) == ("hm", "So:", WANTED)


@pytest.mark.parametrize("name", FORMATS)
def test_malformed_unfinished_and_unknown_calls_are_content(name: str) -> None:
    form, (first, _) = FORMATS[name], CALLS[name]
    for text in (
        first[: first.index(form.end)],
        first.replace("get_weather", "unknown"),
        f"{form.begin}?{form.end}",
        form.begin,
        f"{form.begin}{form.end}",
    ):
        body = text
        for mark in form.around:
            body = body.replace(mark, "")
        assert read(name, False, [text]) == ("", body.lstrip() if body != text else text, [])


@pytest.mark.parametrize(
    ("inside", "text", "reasoning", "content"),
    [
        (None, "<think>\na b\n</think>\n\nc ", "a b", "c "),
        (None, "\n<think></think>c", "", "c"),
        (None, " plain <think>", "", " plain <think>"),
        (None, "<thin", "", "<thin"),
        (None, "", "", ""),
        (True, "a</think>b</think>", "a", "b</think>"),
        (True, "<think>a</think>b", "a", "b"),
        (True, "never ends </thin", "never ends </thin", ""),
        (True, " \n", "", ""),
        (False, " <think>a</think>", "", " <think>a</think>"),
    ],
)
def test_reasoning(inside: bool | None, text: str, reasoning: str, content: str) -> None:
    assert read(None, inside, [text]) == (reasoning, content, [])


def cut(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(edges)]


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), name=st.sampled_from([*FORMATS]), inside=st.sampled_from([None, True, False]))
def test_any_cut_gives_the_same(data: st.DataObject, name: str, inside: bool | None) -> None:
    form = FORMATS[name]
    atoms = ["<think>", "</think>", " ", "\n", "a", "<", "</", "é", *form.marks, *CALLS[name], CALLS[name][0][:40]]
    text = "".join(data.draw(st.lists(st.sampled_from(atoms), max_size=12)))
    places = data.draw(st.lists(st.integers(0, 2000), max_size=20))
    whole = read(name, inside, [text])
    assert read(name, inside, cut(text, places)) == whole
    assert read(name, inside, list(text)) == whole


def test_formats_are_found_in_templates() -> None:
    assert format_of("'<tool_call>' ... <arg_key>{{ k }}</arg_key>\n<arg_value>") == "glm45"
    assert format_of("'<tool_call>' ... <arg_key>{{ k }}</arg_key><arg_value>") == "glm47"
    assert format_of("'function<｜tool▁sep｜>' ... ```json") == "deepseek_v3"  # noqa: RUF001
    assert format_of("name + '<｜tool▁sep｜>'") == "deepseek_v31"  # noqa: RUF001
    assert format_of("<｜DSML｜function_calls>") == "deepseek_v32"  # noqa: RUF001
    assert format_of("{% for m in messages %}") is None


def test_the_prompt_says_whether_reasoning_has_begun() -> None:
    form = ChatFormat(None, "glm45")
    assert form.begins_inside("<|assistant|><think>\n") is True
    assert form.begins_inside("<|assistant|></think>") is False
    assert form.begins_inside("<|assistant|>") is None
    assert ChatFormat(None, "deepseek_r1").begins_inside("<｜Assistant｜>") is True  # noqa: RUF001
