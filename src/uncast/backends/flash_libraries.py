"""Libraries' flash attention over fp16 keys and values, behind one call: output and LSE of one block of rows.

| name         | library                                | heads of (qk, v) channels            | LSE base |
|--------------|----------------------------------------|--------------------------------------|----------|
| `flashinfer` | FlashInfer single prefill, FA3, sm_90  | 128 and 256 each; 192, 128           | 2        |
| `cudnn`      | cuDNN through torch, sm_90             | up to 256; sm_80 and newer: 128      | e        |
| `flash`      | torch's FlashAttention-2, sm_80 and up | up to 256, padded to one width       | e        |
| `reference`  | torch's products in fp32, any device   | any; all scores of a block at once   | e        |

cuDNN builds a plan per shape (a good part of a second): it gets shapes that recur, multiples of `CUDNN_GRANULE` rows and
queries; the rest goes to `flash`. FlashInfer's kernel is compiled by FlashInfer itself, which takes a minute: it is used only
where that has been done, by package flashinfer-jit-cache or by `python -m uncast.backends.flash_libraries QK V`.

A block is un-masked, or causal with its last rows as the queries' own. Torch's two are causal from the top left, so theirs has
as many rows as queries; FlashInfer's is causal from the bottom right and takes any rows before them in the same call.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from typing import Any

import torch

LIBRARIES = ("flashinfer", "cudnn", "flash")
"""Fastest first; `reference` is for tests and is never chosen."""
CUDNN_GRANULE = 256
MAX_WIDTH = 256
_FA3_WIDTHS = ((128, 128), (192, 128), (256, 256))


def _fa3_spec(qk: int, v: int) -> Any:
    from flashinfer.jit import gen_single_prefill_module

    half = torch.float16
    return gen_single_prefill_module("fa3", half, half, half, qk, v, 0, False, False, False)


@functools.cache
def _has_fa3(qk: int, v: int) -> bool:
    """Whether FlashInfer's kernel for these widths lies compiled on this machine."""
    return importlib.util.find_spec("flashinfer") is not None and bool(_fa3_spec(qk, v).is_compiled)


def is_bottom_right(library: str) -> bool:
    """Whether a causal block of `library` may have more rows than queries."""
    return library in ("flashinfer", "reference")


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
        hint = f"compile it by python -m uncast.backends.flash_libraries {qk} {v}, or use cudnn or flash"
        return None if _has_fa3(qk, v) else f"flashinfer's FA3 for widths {qk} and {v} is not compiled here: {hint}"
    if library == "cudnn":
        limit = MAX_WIDTH if arch == 90 else 128
        try:
            if torch.backends.cudnn.version() is None:  # type: ignore[no-untyped-call]
                return "this torch has no cuDNN: use flash"
        except RuntimeError as error:  # another cuDNN than this torch was built with is loaded
            return f"{str(error).partition('. ')[0]}: use flash"
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
        v_width: v's own width. causal: token i sees the rows up to rows - tokens + i; see `is_bottom_right`.

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

    q, k, v = (
        x.transpose(0, 1) for x in (q, k, v)
    )  # its FA3 takes row and head counts as NHD has them, whatever it is told
    out, lse = single_prefill_with_kv_cache(
        q, k, v, causal=causal, kv_layout="NHD", sm_scale=scale, backend="fa3", return_lse=True
    )
    return out.transpose(0, 1), lse.transpose(0, 1), "2"


def _reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor, str]:
    scores = q.float() @ k.float().mT * scale
    if causal:
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1 + k.shape[1] - q.shape[1])
        scores.masked_fill_(hidden, -torch.inf)
    lse = scores.logsumexp(-1)
    return ((scores - lse[..., None]).exp() @ v.float()).half(), lse, "e"


def main(argv: list[str]) -> int:
    """Compiles FlashInfer's FA3 for widths (qk, v), such as 256 256 for GLM; needs nvcc and ninja."""
    try:
        qk, v = (int(x) for x in argv)
    except ValueError:
        print("usage: python -m uncast.backends.flash_libraries QK V   (for example 256 256)", file=sys.stderr)
        return 2
    if (qk, v) not in _FA3_WIDTHS:
        print(f"flashinfer's FA3 takes widths {_FA3_WIDTHS}, not {qk, v}", file=sys.stderr)
        return 2
    if importlib.util.find_spec("flashinfer") is None:
        print("flashinfer is not installed: pip install flashinfer-python", file=sys.stderr)
        return 1
    _fa3_spec(qk, v).build_and_load()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
