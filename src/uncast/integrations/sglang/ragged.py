"""Attention over dense keys and values of many requests: SGLang's un-absorbed prefill, which up-projects rows itself.

On a GPU torch's variable-length FlashAttention, which wants one head width: narrower values are padded. Elsewhere plain
products in fp32, one request at a time.
"""

from __future__ import annotations

import torch

MAX_WIDTH = 256


def supports(device: torch.device, qk: int, v: int, dtype: torch.dtype) -> bool:
    """Whether `ragged_attention` takes heads of these widths here."""
    if device.type != "cuda":
        return True
    return (
        torch.cuda.get_device_capability(device) >= (8, 0)
        and max(qk, v) <= MAX_WIDTH
        and qk % 8 == 0
        and v % 8 == 0
        and dtype in (torch.bfloat16, torch.float16)
    )


def ragged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_indptr: torch.Tensor,
    k_indptr: torch.Tensor,
    *,
    max_q_len: int,
    max_k_len: int,
    causal: bool,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [total_q, heads, v] in q's dtype and LSE [total_q, heads] fp32 (base e; not finite without a key).

    Args:
        q: [total_q, heads, qk]; k: [total_k, heads, qk]; v: [total_k, heads, v].
        q_indptr, k_indptr: int32 [batch + 1]. causal: bottom-right.
    """
    if q.device.type != "cuda":
        return _reference(q, k, v, q_indptr, k_indptr, causal, sm_scale)
    qk, width = q.shape[-1], v.shape[-1]
    if width < qk:
        v = torch.nn.functional.pad(v, (0, qk - width))
    elif qk < width:
        q, k = (torch.nn.functional.pad(x, (0, width - qk)) for x in (q, k))
    out, lse = torch.ops.aten._flash_attention_forward(
        q.contiguous(), k.contiguous(), v.contiguous(), q_indptr, k_indptr, max_q_len, max(1, max_k_len), 0.0, causal,
        False, scale=sm_scale,
    )[:2]  # fmt: skip
    return out[..., :width].contiguous(), lse.T.contiguous()


def _reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_indptr: torch.Tensor,
    k_indptr: torch.Tensor,
    causal: bool,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
    lse = torch.full(q.shape[:2], -torch.inf, device=q.device)
    starts = zip(q_indptr.tolist(), q_indptr[1:].tolist(), k_indptr.tolist(), k_indptr[1:].tolist(), strict=False)
    for q0, q1, k0, k1 in starts:
        if q0 == q1 or k0 == k1:
            continue
        scores = torch.einsum("qhd,khd->hqk", q[q0:q1].float(), k[k0:k1].float()) * sm_scale
        if causal:
            hidden = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).triu(1 + (k1 - k0) - (q1 - q0))
            scores.masked_fill_(hidden.to(scores.device), -torch.inf)
        row_lse = scores.logsumexp(-1)
        weights = (scores - row_lse[..., None]).exp()
        out[q0:q1] = torch.einsum("hqk,khd->qhd", weights, v[k0:k1].float()).to(q.dtype)
        lse[q0:q1] = row_lse.T
    return out, lse
