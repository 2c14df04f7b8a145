"""Step labels that servers write: phase, batch and live tokens.

vLLM: `execute_32_context_0(sq0sk0...)_generation_32(sq32sk55086...)`, shorter `execute_context_1(888_788544)_generation_0(0)`.
SGLang: `step[DECODE bs=32 g_sk=4096]`, `step[EXTEND bs=1 toks=512]`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_VLLM = re.compile(r"^execute_(?:\d+_)?context_(\d+)\(([^)]*)\)_generation_(\d+)\(([^)]*)\)")
_SGLANG = re.compile(r"^step\[(\w+)([^\]]*)\]")
_PROFILER = re.compile(r"^ProfilerStep#(\d+)$")
_OPTIMIZER = re.compile(r"^Optimizer\.step#")
_KEYS = re.compile(r"(sqsq|sqsk|sq|sk)(\d+)")
_PAIRS = re.compile(r"(\w+)=(\d+)")
_MODES = {
    "DECODE": "decode", "EXTEND": "prefill", "PREFILL": "prefill", "MIXED": "mixed", "IDLE": "idle",
    "TARGET_VERIFY": "verify", "DRAFT_EXTEND": "draft", "DRAFT_EXTEND_V2": "draft",
}  # fmt: skip


@dataclass(frozen=True)
class Label:
    """What a label says. `family`: vllm, sglang, profiler or optimizer; None where the label does not say."""

    family: str
    phase: str = "unknown"
    batch: int | None = None
    live_tokens: int | None = None
    new_tokens: int | None = None


def parse_label(name: str) -> Label | None:
    """The label in an annotation's name, None if it is no step."""
    if match := _VLLM.match(name):
        return _vllm(match)
    if match := _SGLANG.match(name):
        return _sglang(match)
    if _PROFILER.match(name):
        return Label("profiler")
    if _OPTIMIZER.match(name):
        return Label("optimizer", phase="training")
    return None


def _vllm(match: re.Match[str]) -> Label:
    context, generation = int(match[1][:12]), int(match[3][:12])
    phase = "decode" if not context else "prefill" if not generation else "mixed"
    keys = [{k: int(v[:18]) for k, v in _KEYS.findall(text)} for text in (match[2], match[4])]
    live = sum(k["sk"] for k in keys if "sk" in k) if any("sk" in k for k in keys) else None
    new = sum(k["sq"] for k in keys if "sq" in k) if any("sq" in k for k in keys) else None
    return Label("vllm", phase, context + generation, live, new)


def _sglang(match: re.Match[str]) -> Label:
    fields = {k: int(v[:18]) for k, v in _PAIRS.findall(match[2])}
    phase = _MODES.get(match[1].upper(), "unknown")
    live = sum(v for k, v in fields.items() if k in ("g_sk", "c_sk", "sk"))
    new = fields.get("toks", fields.get("bs") if phase == "decode" else None)
    return Label("sglang", phase, fields.get("bs"), live or None, new)
