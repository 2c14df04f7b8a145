"""One batch's decode attention: planned by the first layer that asks, shared by the layers after it.

    request b owns query rows qo_indptr[b] .. qo_indptr[b + 1], the last of its seq_lens[b] stored rows
    uniform batch   every request has q_len rows: qo_indptr = q_len * [0, 1, 2, ...], so padding requests of a CUDA graph
                    (seq_lens 0) own rows too, and those become 0
    ragged batch    qo_indptr = query_start_loc; never under a full CUDA graph (the builder claims UNIFORM_BATCH)

Under graph capture a plan is made inside the capture: its scratch belongs to the graph's memory pool and lives as long as the
graph, and its constants are written again at every replay. So a plan made outside (a warm-up's) is never captured, and a
captured one never used outside. A replay reads `seq_lens` and `block_table`, which vLLM refills in place; it never comes back
to Python.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from uncast.attention import MLAPagedAttention, ProblemSpec
from uncast.integrations.vllm.serving import device_arch, serving

DRAFT_ROWS = 64
"""Rows by which a request may grow while its metadata serves: vLLM's draft steps lengthen `seq_lens` in place."""


@dataclass(frozen=True)
class LayerShape:
    """What of a layer selects a plan: layers of equal shape share one."""

    num_heads: int
    kv_layout: str
    page_size: int
    sm_scale: float
    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64
    return_lse: bool = False


@dataclass
class DecodeStep:
    """The metadata of one batch's decode requests and the plans made from it.

    Attributes:
        block_table: int32 [num_decodes, width]; seq_lens: int32 [num_decodes].
        query_start_loc: int32 [num_decodes + 1] on the device.
        num_tokens: query rows of all requests, padding included.
        max_query_len: an upper bound of one request's query rows.
        max_seq_len: an upper bound of `seq_lens` at the first call; later ones may exceed it by `DRAFT_ROWS`.
    """

    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    batch_invariant: bool = False
    _plans: dict[tuple[LayerShape, bool], MLAPagedAttention] = field(default_factory=dict, repr=False)

    @property
    def uniform_query_len(self) -> int | None:
        """Query rows of every request, None if they differ.

        `max_query_len` may stand for a prefill request beside these, so it alone does not tell. Requests without query rows
        exist only as padding of a uniform batch.
        """
        requests = self.seq_lens.shape[0]
        query_len, rest = divmod(self.num_tokens, max(1, requests))
        return query_len if rest == 0 and query_len in (1, self.max_query_len) else None

    def attention(self, shape: LayerShape) -> MLAPagedAttention:
        """The planned attention for layers of `shape`.

        Raises:
            UnservedError: no backend can run it. ProblemError: metadata that does not fit.
        """
        key = shape, is_capturing(self.seq_lens.device)
        found = self._plans.get(key)
        if found is None:
            found = self._plans[key] = self._plan(shape)
        return found

    def _plan(self, shape: LayerShape) -> MLAPagedAttention:
        device = self.seq_lens.device
        query_len = self.uniform_query_len
        if query_len is None:
            qo_indptr, query_len = self.query_start_loc, self.max_query_len
        else:
            ends = (self.seq_lens.shape[0] + 1) * query_len
            qo_indptr = torch.arange(0, ends, query_len, dtype=torch.int32, device=device)
        spec = self._spec(shape, device)
        longest = min(self.block_table.shape[1] * shape.page_size, self.max_seq_len + DRAFT_ROWS)
        attention = MLAPagedAttention(serving(replace(spec, max_q_len=query_len)))
        attention.plan(
            qo_indptr, block_tables=self.block_table, seq_lens=self.seq_lens, num_heads=spec.num_heads,
            head_dim_ckv=spec.head_dim_ckv, head_dim_kpe=spec.head_dim_kpe, page_size=spec.page_size, sm_scale=spec.sm_scale,
            q_data_type=spec.q_data_type, kv_layout=spec.kv_layout, max_q_len=query_len, max_kv_len=longest,
            total_q=self.num_tokens, return_lse=spec.return_lse, lse_base=spec.lse_base, batch_invariant=spec.batch_invariant,
        )  # fmt: skip
        return attention

    def _spec(self, shape: LayerShape, device: torch.device) -> ProblemSpec:
        arch = device_arch() if device.type == "cuda" else 0
        return ProblemSpec(
            num_heads=shape.num_heads, head_dim_ckv=shape.kv_lora_rank, head_dim_kpe=shape.qk_rope_head_dim,
            page_size=shape.page_size, kv_layout=shape.kv_layout, sm_scale=shape.sm_scale, device=device.type, arch=arch,
            return_lse=shape.return_lse, lse_base="e", batch_invariant=self.batch_invariant,
        )  # fmt: skip


def is_capturing(device: torch.device) -> bool:
    """Whether work on `device` is being captured in a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
