"""How a runner plans attention: what all its problems have in common, and the checks of them before anything is served."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from uncast.attention import AttentionPlan, MLAPagedAttention, ProblemSpec
from uncast.attention.metadata import arch_of
from uncast.engine.batch import Batch
from uncast.engine.runner_pool import RunnerError
from uncast.latent.pool import PagedPool
from uncast.models.decoder import MLADecoder
from uncast.verify.indexer_probe import probe_indexer
from uncast.verify.probe import probe_combination


@dataclass(frozen=True)
class Planning:
    """A model's attention over one pool's layout; `base` is the problem of one query, dense."""

    base: ProblemSpec

    @classmethod
    def of(cls, model: MLADecoder, pool: PagedPool, *, deterministic: bool) -> Planning:
        config = model.config
        return cls(
            ProblemSpec(
                num_heads=config.num_heads,
                head_dim_ckv=config.kv_lora_rank,
                head_dim_kpe=config.qk_rope_head_dim,
                page_size=pool.page_size,
                kv_layout=pool.layout.name,
                q_data_type=model.dtype,
                sm_scale=config.sm_scale,
                device=model.device.type,
                arch=arch_of(model.device),
                batch_invariant=deterministic,
            )
        )

    def spec(self, max_q_len: int, topk: int) -> ProblemSpec:
        return replace(self.base, max_q_len=max_q_len, topk=topk)

    def plan_batch(
        self,
        attention: MLAPagedAttention,
        batch: Batch,
        pool: PagedPool,
        topk: int,
        lengths: torch.Tensor | None = None,
        alone_rows: int = 0,
    ) -> AttentionPlan:
        """Plans a batch; `lengths` is the buffer of sequence lengths, for a caller that refills it. Its bytes are counted by
        what the host knows. `alone_rows`: see `Problem`."""
        device = pool.storage.device
        ends, lens = (torch.tensor(values, dtype=torch.int32) for values in (batch.ends, batch.kv_lens))
        plan = attention.plan(
            ends.to(device),
            block_tables=pool.block_table(batch.tables),
            seq_lens=lens.to(device) if lengths is None else lengths,
            max_q_len=batch.max_q_len,
            total_q=batch.ends[-1],
            alone_rows=alone_rows,
            **self._alike(pool, topk),
        )
        if plan.copy_layout is not None:  # such a backend's bytes depend on page numbers, too
            return plan
        return plan.counting(replace(plan.problem, qo_indptr=ends, kv_len_arr=lens))

    def plan_static(
        self,
        attention: MLAPagedAttention,
        pool: PagedPool,
        starts: torch.Tensor,
        tables: torch.Tensor,
        lengths: torch.Tensor,
        q_len: int,
        topk: int,
        alone_rows: int = 0,
    ) -> AttentionPlan:
        """Plans buffers that will be refilled: `q_len` queries a request. `alone_rows`: see `Problem`."""
        return attention.plan(
            starts, block_tables=tables, seq_lens=lengths, max_q_len=q_len, total_q=q_len * lengths.shape[0],
            alone_rows=alone_rows, **self._alike(pool, topk),
        )  # fmt: skip

    def _alike(self, pool: PagedPool, topk: int) -> dict[str, Any]:
        base = self.base
        return {
            "num_heads": base.num_heads, "head_dim_ckv": base.head_dim_ckv, "head_dim_kpe": base.head_dim_kpe,
            "page_size": base.page_size, "sm_scale": base.sm_scale, "q_data_type": base.q_data_type,
            "kv_layout": base.kv_layout, "batch_invariant": base.batch_invariant, "num_pages": pool.num_pages, "topk": topk,
        }  # fmt: skip

    def check(
        self,
        attention: MLAPagedAttention,
        max_q_len: int,
        topks: Iterable[int],
        *,
        thorough: bool = False,
        alone: bool = False,
    ) -> None:
        """Compares attention of up to `max_q_len` queries with the oracle, for each of these topks; `alone`: as steps of few
        rows plan it.

        Raises:
            RunnerError: it differs; one sentence.
        """
        for topk in topks:
            spec = self.spec(max_q_len, topk)
            result = probe_combination(attention.resolve(spec), spec, thorough=thorough, alone=alone)
            if not result.verified:
                raise RunnerError(result.reason)

    def check_indexer(
        self, attention: MLAPagedAttention, max_q_len: int, topk: int, model: MLADecoder, pool: PagedPool
    ) -> None:
        """The same of a model's indexer, if it has one.

        Raises:
            RunnerError: it differs; one sentence.
        """
        if not topk or model.config.indexer is None or pool.index_layout is None:
            return
        spec = self.spec(max_q_len, topk)
        fault = probe_indexer(attention.resolve(spec), spec, model.config.indexer.num_heads, pool.index_layout)
        if fault:
            raise RunnerError(fault)
