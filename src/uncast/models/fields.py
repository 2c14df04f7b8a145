"""Typed access to a parsed JSON object: a fault is one sentence with the file, the field, its value and what is needed."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

MAX_INT = 2**31 - 1

_brief = reprlib.Repr()
_brief.maxlevel, _brief.maxstring, _brief.maxlong, _brief.maxlist = 3, 60, 40, 8


class ConfigError(ValueError):
    """A model configuration that is incomplete, inconsistent or not supported; one sentence."""


class Fields:
    """Fields of one JSON object. A field that is null counts as absent.

    Attributes:
        raw: the parsed object.
        where: what holds the fields, for messages ("config.json").
        error: raised on every fault.
    """

    def __init__(self, raw: Mapping[str, Any], where: str, error: type[ValueError] = ConfigError) -> None:
        self.raw, self.where, self.error = raw, where, error

    def __contains__(self, name: str) -> bool:
        return self.raw.get(name) is not None

    def fault(self, name: str, needed: str) -> ValueError:
        """The error that says what `name` holds and what is needed."""
        return self.error(f"{self.where} has {name} = {_brief.repr(self.raw.get(name))}: {needed}")

    def integer(self, name: str, default: int | None = None, *, low: int = 1, high: int = MAX_INT) -> int:
        """An integer from `low` to `high`; `default` if it is absent (None: it is needed)."""
        if default is not None and name not in self:
            return default
        value = self._needed(name)
        if not _is_integer(value, low, high):
            raise self.fault(name, f"{_integers(low, high)} is needed")
        return int(value)

    def number(self, name: str, default: float | None = None, *, low: float = 0.0, high: float = 1e30) -> float:
        """A number of at least `low` (above it, if it is 0) and at most `high`; `default` as for `integer`."""
        if default is not None and name not in self:
            return default
        value = self._needed(name)
        if not _is_number(value, low, high):
            raise self.fault(name, f"{_numbers(low, high)} is needed")
        return float(value)

    def optional(self, name: str, *, high: float) -> float:
        """A number from 0 to `high`, 0 if it is absent."""
        if name not in self or self._is_zero(name):
            return 0.0
        if not _is_number(self.raw[name], 0.0, high):
            raise self.fault(name, f"a number from 0 to {high:g} is needed")
        return float(self.raw[name])

    def boolean(self, name: str, default: bool) -> bool:
        """True or false; `default` if it is absent."""
        if name not in self:
            return default
        value = self.raw[name]
        if not isinstance(value, bool):
            raise self.fault(name, "true or false is needed")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """A string; `default` as for `integer`."""
        if default is not None and name not in self:
            return default
        value = self._needed(name)
        if not isinstance(value, str):
            raise self.fault(name, "a string is needed")
        return value

    def mapping(self, name: str) -> Mapping[str, Any]:
        """A JSON object, empty if it is absent."""
        value = self.raw.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.fault(name, "a JSON object is needed")
        return value

    def numbers(self, name: str, count: int, *, high: float = 1e30) -> tuple[float, ...]:
        """A list of `count` numbers above 0."""
        value = self._needed(name)
        if not isinstance(value, list) or len(value) != count or not all(_is_number(n, 0.0, high) for n in value):
            raise self.fault(name, f"a list of {count} numbers above 0, up to {high:g}, is needed")
        return tuple(map(float, value))

    def integers(self, name: str, *, low: int, high: int, count: int | None = None) -> tuple[int, ...]:
        """A list of integers (or, unless `count` is given, one integer) from `low` to `high`; empty if it is absent."""
        if name not in self:
            return ()
        value = self.raw[name]
        items = value if isinstance(value, list) or count is not None else [value]
        if not isinstance(items, list) or not all(_is_integer(item, low, high) for item in items):
            what = "an integer or a list of them" if count is None else f"a list of {count} integers"
            raise self.fault(name, f"{what} from {low} to {high} is needed")
        if count is not None and len(items) != count:
            raise self.fault(name, f"a list of {count} integers is needed")
        return tuple(items)

    def choices(self, name: str, count: int, allowed: Sequence[str]) -> tuple[str, ...]:
        """The first `count` strings of a list of at least as many, each one of `allowed`."""
        value = self._needed(name)
        if not isinstance(value, list) or len(value) < count:
            raise self.fault(name, f"{count} of {' or '.join(allowed)} are needed")
        if not all(isinstance(item, str) and item in allowed for item in value):
            raise self.fault(name, f"{count} of {' or '.join(allowed)} are needed")
        return tuple(value[:count])

    def require(self, name: str, allowed: object) -> None:
        """Refuses any other value; absent is fine."""
        value = self.raw.get(name)
        if value is not None and (type(value) is not type(allowed) or value != allowed):
            raise self.fault(name, f"only {allowed!r} is supported")

    def _needed(self, name: str) -> Any:
        if name not in self:
            raise self.error(f"{self.where} has no {name}")
        return self.raw[name]

    def _is_zero(self, name: str) -> bool:
        value = self.raw[name]
        return isinstance(value, int | float) and not isinstance(value, bool) and value == 0


def _is_integer(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_number(value: object, low: float, high: float) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return (value > low or (low != 0.0 and value == low)) and value <= high


def _integers(low: int, high: int) -> str:
    if high == MAX_INT and low in (0, 1):
        return "a positive integer" if low else "a non-negative integer"
    return f"an integer from {low} to {high}"


def _numbers(low: float, high: float) -> str:
    least = "a positive number" if low == 0.0 else f"a number of at least {low:g}"
    return least if high == 1e30 else f"{least} up to {high:g}"
