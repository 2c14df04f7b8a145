"""The model runner: sequences over a paged pool, one forward step for any mix of prefill chunks and decodes."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch

from uncast.attention import AttentionPlan, MLAPagedAttention, ProblemSpec
from uncast.latent.codec import new_counters
from uncast.latent.layouts import row_layout
from uncast.latent.pool import PagedPool
from uncast.models.decoder import ForwardBatch, MLADecoder
from uncast.verify.probe import probe_combination


@dataclass
class Sequence:
    """One request's tokens and where their rows are.

    Token ownership: `tokens[:cached]` have rows in `pages`; `tokens[cached:]` are still to be run.
    """

    tokens: list[int]
    pages: list[int] = field(default_factory=list)
    cached: int = 0


@dataclass(frozen=True)
class StepBytes:
    """Cache bytes of one step over all layers.

    Attributes:
        needed: rows that attention must read once.
        read, written: what the backend read of the cache and of copies, and wrote of copies.
        pool_cast: what casting the whole pool to BF16 once per layer would have read and written; 0 if it is not FP8.
    """

    needed: int
    read: int
    written: int
    pool_cast: int


class RunnerError(RuntimeError):
    """The runner cannot be set up for this model, layout or backend; one sentence."""


class ModelRunner:
    """A model, its pool and its attention.

    Attributes:
        pool: the paged latent cache of all layers.
        counters: int64 [3], saturated, subnormal and NaN values written so far.
    """

    def __init__(
        self,
        model: MLADecoder,
        *,
        kv_layout: str = "auto",
        attention_backend: str = "auto",
        num_pages: int,
        page_size: int = 64,
    ) -> None:
        """Builds the pool and probes decode and extend of its own shapes.

        Raises:
            LayoutError, Refused, UnknownBackend: layout or backend cannot serve this model.
            RunnerError: the backend runs but does not match the oracle.
        """
        config = model.config
        layout = row_layout(kv_layout, config.kv_lora_rank, config.qk_rope_head_dim)
        self.model, self.page_size = model, page_size
        self.pool = PagedPool(
            layout, num_layers=config.num_layers, num_pages=num_pages, page_size=page_size, device=model.device
        )
        self.attention = MLAPagedAttention(attention_backend)
        self.counters = new_counters(model.device)
        self._plan: AttentionPlan | None = None
        self.attention_backend = self._warm_up()

    def _warm_up(self) -> str:
        config = self.model.config
        spec = ProblemSpec(
            num_heads=config.num_heads,
            head_dim_ckv=config.kv_lora_rank,
            head_dim_kpe=config.qk_rope_head_dim,
            page_size=self.page_size,
            kv_layout=self.pool.layout.name,
            q_data_type=self.model.dtype,
            sm_scale=config.sm_scale,
            device=self.model.device.type,
        )
        name = self.attention.resolve(spec)
        for max_q_len in (1, 8):
            result = probe_combination(name, ProblemSpec(**{**vars(spec), "max_q_len": max_q_len}))
            if not result.verified:
                raise RunnerError(result.reason)
        return name

    def ensure_pages(self, sequence: Sequence, num_tokens: int) -> None:
        """Allocates pages so that `sequence` can hold `num_tokens` rows.

        Raises:
            OutOfPages: the pool is full; the sequence is unchanged.
        """
        missing = self.pool.pages_for(num_tokens) - len(sequence.pages)
        if missing > 0:
            sequence.pages.extend(self.pool.allocate(missing))

    def free(self, sequence: Sequence) -> None:
        """Gives the sequence's pages back."""
        pages, sequence.pages, sequence.cached = sequence.pages, [], 0
        self.pool.release(pages)

    def step(self, chunks: Seq[tuple[Sequence, int]], *, every_token: bool = False) -> torch.Tensor:
        """Runs the next `count` uncached tokens of each sequence; pages must be there.

        Returns:
            float32 [len(chunks), vocab]: logits after each chunk's last token; with `every_token`, after each token of all
            chunks in order.
        """
        device = self.model.device
        ids, positions, slots, ends, lens = [], [], [], [0], []
        for sequence, count in chunks:
            start, end = sequence.cached, sequence.cached + count
            ids.extend(sequence.tokens[start:end])
            positions.append(torch.arange(start, end))
            slots.append(self.pool.slots(sequence.pages, start, end))
            ends.append(ends[-1] + count)
            lens.append(end)
        config = self.model.config
        self._plan = self.attention.plan(
            torch.tensor(ends, dtype=torch.int32, device=device),
            block_tables=self.pool.block_table([sequence.pages for sequence, _ in chunks]),
            seq_lens=torch.tensor(lens, dtype=torch.int32, device=device),
            num_heads=config.num_heads,
            head_dim_ckv=config.kv_lora_rank,
            head_dim_kpe=config.qk_rope_head_dim,
            page_size=self.page_size,
            sm_scale=config.sm_scale,
            q_data_type=self.model.dtype,
            kv_layout=self.pool.layout.name,
            max_q_len=max(count for _, count in chunks),
            total_q=ends[-1],
            num_pages=self.pool.num_pages,
        )
        logits = self.model.forward(
            ForwardBatch(
                token_ids=torch.tensor(ids, device=device),
                positions=torch.cat(positions).to(device),
                slot_mapping=torch.cat(slots),
                attention=self.attention,
                cache=self.pool.storage,
                counters=self.counters,
                logit_rows=torch.arange(ends[-1], device=device)
                if every_token
                else torch.tensor(ends[1:], device=device) - 1,
            )
        )
        for sequence, count in chunks:
            sequence.cached += count
        return logits

    def last_step_bytes(self) -> StepBytes:
        """Cache bytes of the last step.

        Raises:
            RunnerError: no step was run.
        """
        if self._plan is None:
            raise RunnerError("no step was run yet")
        layers, layout = self.model.config.num_layers, self.pool.layout
        rows = self.pool.num_pages * self.page_size
        bf16 = row_layout("bf16", layout.kv_lora_rank, layout.qk_rope_head_dim).row_bytes
        return StepBytes(
            needed=self._plan.bytes_needed * layers,
            read=self._plan.bytes_read * layers,
            written=self._plan.bytes_written * layers,
            pool_cast=layers * rows * (layout.row_bytes + bf16) if layout.is_fp8 else 0,
        )
