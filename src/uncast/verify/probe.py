"""Runs a backend on a small poisoned problem of a given spec and compares it with the float64 oracle."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace

import torch

from uncast.attention import ClaimedCapabilityWarning, MLAPagedAttention, Problem, ProblemSpec
from uncast.attention.oracle import mla_oracle, relative_errors
from uncast.attention.verified import mark_verified
from uncast.latent.codec import Scale, decode_rows, encode_rows
from uncast.latent.layouts import row_layout

MAX_ROW_ERROR = 1e-2
"""Allowed relative error of one (token, head)."""
MAX_TENSOR_ERROR = 2.5e-3
"""Allowed relative error of the whole output."""
MAX_LSE_ERROR = 5e-3

_GARBAGE_PAGE = 2**31 - 1


@dataclass(frozen=True)
class ProbeResult:
    """Outcome of one probe: `verified`, or why not in one sentence."""

    verified: bool
    reason: str
    row_error: float = math.nan
    tensor_error: float = math.nan


@dataclass(frozen=True)
class ProbeCase:
    """Inputs of one probe."""

    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    qo_indptr: torch.Tensor
    q_nope: torch.Tensor
    q_pe: torch.Tensor
    cache: torch.Tensor
    ckv_scale: Scale
    kpe_scale: Scale


def make_case(spec: ProblemSpec, kv_lens: list[int], q_lens: list[int], *, seed: int = 0) -> ProbeCase:
    """A random batch for `spec` whose unused pages hold NaN and whose unused block-table entries are garbage."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    layout, page = spec.layout, spec.page_size
    live = [-(-n // page) for n in kv_lens]
    num_pages = sum(live) + 3
    ckv_scale, kpe_scale = (0.013, 0.021) if layout.has_external_scales else (None, None)
    rows = encode_rows(
        randn(num_pages * page, spec.head_dim_ckv),
        randn(num_pages * page, spec.head_dim_kpe),
        layout,
        ckv_scale=ckv_scale,
        kpe_scale=kpe_scale,
    )
    cache = rows.view(num_pages, page, layout.row_bytes)
    order = torch.randperm(num_pages, generator=generator)
    tables = torch.full((len(kv_lens), max(1, *live) + 2), _GARBAGE_PAGE, dtype=torch.int32)
    used, position = torch.zeros(num_pages, page, dtype=torch.bool), 0
    for request, count in enumerate(live):
        pages = order[position : position + count]
        tables[request, :count] = pages.int()
        for index, number in enumerate(pages.tolist()):
            used[number, : min(page, kv_lens[request] - index * page)] = True
        position += count
    cache[~used] = 0xFF  # NaN in e4m3, bf16 and fp32 alike
    total_q = sum(q_lens)
    device, dtype = spec.device, spec.q_data_type
    return ProbeCase(
        block_tables=tables.to(device),
        seq_lens=torch.tensor(kv_lens, dtype=torch.int32, device=device),
        qo_indptr=torch.tensor([0, *torch.tensor(q_lens).cumsum(0).tolist()], dtype=torch.int32, device=device),
        q_nope=randn(total_q, spec.num_heads, spec.head_dim_ckv).to(device, dtype),
        q_pe=randn(total_q, spec.num_heads, spec.head_dim_kpe).to(device, dtype),
        cache=cache.to(device),
        ckv_scale=ckv_scale,
        kpe_scale=kpe_scale,
    )


def plan_case(attention: MLAPagedAttention, spec: ProblemSpec, case: ProbeCase) -> Problem:
    """Plans `attention` for a case of `spec`; returns the normalised problem."""
    return attention.plan(
        case.qo_indptr,
        block_tables=case.block_tables,
        seq_lens=case.seq_lens,
        num_heads=spec.num_heads,
        head_dim_ckv=spec.head_dim_ckv,
        head_dim_kpe=spec.head_dim_kpe,
        page_size=spec.page_size,
        causal=spec.causal,
        sm_scale=spec.sm_scale,
        q_data_type=spec.q_data_type,
        kv_layout=spec.kv_layout,
        lse_base=spec.lse_base,
        batch_invariant=spec.batch_invariant,
        num_pages=case.cache.shape[0],
    ).problem


def run_case(attention: MLAPagedAttention, case: ProbeCase) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE of a planned case."""
    result = attention.run(
        case.q_nope, case.q_pe, case.cache, ckv_scale=case.ckv_scale, kpe_scale=case.kpe_scale, return_lse=True
    )
    assert isinstance(result, tuple)
    return result


def probe_combination(backend: str, spec: ProblemSpec) -> ProbeResult:
    """Runs `backend` twice on a small batch of `spec`; on success the combination counts as verified in this process.

    A backend that attends to a copy of the cache (`copy_layout`) is measured against the values of that copy: rounding them is
    what it is there to show.

    Raises whatever the backend raises; a probe of unknown backends belongs in a child process.
    """
    page = spec.page_size
    kv_lens = [0, 1, page, page + 1, 3 * page + 2, 130]
    q_lens = [1] * len(kv_lens) if spec.max_q_len == 1 else [1, 1, min(spec.max_q_len, page), 2, 5, 8]
    q_lens = [min(q, max(1, kv)) for q, kv in zip(q_lens, kv_lens, strict=True)]
    case = make_case(spec, kv_lens, q_lens)
    attention = MLAPagedAttention(backend)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ClaimedCapabilityWarning)
        problem = plan_case(attention, spec, case)
    (out, lse), (again, lse_again) = (run_case(attention, case) for _ in range(2))
    expected, expected_lse = _reference(problem, case, _copy_layout(attention))
    row_error, tensor_error = relative_errors(out, expected)
    live = expected_lse.isfinite()
    lse_error = float((lse.double() - expected_lse)[live].abs().max()) if bool(live.any()) else 0.0
    if row_error > MAX_ROW_ERROR or tensor_error > MAX_TENSOR_ERROR:
        reason = f"differs from the oracle: relative error {row_error:.1e} of a row, {tensor_error:.1e} of the whole"
    elif not lse_error <= MAX_LSE_ERROR or not torch.equal(lse.isfinite(), live):
        reason = f"differs from the oracle in its LSE: by {lse_error:.1e}"
    elif not (torch.equal(out, again) and torch.equal(lse, lse_again)):
        reason = "gives different bits in two runs on the same input"
    else:
        mark_verified(backend, replace(problem.spec, max_q_len=spec.max_q_len))
        return ProbeResult(True, "", row_error, tensor_error)
    return ProbeResult(False, f"{backend} {reason}", row_error, tensor_error)


def _copy_layout(attention: MLAPagedAttention) -> str | None:
    plan = attention.last_plan
    return None if plan is None else plan.copy_layout


def _reference(problem: Problem, case: ProbeCase, copy_layout: str | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The oracle's output and LSE over the cache, or over a copy of it in `copy_layout`."""
    cache, scales, spec = case.cache, (case.ckv_scale, case.kpe_scale), problem.spec
    if copy_layout is not None:
        copy = row_layout(copy_layout, spec.head_dim_ckv, spec.head_dim_kpe)
        rows = cache.view(-1, spec.layout.row_bytes)
        values = decode_rows(rows, spec.layout, ckv_scale=scales[0], kpe_scale=scales[1])
        cache = encode_rows(*values, copy).view(cache.shape[0], spec.page_size, copy.row_bytes)
        problem, scales = replace(problem, spec=replace(spec, kv_layout=copy_layout)), (None, None)
    return mla_oracle(problem, case.q_nope, case.q_pe, cache, ckv_scale=scales[0], kpe_scale=scales[1])
