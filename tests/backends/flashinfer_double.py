"""A stand-in for `flashinfer.mla` on a CPU: takes the planned wrapper's calls, checks them as the library does, and answers
with the float64 oracle, computed from nothing but the arguments."""

from __future__ import annotations

import types
from typing import Any

import torch

from uncast.attention import Problem, ProblemSpec
from uncast.attention.oracle import mla_oracle


def attend(
    query: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, lens: torch.Tensor, starts: torch.Tensor, *,
    causal: bool, sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """out and base-2 LSE of packed query [total_q, heads, 576] over a bf16 cache [pages, page, 576]."""
    spec = ProblemSpec(
        num_heads=query.shape[1], head_dim_ckv=query.shape[2] - 64, page_size=cache.shape[1], kv_layout="bf16", causal=causal,
        sm_scale=sm_scale, max_q_len=int((starts[1:] - starts[:-1]).max()), device="cpu",
    )  # fmt: skip
    indptr = torch.arange(table.shape[0] + 1, dtype=torch.int32) * table.shape[1]
    problem = Problem(
        spec, starts, indptr, table.reshape(-1), lens, query.shape[0], table.shape[1] * spec.page_size
    )  # fmt: skip
    rank = spec.head_dim_ckv
    return mla_oracle(problem, query[..., :rank], query[..., rank:], cache.view(torch.uint8))


class Metadata:
    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)

    @classmethod
    def dense(cls, cum_seq_lens_q: Any, block_tables: Any, seq_lens: Any, max_q_len: int | None = None) -> Metadata:
        return cls(starts=cum_seq_lens_q, table=block_tables, lens=seq_lens)


class Wrapper:
    """`BatchMLAPagedAttentionWrapper`, packed and dense."""

    last: Wrapper

    def __init__(self, float_workspace_buffer: torch.Tensor, *, backend: str) -> None:
        assert float_workspace_buffer.numel() >= 128 * 2**20 and not bool(float_workspace_buffer[:64].any())
        self.backend = backend
        Wrapper.last = self

    def plan(
        self, *, metadata: Metadata, num_heads: int, head_dim_ckv: int, head_dim_kpe: int, page_size: int, causal: bool,
        sm_scale: float, q_data_type: torch.dtype, kv_data_type: torch.dtype, query_layout: str, kv_cache_layout: str,
        lse_mode: str,
    ) -> None:  # fmt: skip
        assert (query_layout, kv_cache_layout) == ("packed", "packed") and type(sm_scale) is float
        assert q_data_type == kv_data_type == torch.bfloat16
        assert metadata.table.shape[1] % (128 // page_size) == 0 and bool((metadata.lens > 0).all())
        if self.backend != "trtllm-gen":
            assert lse_mode == "none" and not causal and num_heads == 128
        if num_heads == 64:
            raise ValueError("trtllm-gen requires query heads (64) to be divisible by 5.\nand more")
        self.metadata, self.lse_mode, self.causal, self.sm_scale = metadata, lse_mode, causal, sm_scale
        self.shapes = (num_heads, head_dim_ckv + head_dim_kpe, page_size)

    def run(
        self,
        *,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        return_lse: bool,
    ) -> None:
        assert query.is_contiguous() and out.is_contiguous() and kv_cache.dtype == out.dtype == torch.bfloat16
        assert (query.shape[1], query.shape[2], kv_cache.shape[1]) == self.shapes
        assert (lse is not None) == return_lse == (self.lse_mode == "base2")
        m = self.metadata
        result, base2 = attend(
            query, kv_cache, m.table, m.lens, m.starts, causal=self.causal, sm_scale=self.sm_scale
        )  # fmt: skip
        out.copy_(result)
        if lse is not None:
            lse.copy_(base2)


def modules() -> dict[str, types.ModuleType]:
    """For `sys.modules`: the package and its `mla`."""
    package, mla = types.ModuleType("flashinfer"), types.ModuleType("flashinfer.mla")
    mla.BatchMLAPagedAttentionWrapper, mla.MLAPlanMetadata = Wrapper, Metadata  # type: ignore[attr-defined]
    package.mla = mla  # type: ignore[attr-defined]
    return {"flashinfer": package, "flashinfer.mla": mla}
