"""Two contexts in which a rounding to BF16 on the way shows, whatever else a batch holds.

Of a few rows, for probabilities: it shows nearly as much as it can. Row 0 has the largest score of every query row and head, so
its P is 1 and exact. The others' P lie in turn above and below the middle between 1/2 and the next number of BF16, so that each
is off by 7/8 of the largest error, up and down by turns (a kernel that also divides by the sum of rounded P gains nothing).
Over V visible rows that is, values being nearly orthogonal,

    (7/8) 2^-9 sqrt(V - 1) / sqrt(1 + (V - 1) / 4)    2.7e-3 of the output for V = 8; with the output's rounding 3.2e-3

The scores come from the rope channels, which are no part of the values: row t of the cache has two of its own, and each query
sets the first to what its score lacks and the second to what rounding the first left over.

Of many rows, for the results of pieces: queries are an eighth of the usual ones, so that all rows count and every piece does.
"""

from __future__ import annotations

import torch

from uncast.attention import ProblemSpec
from uncast.latent.codec import decode_rows, encode_rows
from uncast.verify.cases import ProbeCase

FEW_ROWS = 8
"""Rows of the first context; it takes 16 rope channels."""
MANY_ROWS = 160
"""Of the second: five pieces of 32 rows."""
_CODE = 64.0
"""Of the rope channels' one in units of kpe_scale: exact in e4m3."""
_QUIET = 0.125
"""So much of the usual one is the queries' latent part, so that the rope part need not be large."""
_LARGEST = 4096.0
"""The rope part of a query stays below it, as every dtype of queries has to hold it."""


def flatten_scores(case: ProbeCase, request: int) -> None:
    """Divides a request's queries by eight, in place."""
    first, last = case.qo_indptr[request : request + 2].tolist()
    case.q_nope[first:last].mul_(_QUIET)
    case.q_pe[first:last].mul_(_QUIET)


def targets(rows: int) -> torch.Tensor:
    """float64 [rows]: P of each row of the context, relative to the first."""
    middle, step = 0.5 + 2.0**-9, 2.0**-12
    turns = torch.where(torch.arange(rows) % 2 == 0, step, -step).double()
    return (middle + turns).index_fill(0, torch.zeros(1, dtype=torch.int64), 1.0)


def tune_few_rows(spec: ProblemSpec, case: ProbeCase, request: int) -> bool:
    """Rewrites the rope channels of a request's cache rows, and its queries, in place; False where there are too few channels
    for its rows, or where `sm_scale` would need queries too large to hold, and then nothing is changed."""
    layout, count = spec.layout, int(case.seq_lens[request])
    unit = _CODE * float(case.kpe_scale) if case.kpe_scale is not None else 1.0
    if 2 * count > spec.head_dim_kpe or 1.0 / (spec.sm_scale * unit) > _LARGEST:
        return False
    first, last = case.qo_indptr[request : request + 2].tolist()
    device = case.cache.device
    token = torch.arange(count, device=device)
    slots = case.block_tables[request].long()[token // spec.page_size] * spec.page_size + token % spec.page_size
    flat = case.cache.view(-1, layout.row_bytes)
    ckv_scale, kpe_scale = case.ckv_scale, case.kpe_scale
    ckv, kpe = decode_rows(flat[slots], layout, ckv_scale=ckv_scale, kpe_scale=kpe_scale)
    kpe.zero_()
    kpe[token, 2 * token] = kpe[token, 2 * token + 1] = unit
    flat[slots] = encode_rows(ckv, kpe, layout, ckv_scale=ckv_scale, kpe_scale=kpe_scale)
    ckv, kpe = decode_rows(flat[slots], layout, ckv_scale=ckv_scale, kpe_scale=kpe_scale, dtype=torch.float64)
    q_nope, q_pe = case.q_nope[first:last], case.q_pe[first:last]
    q_nope.mul_(_QUIET)
    wanted = targets(count).to(device).log() / spec.sm_scale - q_nope.double() @ ckv.T
    wanted = wanted / kpe[token, 2 * token]
    coarse = wanted.to(q_pe.dtype)
    q_pe[..., 0 : 2 * count : 2] = coarse
    q_pe[..., 1 : 2 * count : 2] = (wanted - coarse.double()).to(q_pe.dtype)
    return True
