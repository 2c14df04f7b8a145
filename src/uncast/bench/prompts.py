"""Prompts from a file: a line each as text, or JSON lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from uncast.checkpoints.files import CheckpointError, read_text

if TYPE_CHECKING:
    from uncast.engine.tokenizer import Tokenizer

Messages = list[dict[str, str]]


def read_values(path: Path) -> list[str | Messages]:
    """The prompts of a UTF-8 file: texts, or messages of a chat.

    A file whose name ends in `.jsonl` holds a JSON value a line: a string, or an object with "prompt" or "text" (a string), or
    with "messages". Any other file holds a prompt a line; empty lines do not count.

    Raises:
        ValueError: the file cannot be read, holds no prompt, or a line is none of these; the sentence names the line.
    """
    try:
        text = read_text(path)
    except CheckpointError as error:
        raise ValueError(str(error)) from None
    prompts = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            value = _value(_parse(line, path, number)) if path.suffix == ".jsonl" else line.removesuffix("\r")
            if value is None:
                raise ValueError(
                    f"{path}, line {number}: a string or an object with a string prompt or text, or with messages, is needed"
                )
            prompts.append(value)
    if not prompts:
        raise ValueError(f"{path} holds no prompt")
    return prompts


def read_prompts(path: Path, tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of every prompt of a file of `read_values`; messages are rendered by the model's chat template, and an answer
    may be the last of them.

    Raises:
        ValueError: as `read_values`.
        TemplateError: messages that the chat template refuses.
    """
    return [_encode(value, tokenizer) for value in read_values(path)]


def _parse(line: str, path: Path, number: int) -> Any:
    try:
        value = json.loads(line)
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError(f"{path}, line {number} holds half of a surrogate pair, which is no character") from None
    except (ValueError, RecursionError):
        raise ValueError(f"{path}, line {number} is not JSON") from None
    return value


def _value(value: Any) -> str | Messages | None:
    """None for a value of another form."""
    if isinstance(value, dict):
        messages = value.get("messages")
        if messages is not None:
            return messages if _are_messages(messages) else None
        value = value.get("prompt", value.get("text"))
    return value if isinstance(value, str) else None


def _encode(value: str | Messages, tokenizer: Tokenizer) -> list[int]:
    if isinstance(value, str):
        return tokenizer.encode(value)
    return tokenizer.chat(value, add_generation_prompt=value[-1].get("role") != "assistant")


def _are_messages(messages: Any) -> bool:
    return (
        isinstance(messages, list)
        and bool(messages)
        and all(isinstance(m, dict) and all(isinstance(v, str) for v in m.values()) for m in messages)
    )
