"""From a checked body to the grammar of its answers: `response_format`, `structured_outputs`, `tool_choice`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

from uncast.engine import grammar as grammars
from uncast.engine.grammar import Grammar, GrammarBusy, GrammarError, GrammarSource, Marks
from uncast.server.errors import ApiError, bad_request
from uncast.server.marks import ThinkingReader
from uncast.server.requests import (
    ChatRequest,
    ChosenTool,
    JsonObjectFormat,
    JsonSchemaFormat,
    SamplingBody,
    StructuredOutputs,
)
from uncast.server.state import Served
from uncast.server.tool_formats import Tools


def offered_tools(body: ChatRequest, served: Served) -> Tools | None:
    """The tools that an answer may call; None if there are none, or `tool_choice` is none.

    Raises:
        ApiError: 400 on tools that cannot be offered, or a choice among none.
    """
    choice, tools = body.tool_choice, {tool.function.name: tool.function.parameters or {} for tool in body.tools or ()}
    if len(tools) < len(body.tools or ()):
        raise bad_request("tools: two have the same name", "tools", "invalid_combination")
    if choice not in (None, "none", "auto") and not tools:
        raise bad_request("tool_choice is only allowed with tools", "tool_choice", "invalid_combination")
    if isinstance(choice, ChosenTool) and choice.function.name not in tools:
        raise bad_request(
            f"tool_choice names {choice.function.name!r}, which is not among the tools",
            "tool_choice",
            "invalid_combination",
        )
    if not tools or choice == "none":
        return None
    if served.format.tools is None:
        raise bad_request(
            "tools: this model's chat template shows no known format of tool calls: the server needs "
            "--tool-call-parser",
            "tools",
            "tools_not_supported",
        )
    return {choice.function.name: tools[choice.function.name]} if isinstance(choice, ChosenTool) else tools


async def answer_grammar(
    body: SamplingBody, served: Served, tools: Tools | None = None, *, inside: bool | None = False
) -> Grammar | None:
    """The compiled grammar of the answers; None if any text will do.

    Args:
        tools: what a chat's answer may call.
        inside: whether the answer begins with reasoning, after which the grammar holds.

    Raises:
        ApiError: 400 if it cannot be compiled or contradicts another field, 503 if others take long.
    """
    wanted = _wanted(body, served, tools)
    if wanted is None:
        return None
    param, make = wanted
    if body.ignore_eos:
        raise bad_request(f"ignore_eos is not allowed with {param}", "ignore_eos", "invalid_combination")

    def compiled() -> Grammar:
        source = make()
        return served.grammars.compile(
            grammars.after(source, ThinkingReader.END, Marks(served.tokenizer)) if inside else source
        )

    try:
        return await asyncio.to_thread(compiled)
    except GrammarBusy as error:
        raise ApiError(503, str(error), code="grammar_busy", headers={"Retry-After": "10"}) from None
    except GrammarError as error:
        raise bad_request(f"{param} cannot be compiled: {error}", param, "invalid_grammar") from None


def _wanted(body: SamplingBody, served: Served, tools: Tools | None) -> tuple[str, Callable[[], GrammarSource]] | None:
    """The field that asks for a grammar, and what makes it."""
    found = []
    if body.structured_outputs is not None:
        found.append(("structured_outputs", _structured(body.structured_outputs)))
    if isinstance(body, ChatRequest):
        given = body.response_format
        if isinstance(given, JsonSchemaFormat):
            schema = given.json_schema.schema_
            found.append(("response_format", lambda: grammars.json_grammar(schema)))
        elif isinstance(given, JsonObjectFormat):
            found.append(("response_format", lambda: grammars.json_grammar({"type": "object"})))
        form, several = served.format.tools, body.tool_choice == "required"
        if tools and form is not None and (several or isinstance(body.tool_choice, ChosenTool)):
            found.append(("tool_choice", lambda: form.grammar(tools, Marks(served.tokenizer), several=several)))
    if len(found) > 1:
        names = f"{found[0][0]} and {found[1][0]}"
        raise bad_request(f"{names} both say what the answer must be: give one", found[1][0], "invalid_combination")
    return found[0] if found else None


def _structured(given: StructuredOutputs) -> Callable[[], GrammarSource]:
    named = {"json": given.json_, "regex": given.regex, "choice": given.choice, "grammar": given.grammar}
    kinds = {name: value for name, value in named.items() if value is not None}
    if given.json_object:
        kinds["json_object"] = {"type": "object"}
    if len(kinds) != 1:
        raise bad_request(
            f"structured_outputs has {len(kinds)} of json, json_object, regex, choice and grammar: give one",
            "structured_outputs",
            "invalid_combination",
        )
    if given.regex is not None:
        return lambda: grammars.regex_grammar(given.regex or "")
    if given.choice is not None:
        return lambda: grammars.choice_grammar(given.choice or [])
    if given.grammar is not None:
        return lambda: grammars.lark_grammar(given.grammar or "")
    schema = _schema(given.json_) if given.json_ is not None else {"type": "object"}
    return lambda: grammars.json_grammar(schema)


def _schema(given: object) -> dict[str, object]:
    """A schema that may be given as text."""
    try:
        schema = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError) as error:
        raise bad_request(
            f"structured_outputs.json is not valid JSON: {grammars.one_line(error)}",
            "structured_outputs.json",
            "invalid_json",
        ) from None
    if not isinstance(schema, dict):
        raise bad_request("structured_outputs.json: should be an object", "structured_outputs.json", "invalid_json")
    return schema
