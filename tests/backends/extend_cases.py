"""Cases of un-absorbed extend against float64; in Triton's interpreter: `python -m tests.backends.extend_cases`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from uncast.attention.oracle import relative_errors
from uncast.backends.native_extend import SCRATCH_BYTES, ExtendChunk, unabsorbed_extend
from uncast.latent.codec import Scale, decode_rows, encode_rows, store_rows
from uncast.latent.layouts import RowLayout, row_layout

MAX_ROW_ERROR, MAX_TENSOR_ERROR = 1e-2, 2.5e-3
SCALES = {"fp8_e4m3": (0.037, 1.9)}


@dataclass
class ExtendCase:
    """Requests of (queries, rows) over a pool whose other rows are NaN; page lists go on with garbage."""

    layout: RowLayout
    q_nope: torch.Tensor
    q_pe: torch.Tensor
    cache: torch.Tensor
    chunks: list[ExtendChunk]
    w_uk: torch.Tensor
    w_uv: torch.Tensor
    sm_scale: float
    scales: tuple[Scale, Scale]
    rows: list[tuple[torch.Tensor, torch.Tensor]]

    def run(
        self, library: str | None, scratch_bytes: int = SCRATCH_BYTES, group: int | None = None, **kw: torch.Tensor
    ):
        return unabsorbed_extend(
            self.q_nope, self.q_pe, self.cache, self.chunks, self.w_uk, self.w_uv, layout=self.layout,
            sm_scale=self.sm_scale, ckv_scale=self.scales[0], kpe_scale=self.scales[1], library=library,
            scratch_bytes=scratch_bytes, heads_per_group=group, **kw,
        )  # fmt: skip

    def expected(self, limit: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """float64 out [n, heads, v] and lse (base 2) [n, heads] over stored values; NaN rows where no chunk is.

        limit: only the last so many queries of each chunk (the others stay NaN), and one head at a time."""
        heads, v = self.w_uv.shape[:2]
        out = torch.full((self.q_nope.shape[0], heads, v), torch.nan, dtype=torch.float64, device=self.cache.device)
        lse = torch.full(out.shape[:2], torch.nan, dtype=torch.float64, device=self.cache.device)
        for chunk, (ckv, kpe) in zip(self.chunks, self.rows, strict=True):
            first = chunk.first if limit is None else max(chunk.first, chunk.last - limit)
            seen = torch.arange(chunk.kv_len - (chunk.last - first), chunk.kv_len, device=ckv.device)[:, None]
            hidden = torch.arange(chunk.kv_len, device=ckv.device)[None] > seen
            for head in range(heads):
                keys = ckv @ self.w_uk[head].double().T
                scores = self.q_nope[first : chunk.last, head].double() @ keys.T
                scores += self.q_pe[first : chunk.last, head].double() @ kpe.T
                scores = (scores * self.sm_scale).masked_fill_(hidden, -torch.inf)
                lse[first : chunk.last, head] = scores.logsumexp(-1) / math.log(2)
                out[first : chunk.last, head] = scores.softmax(-1) @ (ckv @ self.w_uv[head].double().T)
        return out, lse


def make_case(
    layout_name: str,
    lengths: list[tuple[int, int]],
    heads: int,
    nope: int,
    v: int,
    *,
    device: str = "cpu",
    page_size: int = 16,
    rank: int = 512,
    rope: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    q_size: float = 1.0,
    w_size: float = 0.02,
) -> ExtendCase:
    generator = torch.Generator().manual_seed(sum(kv for _, kv in lengths) + heads)
    layout = row_layout(layout_name, rank, rope)
    scales = SCALES.get(layout_name, (None, None))
    pages_of = [-(-kv // page_size) for _, kv in lengths]
    cache = torch.full((sum(pages_of) + 1, page_size, layout.row_bytes), 0xFF, dtype=torch.uint8)
    order = torch.randperm(cache.shape[0], generator=generator).int()
    chunks, rows, first, page = [], [], 0, 0
    for (q_len, kv_len), count in zip(lengths, pages_of, strict=True):
        ckv = torch.randn(kv_len, rank, generator=generator)
        kpe = torch.randn(kv_len, rope, generator=generator)
        stored = encode_rows(ckv, kpe, layout, ckv_scale=scales[0], kpe_scale=scales[1])
        mine = order[page : page + count]
        slots = mine.long()[:, None] * page_size + torch.arange(page_size)
        store_rows(cache, stored, slots.view(-1)[:kv_len])
        decoded = decode_rows(stored, layout, ckv_scale=scales[0], kpe_scale=scales[1], dtype=torch.float64)
        rows.append(tuple(x.to(device) for x in decoded))
        table = torch.cat([mine, torch.full((3,), 2**31 - 1, dtype=torch.int32)]).to(device)
        chunks.append(ExtendChunk(first, first + q_len, kv_len, table))
        first, page = first + q_len, page + count
    q = torch.randn(first, heads, nope + rope, generator=generator) * q_size
    w = torch.randn(heads, nope + v, rank, generator=generator) * w_size
    q, w = q.to(dtype).to(device), w.bfloat16().to(device)
    sm_scale = 1.7 / math.sqrt(nope + rope) / q_size * min(1.0, 0.02 / w_size)
    return ExtendCase(layout, q[..., :nope], q[..., nope:], cache.to(device), chunks, w[:, :nope], w[:, nope:],
                      sm_scale, scales, rows)  # fmt: skip


def check(case: ExtendCase, library: str | None, scratch_bytes: int = SCRATCH_BYTES, group: int | None = None) -> tuple:
    """Asserts output and LSE within the tolerance; returns the errors (per row, over the tensor)."""
    shape = (*case.q_nope.shape[:2], case.w_uv.shape[1])
    dtype = case.q_nope.dtype if case.cache.is_cuda else torch.float32  # Triton's interpreter truncates to bf16
    out = torch.full(shape, torch.nan, dtype=dtype, device=case.cache.device)
    lse = torch.full(shape[:2], torch.nan, device=case.cache.device)
    assert case.run(library, scratch_bytes, group, out=out, lse=lse) is out
    expected, expected_lse = case.expected()
    errors = relative_errors(out, expected)
    assert errors[0] <= MAX_ROW_ERROR and errors[1] <= MAX_TENSOR_ERROR, errors
    assert float((lse - expected_lse).abs().max()) <= 4e-3
    assert torch.equal(case.run(library, scratch_bytes, group, out=torch.empty_like(out)), out), "not repeatable"
    return errors


def main() -> None:
    """Small shapes: ragged, several blocks and groups, padded widths, a prefix of 0, tails, queries and weights of any size.

    Not layout `bf16`: Triton's interpreter has no bf16 products.
    """
    small = 2 * 2 * 88 * 256  # blocks of 256 rows of one head
    for layout in ("fp8_e4m3", "fp8_ds_mla"):
        check(make_case(layout, [(5, 600), (3, 3), (1, 17)], 2, 24, 32), "reference", small, 1)
        check(make_case(layout, [(130, 150)], 2, 16, 16, page_size=1), "reference")
    check(make_case("fp8_e4m3", [(4, 1100)], 4, 32, 16, rank=128, rope=16, page_size=128), "reference", small, 2)
    check(make_case("fp8_e4m3", [(4, 40)], 1, 8, 40, rank=64, rope=8), "reference")
    for size in (1e30, 1e-30):
        check(make_case("fp8_e4m3", [(4, 40)], 2, 24, 16, q_size=size), "reference")
    for size in (1e6, 1e-6):
        check(make_case("fp8_ds_mla", [(4, 40)], 2, 24, 16, w_size=size), "reference")
    check(make_case("fp8_e4m3", [(4, 40)], 2, 24, 16, dtype=torch.float16), "reference")
    case = make_case("fp8_e4m3", [(4, 40)], 2, 24, 16)
    plain = case.run("reference")
    case.scales = tuple(torch.tensor([s]) for s in case.scales)
    assert torch.equal(case.run("reference"), plain), "scales as tensors"


if __name__ == "__main__":
    main()
