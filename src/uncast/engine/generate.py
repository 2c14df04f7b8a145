"""One request, streamed: prompt in chunks, then token by token."""

from __future__ import annotations

import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from uncast.engine.runner import ModelRunner, Sequence, StepBytes
from uncast.engine.sampler import SamplingParams, sample
from uncast.engine.stop import StopMatcher
from uncast.engine.tokenizer import Tokenizer
from uncast.models.config import ModelConfig

PREFILL_CHUNK = 256


class RequestError(ValueError):
    """A request that does not fit the model; one sentence."""


@dataclass
class Generation:
    """What one request produced; filled while `stream` runs.

    Attributes:
        text, tokens: the output (stop strings and end tokens excluded from text).
        prompt_tokens: tokens of the prompt.
        prefill_s, decode_s: seconds until the first token, and for the others.
        decode_steps: forward steps of one token.
        finish_reason: "stop" or "length".
        step_bytes: cache bytes of the last step.
    """

    prompt_tokens: int
    text: str = ""
    tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    decode_steps: int = 0
    finish_reason: str = "length"
    step_bytes: StepBytes | None = None

    @property
    def tokens_per_s(self) -> float:
        """Decode speed; the prompt's time is not in it. 0 if nothing was decoded."""
        return self.decode_steps / self.decode_s if self.decode_steps else 0.0


def check_context(config: ModelConfig, prompt_tokens: int, max_tokens: int) -> None:
    """Raises `RequestError` if the request is empty or longer than the model's context."""
    if prompt_tokens < 1:
        raise RequestError("the prompt is empty: at least one token is needed")
    if max_tokens < 1:
        raise RequestError(f"max_tokens is {max_tokens}: at least 1 is needed")
    limit = config.max_position_embeddings
    if prompt_tokens + max_tokens > limit:
        raise RequestError(
            f"{prompt_tokens} prompt tokens and {max_tokens} new ones exceed the model's context of {limit}"
        )


def check_request(runner: ModelRunner, prompt_tokens: int, max_tokens: int) -> None:
    """Raises `RequestError` if the request is empty or longer than the model or the pool allows."""
    check_context(runner.model.config, prompt_tokens, max_tokens)
    rows = runner.pool.num_pages * runner.page_size
    if prompt_tokens + max_tokens > rows:
        raise RequestError(
            f"{prompt_tokens} prompt tokens and {max_tokens} new ones exceed the KV pool of {rows} tokens"
        )


def stream(
    runner: ModelRunner,
    tokenizer: Tokenizer,
    prompt: Seq[int],
    params: SamplingParams,
    *,
    max_tokens: int,
    stop: Seq[str] = (),
    result: Generation,
) -> Iterator[str]:
    """Yields text as it becomes final and fills `result`; the pages are given back at the end, also when closed early.

    Raises:
        RequestError: see `check_request`.
    """
    check_request(runner, len(prompt), max_tokens)
    sequence, generator = Sequence(list(prompt)), params.generator()
    matcher, decoder = StopMatcher(stop), tokenizer.stream()
    began = time.perf_counter()
    try:
        runner.ensure_pages(sequence, len(prompt) + max_tokens)
        while sequence.cached < len(prompt):
            logits = runner.step([(sequence, min(PREFILL_CHUNK, len(prompt) - sequence.cached))])
        result.prefill_s = time.perf_counter() - began
        began = time.perf_counter()
        while True:
            token = sample(logits[0].cpu(), params, generator)
            if token in runner.model.config.stop_token_ids:
                result.finish_reason = "stop"
                break
            sequence.tokens.append(token)
            result.tokens += 1
            shown, stopped = matcher.push(decoder.push(token))
            result.text += shown
            if shown:
                yield shown
            if stopped:
                result.finish_reason = "stop"
                break
            if result.tokens == max_tokens:
                break
            logits = runner.step([(sequence, 1)])
            result.decode_steps += 1
            result.decode_s = time.perf_counter() - began
        rest = matcher.flush()
        if rest:
            result.text += rest
            yield rest
    finally:
        result.step_bytes = runner.last_step_bytes() if sequence.cached else None
        runner.free(sequence)
