"""Random JSON schemas of the kind that clients send; answers to them are of bounded length, except through recursion."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

NAMES = ["name", "id", "käse", "a b", 'quo"te', "x\\y", "🙂", "$ref", "items", "", "価格", "n\nl"]


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema of up to three levels; some refer to definitions, one of them recursive."""
    if depth == 0 and rng.random() < 0.2:
        inner = random_schema(rng, 1)
        tree = {
            "type": "object",
            "properties": {"leaf": inner, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tree"}]}},
            "required": ["leaf", "next"],
            "additionalProperties": False,
        }
        return {"$ref": "#/$defs/tree", "$defs": {"tree": tree}}
    kinds: list[Callable[[random.Random, int], dict[str, Any]]] = [_string, _number, _integer, _choice, _boolean]
    if depth < 3:
        kinds += [_object, _object, _array, _any_of, _map]
    return rng.choice(kinds if depth else kinds[-5:])(rng, depth)


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    kind = rng.randrange(4)
    if kind == 0:
        low = rng.randint(0, 3)
        return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 6)}
    if kind == 1:
        return {
            "type": "string",
            "pattern": rng.choice(["^[a-z]{2,6}$", r"^\d{4}-\d{2}$", "^(ab|cd)+?e{0,3}$", "^x?$"]),
        }
    if kind == 2:
        return {"type": "string", "format": rng.choice(["date", "uuid", "time", "ipv4"])}
    return {"type": ["string", "null"], "maxLength": 5}


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.choice([-3.5, 0, 1])
    return {"type": "number", "minimum": low, "exclusiveMaximum": low + rng.choice([1, 10, 1000])}


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    if rng.random() < 0.3:
        return {"type": "integer", "minimum": 0, "maximum": 1000, "multipleOf": rng.choice([5, 7, 10])}
    low = rng.randint(-50, 50)
    return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)}


def _choice(rng: random.Random, depth: int) -> dict[str, Any]:
    values: list[Any] = ["a", "ünï", "🙂", 'q"\\', 1, -2.5, None, True, [1, {"k": "v"}], {"z": []}]
    return {"enum": rng.sample(values, rng.randint(1, 5))} if rng.random() < 0.7 else {"const": rng.choice(values)}


def _boolean(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": rng.choice(["boolean", "null"])}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(0, 4))
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth + 1) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
        "additionalProperties": False,
    }


def _map(rng: random.Random, depth: int) -> dict[str, Any]:
    keys = {"type": "object", "patternProperties": {"^k[0-9]$": random_schema(rng, depth + 1)}}
    return {**keys, "additionalProperties": False, "maxProperties": 3}


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    if rng.random() < 0.3:
        first = [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]
        return {"type": "array", "prefixItems": first, "items": False, "minItems": rng.randint(0, len(first))}
    low = rng.randint(0, 2)
    return {
        "type": "array",
        "items": random_schema(rng, depth + 1),
        "minItems": low,
        "maxItems": low + rng.randint(0, 2),
    }


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]}
