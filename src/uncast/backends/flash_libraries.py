"""Libraries' flash attention over fp16 keys and values, behind one call: output and LSE of one block of rows.

| name         | library                                | heads of (qk, v) channels            | LSE base |
|--------------|----------------------------------------|--------------------------------------|----------|
| `flashinfer` | FlashInfer single prefill, FA3, sm_90  | 64, 128 and 256 each; 192, 128       | 2        |
| `cudnn`      | cuDNN through torch, sm_90             | up to 256; sm_80 and newer: 128      | e        |
| `flash`      | torch's FlashAttention-2, sm_80 and up | up to 256, padded to one width       | e        |
| `reference`  | torch's products in fp32, any device   | any; all scores of a block at once   | e        |

cuDNN builds a plan per shape (a good part of a second): it gets shapes that recur, multiples of `CUDNN_GRANULE` rows and
queries; the rest goes to `flash`. A block is un-masked, or square and causal, where top-left and bottom-right are the same.
"""

from __future__ import annotations

import functools
import importlib.util

import torch

LIBRARIES = ("flashinfer", "cudnn", "flash")
"""Fastest first; `reference` is for tests and is never chosen."""
CUDNN_GRANULE = 256
MAX_WIDTH = 256
_FA3_WIDTHS = ((64, 64), (128, 128), (192, 128), (256, 256))


@functools.cache
def _has_flashinfer() -> bool:
    return importlib.util.find_spec("flashinfer") is not None


def refusal(library: str, arch: int, qk: int, v: int) -> str | None:
    """None if `library` can run heads of these widths on compute capability `arch`, else why not."""
    if library == "reference":
        return None
    if library not in LIBRARIES:
        return f"there is no attention library {library!r}: use one of {', '.join(LIBRARIES)}"
    if qk % 8 or v % 8 or max(qk, v) > MAX_WIDTH:
        return f"{library} takes head widths that are multiples of 8 up to {MAX_WIDTH}, not {qk} and {v}"
    if library == "flashinfer":
        if arch != 90 or (qk, v) not in _FA3_WIDTHS:
            return (
                f"flashinfer's FA3 takes compute capability 9.0 and widths {_FA3_WIDTHS}, not {arch / 10} with {qk, v}"
            )
        return None if _has_flashinfer() else "flashinfer is not installed: use cudnn or flash"
    if library == "cudnn":
        limit = MAX_WIDTH if arch == 90 else 128
        if torch.backends.cudnn.version() is None:  # type: ignore[no-untyped-call]
            return "this torch has no cuDNN: use flash"
        return None if max(qk, v) <= limit else f"cudnn takes widths up to {limit} here, not {qk} and {v}: use flash"
    return None


def choose(arch: int, qk: int, v: int) -> str:
    """The fastest library for these widths.

    Raises:
        ValueError: none can.
    """
    reasons = [(name, refusal(name, arch, qk, v)) for name in LIBRARIES]
    for name, reason in reasons:
        if reason is None:
            return name
    raise ValueError("; ".join(str(reason) for _, reason in reasons))


def library_for_block(library: str, tokens: int, rows: int) -> str:
    """`library`, or `flash` where cuDNN would build a plan for a shape that may not come again."""
    odd = tokens % CUDNN_GRANULE or rows % CUDNN_GRANULE
    return "flash" if library == "cudnn" and odd else library


def split_rows(library: str, tokens: int, rows: int) -> int:
    """How many of the first `rows` rows (at most one block) `library` should get at once: all, or whole granules of them."""
    if library == "cudnn" and tokens % CUDNN_GRANULE == 0 and rows > CUDNN_GRANULE:
        return rows - rows % CUDNN_GRANULE
    return rows


def attend(
    library: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, v_width: int, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor, str]:
    """Attention over one block.

    Args:
        q: fp16 [heads, tokens, width]; k, v: fp16 [heads, rows, width], channels behind their own width zero.
        v_width: v's own width. causal: only with tokens == rows.

    Returns:
        out fp16 [heads, tokens, v_width or more], lse fp32 [heads, tokens] (views), and the base of lse, "2" or "e".
    """
    if library == "flashinfer":
        return _flashinfer(q, k, v[..., :v_width], causal, scale)
    if library == "reference":
        return _reference(q, k, v[..., :v_width], causal, scale)
    if library == "cudnn":
        return _cudnn(q, k, v[..., :v_width], causal, scale)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention(q[None], k[None], v[None], 0.0, causal, scale=scale)[
        :2
    ]
    return out[0], lse[0], "e"


def _cudnn(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor, str]:
    out, lse = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q[None], k[None], v[None], None, True, 0.0, causal, scale=scale
    )[:2]
    return out[0], lse.view(lse.shape[1], lse.shape[2]), "e"


def _flashinfer(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor, str]:
    from flashinfer.prefill import single_prefill_with_kv_cache

    out, lse = single_prefill_with_kv_cache(
        q.transpose(0, 1), k, v, causal=causal, kv_layout="HND", sm_scale=scale, backend="fa3", return_lse=True
    )
    return out.transpose(0, 1), lse.transpose(0, 1), "2"


def _reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor, str]:
    scores = q.float() @ k.float().mT * scale
    if causal:
        scores.masked_fill_(torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1), -torch.inf)
    lse = scores.logsumexp(-1)
    return ((scores - lse[..., None]).exp() @ v.float()).half(), lse, "e"
