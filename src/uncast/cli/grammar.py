"""`--json-schema` and `--grammar` of `generate`: what the server's `response_format` and `structured_outputs` do."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from uncast.checkpoints.files import CheckpointError, read_json, read_text
from uncast.cli.main import UsageError, WorkError
from uncast.engine import grammar as grammars
from uncast.engine.grammar import Grammar, GrammarCompiler, GrammarError, GrammarSource, Marks
from uncast.engine.tokenizer import Tokenizer
from uncast.models.config import ModelConfig
from uncast.server.chat_format import ChatFormat
from uncast.server.marks import ThinkingReader

INCOMPLETE = "the text was cut at --max-tokens: it is not complete by its grammar"


@dataclass(frozen=True)
class Following:
    """What the text must follow.

    Attributes:
        shown: special tokens that stay in the text, so that reasoning can be told from the answer.
    """

    grammar: Grammar | None = None
    shown: Sequence[str] = ()


def add_grammar(parser: argparse.ArgumentParser) -> None:
    """The two options."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--json-schema", type=Path, metavar="FILE",
        help="the text is JSON that this schema accepts (after </think> where a chat's answer begins with reasoning)",
    )  # fmt: skip
    group.add_argument(
        "--grammar", type=Path, metavar="FILE", help="the text follows this Lark grammar, as llguidance reads it"
    )


def following(args: argparse.Namespace, prompt: str, tokenizer: Tokenizer, config: ModelConfig) -> Following:
    """The compiled grammar of the options.

    Args:
        prompt: the text that the model continues.

    Raises:
        UsageError: the file cannot be read or what it holds cannot be compiled.
        WorkError: llguidance is not installed.
    """
    path: Path | None = args.json_schema or args.grammar
    if path is None:
        return Following()
    try:
        grammars.check_available()
    except GrammarError as error:
        raise WorkError(str(error)) from None
    form = ChatFormat.of(tokenizer) if args.chat else ChatFormat()
    inside = bool(form.reasoning and form.begins_inside(prompt))
    try:
        source = _source(args, path)
        if inside:
            source = grammars.after(source, ThinkingReader.END, Marks(tokenizer))
        compiler = GrammarCompiler(tokenizer, config.vocab_size, config.stop_token_ids)
        try:
            return Following(compiler.compile(source), form.shown(None) if inside else ())
        finally:
            compiler.close()
    except CheckpointError as error:
        raise UsageError(str(error)) from None
    except GrammarError as error:
        raise UsageError(f"{path} cannot be compiled: {error}") from None


def _source(args: argparse.Namespace, path: Path) -> GrammarSource:
    return grammars.json_grammar(read_json(path)) if args.json_schema else grammars.lark_grammar(read_text(path))
