"""Prompts for a load: random token ids, random words, or a file."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from uncast.bench.prompts import read_values
from uncast.bench.serve import ServerError
from uncast.bench.serve_request import Answer, Endpoint, Prompt, ask

WORDS = """
time year people way day man thing woman life child world school state family student group country problem hand part place case
week company system program question work government number night point home water room mother area money story fact month lot
right study book eye job word business issue side kind head house service friend father power
"""
_PROBE_WORDS = 8


def token_prompts(count: int, length: int, max_tokens: int, *, vocab_size: int, seed: int) -> list[Prompt]:
    """Prompts of exactly `length` random token ids below `vocab_size`, for /v1/completions."""
    rng = random.Random(seed)
    return [Prompt([rng.randrange(vocab_size) for _ in range(length)], max_tokens) for _ in range(count)]


def word_prompts(count: int, words: int, max_tokens: int, *, seed: int) -> list[Prompt]:
    """Prompts of random English words."""
    rng, known = random.Random(seed), WORDS.split()
    return [Prompt(" ".join(rng.choices(known, k=words)), max_tokens) for _ in range(count)]


def file_prompts(path: Path, max_tokens: int, *, chat: bool) -> list[Prompt]:
    """The prompts of a file: see `uncast.bench.prompts.read_values`.

    Raises:
        ValueError: it cannot be read or holds something else, or messages although the endpoint is not for a chat.
    """
    values = read_values(path)
    for number, value in enumerate(values, 1):
        if not chat and not isinstance(value, str):
            raise ValueError(
                f"{path}: prompt {number} holds messages, which only the chat endpoint takes: give --endpoint chat"
            )
    return [Prompt(value, max_tokens) for value in values]


def warm_up_of(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """`count` prompts that begin otherwise, so that no prefix cache knows the real ones."""

    def other(content: Any, index: int) -> Any:
        if isinstance(content, str):
            return f"Warm-up {index}. {content}"
        first, *rest = content
        if isinstance(first, int):
            return [*reversed(content)]
        return [{**first, "content": other(first.get("content") or "", index)}, *rest]

    chosen = [prompts[index % len(prompts)] for index in range(count)]
    return [replace(prompt, content=other(prompt.content, index)) for index, prompt in enumerate(chosen)]


def words_for(endpoint: Endpoint, tokens: int) -> int:
    """How many words make a prompt of about `tokens` tokens here: two requests of one output token tell.

    Raises:
        ServerError: they fail, or the server says nothing of prompt tokens.
        ValueError: the chat template alone has more tokens.
    """
    few = _prompt_tokens(endpoint, _PROBE_WORDS)
    many = max(4 * _PROBE_WORDS, tokens // 2)
    each = max(0.1, (_prompt_tokens(endpoint, many) - few) / (many - _PROBE_WORDS))
    words = round(_PROBE_WORDS + (tokens - few) / each)
    if words < 1:
        raise ValueError(
            f"input_len is {tokens}: the chat template of this model makes {round(few - _PROBE_WORDS * each)} tokens of nothing"
        )
    return words


def _prompt_tokens(endpoint: Endpoint, words: int) -> int:
    answer = _ask_once(replace(endpoint, stream=False), word_prompts(1, words, 1, seed=words)[0])
    if answer.failure is not None:
        raise ServerError(f"{endpoint.url} refused a prompt of {words} words: {answer.failure}: {answer.detail}")
    if answer.prompt_tokens is None:
        raise ServerError(f"{endpoint.url} does not say how many tokens a prompt has: give --prompts FILE")
    return answer.prompt_tokens


def _ask_once(endpoint: Endpoint, prompt: Prompt) -> Answer:
    async def once() -> Answer:
        async with httpx.AsyncClient(timeout=None, trust_env=False) as client:
            return await ask(client, endpoint, prompt)

    return asyncio.run(once())
