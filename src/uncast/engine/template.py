"""Chat templates: Jinja from a model's folder, rendered in a sandbox with bounded work, memory and time.

A template is foreign code. Everything it can do many times or to large sizes passes a `_Budget` first: items of loops, calls,
text that is put out, and the sizes that operators and filters make. What is left is bounded by the template's own length.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_TEMPLATE_CHARS = 1 << 20
MAX_WORK = 1 << 22
"""Characters put out or built, plus loop items and calls; a conversation's own text allows 32 times its length more."""
MAX_SECONDS = 10.0
_MAX_BITS = 4096
_CALL = 32
"""What a call costs beside a character."""
_WIDE = re.compile(r"\d{5}|\*")
"""Field widths that no chat template needs."""


class TemplateError(ValueError):
    """Messages that the model's chat template refuses, a template that fails, or a model without one; one sentence."""


class _TooMuch(Exception):
    """The template's budget is spent."""


class _Budget:
    def __init__(self, work: int) -> None:
        self.work = self._left = work
        self._deadline = time.monotonic() + MAX_SECONDS

    def spend(self, amount: int) -> None:
        """Raises `_TooMuch` if the work or the time is used up."""
        self._left -= amount
        if self._left < 0:
            raise _TooMuch("it makes more text or takes more steps than any conversation needs")
        if time.monotonic() > self._deadline:
            raise _TooMuch(f"it takes longer than {MAX_SECONDS:g} s")


class _Counted(NodeTransformer):
    """Passes every loop's items and every `~` through the budget."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        literal = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        cost: list[nodes.Expr] = [nodes.Const(1 + literal, lineno=node.lineno)]
        node.iter = nodes.Filter(node.iter, "_counted", cost, [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(parts, "_concat", [], [], None, None, lineno=node.lineno)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, budget: _Budget) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, finalize=self._put_out)
        self.budget = budget
        self.globals["raise_exception"] = _refuse
        del self.globals["lipsum"]
        self.filters = {name: self._guarded(name, filter_) for name, filter_ in self.filters.items()}
        self.filters["tojson"] = self._guarded("tojson", _to_json)
        self.filters |= {"_counted": self._counted, "_concat": self._concat}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Counted().visit(super()._parse(source, name, filename))
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.budget.spend(_size_of_binop(operator, left, right))
        if operator == "%" and isinstance(left, str):
            self.budget.spend(len(left) + self._weight(right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps str.format
        name, owner = getattr(method, "__name__", ""), getattr(method, "__self__", None)
        args = __self._checked(name, args, (owner, *kwargs.values()))
        return __self._paid(super().call(__context, __obj, *args, **kwargs))

    def _guarded(self, name: str, filter_: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(filter_)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            return self._paid(filter_(*self._checked(name, args, kwargs.values()), **kwargs))

        return guarded

    def _checked(self, name: str, args: tuple[Any, ...], others: Iterable[Any]) -> tuple[Any, ...]:
        """The arguments, once it is known that neither they nor the result are too large."""
        if name == "join":
            args = tuple(list(arg) if isinstance(arg, Iterator) else arg for arg in args)
        every = (*others, *args)
        self.budget.spend(_CALL + _growth(name, every))
        for arg in every:
            self._weight(arg)
        return args

    def _weight(self, value: Any) -> int:
        """Characters in a value, nested ones too (a list that holds itself twice, twenty times over, is short only in memory);
        looking costs one per item, and more than a whole budget of them is `_TooMuch`."""
        if isinstance(value, str):
            return len(value)
        total, pending = 0, [value]
        while pending:
            item = pending.pop()
            if isinstance(item, str | bytes):
                total += len(item)
            elif isinstance(item, dict):
                pending += [*item, *item.values()]
                self.budget.spend(2 * len(item))
            elif isinstance(item, list | tuple | set | frozenset):
                pending += item
                self.budget.spend(len(item))
            if total > self.budget.work:
                self.budget.spend(total)
        return total

    def _counted(self, items: Iterable[Any], cost: int) -> Iterator[Any]:
        for item in items:
            self.budget.spend(cost)
            yield item

    def _concat(self, parts: Sequence[Any]) -> str:
        self.budget.spend(self._weight(list(parts)))
        return "".join(str(part) for part in parts)

    def _put_out(self, value: Any) -> Any:
        self.budget.spend(self._weight(value))
        return value

    def _paid(self, value: Any) -> Any:
        if isinstance(value, str | list | tuple):
            self.budget.spend(len(value))
        return value


def render(source: str, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
    """A conversation as text.

    Raises:
        TemplateError: the template refuses the messages, fails, or does more than any conversation needs.
    """
    if len(source) > MAX_TEMPLATE_CHARS:
        raise TemplateError(f"the chat template has more than {MAX_TEMPLATE_CHARS} characters")
    given = sum(len(value) for message in messages for value in message.values() if isinstance(value, str))
    budget = _Budget(MAX_WORK + 32 * given)
    try:
        template = _Environment(budget).from_string(source)
        parts = []
        for part in template.generate(messages=list(messages), **variables):
            budget.spend(len(part))
            parts.append(part)
        return "".join(parts)
    except _TooMuch as error:
        raise TemplateError(f"the chat template was stopped: {error}") from None
    except _Refusal as error:
        raise TemplateError(f"the chat template refuses these messages: {_one_line(error)}") from None
    except jinja2.TemplateError as error:
        raise TemplateError(f"the chat template fails: {_one_line(error)}") from None
    except Exception as error:  # foreign code: it can raise anything, and all of it is the template's fault
        raise TemplateError(f"the chat template fails: {type(error).__name__}: {_one_line(error)}") from None


class _Refusal(jinja2.TemplateError):
    """What `raise_exception` of a template raises."""


def _refuse(message: object) -> None:
    raise _Refusal(str(message))


def _one_line(error: Exception) -> str:
    text = " ".join(str(error)[:1000].split())
    return text if len(text) <= 300 else text[:297] + "..."


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, sort_keys: bool = False) -> str:
    """JSON as chat templates expect it: without HTML's escapes, which Jinja's own filter writes."""
    return json.dumps(value, ensure_ascii=bool(ensure_ascii), indent=indent, sort_keys=bool(sort_keys))


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple) else 0


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _size_of_binop(operator: str, left: Any, right: Any) -> int:
    """About how large the result of an operator becomes."""
    if operator == "+":
        return _length(left) + _length(right)
    if operator == "%":
        return MAX_WORK << 10 if isinstance(left, str) and _WIDE.search(left) else 0
    repeated = max(_length(left) * abs(right) if isinstance(right, int) else 0,
                   _length(right) * abs(left) if isinstance(left, int) else 0)  # fmt: skip
    bits = _bits(left) * abs(right) if operator == "**" and isinstance(right, int) else _bits(left) + _bits(right)
    return repeated + (MAX_WORK << 10 if bits > _MAX_BITS else 0)


def _growth(name: str, args: Sequence[Any]) -> int:
    """About how large the result of a filter or a string's method becomes, beyond the size of its arguments."""
    texts = [arg for arg in args if isinstance(arg, str)]
    number = max((abs(arg) for arg in args if isinstance(arg, int)), default=0)
    if name in ("center", "ljust", "rjust", "zfill", "wordwrap", "truncate"):
        return number if name != "truncate" else 0
    if name in ("batch", "slice"):
        return number
    if name in ("indent", "expandtabs", "tojson"):
        return number * sum(1 + text.count("\n") + text.count("\t") for text in texts or [""])
    if name == "replace" and len(texts) >= 3:
        return texts[0].count(texts[1]) * len(texts[2])
    if name == "join":
        lists = [arg for arg in args if isinstance(arg, list | tuple)]
        lengths = [0, 0, *sorted(map(len, texts))]
        if not lists:  # the filter joins a text's characters, too
            return lengths[-1] * lengths[-2]
        return sum(sum(map(_length, items)) + len(items) * lengths[-1] for items in lists)
    if name in ("format", "format_map"):
        return MAX_WORK << 10 if number >= 10_000 or any(_WIDE.search(text) for text in texts[:1]) else 0
    return 0
