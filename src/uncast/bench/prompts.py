"""Prompts from a file: a line each as text, or JSON lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from uncast.checkpoints.files import CheckpointError, read_text
from uncast.engine.tokenizer import Tokenizer


def read_prompts(path: Path, tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of every prompt of a UTF-8 file.

    A file whose name ends in `.jsonl` holds a JSON value a line: a string, or an object with "prompt" or "text" (a string), or
    with "messages" (rendered by the model's chat template; an answer may be the last). Any other file holds a prompt a line;
    empty lines do not count.

    Raises:
        ValueError: the file cannot be read, holds no prompt, or a line is none of these; the sentence names the line.
        TemplateError: messages that the chat template refuses.
    """
    try:
        text = read_text(path)
    except CheckpointError as error:
        raise ValueError(str(error)) from None
    prompts = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            value = _parse(line, path, number) if path.suffix == ".jsonl" else line.removesuffix("\r")
            ids = _encode(value, tokenizer)
            if ids is None:
                raise ValueError(
                    f"{path}, line {number}: a string or an object with a string prompt or text, or with messages, is needed"
                )
            prompts.append(ids)
    if not prompts:
        raise ValueError(f"{path} holds no prompt")
    return prompts


def _parse(line: str, path: Path, number: int) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError(f"{path}, line {number} is not JSON") from None


def _encode(value: Any, tokenizer: Tokenizer) -> list[int] | None:
    """None for a value of another form."""
    if isinstance(value, dict):
        messages = value.get("messages")
        if messages is not None:
            if not _are_messages(messages):
                return None
            return tokenizer.chat(messages, add_generation_prompt=messages[-1].get("role") != "assistant")
        value = value.get("prompt", value.get("text"))
    return tokenizer.encode(value) if isinstance(value, str) else None


def _are_messages(messages: Any) -> bool:
    return (
        isinstance(messages, list)
        and bool(messages)
        and all(isinstance(m, dict) and all(isinstance(v, str) for v in m.values()) for m in messages)
    )
