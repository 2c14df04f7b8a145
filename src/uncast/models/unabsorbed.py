"""Un-absorbed prefill on a CPU: keys and values of every head, up-projected from the stored rows block by block.

    absorbed     s = (q_nope W_UK) c + q_pe k_pe          out = W_UV (sum p c)            2 H (2 R + dr) a pair
    un-absorbed  s = q_nope (W_UK c) + q_pe k_pe          out = sum p (W_UV c)            2 H (dn + dr + dv) a pair

The same numbers in another order. Un-absorbed saves on every (query, row) pair and pays 2 H R (dn + dv) for each *row*, where
absorbed pays as much for each *query*: it wins while the cached part is not much longer than the chunk, or always if dn + dv is
small. The pool is read as it is stored, one block of rows in a bounded scratch as operand of the up-projection; of keys and
values only one block exists.

Time absorbed / time un-absorbed on one x86 core (fp8_ds_mla, float32, page size 64, projections included; in brackets the ratio
of operations that `auto` decides by; from MIN_GAIN on it goes un-absorbed):

| queries, rows          | 64, 64      | 256, 256    | 64, 256     | 256, 512    | 256, 4096   | 512, 4096   |
|------------------------|-------------|-------------|-------------|-------------|-------------|-------------|
| tiny-glm 4x64/64/64    | 1.69 (1.41) | 2.92 (2.28) | 1.26 (1.01) | 2.70 (2.36) | 2.21 (2.42) | 2.88 (3.36) |
| V2-Lite 16x128/64/128  | 1.31 (1.18) | 2.09 (1.57) | 0.76 (0.63) | 1.71 (1.43) | 1.26 (1.32) | 1.68 (1.89) |
| GLM-4.7-Flash 20x192/64/256 | 1.10 (1.08) | 1.23 (1.25) | 0.53 (0.46) | 1.00 (0.99) | 0.76 (0.80) | 1.07 (1.16) |
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from uncast.attention import MLAPagedAttention, Problem
from uncast.latent.codec import Scale
from uncast.latent.reader import RowReader
from uncast.models.config import ModelConfig

PREFILL_MODES = ("auto", "absorbed", "unabsorbed")
MIN_GAIN = 1.15
"""`auto` goes un-absorbed from this ratio of operations on: below it, smaller matrix products may cost what is saved."""

QUERY_ROWS = 2048
"""Query rows (heads x queries) whose scores over one block are held at once."""

_CPU_BACKENDS = ("torch_cpu",)
"""Backends that read rows as stored on the CPU. With any other one (a baseline, a GPU kernel) every chunk is that backend's."""


@dataclass(frozen=True)
class Chunk:
    """One request's part of a step that goes un-absorbed: its query rows first..last, its cached rows and their pages."""

    first: int
    last: int
    kv_len: int
    pages: torch.Tensor


@dataclass(frozen=True)
class PrefillSplit:
    """Which requests of a step go un-absorbed.

    Attributes:
        chunks: those that do.
        rows: int64 [n], the query rows of the others, in order.
        rest: planned for `rows`; None if there are none.
        reader: scratch of one block of rows.
    """

    chunks: list[Chunk]
    rows: torch.Tensor
    rest: MLAPagedAttention | None
    reader: RowReader


def operations(config: ModelConfig, q_len: int, kv_len: int) -> tuple[int, int]:
    """Multiply-adds of a causal chunk, absorbed and un-absorbed: `q_len` queries at the end of `kv_len` rows, one layer."""
    heads, rank = config.num_heads, config.kv_lora_rank
    nope, rope, v = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    pairs = q_len * kv_len - q_len * (q_len - 1) // 2
    projection = rank * (nope + v)
    return (
        heads * (pairs * (2 * rank + rope) + q_len * projection),
        heads * (pairs * (nope + rope + v) + kv_len * projection),
    )


def goes_unabsorbed(config: ModelConfig, mode: str, q_len: int, kv_len: int) -> bool:
    """The choice for one chunk; it depends on nothing but the model and the chunk's own lengths."""
    if mode == "absorbed" or not 1 < q_len <= kv_len:
        return False
    absorbed, unabsorbed = operations(config, q_len, kv_len)
    return mode == "unabsorbed" or absorbed >= MIN_GAIN * unabsorbed


def split_prefill(config: ModelConfig, mode: str, attention: MLAPagedAttention) -> PrefillSplit | None:
    """Splits a planned step; None if every request is absorbed."""
    plan = attention.last_plan
    if mode == "absorbed" or plan is None or plan.backend not in _CPU_BACKENDS:
        return None
    problem, spec = plan.problem, plan.problem.spec
    if spec.max_q_len == 1 or spec.batch_invariant or not spec.causal:
        return None
    ends, starts, lens = problem.qo_indptr.tolist(), problem.kv_indptr.tolist(), problem.kv_len_arr.tolist()
    chunks, rest = [], []
    for request, kv_len in enumerate(lens):
        first, last = ends[request], ends[request + 1]
        if goes_unabsorbed(config, mode, last - first, kv_len):
            live = -(-kv_len // spec.page_size)
            chunks.append(Chunk(first, last, kv_len, problem.kv_indices[starts[request] :][:live]))
        else:
            rest.append(request)
    if not chunks:
        return None
    rows = [row for request in rest for row in range(ends[request], ends[request + 1])]
    planned = _plan_rest(plan.backend, problem, rest) if rows else None
    return PrefillSplit(chunks, torch.tensor(rows), planned, RowReader(spec.layout, spec.page_size))


def _plan_rest(backend: str, problem: Problem, requests: list[int]) -> MLAPagedAttention:
    spec, index = problem.spec, torch.tensor(requests)
    q_lens = problem.qo_indptr.diff()[index]
    kv_lens = problem.kv_len_arr[index]
    starts = problem.kv_indptr.tolist()
    pages = [
        problem.kv_indices[starts[r] :][: -(-n // spec.page_size)]
        for r, n in zip(requests, kv_lens.tolist(), strict=True)
    ]
    attention = MLAPagedAttention(backend)
    attention.plan(
        _indptr(q_lens),
        _indptr(torch.tensor([len(p) for p in pages])),
        torch.cat(pages),
        kv_lens,
        num_heads=spec.num_heads,
        head_dim_ckv=spec.head_dim_ckv,
        head_dim_kpe=spec.head_dim_kpe,
        page_size=spec.page_size,
        causal=spec.causal,
        sm_scale=spec.sm_scale,
        q_data_type=spec.q_data_type,
        kv_layout=spec.kv_layout,
        num_pages=problem.num_pages,
    )
    return attention


def _indptr(lengths: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).int()])


def attend_unabsorbed(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    cache: torch.Tensor,
    chunk: Chunk,
    reader: RowReader,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    *,
    sm_scale: float,
    ckv_scale: Scale,
    kpe_scale: Scale,
) -> torch.Tensor:
    """Causal attention of one chunk over its stored rows.

    Args:
        q_nope: [n, heads, nope], not absorbed; q_pe: [n, heads, rope], rotated.
        cache: uint8 [num_pages, page_size, row_bytes].
        w_uk: [heads, nope, rank]; w_uv: [heads, v, rank].

    Returns:
        [n, heads, v] in q's dtype; float32 inside. Source: DeepSeek-V2 (arXiv 2405.04434), equations 9 to 19.
    """
    heads, nope, rank = w_uk.shape
    latent_scale = _value(ckv_scale)
    state = _Softmax(
        (q_nope.float() * (sm_scale * latent_scale)).transpose(0, 1).contiguous(),
        (q_pe.float() * (sm_scale * _value(kpe_scale))).transpose(0, 1).contiguous(),
        w_uv.shape[1],
        chunk.kv_len,
    )
    up_k, up_v = w_uk.reshape(-1, rank).float(), w_uv.reshape(-1, rank).float()
    for start in range(0, chunk.kv_len, reader.rows_per_block):
        count = min(reader.rows_per_block, chunk.kv_len - start)
        rows = reader.read_block(cache, chunk.pages, start, count)
        latent = rows[:, :rank].T
        keys = (up_k @ latent).view(heads, nope, count)
        values = (up_v @ latent).view(heads, -1, count).transpose(1, 2)
        state.add(start, keys, rows[:, rank:], values)
    return state.result().mul_(latent_scale).transpose(0, 1).to(q_nope.dtype)


class _Softmax:
    """Online softmax of a chunk's queries [heads, n, dim] over blocks of rows; scales are folded into the queries."""

    def __init__(self, q_nope: torch.Tensor, q_pe: torch.Tensor, v_dim: int, kv_len: int) -> None:
        heads, queries = q_nope.shape[:2]
        self.q_nope, self.q_pe = q_nope, q_pe
        self.before = kv_len - queries  # rows that every query sees, besides itself
        self.step = max(1, QUERY_ROWS // heads)
        self.top = torch.full((heads, queries, 1), -math.inf)
        self.total = torch.zeros(heads, queries, 1)
        self.acc = torch.zeros(heads, queries, v_dim)

    def add(self, start: int, keys: torch.Tensor, kpe: torch.Tensor, values: torch.Tensor) -> None:
        """Rows start..: keys [heads, nope, count], kpe [count, rope], values [heads, count, v]."""
        queries = self.q_nope.shape[1]
        for begin in range(max(0, start - self.before), queries, self.step):
            end = min(begin + self.step, queries)
            self._add_tile(slice(begin, end), self.before + begin + 1 - start, keys, kpe, values)

    def _add_tile(self, tile: slice, limit: int, keys: torch.Tensor, kpe: torch.Tensor, values: torch.Tensor) -> None:
        """The tile's first query sees `limit` rows of the block, each next one a row more."""
        count = min(kpe.shape[0], limit + tile.stop - tile.start - 1)
        scores = torch.matmul(self.q_pe[:, tile], kpe[:count].T).baddbmm_(self.q_nope[:, tile], keys[:, :, :count])
        if count > limit:
            seen = torch.arange(limit, limit + tile.stop - tile.start)[:, None]
            scores.masked_fill_(torch.arange(count)[None] >= seen, -math.inf)
        # Every query of a tile that is computed sees a row of this block, so no maximum is -inf.
        top = torch.maximum(self.top[:, tile], scores.amax(-1, keepdim=True))
        weights = scores.sub_(top).exp_()
        keep = (self.top[:, tile] - top).exp_()
        self.total[:, tile] = self.total[:, tile] * keep + weights.sum(-1, keepdim=True)
        self.acc[:, tile] = torch.baddbmm(self.acc[:, tile] * keep, weights, values[:, :count])
        self.top[:, tile] = top

    def result(self) -> torch.Tensor:
        """float32 [heads, n, v]."""
        return self.acc / self.total


def _value(scale: Scale) -> float:
    return 1.0 if scale is None else float(scale)
