"""The float64 oracle: what every backend must compute, written for reading.

    s[i, h, t] = sm_scale * (q_nope[i, h] . ckv[t] + q_pe[i, h] . kpe[t]),  t < kv_len - q_len + i + 1 when causal
    out[i, h]  = sum_t softmax(s[i, h])[t] * ckv[t]
    lse[i, h]  = log(sum_t exp(s[i, h, t])), base 2 by default

Sparse attention sums over the tokens `indices[i]` instead, each as often as it is listed.

Source: DeepSeek-V2 (arXiv 2405.04434) section 2.1, in the absorbed form: one 576-wide key, whose first 512 channels are
also the value, shared by all heads.
"""

from __future__ import annotations

import math

import torch

from uncast.attention.problem import Problem
from uncast.latent.codec import Scale, decode_rows


def request_rows(problem: Problem, cache: torch.Tensor, request: int) -> torch.Tensor:
    """uint8 [kv_len, row_bytes]: the live rows of one request, in order."""
    spec = problem.spec
    kv_len = int(problem.kv_len_arr[request])
    start = int(problem.kv_indptr[request])
    num_pages = -(-kv_len // spec.page_size)
    pages = problem.kv_indices[start : start + num_pages].long()
    rows = cache.view(torch.uint8).view(-1, spec.page_size, spec.layout.row_bytes)[pages]
    return rows.reshape(-1, spec.layout.row_bytes)[:kv_len]


def mla_oracle(
    problem: Problem,
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    cache: torch.Tensor,
    *,
    ckv_scale: Scale = None,
    kpe_scale: Scale = None,
    indices: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [total_q, num_heads, head_dim_ckv] and LSE [total_q, num_heads], both float64, from the stored values.

    Shapes and dtypes as `Backend.run`. A request of length 0 gives output 0 and LSE -inf, and so does a causal query row
    that sees no cached row, or a sparse one that selects none.
    """
    spec = problem.spec
    total_q = q_nope.shape[0]
    out = torch.zeros(total_q, spec.num_heads, spec.head_dim_ckv, dtype=torch.float64, device=q_nope.device)
    lse = torch.full((total_q, spec.num_heads), -math.inf, dtype=torch.float64, device=q_nope.device)
    for request in range(problem.batch_size):
        first, last = int(problem.qo_indptr[request]), int(problem.qo_indptr[request + 1])
        q_len, kv_len = last - first, int(problem.kv_len_arr[request])
        if q_len == 0 or kv_len == 0:
            continue
        rows = request_rows(problem, cache, request)
        ckv, kpe = decode_rows(rows, spec.layout, ckv_scale=ckv_scale, kpe_scale=kpe_scale, dtype=torch.float64)
        scores = q_nope[first:last].double() @ ckv.T + q_pe[first:last].double() @ kpe.T
        scores = scores * spec.sm_scale
        if indices is not None:
            for i in range(q_len):
                chosen = indices[first + i]
                chosen = chosen[(chosen >= 0) & (chosen < kv_len)].long()
                out[first + i], lse[first + i] = _attend(scores[i][:, chosen], ckv[chosen])
            continue
        if spec.causal:
            row = torch.arange(q_len, device=scores.device)[:, None, None]
            token = torch.arange(kv_len, device=scores.device)[None, None, :]
            scores = scores.masked_fill(token > kv_len - q_len + row, -math.inf)
        out[first:last], lse[first:last] = _attend(scores, ckv)
    return out, lse if spec.lse_base == "e" else lse / math.log(2.0)


def _attend(scores: torch.Tensor, ckv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [..., head_dim_ckv] and base-e LSE [...] of scores [..., tokens] over ckv [tokens, head_dim_ckv]."""
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse[..., None]).masked_fill(lse.isinf()[..., None], 0.0)
    return weights @ ckv, lse


def relative_errors(out: torch.Tensor, reference: torch.Tensor) -> tuple[float, float]:
    """(largest relative error over (token, head), relative error of the whole tensor), 2-norms, against `reference`.

    A NaN anywhere gives infinity. Rows whose reference is zero must be zero.
    """
    out = out.to(torch.float64)
    diff = (out - reference).norm(dim=-1)
    size = reference.norm(dim=-1)
    if not bool(out.isfinite().all()) or bool((diff[size == 0] > 0).any()):
        return math.inf, math.inf
    live = size > 0
    if not bool(live.any()):
        return 0.0, 0.0
    return float((diff[live] / size[live]).max()), float(diff.norm() / size.norm())
