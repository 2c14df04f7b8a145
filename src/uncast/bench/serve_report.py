"""Figures of a measured load: percentiles, a row for CSV, an object for JSON."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from uncast.bench.serve import Closed, LoadResult

MAX_LAG_MS = 5.0
"""A client whose timers are later than this in one of a hundred cases measures itself, too."""


@dataclass(frozen=True)
class Percentiles:
    """Milliseconds; NaN without values. p90: nine in ten are no longer (linear between neighbours)."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Percentiles:
        if not seconds:
            return cls(math.nan, math.nan, math.nan, math.nan)
        ms = sorted(1e3 * value for value in seconds)
        return cls(*(round(value, 4) for value in (statistics.fmean(ms), _at(ms, 0.5), _at(ms, 0.9), _at(ms, 0.99))))


def _at(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


@dataclass(frozen=True)
class Figures:
    """What a load came to; latencies and rates are of complete answers only.

    Attributes:
        load: of `str(load)`.
        requests, complete, not_sent: sent, answered in full, left out after too many failures.
        failures: kind -> how many.
        seconds: from the first request to the last answer's end.
        requests_per_s, output_tokens_per_s, prompt_tokens_per_s: over these seconds; NaN where nothing is known of prompts.
        prompt_tokens, output_tokens, cached_tokens: all of them; None where the server does not say.
        tokens_from: "usage", "chunks" (a chunk with several tokens counts once) or "usage or chunks".
        tokens_per_chunk: NaN without chunks; above 1 an ITL is between chunks, not between tokens.
        ttft: until the first chunk with tokens.
        itl: between chunks, of all answers together.
        tpot: of an answer, per token after the first.
        e2e: until the end.
        lag: how late this client's own timers were.
    """

    load: str
    requests: int
    complete: int
    not_sent: int
    failures: dict[str, int]
    seconds: float
    requests_per_s: float
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    prompt_tokens: int | None
    output_tokens: int
    cached_tokens: int | None
    tokens_from: str
    tokens_per_chunk: float
    ttft: Percentiles
    itl: Percentiles
    tpot: Percentiles
    e2e: Percentiles
    lag: Percentiles

    def notes(self) -> list[str]:
        """What a reader must know to believe the figures."""
        notes = []
        if self.load.startswith("concurrency"):
            notes.append(
                "closed loop: a slow answer delays the next request, so waiting users are not in the percentiles"
            )
        if self.complete and self.tokens_from != "usage":
            notes.append(f"tokens are of {self.tokens_from}: the server gives no usage, and a chunk may hold several")
        if self.tokens_per_chunk > 1.02:
            notes.append(f"{self.tokens_per_chunk:.2f} tokens a chunk: ITL is between chunks, TPOT is per token")
        if self.cached_tokens:
            notes.append(f"{self.cached_tokens:,} prompt tokens came from the server's prefix cache")
        if self.lag.p99 > MAX_LAG_MS:
            notes.append(
                f"this client was {self.lag.p99:.1f} ms late in one case of a hundred: latencies hold that, too"
            )
        return notes

    def json(self) -> dict[str, Any]:
        """As JSON has it: None instead of NaN; percentiles in milliseconds under names that say so."""
        fields = {f"{k}_ms" if isinstance(v, dict) and "p50" in v else k: v for k, v in asdict(self).items()}
        return {name: _without_nan(value) for name, value in fields.items()} | {"notes": self.notes()}

    def row(self) -> dict[str, object]:
        """As CSV has it: one flat row."""
        row: dict[str, object] = {}
        for name, value in self.json().items():
            if name == "failures":
                row[name] = "; ".join(f"{count} {kind}" for kind, count in self.failures.items())
            elif isinstance(value, dict):
                row |= {f"{name.removesuffix('_ms')}_{which}_ms": part for which, part in value.items()}
            elif name != "notes":
                row[name] = value
        return row


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nan(part) for name, part in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value


def figures(result: LoadResult) -> Figures:
    """The figures of a load."""
    done, seconds = result.complete, result.ended - result.began
    output = sum(answer.tokens for answer in done)
    chunks = sum(len(answer.chunks) for answer in done)
    prompts = [answer.prompt_tokens for answer in done if answer.prompt_tokens is not None]
    cached = [answer.cached_tokens for answer in done if answer.cached_tokens is not None]
    prompt = sum(prompts) if len(prompts) == len(done) and done else None

    def rate(count: float) -> float:
        return round(count / seconds, 4) if seconds > 0 else math.nan

    return Figures(
        load=str(result.load),
        requests=len(result.answers),
        complete=len(done),
        not_sent=result.not_sent,
        failures=result.failures,
        seconds=round(seconds, 4),
        requests_per_s=rate(len(done)),
        output_tokens_per_s=rate(output),
        prompt_tokens_per_s=math.nan if prompt is None else rate(prompt),
        prompt_tokens=prompt,
        output_tokens=output,
        cached_tokens=sum(cached) if cached else None,
        tokens_from=_tokens_from(result),
        tokens_per_chunk=round(output / chunks, 3) if chunks else math.nan,
        ttft=Percentiles.of([answer.ttft_s for answer in done if answer.ttft_s is not None]),
        itl=Percentiles.of([gap for answer in done for gap in answer.itl_s]),
        tpot=Percentiles.of([answer.tpot_s for answer in done if answer.tpot_s is not None]),
        e2e=Percentiles.of([answer.e2e_s for answer in done]),
        lag=Percentiles.of(result.lag_s),
    )


def _tokens_from(result: LoadResult) -> str:
    said = {answer.output_tokens is not None for answer in result.complete}
    return {frozenset({True}): "usage", frozenset({False}): "chunks"}.get(frozenset(said), "usage or chunks")


def serving_row(
    result: LoadResult, *, server: str, version: str, kv_cache_dtype: str, context: int, gpu: str, versions: str
) -> dict[str, object]:
    """A row of `benchmarks/results/serving-h200.csv`: a closed loop's concurrency is the batch, `ms_per_token` the median TPOT.

    Args:
        context: tokens that are cached when decoding starts, as the caller has set it up.

    Raises:
        ValueError: the load was open, or not every request was answered.
    """
    if not isinstance(result.load, Closed) or not result.good:
        raise ValueError(f"{result.load} with failures {result.failures}: a row is of a closed loop without failures")
    found = figures(result)
    return {
        "server": server, "version": version, "model": result.endpoint.model, "kv_cache_dtype": kv_cache_dtype,
        "batch": result.load.concurrency, "context": context, "ms_per_token": found.tpot.p50, "ttft_ms": found.ttft.p50,
        "gpu": gpu, "versions": versions,
    }  # fmt: skip
