"""What goes into the engine and what comes out: `Request` and `RequestOutput`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from uncast.engine.sampler import SamplingError, SamplingParams

if TYPE_CHECKING:
    from uncast.engine.grammar import Grammar

__all__ = [
    "GenerationError", "Request", "RequestError", "RequestOutput", "SamplingError", "SamplingParams", "TokenLogprob",
]  # fmt: skip

MAX_STOPS = 16
NOT_FINITE = "the model's logits are not finite: its weights or its configuration are damaged, or its numbers overflow"
"""Why a request ends with finish_reason "error"."""

_ids = itertools.count(1)


class RequestError(ValueError):
    """A request that is malformed or does not fit the model or the pool; one sentence that names the field."""


class GenerationError(RuntimeError):
    """A request that was valid and ended because the model's output is of no use; one sentence."""


def check_text(text: str, name: str) -> None:
    """Raises `RequestError` if the text holds half of a surrogate pair, which no encoding has (as undecodable bytes of a
    command line do)."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(f"{name} is not valid Unicode: character {error.start} is a lone surrogate") from None


def check_lengths(
    prompt_tokens: int, max_tokens: int, *, context: int | None = None, pool_rows: int | None = None
) -> None:
    """Raises `RequestError` if a request of these lengths is empty or longer than the limits given."""
    if prompt_tokens < 1:
        raise RequestError("the prompt is empty: at least one token is needed")
    if not _is_integer(max_tokens):
        raise RequestError(f"max_tokens is {max_tokens!r:.80}: an integer of at least 1 is needed")
    if max_tokens < 1:
        raise RequestError(f"max_tokens is {max_tokens}: at least 1 is needed")
    for limit, what in ((context, "the model's context of {}"), (pool_rows, "the KV pool of {} tokens")):
        if limit is not None and prompt_tokens + max_tokens > limit:
            raise RequestError(f"{prompt_tokens} prompt tokens and {max_tokens} new ones exceed {what.format(limit)}")


@dataclass(frozen=True)
class Request:
    """One prompt to continue. `n` completions are `n` requests: the prefix cache makes the later ones cheap.

    Attributes:
        prompt: token ids, at least one.
        params: how tokens are chosen.
        max_tokens: new tokens at most; at least 1.
        stop: the text ends before the first of these strings; it is not part of the text.
        stop_token_ids: token ids that end the text, besides the model's own end tokens.
        ignore_eos: the model's own end tokens do not end the text (`stop_token_ids` still do).
        grammar: what the tokens must follow; where nothing can follow any more the text ends ("stop").
        shown_special: special tokens that are part of the text, as marks for whoever reads it.
        request_id: unique among the requests in the engine; made up when left out.
    """

    prompt: Seq[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int = 16
    stop: Seq[str] = ()
    stop_token_ids: Seq[int] = ()
    ignore_eos: bool = False
    grammar: Grammar | None = None
    shown_special: Seq[str] = ()
    request_id: str = field(default_factory=lambda: f"request-{next(_ids)}")

    def __post_init__(self) -> None:
        """Raises `RequestError`."""
        check_lengths(len(self.prompt), self.max_tokens)
        for name, ids in (("the prompt", self.prompt), ("stop_token_ids", self.stop_token_ids)):
            wrong = [token for token in ids if not _is_integer(token)]
            if wrong:
                raise RequestError(f"{name} holds {wrong[0]!r:.80}: token ids are integers")
        if isinstance(self.stop, str):
            raise RequestError("stop is one string: a sequence of strings is needed")
        for text in self.stop:
            if not isinstance(text, str):
                raise RequestError(f"stop holds {text!r:.80}: strings are needed")
            if not text:
                raise RequestError("a stop string must not be empty")
            check_text(text, "a stop string")
        if len(self.stop) > MAX_STOPS:
            raise RequestError(f"stop has {len(self.stop)} strings: at most {MAX_STOPS} are allowed")
        if any(token < 0 for token in self.stop_token_ids):
            raise RequestError(f"stop_token_ids is {list(self.stop_token_ids)}: token ids are not negative")

    def check_fits(self, *, vocab_size: int, context: int, pool_rows: int) -> None:
        """Checks the request against a model and its pool.

        Raises:
            RequestError: token ids outside the vocabulary, or more tokens than the context or the pool holds.
        """
        named = {"prompt": self.prompt, "stop_token_ids": self.stop_token_ids, "logit_bias": self.params.logit_bias}
        for name, ids in named.items():
            for token in ids:
                if not 0 <= token < vocab_size:
                    raise RequestError(f"{name} has token {token}: the vocabulary has ids 0 to {vocab_size - 1}")
        check_lengths(len(self.prompt), self.max_tokens, context=context, pool_rows=pool_rows)


@dataclass(frozen=True)
class TokenLogprob:
    """Natural-log probabilities at one generated token, of the model's own distribution: before penalties, bias, temperature.

    Attributes:
        token_id, logprob: the chosen token.
        top: the `params.logprobs` likeliest tokens, best first, as (token_id, logprob); the chosen one may be missing.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class RequestOutput:
    """What one step added to one request; the last one of a request has a finish_reason.

    Attributes:
        request_id: of the request.
        text: text that became final in this step; may be empty (within a character or a possible stop string).
        token_ids: tokens generated in this step. A token that ends the text by its id is not among them; tokens of a stop
            string are.
        logprobs: one per token in `token_ids` if `params.logprobs` was given, else empty.
        finish_reason: None while running, "stop" (end token, stop id or stop string), "length" (max_tokens), "abort", "error".
        matched_stop: the stop string or the token id that ended the text, else None.
        prompt_tokens: tokens of the prompt.
        cached_tokens: prompt tokens whose rows came from the prefix cache.
        completion_tokens: tokens generated so far, `token_ids` of all outputs together.
        error: what went wrong, one sentence, if finish_reason is "error"; else None.
        grammar_failed: whether it was the request's grammar that went wrong.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: str | None
    matched_stop: str | int | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    error: str | None = None
    grammar_failed: bool = False

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
