"""Stand-ins for what SGLang hands to a backend: runner, pools, layers, batches; only what `uncast` reads, as in 0.5.23."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any

import torch

RANK, ROPE = 512, 64
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Mode(Enum):
    """SGLang's `ForwardMode`, with the predicates that are asked."""

    EXTEND = 1
    DECODE = 2
    IDLE = 3
    TARGET_VERIFY = 4
    DRAFT_EXTEND_V2 = 5

    def is_decode_or_idle(self) -> bool:
        return self in (Mode.DECODE, Mode.IDLE)

    def is_target_verify(self) -> bool:
        return self is Mode.TARGET_VERIFY

    def is_draft_extend_v2(self) -> bool:
        return self is Mode.DRAFT_EXTEND_V2

    def is_extend_without_speculative(self) -> bool:
        return self is Mode.EXTEND


class Pool:
    """`MLATokenToKVPool`: per layer [size + page_size, 1, 576]; FP8 stored as uint8; its own writer ignores k_scale."""

    def __init__(self, size: int, page_size: int, dtype: torch.dtype, layers: int = 2) -> None:
        self.size, self.page_size, self.dtype, self.start_layer = size, page_size, dtype, 0
        self.kv_lora_rank, self.qk_rope_head_dim, self.use_dsa = RANK, ROPE, False
        fp8 = dtype == torch.float8_e4m3fn
        # What no request owns is NaN: reading it would show.
        fill = 0x7F if fp8 else float("nan")
        self.kv_buffer = [
            torch.full((size + page_size, 1, RANK + ROPE), fill, dtype=torch.uint8 if fp8 else dtype, device=DEVICE)
            for _ in range(layers)
        ]

    def _check_physical_write_loc(self, loc_info: Any, where: str) -> None:
        assert where

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.kv_buffer[layer_id].view(self.dtype)

    def set_mla_kv_buffer(
        self, layer: Any, loc_info: Any, cache_k_nope: Any, cache_k_rope: Any, layer_id_override: int | None = None
    ) -> None:
        rows = torch.cat([cache_k_nope, cache_k_rope], -1).to(self.dtype)
        self.kv_buffer[layer.layer_id][loc_info] = rows.view(self.kv_buffer[0].dtype)

    def set_kv_buffer(
        self, layer: Any, loc_info: Any, cache_k: Any, cache_v: Any, layer_id_override: int | None = None
    ) -> None:
        self.set_mla_kv_buffer(layer, loc_info, cache_k[..., :RANK], cache_k[..., RANK:])

    def get_mla_kv_buffer(self, layer: Any, loc: torch.Tensor, dst_dtype: torch.dtype | None = None) -> Any:
        rows = self.get_key_buffer(layer.layer_id).view(self.kv_buffer[0].dtype)[loc].view(self.dtype)
        rows = rows.to(dst_dtype or self.dtype)
        return rows[..., :RANK].contiguous(), rows[..., RANK:].contiguous()


@dataclass
class Layer:
    """`RadixAttention`'s facts."""

    tp_q_head_num: int = 4
    layer_id: int = 1
    head_dim: int = RANK + ROPE
    v_head_dim: int = RANK
    tp_k_head_num: int = 1
    scaling: float = 0.11
    logit_cap: float = 0.0
    k_scale: torch.Tensor | None = None
    k_scale_float: float | None = None


@dataclass
class Server:
    """A runner whose requests own shuffled pages, and the truth about them."""

    page_size: int
    dtype: torch.dtype = torch.float8_e4m3fn
    q_dtype: torch.dtype = torch.bfloat16
    context: int = 400
    requests: int = 6
    drafts: int = 0
    algorithm: str | None = None
    topk: int | None = None
    heads: int = 4
    runner: Any = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(self.page_size + self.requests)
        pages = -(-(self.context + 8) // self.page_size)
        self.pool = Pool(self.requests * pages * self.page_size, self.page_size, self.dtype)
        order = torch.randperm(self.requests * pages).add_(1).view(self.requests, pages, 1)
        slots = (order * self.page_size + torch.arange(self.page_size)).view(self.requests, -1)
        self.req_to_token = slots[:, : self.context + 8].int().to(DEVICE)
        self.runner = SimpleNamespace(
            model_config=SimpleNamespace(
                kv_lora_rank=RANK, qk_rope_head_dim=ROPE, qk_nope_head_dim=128, v_head_dim=128, context_len=self.context,
                num_attention_heads=self.heads,
            ),
            token_to_kv_pool=self.pool, req_to_token_pool=SimpleNamespace(req_to_token=self.req_to_token),
            page_size=self.page_size, kv_cache_dtype=self.dtype, dtype=self.q_dtype, device=DEVICE, model=None,
            server_args=SimpleNamespace(
                speculative_algorithm=self.algorithm, speculative_eagle_topk=self.topk,
                speculative_num_draft_tokens=self.drafts or None,
            ),
            kv_index_translator=None, is_draft_worker=False, use_mla_backend=True,
        )  # fmt: skip

    def slots(self, request: int, start: int, end: int) -> torch.Tensor:
        return self.req_to_token[request, start:end].long()


def batch(
    server: Server,
    mode: Mode,
    prefix: list[int],
    extend: list[int],
    *,
    host: bool = True,
    rows: list[int] | None = None,
) -> Any:
    """A ForwardBatch in which request `rows[i]` holds `prefix[i]` rows and brings `extend[i]` new ones.

    `seq_lens` is what SGLang puts there: the prefix alone for verify, else both.
    """
    rows = list(range(1, len(prefix) + 1)) if rows is None else rows
    total = [p + e for p, e in zip(prefix, extend, strict=True)]
    lens = prefix if mode is Mode.TARGET_VERIFY else total
    loc = [server.slots(r, p, p + e) for r, p, e in zip(rows, prefix, extend, strict=True)]
    int32 = {"dtype": torch.int32, "device": DEVICE}
    return SimpleNamespace(
        forward_mode=mode, batch_size=len(prefix), input_ids=torch.zeros(sum(extend), dtype=torch.int64, device=DEVICE),
        req_pool_indices=torch.tensor(rows, dtype=torch.int64, device=DEVICE),
        seq_lens=torch.tensor(lens, dtype=torch.int64, device=DEVICE),
        seq_lens_cpu=torch.tensor(lens, dtype=torch.int64) if host else None,
        out_cache_loc=torch.cat(loc) if loc else torch.zeros(0, dtype=torch.int64, device=DEVICE),
        spec_info=SimpleNamespace(draft_token_num=extend[0]) if mode is Mode.TARGET_VERIFY else None,
        extend_seq_lens=torch.tensor(extend, **int32), extend_seq_lens_cpu=list(extend),
        extend_prefix_lens=torch.tensor(prefix, **int32), extend_prefix_lens_cpu=list(prefix),
        attn_attend_prefix_cache=None, mha_return_lse=None, prefix_chunk_idx=None, prefix_chunk_cu_seq_lens=None,
        prefix_chunk_max_seq_lens=None, kv_loc_plan=None,
    )  # fmt: skip


def oracle(
    server: Server, q: torch.Tensor, layer: Layer, totals: list[int], q_lens: list[int], rows: list[int], scale: float
) -> torch.Tensor:
    """float64 [tokens, heads, 512] from the stored rows: causal, bottom-right."""
    outputs, first = [], 0
    stored = server.pool.get_key_buffer(layer.layer_id)
    for total, q_len, row in zip(totals, q_lens, rows, strict=True):
        keys = stored.view(server.pool.kv_buffer[0].dtype)[server.slots(row, 0, total)].view(server.dtype)
        keys = keys.view(-1, RANK + ROPE).double() * scale
        scores = torch.einsum("qhd,kd->qhk", q[first : first + q_len].double(), keys) * layer.scaling
        last = torch.arange(total - q_len, total, device=DEVICE)[:, None, None]
        scores = scores.masked_fill(torch.arange(total, device=DEVICE) > last, -torch.inf)
        outputs.append(torch.softmax(scores, -1) @ keys[:, :RANK])
        first += q_len
    return torch.cat(outputs)
