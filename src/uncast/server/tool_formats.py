"""How models write tool calls, and grammars for them. One call is text between two marks.

Formats, as the models' chat templates and model cards show them:

    glm45         <tool_call>NAME\\n<arg_key>K</arg_key>\\n<arg_value>V</arg_value>\\n</tool_call>      GLM-4.5 to 4.6
    glm47         the same without line ends                                                      GLM-4.7, GLM-5
    deepseek_v3   <|calls_begin|><|call_begin|>function<|sep|>NAME\\n```json\\n{...}\\n```<|call_end|>...<|calls_end|>    V3, R1
    deepseek_v31  <|calls_begin|><|call_begin|>NAME<|sep|>{...}<|call_end|>...<|calls_end|>         V3.1
    deepseek_v32  <|DSML|function_calls>\\n<|DSML|invoke name="NAME">\\n...\\n</|DSML|invoke>\\n</|DSML|function_calls>
                  with a line <|DSML|parameter name="K" string="true">V</|DSML|parameter> for each argument    V3.2

DeepSeek's own marks have a wide bar and a low block where this page has `|` and `_`. A value is raw text where the tool's
schema says string, else JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from uncast.engine.grammar import GrammarSource, Marks, json_part, lark_text

Tools = Mapping[str, Mapping[str, Any]]
"""Tool name -> JSON schema of its parameters."""
_CALLS, _CALLS_END = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"
_CALL, _CALL_END = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"
_SEP = "<\uff5ctool\u2581sep\uff5c>"
_DSML = "\uff5cDSML\uff5c"
_ARGUMENT = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.S)
_MARK = re.compile(rf"(<[^<>\s]+>|{_DSML})")
_PARAMETER = re.compile(rf'\s*<{_DSML}parameter name="(.*?)" string="(true|false)">(.*?)</{_DSML}parameter>\s*', re.S)


_TOKENS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", _SEP, _DSML)


@dataclass(frozen=True)
class ToolFormat:
    """One way to write calls.

    Attributes:
        begin, end: around a call.
        around: marks that only hold calls together.
        read: a call's text between its marks -> name and arguments, None if it is malformed.
        rule: the grammar of a call's text between its marks, for one tool.
        before, after: what comes before the first call and after the last.
        between: between two calls.
    """

    begin: str
    end: str
    around: tuple[str, ...]
    read: Callable[[str, Tools], tuple[str, dict[str, Any]] | None]
    rule: Callable[[str, Mapping[str, Any], str, Marks, _Rules], str]
    before: str = ""
    after: str = ""
    between: str = ""

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that some tokenizers have as special tokens."""
        return self.begin, self.end, *self.around, *_TOKENS

    def grammar(self, tools: Tools, marks: Marks, *, several: bool) -> GrammarSource:
        """One call of one of the tools, or several."""
        rules = _Rules()
        names = []
        for index, (name, schema) in enumerate(tools.items()):
            body = self.rule(name, schema, f"tool{index}", marks, rules)
            rules.lines.append(f"tool{index}: {marks.literal(self.begin)} {body} {marks.literal(self.end)}")
            names.append(f"tool{index}")
        between = f"{lark_text(self.between)} " if self.between else ""
        more = f" ({between}call)*" if several else ""
        before, after = (_joined(text, marks) for text in (self.before, self.after))
        lines = [f"start: {before} call{more} {after}".strip(), f"call: {' | '.join(names)}", *rules.lines]
        return GrammarSource("\n".join(lines), rules.parts)


class _Rules:
    """Rules and named parts of a grammar that is being made."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.parts: dict[str, Mapping[str, Any]] = {}

    def json(self, name: str, schema: Mapping[str, Any]) -> str:
        self.parts[name] = json_part(schema)
        return f"@{name}"


def _joined(text: str, marks: Marks) -> str:
    """An expression for a text in which marks may be tokens of their own."""
    return " ".join(marks.literal(piece) for piece in _MARK.split(text) if piece)


def is_text(schema: Mapping[str, Any], key: str) -> bool:
    """Whether a parameter is a string and nothing else."""
    one = _resolved(schema, (schema.get("properties") or {}).get(key))
    return one.get("type") == "string" or ("enum" in one and all(isinstance(value, str) for value in one["enum"]))


def _resolved(schema: Mapping[str, Any], one: Any) -> Mapping[str, Any]:
    """A parameter's schema; a reference to a definition of the tool's schema is followed once."""
    if isinstance(one, Mapping) and isinstance(one.get("$ref"), str):
        place = re.fullmatch(r"#/(\$defs|definitions)/([^/~%]+)", one["$ref"])
        one = (schema.get(place[1]) or {}).get(place[2]) if place else None
    return one if isinstance(one, Mapping) else {}


def _value(raw: str, schema: Mapping[str, Any], key: str) -> Any:
    if is_text(schema, key):
        return raw
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return raw


def _pairs(pattern: re.Pattern[str], text: str) -> list[tuple[str, ...]] | None:
    """The groups of matches that follow each other through the whole text; None if anything else is in it."""
    found, place = [], 0
    while place < len(text):
        match = pattern.match(text, place)
        if match is None:
            return None
        found.append(tuple(match.groups()))
        place = match.end()
    return found


def _read_glm(text: str, tools: Tools) -> tuple[str, dict[str, Any]] | None:
    head, mark, rest = text.partition("<arg_key>")
    name, pairs = head.strip(), _pairs(_ARGUMENT, mark + rest)
    if name not in tools or pairs is None:
        return None
    return name, {key.strip(): _value(raw, tools[name], key.strip()) for key, raw in pairs}


def _read_json(name: str, raw: str, tools: Tools) -> tuple[str, dict[str, Any]] | None:
    try:
        arguments = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return (name, arguments) if name in tools and isinstance(arguments, dict) else None


def _read_v3(text: str, tools: Tools) -> tuple[str, dict[str, Any]] | None:
    match = re.fullmatch(rf"function{_SEP}([^\n]*)\n```json\n(.*)\n```\s*", text, re.S)
    return None if match is None else _read_json(match[1].strip(), match[2], tools)


def _read_v31(text: str, tools: Tools) -> tuple[str, dict[str, Any]] | None:
    name, mark, raw = text.partition(_SEP)
    return _read_json(name.strip(), raw, tools) if mark else None


def _read_v32(text: str, tools: Tools) -> tuple[str, dict[str, Any]] | None:
    name, mark, rest = text.partition('">')
    if not mark or name not in tools:
        return None
    if rest.strip().startswith("{"):
        return _read_json(name, rest, tools)
    pairs = _pairs(_PARAMETER, rest.strip())
    try:
        return (
            None
            if pairs is None
            else (name, {key: raw if kind == "true" else json.loads(raw) for key, kind, raw in pairs})
        )
    except (ValueError, RecursionError):
        return None


def _each_parameter(
    schema: Mapping[str, Any],
    prefix: str,
    marks: Marks,
    rules: _Rules,
    one: Callable[[str, str, bool], str],
    end: str,
) -> str:
    """Expressions for the parameters in the schema's order; those that are not required may be missing."""
    needed, shared = set(schema.get("required") or ()), {k: schema[k] for k in ("$defs", "definitions") if k in schema}
    parts = []
    for index, key in enumerate(schema.get("properties") or {}):
        rule, text = f"{prefix}v{index}", is_text(schema, key)
        given = _resolved(schema, schema["properties"][key])
        if text and "enum" in given:
            rules.lines.append(f"{rule}: ({' | '.join(map(lark_text, given['enum']))}) {marks.literal(end)}")
            value = rule
        elif text:
            rules.lines.append(marks.until(rule, end))
            value = rule
        else:
            whole = schema["properties"][key]
            value = (
                f"{rules.json(rule, {**whole, **shared} if isinstance(whole, Mapping) else {})} {marks.literal(end)}"
            )
        parts.append(f"({one(key, value, text)}){'' if key in needed else '?'}")
    return " ".join(parts)


def _glm_rule(line: str) -> Callable[[str, Mapping[str, Any], str, Marks, _Rules], str]:
    def rule(name: str, schema: Mapping[str, Any], prefix: str, marks: Marks, rules: _Rules) -> str:
        def one(key: str, value: str, text: bool) -> str:
            head = ("<arg_key>", key, "</arg_key>", line, "<arg_value>")
            return f"{' '.join(marks.literal(piece) for piece in head if piece)} {value}{tail}"

        tail = f" {lark_text(line)}" if line else ""
        return f"{lark_text(name + line)} {_each_parameter(schema, prefix, marks, rules, one, '</arg_value>')}"

    return rule


def _v3_rule(name: str, schema: Mapping[str, Any], prefix: str, marks: Marks, rules: _Rules) -> str:
    head = f'"function" {marks.literal(_SEP)} {lark_text(name)} "\\n```json\\n"'
    return f'{head} {rules.json(prefix + "a", {"type": "object", **schema})} "\\n```"'


def _v31_rule(name: str, schema: Mapping[str, Any], prefix: str, marks: Marks, rules: _Rules) -> str:
    return f"{lark_text(name)} {marks.literal(_SEP)} {rules.json(prefix + 'a', {'type': 'object', **schema})}"


def _v32_rule(name: str, schema: Mapping[str, Any], prefix: str, marks: Marks, rules: _Rules) -> str:
    def one(key: str, value: str, text: bool) -> str:
        head = f'<{_DSML}parameter name="{key}" string="{"true" if text else "false"}">'
        return f'{_joined(head, marks)} {value} "\\n"'

    body = _each_parameter(schema, prefix, marks, rules, one, f"</{_DSML}parameter>")
    return f"{lark_text(name + chr(34) + '>' + chr(10))} {body}"


_DEEPSEEK = {"begin": _CALL, "end": _CALL_END, "around": (_CALLS, _CALLS_END), "before": _CALLS, "after": _CALLS_END}
_BLOCK, _BLOCK_END = f"<{_DSML}function_calls>", f"</{_DSML}function_calls>"
FORMATS: dict[str, ToolFormat] = {
    "glm45": ToolFormat("<tool_call>", "</tool_call>", (), _read_glm, _glm_rule("\n"), between="\n"),
    "glm47": ToolFormat("<tool_call>", "</tool_call>", (), _read_glm, _glm_rule("")),
    "deepseek_v3": ToolFormat(read=_read_v3, rule=_v3_rule, between="\n", **_DEEPSEEK),  # type: ignore[arg-type]
    "deepseek_v31": ToolFormat(read=_read_v31, rule=_v31_rule, **_DEEPSEEK),  # type: ignore[arg-type]
    "deepseek_v32": ToolFormat(
        f'<{_DSML}invoke name="', f"</{_DSML}invoke>", (_BLOCK, _BLOCK_END), _read_v32, _v32_rule,
        before=_BLOCK + "\n", after="\n" + _BLOCK_END, between="\n",
    ),
}  # fmt: skip


def format_of(template: str) -> str | None:
    """The format that a chat template's text shows."""
    if _DSML in template:
        return "deepseek_v32"
    if "<arg_key>" in template:
        return "glm47" if re.search(r"</arg_key><arg_value>", template) else "glm45"
    if _SEP in template:
        return "deepseek_v3" if "```json" in template else "deepseek_v31"
    return None
