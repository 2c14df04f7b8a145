"""`flashmla` and `flashmla_lossy_q`: the dense Hopper kernels of `sgl-flash-mla` (its frozen `csrc_legacy`).

`flashmla` reads a BF16 cache. `flashmla_lossy_q` reads an FP8 cache but rounds the queries (and inside, the probabilities) to
FP8: it misses the default accuracy by an order of magnitude, so it exists only under this name and `auto` never takes it.

`flashmla` rounds P to BF16 (`rPb` is of the input's type in FlashMLA's csrc/sm90/decode/dense/splitkv_mla.cuh) and merges
pieces of split contexts from FP32 (`gOorAccum` there).
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import torch

from uncast.attention.backend import Capability
from uncast.attention.problem import Problem, ProblemSpec
from uncast.backends._pages import block_table, clear_unseen, common_q_len, is_idle, unseen_rows
from uncast.backends._write import FusedWriter
from uncast.latent.codec import Scale
from uncast.numerics.e4m3 import E4M3_MAX


class FlashMLABackend(FusedWriter):
    """Adapter of `flash_mla_with_kvcache(use_legacy=True)` for a BF16 cache."""

    name = "flashmla"
    layout = "bf16"
    requires = "sgl-flash-mla"
    uniform_q_len = True
    bf16_probabilities: Collection[str] = ("bf16",)

    def __init__(self) -> None:
        import flash_mla

        self._library: Any = flash_mla

    @classmethod
    def capability(cls, spec: ProblemSpec) -> Capability:
        reason = cls._refusal(spec)
        return Capability.refused(f"{cls.name} {reason}") if reason else Capability.claimed()

    @classmethod
    def _refusal(cls, spec: ProblemSpec) -> str | None:
        if spec.device != "cuda" or spec.arch != 90:
            return f"is built for sm_90, not {spec.device} sm_{spec.arch}"
        if spec.kv_layout != cls.layout:
            return f"reads a {cls.layout} cache, not {spec.kv_layout}"
        if spec.q_data_type != torch.bfloat16:
            return f"takes bfloat16 queries, not {spec.q_data_type}"
        if (spec.head_dim_ckv, spec.head_dim_kpe, spec.page_size) != (512, 64, 64):
            return f"needs 512/64 rows in pages of 64, not {spec.head_dim_ckv}/{spec.head_dim_kpe} in {spec.page_size}"
        if spec.topk:
            return f"has dense kernels only, and topk is {spec.topk}"
        if spec.batch_invariant:
            return "splits work over the whole batch, so a request's bits depend on it: leave batch_invariant off"
        return None

    def plan(self, problem: Problem) -> None:
        self._problem, self._q_len = problem, common_q_len(problem, self.name)
        self._unseen, self._idle = unseen_rows(problem), is_idle(problem)
        if self._idle:
            return
        self._table = block_table(problem)
        self._lens = problem.kv_len_arr.clamp_min(1)  # the FP8 kernel reads block_table[-1] for an empty request
        self._schedule = self._make_schedule(problem)

    def _make_schedule(self, problem: Problem) -> Any:
        return self._library.get_mla_metadata()[0]

    def _query(self, q_nope: torch.Tensor, q_pe: torch.Tensor) -> torch.Tensor:
        heads = self._problem.spec.num_heads
        return torch.cat([q_nope, q_pe], dim=-1).view(self._problem.batch_size, self._q_len, heads, -1)

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
        if self._idle:
            clear_unseen(self._unseen, out, lse)
            return
        result, row_lse = self._call(self._query(q_nope, q_pe), cache.view(torch.bfloat16), is_fp8=False)
        self._store(result, row_lse, out, lse)

    def _call(self, query: torch.Tensor, cache: torch.Tensor, *, is_fp8: bool, **descale: torch.Tensor) -> Any:
        spec = self._problem.spec
        return self._library.flash_mla_with_kvcache(
            query, cache.unsqueeze(2), self._table, self._lens, spec.head_dim_ckv, self._schedule,
            softmax_scale=spec.sm_scale, causal=spec.causal, is_fp8_kvcache=is_fp8, use_legacy=True, **descale,
        )  # fmt: skip

    def _store(self, result: torch.Tensor, row_lse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        out.copy_(result.view(out.shape))
        if lse is not None:
            base = 1.0 if self._problem.spec.lse_base == "e" else 1.0 / math.log(2.0)
            lse.copy_(row_lse.transpose(1, 2).reshape(lse.shape) * base)
        clear_unseen(self._unseen, out, lse)


class FlashMLALossyQ(FlashMLABackend):
    """The FP8 mode: queries are quantised per tensor on every call."""

    name = "flashmla_lossy_q"
    layout = "fp8_e4m3"
    lossy = True
    bf16_probabilities = ()

    def _make_schedule(self, problem: Problem) -> Any:
        schedule = self._library.get_mla_metadata()[0]
        rows = self._q_len * problem.spec.num_heads
        made = self._library.get_mla_decoding_metadata(
            self._lens, rows, 1, problem.spec.num_heads, is_fp8_kvcache=True, use_legacy=True
        )
        schedule.tile_scheduler_metadata, schedule.num_splits = made
        return schedule

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
        if self._idle:
            clear_unseen(self._unseen, out, lse)
            return
        # One descale for the whole row: what differs goes into q_pe.
        ratio = _scale(kpe_scale, out) / _scale(ckv_scale, out)
        query = self._query(q_nope, (q_pe * ratio).to(q_pe.dtype)).float()
        descale = query.abs().amax().clamp_min(1e-12) / E4M3_MAX
        codes = (query / descale).to(torch.float8_e4m3fn)
        result, row_lse = self._call(
            codes,
            cache.view(torch.float8_e4m3fn),
            is_fp8=True,
            descale_q=descale.view(1),
            descale_k=_scale(ckv_scale, out),
        )
        self._store(result, row_lse, out, lse)


def _scale(scale: Scale, like: torch.Tensor) -> torch.Tensor:
    if isinstance(scale, torch.Tensor):
        return scale.to(like.device, torch.float32).view(1)
    return torch.full((1,), 1.0 if scale is None else scale, dtype=torch.float32, device=like.device)
