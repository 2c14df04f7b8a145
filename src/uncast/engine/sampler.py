"""From logits to the next token."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch

MAX_LOGPROBS = 20
_RANGES = {
    "temperature": (0.0, 100.0, "0 to 100"),
    "top_p": (0.0, 1.0, "above 0, up to 1"),
    "min_p": (0.0, 1.0, "0 to 1"),
    "presence_penalty": (-2.0, 2.0, "-2 to 2"),
    "frequency_penalty": (-2.0, 2.0, "-2 to 2"),
    "repetition_penalty": (0.0, 10.0, "above 0, up to 10"),
}
"""Lowest and highest value; the lowest of top_p and repetition_penalty is not itself allowed."""
_LARGEST = torch.finfo(torch.float32).max


class SamplingError(ValueError):
    """A sampling parameter out of range; names the field, what was given and what is allowed."""


@dataclass(frozen=True)
class SamplingParams:
    """How one request chooses tokens.

    Attributes:
        temperature: 0 is greedy.
        top_k: the k best; 0 is off.
        top_p: the smallest set whose probability reaches p; 1 is off.
        min_p: at least min_p times the best token's probability; 0 is off.
        seed: of this request's own generator; None draws one.
        presence_penalty: subtracted once from the logit of every token that was generated before.
        frequency_penalty: subtracted from a token's logit for each time it was generated before.
        repetition_penalty: divides positive and multiplies negative logits of tokens in the prompt or generated before
            (CTRL, arXiv 1909.05858, section 4.1); 1 is off.
        logit_bias: token id -> number added to its logit.
        logprobs: report log-probabilities, with the n likeliest tokens; None reports none.

    Raises:
        SamplingError: a value out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None

    def __post_init__(self) -> None:
        for name, (low, high, allowed) in _RANGES.items():
            value = getattr(self, name)
            above = name in ("top_p", "repetition_penalty")
            _check(_is(value, float) and low <= value <= high and not (above and value == low), name, value, allowed)
        _check(_is(self.top_k, int) and self.top_k >= 0, "top_k", self.top_k, "an integer of 0 (off) or more")
        for name, last, allowed in (
            ("seed", 2**63 - 1, "0 to 2^63 - 1"),
            ("logprobs", MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}"),
        ):
            value = getattr(self, name)
            _check(value is None or (_is(value, int) and 0 <= value <= last), name, value, f"an integer of {allowed}")
        for token, bias in self.logit_bias.items():
            _check(_is(token, int) and token >= 0, "logit_bias", f"for token {token}", "token ids of 0 or more")
            _check(
                _is(bias, float) and -100.0 <= bias <= 100.0, "logit_bias", f"{bias} for token {token}", "-100 to 100"
            )

    def generator(self) -> torch.Generator:
        """A new generator seeded for this request."""
        generator = torch.Generator()
        if self.seed is None:
            generator.seed()
        else:
            generator.manual_seed(self.seed)
        return generator


def _is(value: object, kind: type) -> bool:
    """Whether it is an int, or for float any real number; a bool is neither."""
    return isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)


def _check(ok: bool, name: str, value: object, allowed: str) -> None:
    if not ok:
        raise SamplingError(f"{name} is {value!s:.80}: allowed is {allowed}")


class Penalties:
    """What changes a request's logits before its sampler: penalties over its own tokens, and biases."""

    def __init__(self, params: SamplingParams, prompt: Seq[int], vocab_size: int) -> None:
        self._params = params
        self._penalised = bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0)
        if self._penalised:
            self._counts = torch.zeros(vocab_size, dtype=torch.int32)
            self._seen = torch.zeros(vocab_size, dtype=torch.bool)
            self._seen[torch.tensor(prompt)] = True
        self._biased = torch.tensor(list(params.logit_bias), dtype=torch.int64)
        self._bias = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)

    @property
    def active(self) -> bool:
        """Whether `apply` changes anything."""
        return self._penalised or self._biased.numel() > 0

    def count(self, token: int) -> None:
        """Takes note of a generated token."""
        if self._penalised:
            self._counts[token] += 1
            self._seen[token] = True

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """New logits float32 [vocab]: repetition, frequency and presence penalty, then bias."""
        params, logits = self._params, logits.clone()
        if self._penalised:
            factor = params.repetition_penalty
            seen = logits[self._seen]
            changed = torch.where(seen > 0, seen.double() / factor, seen.double() * factor)
            logits[self._seen] = changed.clamp(-_LARGEST, _LARGEST).float()  # a tiny factor must not make them infinite
            logits -= params.frequency_penalty * self._counts + params.presence_penalty * (self._counts > 0)
        logits[self._biased] += self._bias
        return logits


@dataclass(frozen=True)
class Draw:
    """How one row samples, with its random number; a temperature of 0 keeps what was chosen before."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    number: float = 0.0

    @classmethod
    def of(cls, params: SamplingParams, generator: torch.Generator) -> Draw:
        """Takes the next of the request's random numbers, as `sample` does."""
        number = float(torch.rand((), generator=generator, dtype=torch.float64))
        return cls(params.temperature, params.top_k, params.top_p, params.min_p, number)

    def packed(self) -> tuple[float, ...]:
        """A column of `sample_rows`' `draws`."""
        return self.temperature, float(min(self.top_k, 1 << 40)), self.top_p, self.min_p, self.number


def sample_rows(logits: torch.Tensor, draws: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:
    """`sample` for many rows on any device, with nothing that makes the host wait.

    The same tokens for the same random numbers: only sums over the vocabulary are rounded in another order (float64).

    Args:
        logits: float32 [n, vocab].
        draws: float64 [5, n], columns of `Draw.packed`.
        otherwise: int64 [n], taken where the temperature is 0. Of rows whose logits are not finite the result means nothing.

    Returns:
        int64 [n].
    """
    temperature, top_k, top_p, min_p, number = draws[..., None]
    greedy = temperature == 0.0
    ranked, order = logits.sort(dim=-1, descending=True, stable=True)
    wide = ranked.double()
    weights = torch.softmax((wide - wide[:, :1]) / torch.where(greedy, 1.0, temperature), dim=-1)
    places = torch.arange(logits.shape[-1], device=logits.device, dtype=torch.float64)
    keep = (weights > 0) & ((top_k == 0) | (places < top_k))
    kept = torch.where(keep, weights, 0.0)
    keep &= (top_p >= 1.0) | (weights.cumsum(-1) - weights < top_p * kept.sum(-1, keepdim=True))
    keep &= weights >= min_p * weights[:, :1]
    keep[:, 0] = True
    sums = torch.where(keep, weights, 0.0).cumsum(-1)
    found = torch.searchsorted(sums, number * sums[:, -1:], right=True)
    last = torch.where(keep, places, 0.0).amax(-1, keepdim=True).long()
    tokens = order.gather(-1, torch.minimum(found, last))
    return torch.where(greedy, otherwise[:, None], tokens)[:, 0]


def sample(logits: torch.Tensor, params: SamplingParams, generator: torch.Generator) -> int:
    """The next id from finite logits float32 [vocab]; filters apply in the order top_k, top_p, min_p, after temperature."""
    if params.temperature == 0.0:
        return int(logits.argmax())
    # The best logit becomes 0 before the division: whatever the temperature, nothing overflows upwards.
    wide = logits.double()
    probabilities = torch.softmax((wide - wide.max()) / params.temperature, dim=-1)
    order = probabilities.argsort(descending=True, stable=True)
    ranked = probabilities[order]
    keep = ranked > 0  # a token that a grammar rules out is never drawn, however the sums below are rounded
    if params.top_k:
        keep[min(params.top_k, keep.numel()) :] = False
    if params.top_p < 1.0:
        total = ranked[keep].sum()
        keep &= ranked.cumsum(0) - ranked < params.top_p * total
    if params.min_p > 0.0:
        keep &= ranked >= params.min_p * ranked[0]
    keep[0] = True
    weights = ranked * keep
    draw = torch.rand((), generator=generator, dtype=torch.float64) * weights.sum()
    position = int(torch.searchsorted(weights.cumsum(0), draw, right=True))
    return int(order[min(position, int(keep.nonzero()[-1]))])
