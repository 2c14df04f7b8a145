"""The byte accounting at the end of `uncast generate`."""

from __future__ import annotations

from typing import Any

from uncast.engine.generate import Generation
from uncast.engine.runner import ModelRunner


def summary(runner: ModelRunner, result: Generation) -> dict[str, Any]:
    """The `--json` object. Bytes are of the last step, over all layers; a step's copies count once read, once written."""
    step = result.step_bytes
    assert step is not None
    index = runner.pool.index_layout
    return {
        "text": result.text,
        "tokens": result.tokens,
        "prompt_tokens": result.prompt_tokens,
        "finish_reason": result.finish_reason,
        "tokens_per_s": round(result.tokens_per_s, 2),
        "kv_bytes_per_token_layer": runner.pool.layout.row_bytes,
        "index_bytes_per_token_layer": 0 if index is None else index.row_bytes,
        "kv_bytes_read_per_step": step.read,
        "kv_bytes_needed_per_step": step.needed,
        "kv_bytes_written_per_step": step.written,
        "pool_cast_bytes_per_step": step.pool_cast,
        "saturated_subnormal_nan": runner.counters.tolist(),
        "speculation": result.speculation,
        "drafted_tokens": result.drafted,
        "accepted_draft_tokens": result.accepted,
        "attention_backend": runner.attention_backend,
        "kv_cache_dtype": runner.pool.layout.name,
    }


def print_summary(facts: dict[str, Any], runner: ModelRunner, result: Generation) -> None:
    """The same facts for a reader, a line each, on stdout."""
    lines: list[tuple[str, str]] = []
    rows = runner.pool.num_pages * runner.page_size
    read, needed, cast = (
        facts["kv_bytes_read_per_step"],
        facts["kv_bytes_needed_per_step"],
        facts["pool_cast_bytes_per_step"],
    )
    lines.append(
        ("tokens", f"{result.tokens} new after {result.prompt_tokens} of prompt, {result.tokens_per_s:.1f} tokens/s")
    )
    if result.speculation != "off":
        share = result.accepted / max(1, result.drafted)
        came_of_it = f", {result.accepted} of {result.drafted} accepted ({share:.0%})" if result.drafted else ""
        lines.append(("speculation", result.speculation + came_of_it))
    lines.append(("cache", f"{facts['kv_cache_dtype']}, {facts['kv_bytes_per_token_layer']} B per token and layer"))
    indexer, what = runner.model.config.indexer, "live rows"
    if indexer is not None:
        full = len(indexer.full_layers)
        lines.append(("index cache", f"{facts['index_bytes_per_token_layer']} B per token in {full} layers"))
        what = f"at most {indexer.topk:,} rows a query, and index keys"
    lines.append(("attention", f"{facts['attention_backend']}, {runner.model.config.num_layers} layers"))
    lines.append(("cache bytes needed", f"{needed:,} B in the last step ({what}, read once)"))
    ratio = f", {read / needed:.2f}x needed" if needed else ""
    lines.append(("cache bytes read", f"{read:,} B{ratio}"))
    if facts["kv_bytes_written_per_step"]:
        lines.append(("copies written", f"{facts['kv_bytes_written_per_step']:,} B"))
    if cast:
        lines.append(
            ("a pool cast", f"would have moved {cast:,} B (this pool of {rows:,} tokens to BF16, every layer)")
        )
    saturated, _, nan = facts["saturated_subnormal_nan"]
    if saturated or nan:
        lines.append(("warning", f"{saturated} values saturated and {nan} were NaN when written to the cache"))
    for name, text in lines:
        print(f"{name:<18}  {text}")
