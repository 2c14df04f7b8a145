"""Un-absorbed prefill: which chunks go there, and how on a CPU; a GPU's is `uncast.backends.native_extend`.

Keys and values of every head are up-projected from the stored rows block by block; `uncast.attention.crossover` has the
formulas, the operations and the choice. The pool is read as it is stored, one block of rows in a bounded scratch as operand of
the up-projection; of keys and values only one block exists.

Time absorbed / time un-absorbed on one x86 core (fp8_ds_mla, float32, page size 64, projections included; in brackets the ratio
of operations that `auto` decides by; from 1.15 on it goes un-absorbed):

| queries, rows          | 64, 64      | 256, 256    | 64, 256     | 256, 512    | 256, 4096   | 512, 4096   |
|------------------------|-------------|-------------|-------------|-------------|-------------|-------------|
| tiny-glm 4x64/64/64    | 1.69 (1.41) | 2.92 (2.28) | 1.26 (1.01) | 2.70 (2.36) | 2.21 (2.42) | 2.88 (3.36) |
| V2-Lite 16x128/64/128  | 1.31 (1.18) | 2.09 (1.57) | 0.76 (0.63) | 1.71 (1.43) | 1.26 (1.32) | 1.68 (1.89) |
| GLM-4.7-Flash 20x192/64/256 | 1.10 (1.08) | 1.23 (1.25) | 0.53 (0.46) | 1.00 (0.99) | 0.76 (0.80) | 1.07 (1.16) |
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

import torch

from uncast.attention import MLAPagedAttention, Problem, ProblemSpec
from uncast.attention.crossover import ExtendChunk, HeadDims, may_prefer_unabsorbed, prefers_unabsorbed
from uncast.latent.codec import Scale
from uncast.latent.layouts import RowLayout
from uncast.latent.reader import RowReader
from uncast.models.config import ModelConfig

PREFILL_MODES = ("auto", "absorbed", "unabsorbed")
QUERY_ROWS = 2048
"""Query rows (heads x queries) whose scores over one block are held at once."""

_CPU_BACKENDS, _GPU_BACKENDS = ("torch_cpu",), ("native",)
"""Backends that read rows as stored. With any other one (a baseline, a peer) every chunk is that backend's."""


@dataclass(frozen=True)
class PrefillSplit:
    """Which requests of a step go un-absorbed.

    Attributes:
        chunks: those that do.
        rows: int64 [n], the query rows of the others, in order.
        rest: planned for `rows`; None if there are none.
        layout: of the cache's rows.
        reader: scratch of one block of rows on a CPU; None on a GPU.
    """

    chunks: list[ExtendChunk]
    rows: torch.Tensor
    rest: MLAPagedAttention | None
    layout: RowLayout
    reader: RowReader | None


def head_dims(config: ModelConfig) -> HeadDims:
    return HeadDims(
        config.num_heads, config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    )


def goes_unabsorbed(config: ModelConfig, mode: str, q_len: int, kv_len: int, device: str = "cpu") -> bool:
    """The choice for one chunk; it depends on nothing but the model, the device and the chunk's own lengths."""
    if mode == "absorbed" or not 1 < q_len <= kv_len:
        return False
    return mode == "unabsorbed" or prefers_unabsorbed(head_dims(config), q_len, kv_len, device)


def split_prefill(config: ModelConfig, mode: str, attention: MLAPagedAttention) -> PrefillSplit | None:
    """Splits a planned step; None if every request is absorbed, as in sparse attention.

    On a GPU lengths come to the host (one sync a step), but only where the bounds known there allow an un-absorbed chunk.
    """
    plan = attention.last_plan
    if mode == "absorbed" or plan is None:
        return None
    problem, spec = plan.problem, plan.problem.spec
    if (
        spec.max_q_len == 1
        or spec.batch_invariant
        or spec.topk
        or not spec.causal
        or not _can(config, plan.backend, spec)
    ):
        return None
    if mode == "auto" and not may_prefer_unabsorbed(head_dims(config), spec.max_q_len, problem.max_kv_len, spec.device):
        return None
    ends, starts, lens = problem.qo_indptr.tolist(), problem.kv_indptr.tolist(), problem.kv_len_arr.tolist()
    chunks, rest = [], []
    for request, kv_len in enumerate(lens):
        first, last = ends[request], ends[request + 1]
        if goes_unabsorbed(config, mode, last - first, kv_len, spec.device):
            pages = problem.kv_indices[starts[request] :][: -(-kv_len // spec.page_size)]
            chunks.append(ExtendChunk(first, last, kv_len, pages))
        else:
            rest.append(ExtendChunk(first, last, kv_len, problem.kv_indices[starts[request] :]))
    if not chunks:
        return None
    rows = torch.tensor(
        [row for c in rest for row in range(c.first, c.last)], dtype=torch.int64, device=problem.qo_indptr.device
    )
    planned = _plan_rest(plan.backend, problem, rest) if rows.shape[0] else None
    reader = RowReader(spec.layout, spec.page_size) if spec.device == "cpu" else None
    return PrefillSplit(chunks, rows, planned, spec.layout, reader)


def _can(config: ModelConfig, backend: str, spec: ProblemSpec) -> bool:
    """Whether `backend`'s device has an un-absorbed path for this model and cache."""
    if backend in _CPU_BACKENDS:
        return True
    if backend not in _GPU_BACKENDS:
        return False
    from uncast.backends.native_extend import unabsorbed_refusal  # needs Triton

    widths = (config.qk_nope_head_dim, config.v_head_dim)
    return unabsorbed_refusal(spec.layout, spec.arch, spec.q_data_type, spec.q_data_type, *widths) is None


def _plan_rest(backend: str, problem: Problem, requests: list[ExtendChunk]) -> MLAPagedAttention:
    spec, device = problem.spec, problem.qo_indptr.device
    pages = [r.pages[: -(-r.kv_len // spec.page_size)] for r in requests]
    q_lens, kv_lens = [r.last - r.first for r in requests], [r.kv_len for r in requests]
    attention = MLAPagedAttention(backend)
    attention.plan(
        _indptr(q_lens).to(device),
        _indptr([p.shape[0] for p in pages]).to(device),
        torch.cat(pages),
        torch.tensor(kv_lens, dtype=torch.int32, device=device),
        num_heads=spec.num_heads,
        head_dim_ckv=spec.head_dim_ckv,
        head_dim_kpe=spec.head_dim_kpe,
        page_size=spec.page_size,
        causal=spec.causal,
        sm_scale=spec.sm_scale,
        q_data_type=spec.q_data_type,
        kv_layout=spec.kv_layout,
        max_q_len=max(1, *q_lens),
        max_kv_len=max(kv_lens),
        total_q=sum(q_lens),
        num_pages=problem.num_pages,
    )
    return attention


def _indptr(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def attend_chunks(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    cache: torch.Tensor,
    split: PrefillSplit,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    out: torch.Tensor,
    *,
    sm_scale: float,
    ckv_scale: Scale,
    kpe_scale: Scale,
) -> None:
    """Values of the split's chunks into their rows of out [n, heads, v]; the other arguments as in `attend_unabsorbed`."""
    if split.reader is None:
        from uncast.backends.native_extend import unabsorbed_extend  # needs Triton

        unabsorbed_extend(
            q_nope, q_pe, cache, split.chunks, w_uk, w_uv,
            layout=split.layout, sm_scale=sm_scale, ckv_scale=ckv_scale, kpe_scale=kpe_scale, out=out,
        )  # fmt: skip
        return
    for chunk in split.chunks:
        rows = slice(chunk.first, chunk.last)
        out[rows] = attend_unabsorbed(
            q_nope[rows], q_pe[rows], cache, chunk, split.reader, w_uk, w_uv,
            sm_scale=sm_scale, ckv_scale=ckv_scale, kpe_scale=kpe_scale,
        )  # fmt: skip


def attend_unabsorbed(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    cache: torch.Tensor,
    chunk: ExtendChunk,
    reader: RowReader,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    *,
    sm_scale: float,
    ckv_scale: Scale,
    kpe_scale: Scale,
) -> torch.Tensor:
    """Causal attention of one chunk over its stored rows, on a CPU.

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
