"""What the figures of `uncast kv-error` mean, in sentences."""

from __future__ import annotations

from collections.abc import Sequence

from uncast.bench.kv_error import REFERENCE, ContenderError

CLOSE_KL = 1e-3
"""Nats a token up to which a layout counts as close to BF16. Under trained small models FP8 layouts lie at 7e-5 to 2e-4 where
nothing is wrong, and at 2e-3 to 2e-2 where rope channels or latents do not fit e4m3 (0.2 against 2 to 9 % of top-1 tokens)."""
_SATURATED, _SUBNORMAL = 1e-6, 0.25
"""Shares of a layer's numbers above which they are worth a sentence. A few subnormal numbers do no harm: they are small beside
the others that a dot product adds up."""
_BETTER = 0.8


def advice(results: Sequence[ContenderError], reference_bytes: int) -> list[str]:
    """A recommendation first, then what stands against each layout."""
    sentences = [_recommendation(results, reference_bytes)]
    for result in results:
        sentences += _faults(result)
    plain, fitted = _pair(results)
    if plain is not None and fitted is not None:
        if fitted.kl < _BETTER * plain.kl:
            sentences.append(
                f"calibrated scales lower the KL of fp8_e4m3 from {plain.kl:.1e} to {fitted.kl:.1e}: write them with "
                "--write-scales and serve with --kv-cache-dtype fp8_e4m3 --kv-scales FILE"
            )
        else:
            sentences.append(
                f"calibrated scales change little for fp8_e4m3 here (KL {plain.kl:.1e} to {fitted.kl:.1e}): its error is "
                "e4m3's 3 mantissa bits, which no scale mends"
            )
    return sentences


def _recommendation(results: Sequence[ContenderError], reference_bytes: int) -> str:
    close = [result for result in results if result.kl <= CLOSE_KL]
    if not close:
        best = min(results, key=lambda result: result.kl)
        return (
            f"stay with {REFERENCE}: no layout keeps KL under {CLOSE_KL:.0e} nats on these prompts; the nearest is "
            f"{best.contender.name} with {best.kl:.1e}"
        )
    chosen = min(close, key=lambda result: (result.row_bytes, result.kl))
    saved = 100 * (1 - chosen.row_bytes / reference_bytes)
    return (
        f"use {chosen.contender.name}: {chosen.row_bytes} B a row ({saved:.0f} % less than {REFERENCE}), "
        f"KL {chosen.kl:.1e} nats, {100 * chosen.top1_changed:.2f} % of the likeliest tokens change"
    )


def _faults(result: ContenderError) -> list[str]:
    name, layers, found = result.contender.name, result.layers, []
    saturated = [i for i, layer in enumerate(layers) if layer.saturated > _SATURATED * layer.values]
    if saturated:
        total, worst = sum(layers[i].saturated for i in saturated), max(saturated, key=lambda i: layers[i].saturated)
        found.append(
            f"{name}: {total:,} numbers exceed 448 times their scale and are cut off, in {_layers(saturated)}, most in layer "
            f"{worst}"
        )
    subnormal = [i for i, layer in enumerate(layers) if layer.subnormal > _SUBNORMAL * layer.values]
    if subnormal:
        share = max(layers[i].subnormal / layers[i].values for i in subnormal)
        found.append(
            f"{name}: up to {100 * share:.0f} % of a layer's numbers lie under e4m3's normal range (2^-6 times the scale) in "
            f"{_layers(subnormal)}, where it has fewer than 3 mantissa bits"
        )
    nan = sum(layer.nan for layer in layers)
    if nan:
        found.append(f"{name}: {nan:,} numbers are NaN, which is the model's own fault: look at its weights")
    if result.kl > CLOSE_KL:
        errors = [layer.attention_error for layer in layers]
        worst = errors.index(max(errors))
        found.append(
            f"{name}: KL {result.kl:.1e} nats, {100 * result.top1_changed:.1f} % of the likeliest tokens change; the largest "
            f"attention error is {100 * errors[worst]:.1f} %, in layer {worst}"
        )
    return found


def _pair(results: Sequence[ContenderError]) -> tuple[ContenderError | None, ContenderError | None]:
    """fp8_e4m3 without calibrated scales, and with."""
    flat = [result for result in results if result.contender.kv_layout == "fp8_e4m3"]
    plain = next((result for result in flat if result.contender.source != "calibrated"), None)
    return plain, next((result for result in flat if result.contender.source == "calibrated"), None)


def _layers(numbers: list[int]) -> str:
    if len(numbers) > 6:
        return f"{len(numbers)} layers"
    return f"layer{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
