"""One admitted or waiting request: its tokens and pages, its random numbers, and the text that is not final yet."""

from __future__ import annotations

from dataclasses import replace

import torch

from uncast.engine.prefix_cache import PrefixNode
from uncast.engine.request import Request, RequestOutput, TokenLogprob
from uncast.engine.runner import Sequence
from uncast.engine.sampler import Draw, Penalties, sample
from uncast.engine.stop import StopMatcher
from uncast.engine.swap import HostPages
from uncast.engine.tokenizer import Tokenizer


class ActiveRequest:
    """Mutable state of one request.

    Token and page ownership (page_size 4, `|` between pages):

        tokens   p p p p | p p p p | p p g g | g
                 [0, cached) have rows in `pages`        [cached, len(tokens)) are still to be run
        pages    [0, shared) stand in the prefix tree    [shared, len(pages)) belong to this request alone:
                 (found there or given to it)            not full yet, or the tree has other bytes for these tokens

    Attributes:
        arrival: grows with every request; the youngest is preempted first.
        node, shared: where in the prefix tree `tokens[:shared * page_size]` end; None: this request gives it no (more) pages.
        host: the bytes of all pages while the request is swapped out, else None.
        cached_tokens: prompt tokens found in the prefix cache.
    """

    def __init__(
        self, request: Request, arrival: int, tokenizer: Tokenizer, end_ids: frozenset[int], vocab: int
    ) -> None:
        self.request, self.arrival, self.end_ids = request, arrival, end_ids
        self.sequence = Sequence(list(request.prompt))
        self.node: PrefixNode | None = None
        self.shared = 0
        self.host: HostPages | None = None
        self.cached_tokens = 0
        self.generated = 0
        self.generator = request.params.generator()
        self.penalties = Penalties(request.params, request.prompt, vocab)
        self.grammar = None if request.grammar is None else request.grammar.begin()
        self._matcher, self._decoder = StopMatcher(request.stop), tokenizer.stream(request.shown_special)

    @property
    def remaining(self) -> int:
        """Tokens that have no row yet; 1 while decoding."""
        return len(self.sequence.tokens) - self.sequence.cached

    @property
    def prefilling(self) -> bool:
        return self.sequence.cached < len(self.request.prompt)

    @property
    def can_draft(self) -> bool:
        """Whether the MTP layer has all rows of this request and its first guess."""
        mtp = self.sequence.mtp
        return mtp is not None and bool(mtp.drafts) and mtp.cached == self.sequence.cached

    @property
    def is_behind(self) -> bool:
        """Whether the model has rows of this request that the MTP layer is still to get."""
        return self.sequence.mtp is not None and bool(self.sequence.mtp.behind)

    @property
    def takes_best(self) -> bool:
        """Whether the likeliest token is taken and nothing else is asked for."""
        return self.request.params.temperature == 0.0 and self.chosen_on_device

    @property
    def chosen_on_device(self) -> bool:
        """Whether nothing but logits, the sampler's parameters and random numbers decide on the next token."""
        return self.request.params.logprobs is None and not self.penalties.active and self.grammar is None

    def peek(self, count: int) -> list[Draw]:
        """How the next so many rows sample; their random numbers stay to be drawn."""
        state = self.generator.get_state()
        draws = [Draw.of(self.request.params, self.generator) for _ in range(count)]
        self.generator.set_state(state)
        return draws

    def draw(self) -> None:
        """Draws the random number of a token that was sampled with what `peek` said."""
        if self.request.params.temperature > 0.0:
            torch.rand((), generator=self.generator, dtype=torch.float64)

    def choose(self, logits: torch.Tensor) -> tuple[int, TokenLogprob | None]:
        """The next token from the model's logits float32 [vocab] on the host, and its log-probability if asked for.

        Raises:
            GrammarError: no token follows the request's grammar.
        """
        params = self.request.params
        changed = self.penalties.apply(logits) if self.penalties.active else logits
        if self.grammar is not None:
            changed = self.grammar.apply(changed)
        token = sample(changed, params, self.generator)
        if params.logprobs is None:
            return token, None
        log_p = logits.double().log_softmax(-1)
        values, ids = log_p.topk(min(params.logprobs, log_p.numel()))
        return token, TokenLogprob(token, float(log_p[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))

    def accept(self, token: int, logprob: TokenLogprob | None) -> RequestOutput:
        """Takes a sampled token: into the text, or as the end of it."""
        if token in self.end_ids:
            text = self._rest()
            matched = token if self._matcher.matched is None else self._matcher.matched
            return self.output(text, finish_reason="stop", matched_stop=matched)
        self.sequence.tokens.append(token)
        self.penalties.count(token)
        self.generated += 1
        if self.grammar is not None:
            self.grammar.accept(token)
        text, stopped = self._matcher.push(self._decoder.push(token))
        if self.grammar is not None and self.grammar.complete and not stopped:
            text, stopped = text + self._rest(), True
        full = self.generated == self.request.max_tokens
        if full and not stopped:
            text += self._rest()
            stopped = self._matcher.matched is not None
        reason = "stop" if stopped else "length" if full else None
        logprobs = () if logprob is None else (logprob,)
        return self.output(text, (token,), logprobs, reason, self._matcher.matched)

    def aborted(self) -> RequestOutput:
        """The last output of a request that was ended from outside."""
        return self.output(self._rest(), finish_reason="abort")

    def failed(self, error: str, *, grammar: bool = False) -> RequestOutput:
        """The last output of a request whose next token cannot be chosen, perhaps because of its grammar."""
        return replace(self.output(self._rest(), finish_reason="error"), error=error, grammar_failed=grammar)

    def _rest(self) -> str:
        """What is held back when nothing more comes; a stop string that the last bytes complete still cuts it."""
        text, stopped = self._matcher.push(self._decoder.flush())
        return text if stopped else text + self._matcher.flush()

    def output(
        self,
        text: str,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] = (),
        finish_reason: str | None = None,
        matched_stop: str | int | None = None,
    ) -> RequestOutput:
        return RequestOutput(
            request_id=self.request.request_id,
            text=text,
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=finish_reason,
            matched_stop=matched_stop,
            prompt_tokens=len(self.request.prompt),
            cached_tokens=self.cached_tokens,
            completion_tokens=self.generated,
        )
