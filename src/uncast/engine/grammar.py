"""Grammars that an answer must follow (JSON schemas, regular expressions, choices, Lark) as masks over the vocabulary.

The work is llguidance's (MIT, no dependencies, `pip install 'uncast[grammar]'`); xgrammar would bring transformers and triton
along. It bounds what a grammar may cost at each token, and while it is compiled with exceptions: see `grammar_check`.

With speculation drafts are checked in order: the mask at each place follows the tokens before it, and a draft that it rules out
is not taken.
"""

from __future__ import annotations

import importlib.util
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from uncast.engine.grammar_check import CheckFailed, GrammarChecker, limits

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from uncast.engine.tokenizer import Tokenizer

MAX_CHARS = 1 << 17
"""Of a grammar's source, schemas included."""
MAX_SECONDS = 10
"""To compile one."""
_STACK_BYTES = 64 << 20
"""Of a compiling thread; untouched pages cost nothing. More than `grammar_check` gets by with."""
INSTALL_HINT = "pip install 'uncast[grammar]'"
_CACHED = 64
_JSON_OPTIONS = {"whitespace_pattern": r"( |\n[ \t]{0,20})?"}
"""One blank, or a new line and its indentation: without a bound a small model can go on with blanks until its length is used
up."""


ONE_OF = (
    "the alternatives of oneOf must exclude each other by their types or by a property that each requires with its own const "
    "or enum, named as discriminator if they are given by $ref; where several may fit, use anyOf"
)
"""llguidance proves that much and then takes oneOf as anyOf, which is exact; its option to take any oneOf so is not used."""


class GrammarError(ValueError):
    """A grammar that cannot be compiled, or can no longer be followed; one sentence."""


class GrammarBusy(GrammarError):
    """Other grammars take long to compile; this one was not tried."""


def check_available() -> None:
    """Raises `GrammarError` if the extra is not installed."""
    if importlib.util.find_spec("llguidance") is None:
        raise GrammarError(f"structured output needs llguidance: {INSTALL_HINT}")


@dataclass(frozen=True)
class GrammarSource:
    """A grammar before it is compiled: Lark text (llguidance's dialect) whose rule `start` may use others as `@name`.

    Attributes:
        parts: name -> `{"json_schema": ...}` or `{"lark_grammar": ...}`.
    """

    lark: str
    parts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def text(self) -> str:
        """The whole as llguidance reads it, which also identifies it.

        Raises:
            GrammarError: it is nested too deeply or too long.
        """
        grammars = [{"name": "top", "lark_grammar": "%llguidance {}\n" + self.lark}]
        grammars += [{"name": name, **part} for name, part in self.parts.items()]
        try:
            text = json.dumps({"grammars": grammars}, ensure_ascii=False)
        except RecursionError:
            raise GrammarError("it is nested too deeply") from None
        if len(text) > MAX_CHARS:
            raise GrammarError(f"it has {len(text)} characters: at most {MAX_CHARS} are allowed")
        return text


def json_part(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A part that is JSON after a schema, with few blanks between its tokens."""
    return {"json_schema": {**schema, "x-guidance": _JSON_OPTIONS}}


def json_grammar(schema: Mapping[str, Any]) -> GrammarSource:
    """JSON that a schema accepts. `{"type": "object"}` is OpenAI's `json_object`."""
    return GrammarSource("start: @answer", {"answer": json_part(schema)})


def regex_grammar(pattern: str) -> GrammarSource:
    """A text that the whole pattern matches (syntax of Rust's regex crate: no look-around, no back references)."""
    return GrammarSource("start: @answer", {"answer": {"lark_grammar": f"start: {lark_regex(pattern)}"}})


def choice_grammar(choices: Sequence[str]) -> GrammarSource:
    """One of some texts."""
    return GrammarSource(f"start: CHOICE\nCHOICE: {' | '.join(lark_text(choice) for choice in choices)}")


def lark_grammar(text: str) -> GrammarSource:
    """A Lark grammar with a rule `start`, in llguidance's dialect."""
    return GrammarSource("start: @answer", {"answer": {"lark_grammar": text}})


class Marks:
    """How a model's marks, such as `</think>`, are spelled in a grammar: as one token where the tokenizer has a special one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._special = tokenizer.special_ids

    def literal(self, text: str) -> str:
        """An expression for one mark."""
        token = self._special.get(text)
        return lark_text(text) if token is None else f"<[{token}]>"

    def until(self, name: str, end: str) -> str:
        """A rule for any text that ends with the first mark `end`."""
        token = self._special.get(end)
        if token is not None:
            return f"{name}: /(?s:.*)/ <[{token}]>"
        return f"{name}[suffix={lark_text(end)}]: /(?s:.*)/"


def after(source: GrammarSource, end: str, marks: Marks) -> GrammarSource:
    """Any text up to the first mark `end`, then blanks and the grammar: an answer after its reasoning."""
    body = re.sub(r"^start:", "answer:", source.lark, count=1, flags=re.M)
    return GrammarSource(f"start: before /[ \\n]{{0,4}}/ answer\n{marks.until('before', end)}\n{body}", source.parts)


def lark_text(text: str) -> str:
    """A literal."""
    return json.dumps(text, ensure_ascii=False)


def lark_regex(pattern: str) -> str:
    """A pattern between slashes, with the meaning of \\d and \\w that JSON schemas have.

    Raises:
        GrammarError: without llguidance.
    """
    check_available()
    from llguidance import regex_to_lark

    return f"/{regex_to_lark(pattern, use_ascii='dw')}/"


class GrammarState:
    """Where one request's answer is in its grammar."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, ends: list[int]) -> None:
        self._matcher, self._vocab, self._ends = matcher, vocab_size, ends

    @property
    def complete(self) -> bool:
        """Whether nothing can follow but the end."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """New logits float32 [vocab] on the host: -inf for every token that cannot follow; end tokens can where the grammar can
        end.

        Raises:
            GrammarError: no token can follow, the model gives none of them a finite logit, or the grammar's limits per token
                are used up.
        """
        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise GrammarError(f"the grammar cannot be followed any further: {one_line(self._matcher.get_error())}")
        allowed = torch.from_numpy(np.unpackbits(packed, count=self._vocab, bitorder="little").astype(bool))
        if not self._matcher.is_accepting():
            allowed[self._ends] = False  # an end token may have a text, too, but never is one
        masked = logits.masked_fill(~allowed, -torch.inf)
        if not masked.max().isfinite():
            raise GrammarError("the grammar cannot be followed any further: no token of the model's vocabulary fits")
        return masked

    def accept(self, token: int) -> None:
        """Takes the next token, one that `apply` allowed."""
        self._matcher.consume_token(token)


class Grammar:
    """A compiled grammar; any number of requests can begin it."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, ends: list[int]) -> None:
        self._matcher, self._vocab, self._ends = matcher, vocab_size, ends

    def begin(self) -> GrammarState:
        """A state at the beginning. Safe from any thread."""
        return GrammarState(self._matcher.deep_copy(), self._vocab, self._ends)


class GrammarCompiler:
    """Compiles grammars for one model's tokens and remembers the last ones. Safe from any thread."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: Collection[int]) -> None:
        """Args: end_ids: the model's end tokens, which a grammar allows where it can end."""
        self._source, self._vocab, self._ends = tokenizer, vocab_size, sorted(end_ids)
        self._lock, self._checking = threading.Lock(), threading.Lock()
        self._checker: GrammarChecker | None = None
        self._tokenizer: LLTokenizer | None = None
        self._cache: OrderedDict[str, Grammar] = OrderedDict()

    def compile(self, source: GrammarSource) -> Grammar:
        """A compiled grammar; takes milliseconds, seconds for the largest that are allowed.

        Raises:
            GrammarError: it is not valid, needs what llguidance does not have, or is too large or too complex; or the extra is
                missing.
            GrammarBusy: no other grammar was compiled in time.
        """
        check_available()
        text = source.text()
        with self._lock:
            known = self._cache.get(text)
            if known is not None:
                self._cache.move_to_end(text)
                return known
        if not self._checking.acquire(timeout=MAX_SECONDS):
            raise GrammarBusy("other grammars take long to compile: try again later")
        try:
            self._check(text)
        finally:
            self._checking.release()
        grammar = Grammar(self._matcher(text), self._vocab, self._ends)
        with self._lock:
            self._cache[text] = grammar
            while len(self._cache) > _CACHED:
                self._cache.popitem(last=False)
        return grammar

    def close(self) -> None:
        """Ends the other process; it starts again when it is needed."""
        with self._checking:
            if self._checker is not None:
                self._checker.close()

    def _check(self, text: str) -> None:
        """Compiles in another process, which may end of it."""
        self._tokens()
        if self._checker is None:
            self._checker = GrammarChecker(self._source.to_json(), self._vocab, self._ends, MAX_SECONDS)
        try:
            fault = self._checker.check(text)
        except CheckFailed:
            raise GrammarError(
                f"it is too complex: not compiled within {MAX_SECONDS} s and the memory there is"
            ) from None
        if fault:
            raise GrammarError(ONE_OF if "coerce_one_of" in fault else one_line(fault))

    def _matcher(self, text: str) -> LLMatcher:
        """Compiles, in a thread with a large stack, what has been checked."""
        tokens, made = self._tokens(), []

        def work() -> None:
            from llguidance import LLMatcher

            matcher = LLMatcher(tokens, text, log_level=0, limits=limits())
            if not matcher.is_error():
                matcher.compute_bitmask()  # the first mask is the dearest one: not in the engine's thread
            made.append(matcher)

        with self._lock:
            usual = threading.stack_size(_STACK_BYTES)
            thread = threading.Thread(target=work, name="uncast-grammar", daemon=True)
            thread.start()
            threading.stack_size(usual)
        thread.join()
        if not made or made[0].is_error():
            raise GrammarError(one_line(made[0].get_error() if made else "llguidance failed"))
        return made[0]

    def _tokens(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        if not self._ends:
            raise GrammarError("this model has no end token, without which a grammar cannot end")
        with self._lock:
            if self._tokenizer is None:
                try:
                    self._tokenizer = LLTokenizer(
                        self._source.to_json(), n_vocab=self._vocab, eos_token=list(self._ends)
                    )
                except (ValueError, OSError) as error:
                    raise GrammarError(f"llguidance cannot use this model's tokenizer: {one_line(error)}") from None
            return self._tokenizer


def one_line(error: object) -> str:
    """The first sentence of a library's message, with its reason where that stands in a later line, as for a regex."""
    lines = [line.strip() for line in str(error)[:2000].splitlines() if line.strip()]
    text = lines[0] if lines else "no reason was given"
    if text.endswith(":"):
        reasons = [line.removeprefix("error:").strip() for line in lines if line.startswith("error:")]
        text = f"{text} {reasons[0]}" if reasons else text
    return text if len(text) <= 300 else text[:297] + "..."
