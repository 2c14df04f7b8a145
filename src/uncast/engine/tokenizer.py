"""Text to token ids and back, and the chat template, from a Hugging Face folder's tokenizer files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import DecodeStream

from uncast.checkpoints.files import CheckpointError, read_json


class TemplateError(ValueError):
    """Messages that the model's chat template refuses, or a model without a template; one sentence."""


class Tokenizer:
    """`tokenizer.json` (required) and `tokenizer_config.json` (chat template) of a folder."""

    def __init__(self, folder: Path) -> None:
        """Raises `CheckpointError` if tokenizer.json is missing or cannot be read."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{folder} has no tokenizer.json")
        try:
            self._fast = FastTokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exception
            raise CheckpointError(f"cannot read {path}: {error}") from None
        config_path = folder / "tokenizer_config.json"
        self._config = read_json(config_path) if config_path.is_file() else {}
        template = folder / "chat_template.jinja"
        self._template = (
            template.read_text(encoding="utf-8") if template.is_file() else self._config.get("chat_template")
        )

    @property
    def vocab_size(self) -> int:
        return self._fast.get_vocab_size()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids; special tokens as the tokenizer's post-processor adds them."""
        ids: list[int] = self._fast.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text: str = self._fast.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def piece(self, token_id: int) -> str | None:
        """The vocabulary's spelling of a token (byte-level or `<0xE2>` pieces show its bytes); None if there is none."""
        piece: str | None = self._fast.id_to_token(token_id)
        return piece

    def stream(self) -> IncrementalDecoder:
        return IncrementalDecoder(self._fast)

    def chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation rendered by the model's template.

        Raises:
            TemplateError: no template, or it refuses the messages.
        """
        if not isinstance(self._template, str):
            raise TemplateError("this model has no chat template")
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _raise_from_template
        special = {
            name: value for name, value in self._config.items() if name.endswith("_token") and isinstance(value, str)
        }
        try:
            text = environment.from_string(self._template).render(
                messages=list(messages), add_generation_prompt=add_generation_prompt, **special
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise TemplateError(f"the chat template refuses these messages: {error}") from None
        return self.encode(text, add_special_tokens=False)


class IncrementalDecoder:
    """Ids in, text out, holding back bytes until they are whole characters."""

    def __init__(self, fast: FastTokenizer) -> None:
        self._fast = fast
        self._stream = DecodeStream(skip_special_tokens=True)
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        """The text that became final with this token, often empty within a multi-token character."""
        text = self._stream.step(self._fast, token_id) or ""
        self._held = [] if text else [*self._held, token_id]
        return text

    def flush(self) -> str:
        """The text of tokens held back at the end, with U+FFFD for what is no whole character."""
        held, self._held = self._held, []
        text: str = self._fast.decode(held, skip_special_tokens=True) if held else ""
        return text


def _raise_from_template(message: str) -> None:
    raise jinja2.TemplateError(message)
