"""Text to token ids and back, and the chat template, from a Hugging Face folder's tokenizer files."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import DecodeStream

from uncast.checkpoints.files import CheckpointError, read_json_if_there, read_text
from uncast.checkpoints.gguf_file import companion_folder
from uncast.engine.request import check_text
from uncast.engine.template import TemplateError, render

__all__ = ["IncrementalDecoder", "TemplateError", "Tokenizer"]


class Tokenizer:
    """`tokenizer.json` (required) and `tokenizer_config.json` (chat template) of a folder."""

    def __init__(self, folder: Path, vocab_size: int | None = None) -> None:
        """Reads the files.

        Args:
            vocab_size: of the model; every id of the tokenizer must be below it.

        Raises:
            CheckpointError: tokenizer.json is missing or cannot be read, or does not belong to the model.
        """
        folder = companion_folder(folder)
        path = folder / "tokenizer.json"
        if not os.path.lexists(path):
            raise CheckpointError(f"{folder} has no tokenizer.json")
        text = read_text(path)
        try:
            self._fast = FastTokenizer.from_str(text)
        except Exception as error:  # tokenizers raises bare Exception
            raise CheckpointError(f"cannot read {path}: {error}") from None
        largest = max(self._fast.get_vocab().values(), default=-1)
        if vocab_size is not None and largest >= vocab_size:
            raise CheckpointError(f"{path} has token {largest}: the model's vocabulary has ids 0 to {vocab_size - 1}")
        self._config = read_json_if_there(folder / "tokenizer_config.json")
        self._template_file = folder / "chat_template.jinja"

    @property
    def vocab_size(self) -> int:
        return self._fast.get_vocab_size()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids; special tokens as the tokenizer's post-processor adds them.

        Raises:
            RequestError: the text holds half of a surrogate pair.
        """
        check_text(text, "the prompt")
        ids: list[int] = self._fast.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text: str = self._fast.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def piece(self, token_id: int) -> str | None:
        """The vocabulary's spelling of a token (byte-level or `<0xE2>` pieces show its bytes); None if there is none."""
        piece: str | None = self._fast.id_to_token(token_id)
        return piece

    def to_json(self) -> str:
        """The tokenizer as the text of a tokenizer.json, without padding and truncation."""
        text: str = self._fast.to_str()
        return json.dumps({**json.loads(text), "padding": None, "truncation": None})

    @functools.cached_property
    def special_ids(self) -> dict[str, int]:
        """Tokens that decoding leaves out: text -> id."""
        added = self._fast.get_added_tokens_decoder()
        return {token.content: number for number, token in added.items() if token.special}

    def stream(self, shown: Collection[str] = ()) -> IncrementalDecoder:
        """A decoder; `shown` are special tokens that are part of its text."""
        hidden = {number for text, number in self.special_ids.items() if text not in shown}
        return IncrementalDecoder(self._fast, hidden if len(hidden) < len(self.special_ids) else None)

    def chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation rendered by the model's template.

        Raises:
            TemplateError: no template, or it refuses the messages or fails.
            RequestError: a message holds half of a surrogate pair.
        """
        text = self.render(messages, add_generation_prompt=add_generation_prompt)
        return self.encode(text, add_special_tokens=False)

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The text of a conversation by the model's template, which sees `variables`, too.

        Raises:
            TemplateError: no template, or it refuses the messages or fails.
        """
        special = {
            name: value for name, value in self._config.items() if name.endswith("_token") and isinstance(value, str)
        }
        return render(self.template, messages, **{**special, **variables})

    @functools.cached_property
    def template(self) -> str:
        """Read on first use: a model with a damaged template can still complete texts.

        Raises:
            TemplateError: no template, or a file that cannot be read.
        """
        if not os.path.lexists(self._template_file):
            template = self._config.get("chat_template")
            if not isinstance(template, str):
                raise TemplateError("this model has no chat template")
            return template
        try:
            return read_text(self._template_file)
        except CheckpointError as error:
            raise TemplateError(str(error)) from None


class IncrementalDecoder:
    """Ids in, text out, holding back bytes until they are whole characters."""

    def __init__(self, fast: FastTokenizer, hidden: Collection[int] | None = None) -> None:
        """Args: hidden: ids without text; None hides every special token."""
        self._fast, self._hidden = fast, hidden
        self._stream = DecodeStream(skip_special_tokens=hidden is None)
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        """The text that became final with this token, often empty within a multi-token character."""
        if self._hidden is not None and token_id in self._hidden:
            return ""
        text = self._stream.step(self._fast, token_id) or ""
        self._held = [] if text else [*self._held, token_id]
        return text

    def flush(self) -> str:
        """The text of tokens held back at the end, with U+FFFD for what is no whole character."""
        held, self._held = self._held, []
        text: str = self._fast.decode(held, skip_special_tokens=self._hidden is None) if held else ""
        return text
