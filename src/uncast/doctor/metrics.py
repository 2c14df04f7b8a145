"""Live tokens from a server's Prometheus metrics.

SGLang exports them (`sglang:num_used_tokens`); vLLM exports the share of the pool in use and, in a label, its size.
"""

from __future__ import annotations

import re

from uncast.doctor.errors import LiveError
from uncast.doctor.http import get

_LINE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+([-+0-9.eE]+|NaN|[-+]Inf)(?:\s+\d+)?$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def live_tokens(url: str) -> int:
    """Cache rows in use, from the metrics at `url` (`/metrics` is appended to a bare server address).

    Raises:
        LiveError: the address does not answer, or has none of the metrics that tell.
    """
    address = url if url.rstrip("/").endswith("metrics") else url.rstrip("/") + "/metrics"
    return parse_live_tokens(get(address).decode("utf-8", errors="replace"), address)


def parse_live_tokens(text: str, where: str) -> int:
    """As `live_tokens`, of the metrics' text. Several engines are summed."""
    used: list[float] = []
    share: list[float] = []
    pool: list[float] = []
    for line in text.splitlines():
        match = _LINE.match(line.strip())
        if match is None or match[3] in ("NaN", "+Inf", "-Inf", "Inf"):
            continue
        name, labels = match[1], dict(_LABEL.findall(match[2] or ""))
        try:
            value = float(match[3])
        except ValueError:
            continue
        if name in ("sglang:num_used_tokens", "sglang_num_used_tokens"):
            used.append(value)
        elif name in ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"):
            share.append(value)
        elif name == "vllm:cache_config_info":
            blocks, size = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
            if blocks.isdigit() and size.isdigit():
                pool.append(int(blocks) * int(size))
    if used:
        return round(sum(used))
    if share and len(pool) in (1, len(share)):
        return round(sum(s * pool[n if len(pool) > 1 else 0] for n, s in enumerate(share)))
    raise LiveError(
        f"{where} tells no live tokens: needed is sglang:num_used_tokens, or vllm:kv_cache_usage_perc with "
        "vllm:cache_config_info; or give --live-tokens"
    )
