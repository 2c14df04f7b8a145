"""One request, streamed: the engine with a single place in it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from uncast.engine.core import Engine, EngineConfig
from uncast.engine.grammar import Grammar
from uncast.engine.request import GenerationError, Request
from uncast.engine.runner import ModelRunner, StepBytes
from uncast.engine.sampler import SamplingParams
from uncast.engine.tokenizer import Tokenizer

PREFILL_CHUNK = 256


@dataclass
class Generation:
    """What one request produced; filled while `stream` runs.

    Attributes:
        text, tokens: the output (stop strings and end tokens excluded from text).
        prompt_tokens: tokens of the prompt.
        prefill_s, decode_s: seconds until the first token, and for the others.
        decode_steps: tokens after the first, an end token included.
        finish_reason: "stop" or "length".
        step_bytes: cache bytes of the last step.
        drafted, accepted: tokens that the MTP layer drafted, and those that became text.
        speculation: what was done about drafts, in words.
    """

    prompt_tokens: int
    text: str = ""
    tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    decode_steps: int = 0
    finish_reason: str = "length"
    step_bytes: StepBytes | None = None
    drafted: int = 0
    accepted: int = 0
    speculation: str = "off"

    @property
    def tokens_per_s(self) -> float:
        """Decode speed; the prompt's time is not in it. 0 if nothing was decoded."""
        return self.decode_steps / self.decode_s if self.decode_steps else 0.0


def stream(
    runner: ModelRunner,
    tokenizer: Tokenizer,
    prompt: Seq[int],
    params: SamplingParams,
    *,
    max_tokens: int,
    stop: Seq[str] = (),
    result: Generation,
    speculate: int | None = 0,
    grammar: Grammar | None = None,
    shown_special: Seq[str] = (),
) -> Iterator[str]:
    """Yields text as it becomes final and fills `result`; the pages are given back at the end, also when closed early.

    Raises:
        RequestError: the request is malformed or longer than the model or the pool allows.
        GenerationError: the model's logits are not finite, or the grammar cannot be followed any further; raised after the text
            until then.
    """
    limits = EngineConfig(
        max_running=1, max_waiting=1, max_step_tokens=PREFILL_CHUNK, prefix_cache=False, speculate=speculate
    )
    engine = Engine(runner, tokenizer, limits)
    request = Request(prompt, params, max_tokens, stop, grammar=grammar, shown_special=shown_special)
    engine.add(request)
    began, first = time.perf_counter(), True
    try:
        while engine.has_work:
            outputs = engine.step()
            result.step_bytes = engine.last_step_bytes
            if engine.speculation is not None:
                result.drafted, result.accepted = engine.speculation.drafted, engine.speculation.accepted
                result.speculation = engine.speculation.describe()
            for output in outputs:
                now = time.perf_counter()
                if first:
                    result.prefill_s, began, first = now - began, now, False
                else:
                    result.decode_steps += 1
                    result.decode_s = now - began
                result.tokens = output.completion_tokens
                result.finish_reason = output.finish_reason or result.finish_reason
                result.text += output.text
                if output.text:
                    yield output.text
                if output.error is not None:
                    raise GenerationError(output.error)
    finally:
        engine.abort(request.request_id)
