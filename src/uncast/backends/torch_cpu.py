"""`torch_cpu`: reads FP8 pages block by block into a bounded scratch, never the pool.

Scratch: a `RowReader`'s, and the scores of one block for at most `QUERY_ROWS` query rows (heads x queries). It depends on
neither the pool nor the context.

Sparse attention takes one query at a time: its selected rows, in order of position, each read once.
"""

from __future__ import annotations

import math

import torch

from uncast.attention.backend import Backend, Capability
from uncast.attention.problem import Problem, ProblemSpec
from uncast.latent.codec import Scale
from uncast.latent.reader import BLOCK_ROWS, RowReader

__all__ = ["BLOCK_ROWS", "QUERY_ROWS", "TorchCpuBackend"]

QUERY_ROWS = 2048


class TorchCpuBackend(Backend):
    """Online softmax in float32 over blocks of `BLOCK_ROWS` rows; every request is computed on its own."""

    name = "torch_cpu"

    def capability(self, spec: ProblemSpec) -> Capability:
        if spec.device != "cpu":
            return Capability.refused(f"torch_cpu runs on cpu, not on {spec.device}")
        return Capability.claimed()

    def __init__(self) -> None:
        self._spec: tuple[object, ...] = ()

    def plan(self, problem: Problem) -> None:
        self._problem = problem
        spec = problem.spec
        key = (spec.layout, spec.page_size)
        if key != self._spec:
            self._spec, self._reader = key, RowReader(spec.layout, spec.page_size)
        self._qo = problem.qo_indptr.tolist()

    def run(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        cache: torch.Tensor,
        *,
        ckv_scale: Scale,
        kpe_scale: Scale,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        indices: torch.Tensor | None = None,
    ) -> None:
        if indices is not None:
            self._run_sparse(q_nope, q_pe, cache, ckv_scale, kpe_scale, out, lse, indices)
            return
        problem, spec = self._problem, self._problem.spec
        starts, lengths = problem.kv_indptr.tolist(), problem.kv_len_arr.tolist()
        query_scale = (spec.sm_scale * _value(ckv_scale), spec.sm_scale * _value(kpe_scale))
        step = max(1, QUERY_ROWS // spec.num_heads)
        for request, kv_len in enumerate(lengths):
            first, last = self._qo[request], self._qo[request + 1]
            pages = problem.kv_indices[starts[request] : starts[request] + -(-kv_len // spec.page_size)]
            for begin in range(first, last, step):
                end = min(begin + step, last)
                visible = kv_len - (last - end) if spec.causal else kv_len
                query = torch.cat(
                    [q_nope[begin:end].float() * query_scale[0], q_pe[begin:end].float() * query_scale[1]], dim=-1
                )
                result, row_lse = _attend(query, cache, pages, visible, spec, self._reader)
                out[begin:end] = result.mul_(_value(ckv_scale))
                if lse is not None:
                    lse[begin:end] = row_lse if spec.lse_base == "e" else row_lse / math.log(2.0)

    def _run_sparse(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        cache: torch.Tensor,
        ckv_scale: Scale,
        kpe_scale: Scale,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        indices: torch.Tensor,
    ) -> None:
        problem, spec = self._problem, self._problem.spec
        starts, lengths = problem.kv_indptr.tolist(), problem.kv_len_arr.tolist()
        query_scale = (spec.sm_scale * _value(ckv_scale), spec.sm_scale * _value(kpe_scale))
        for request, kv_len in enumerate(lengths):
            pages = problem.kv_indices[starts[request] : starts[request] + -(-kv_len // spec.page_size)].long()
            for row in range(self._qo[request], self._qo[request + 1]):
                chosen = indices[row]
                live = chosen[(chosen >= 0) & (chosen < kv_len)].long()
                tokens, times = live.unique(return_counts=True)  # type: ignore[no-untyped-call]
                slots = pages[tokens // spec.page_size] * spec.page_size + tokens % spec.page_size
                query = torch.cat([q_nope[row].float() * query_scale[0], q_pe[row].float() * query_scale[1]], dim=-1)
                result, row_lse = _attend_selected(query, cache, slots, times, self._reader)
                out[row] = result.mul_(_value(ckv_scale))
                if lse is not None:
                    lse[row] = row_lse if spec.lse_base == "e" else row_lse / math.log(2.0)


def _value(scale: Scale) -> float:
    return 1.0 if scale is None else float(scale)


def _attend(
    query: torch.Tensor, cache: torch.Tensor, pages: torch.Tensor, visible: int, spec: ProblemSpec, reader: RowReader
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of query [n, heads, 576] (scales folded in) over the first `visible` rows; the last query sees all of them.

    Returns out [n, heads, head_dim_ckv] in units of the stored codes and lse [n, heads] (base e), float32.
    """
    queries, heads, width = query.shape
    flat = query.view(queries * heads, width)
    state = _Softmax(queries * heads, spec.head_dim_ckv)
    first_limit = visible - queries + 1 if spec.causal else visible
    for start in range(0, max(visible, 0), reader.rows_per_block):
        count = min(reader.rows_per_block, visible - start)
        keys = reader.read_block(cache, pages, start, count)
        scores = flat @ keys.T
        if start + count > first_limit:
            limit = torch.arange(first_limit, first_limit + queries).repeat_interleave(heads)[:, None]
            scores.masked_fill_(torch.arange(start, start + count)[None, :] >= limit, -math.inf)
        state.add(scores, keys)
    out, lse = state.result()
    return out.view(queries, heads, -1), lse.view(queries, heads)


def _attend_selected(
    query: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, times: torch.Tensor, reader: RowReader
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one query [heads, 576] (scales folded in) over the rows in `slots`, each counted `times` (int64 [n]).

    Returns out [heads, head_dim_ckv] in units of the stored codes and lse [heads] (base e), float32.
    """
    state, often = _Softmax(query.shape[0], reader.rank), times.log()
    for start in range(0, slots.shape[0], reader.rows_per_block):
        part = slice(start, start + reader.rows_per_block)
        keys = reader.read_rows(cache, slots[part])
        state.add((query @ keys.T).add_(often[part]), keys)
    return state.result()


class _Softmax:
    """Online softmax of query rows over blocks of cache rows."""

    def __init__(self, rows: int, rank: int) -> None:
        self.top = torch.full((rows, 1), -math.inf)
        self.total = torch.zeros(rows, 1)
        self.acc = torch.zeros(rows, rank)

    def add(self, scores: torch.Tensor, keys: torch.Tensor) -> None:
        """scores [rows, n] (overwritten) of cache rows keys [n, rank + rope]; -inf where a row is not seen."""
        new_top = torch.maximum(self.top, scores.amax(-1, keepdim=True))
        base = new_top.masked_fill(new_top == -math.inf, 0.0)
        weights = scores.sub_(base).exp_()
        keep = (self.top - base).exp_()
        self.total.mul_(keep).add_(weights.sum(-1, keepdim=True))
        self.acc.mul_(keep).addmm_(weights, keys[:, : self.acc.shape[1]])
        self.top = new_top

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Output [rows, rank] and LSE [rows], base e."""
        lse = (self.top + self.total.log())[:, 0]
        return self.acc.div_(self.total.masked_fill_(self.total == 0, 1.0)), lse
