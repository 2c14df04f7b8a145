"""One forward pass of an SGLang batch as `MLAPagedAttention` plans it, in new tensors or in buffers that a graph holds.

    mode            query rows a request       cached rows (kv_len), this call's included
    decode          1                          seq_lens
    draft step i    1                          seq_lens + i + 1    (seq_lens stays at the committed prefix)
    target verify   draft_token_num            seq_lens + draft_token_num
    draft extend    window                     seq_lens, less what of the window extend_seq_lens does not use
    extend, mixed   extend_seq_lens            seq_lens

Page j of request b is `req_to_token[req_pool_indices[b], j * page_size] // page_size`. Entries behind a request's live pages
are whatever `req_to_token` holds there: no kernel reads them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from uncast.attention import MLAPagedAttention


@dataclass(frozen=True)
class Shape:
    """What every plan of one server has in common.

    Attributes:
        backend: uncast's backend name; kv_layout: row layout of the pool; page_size: rows a page.
        head_dim_ckv, head_dim_kpe: latent and rope channels; q_data_type: dtype of queries.
    """

    backend: str
    kv_layout: str
    page_size: int
    head_dim_ckv: int
    head_dim_kpe: int
    q_data_type: torch.dtype


@dataclass
class StepMetadata:
    """One batch; `attention` plans it on first use and keeps the plan, so layers (and graph replays) share it.

    Attributes:
        qo_indptr: int32 [batch + 1]; block_table: int32 [batch, width]; kv_len: int32 [batch].
        total_q: query rows; max_q_len, max_kv_len: bounds of one request.
    """

    shape: Shape
    qo_indptr: torch.Tensor
    block_table: torch.Tensor
    kv_len: torch.Tensor
    total_q: int
    max_q_len: int
    max_kv_len: int
    _plans: dict[tuple[int, float], MLAPagedAttention] = field(default_factory=dict)

    def attention(self, num_heads: int, sm_scale: float) -> MLAPagedAttention:
        """The planned attention for layers of `num_heads` heads and this softmax scale."""
        key = (num_heads, sm_scale)
        if key not in self._plans:
            planned, shape = MLAPagedAttention(self.shape.backend), self.shape
            planned.plan(
                self.qo_indptr, block_tables=self.block_table, seq_lens=self.kv_len, num_heads=num_heads,
                head_dim_ckv=shape.head_dim_ckv, head_dim_kpe=shape.head_dim_kpe, page_size=shape.page_size,
                causal=True, sm_scale=sm_scale, q_data_type=shape.q_data_type, kv_layout=shape.kv_layout,
                max_q_len=self.max_q_len, max_kv_len=self.max_kv_len, total_q=self.total_q,
            )  # fmt: skip
            self._plans[key] = planned
        return self._plans[key]


@dataclass(frozen=True)
class Lengths:
    """Query rows a request (None: ragged, by extend_seq_lens) and what is added to seq_lens."""

    q_len: int | None
    extra: int = 0
    window_aligned: bool = False


def read_lengths(batch: Any, draft_step: int | None, num_draft_tokens: int) -> Lengths:
    """The row of the module's table that fits a ForwardBatch (or the view of one that graph runners pass)."""
    mode = batch.forward_mode
    if mode.is_decode_or_idle():
        return Lengths(1, 0 if draft_step is None else draft_step + 1)
    if mode.is_target_verify():
        count = getattr(batch.spec_info, "draft_token_num", None) or num_draft_tokens
        return Lengths(count, count)
    if mode.is_draft_extend_v2():
        ids = getattr(batch, "input_ids", None)
        window = num_draft_tokens if ids is None or not batch.batch_size else ids.shape[0] // batch.batch_size
        return Lengths(window, window_aligned=True)
    return Lengths(None)


class MetadataBuilder:
    """Fills `StepMetadata` from batches.

    Args:
        req_to_token: int32 [requests, context] of the runner's request pool.
        context_len: the most tokens a request may hold, drafts not counted.
        num_draft_tokens: drafted tokens a step, 0 without speculation.
        draft_step: which step of a multi-step draft this is, None for none.
    """

    def __init__(
        self,
        shape: Shape,
        req_to_token: torch.Tensor,
        context_len: int,
        num_draft_tokens: int = 0,
        draft_step: int | None = None,
    ) -> None:
        self.shape, self.req_to_token, self.num_draft_tokens = shape, req_to_token, num_draft_tokens
        self.draft_step = draft_step
        # A request's row of req_to_token may be longer than the context; reads never pass either.
        longest = min(context_len + max(1, num_draft_tokens), req_to_token.shape[1])
        self.width = -(-longest // shape.page_size)
        self._firsts = req_to_token[:, : self.width * shape.page_size : shape.page_size]
        self._graphs: dict[tuple[int, int], StepMetadata] = {}
        self._tables: torch.Tensor | None = None
        self._lens: torch.Tensor | None = None

    def allocate(self, max_bs: int) -> None:
        """Buffers for graphs of up to `max_bs` requests: 4 bytes a page of `max_bs` full contexts. Earlier graphs are void."""
        device = self.req_to_token.device
        self._tables = torch.zeros((max_bs, self.width), dtype=torch.int32, device=device)
        self._lens = torch.ones(max_bs, dtype=torch.int32, device=device)
        self._graphs = {}

    def build(self, batch: Any, translator: Any = None) -> StepMetadata:
        """An eager pass: new tensors, as wide as the longest request."""
        lengths = read_lengths(batch, self.draft_step, self.num_draft_tokens)
        kv_len = _kv_lens(batch, lengths)
        on_host = batch.seq_lens_cpu
        longest = self.width * self.shape.page_size
        if on_host is not None and len(on_host):
            longest = min(longest, int(on_host.max()) + max(lengths.extra, lengths.q_len or 0))
        table = self._table(batch, -(-longest // self.shape.page_size), translator)
        if lengths.q_len is None:
            q_lens = batch.extend_seq_lens_cpu
            qo = torch.zeros(batch.batch_size + 1, dtype=torch.int32, device=table.device)
            qo[1:] = batch.extend_seq_lens.cumsum(0)
            return StepMetadata(self.shape, qo, table, kv_len, sum(q_lens), max([1, *q_lens]), longest)
        qo = _uniform(batch.batch_size, lengths.q_len, table.device)
        return StepMetadata(
            self.shape, qo, table, kv_len, batch.batch_size * lengths.q_len, max(1, lengths.q_len), longest
        )

    def build_in_place(self, batch: Any, translator: Any = None) -> StepMetadata:
        """A pass in `allocate`'s buffers, for capture and every replay; a batch that has no place there is built eagerly.

        A batch's lengths on the host are not looked at: runners leave them stale or out where no backend asks for them. Every
        column is filled.
        """
        lengths, bs = read_lengths(batch, self.draft_step, self.num_draft_tokens), batch.batch_size
        if self._tables is None or self._lens is None or lengths.q_len is None or not 0 < bs <= self._tables.shape[0]:
            return self.build(batch, translator)
        key = (bs, lengths.q_len)
        step = self._graphs.get(key)
        if step is None:
            lens = self._lens[:bs]
            step = self._graphs[key] = StepMetadata(
                self.shape, _uniform(bs, lengths.q_len, lens.device), self._tables[:bs], lens, bs * lengths.q_len,
                lengths.q_len, self.width * self.shape.page_size,
            )  # fmt: skip
        step.kv_len.copy_(batch.seq_lens[:bs])
        if lengths.extra:
            step.kv_len.add_(lengths.extra)
        self._fill(step.block_table, batch, translator)
        return step

    def _table(self, batch: Any, pages: int, translator: Any) -> torch.Tensor:
        table = torch.zeros((batch.batch_size, max(1, pages)), dtype=torch.int32, device=self.req_to_token.device)
        self._fill(table, batch, translator)
        return table

    def _fill(self, table: torch.Tensor, batch: Any, translator: Any) -> None:
        """Page numbers into all of `table`, at most `width` wide."""
        rows, pages = table.shape
        if not rows:
            return
        if translator is not None and translator.reads_are_translated:
            translator.copy_page_table(batch.kv_loc_plan, out=table)
            return
        firsts = self._firsts if pages == self.width else self._firsts[:, :pages]
        torch.index_select(firsts, 0, batch.req_pool_indices[:rows], out=table)
        if self.shape.page_size > 1:
            table.div_(self.shape.page_size, rounding_mode="floor")


def _kv_lens(batch: Any, lengths: Lengths) -> torch.Tensor:
    lens = batch.seq_lens[: batch.batch_size]
    if lengths.window_aligned and getattr(batch, "extend_seq_lens", None) is not None:
        lens = lens - batch.extend_seq_lens + lengths.q_len
    if lengths.extra:
        lens = lens + lengths.extra
    typed: torch.Tensor = lens.to(torch.int32).contiguous()
    return typed


def _uniform(batch: int, q_len: int, device: torch.device) -> torch.Tensor:
    return torch.arange(batch + 1, dtype=torch.int32, device=device) * q_len
