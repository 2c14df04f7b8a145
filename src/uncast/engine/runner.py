"""The model runner: sequences over a paged pool, one forward step for any mix of prefill chunks and decodes."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import torch
from torch.profiler import record_function

from uncast.attention import AttentionPlan, MLAPagedAttention, ProblemSpec
from uncast.attention.metadata import arch_of
from uncast.engine.batch import Batch
from uncast.engine.fixed_rows import ROW_TILE, with_fixed_rows
from uncast.engine.labels import step_label
from uncast.engine.step_bytes import StepBytes, step_bytes
from uncast.latent.codec import new_counters
from uncast.latent.index_keys import IndexLayout, index_layout, matching_layout
from uncast.latent.layouts import RowLayout, row_layout
from uncast.latent.pool import PagedPool
from uncast.models.config import ModelConfig
from uncast.models.decoder import ForwardBatch, MLADecoder
from uncast.models.indexer import IndexCache
from uncast.verify.indexer_probe import probe_indexer
from uncast.verify.probe import probe_combination

__all__ = ["ModelRunner", "RunnerError", "Sequence", "StepBytes"]

_NO_MEMORY = ("allocate memory", "out of memory", "overflow", "Overflow")


@dataclass
class Sequence:
    """One request's tokens and where their rows are.

    Token ownership: `tokens[:cached]` have rows in `pages`; `tokens[cached:]` are still to be run.
    """

    tokens: list[int]
    pages: list[int] = field(default_factory=list)
    cached: int = 0


class RunnerError(RuntimeError):
    """The runner cannot be set up for this model, layout or backend; one sentence."""


def _pool(
    config: ModelConfig,
    layout: RowLayout,
    num_pages: int,
    page_size: int,
    device: torch.device,
    keys: IndexLayout | None,
) -> PagedPool:
    """A pool for the model's rows and, with an indexer, its keys.

    Raises:
        RunnerError: it does not fit into memory.
    """
    try:
        return PagedPool(
            layout,
            num_layers=config.num_layers,
            num_pages=num_pages,
            page_size=page_size,
            device=device,
            index_layout=keys,
            num_index_layers=0 if config.indexer is None else len(config.indexer.full_layers),
        )
    except (MemoryError, OverflowError, RuntimeError, TypeError) as error:
        # torch has a class for this on a GPU only, and refuses sizes beyond 64 bits in several ways.
        if isinstance(error, RuntimeError) and not any(words in str(error) for words in _NO_MEMORY):
            raise
        tokens = num_pages * page_size
        raise RunnerError(f"a KV pool of {tokens} tokens does not fit into memory: ask for fewer") from None


def _index_layout(name: str, rows: RowLayout, head_dim: int) -> IndexLayout:
    return matching_layout(rows, head_dim) if name == "auto" else index_layout(name, head_dim)


class ModelRunner:
    """A model, its pool and its attention.

    Attributes:
        pool: the paged latent cache of all layers.
        counters: int64 [3], saturated, subnormal and NaN values written so far.
        deterministic: a sequence's logits are the same bits in every batch; see `fixed_rows`.
    """

    def __init__(
        self,
        model: MLADecoder,
        *,
        kv_layout: str = "auto",
        attention_backend: str = "auto",
        num_pages: int,
        page_size: int = 64,
        deterministic: bool = False,
        index_layout_name: str = "auto",
    ) -> None:
        """Builds the pool and probes decode and extend of its own shapes.

        Args:
            index_layout_name: of the indexer's keys, if the model has one; `auto` goes with `kv_layout`.

        Raises:
            LayoutError, Refused, UnknownBackend: layout or backend cannot serve this model.
            RunnerError: the pool does not fit into memory, the backend runs but does not match the oracle, or `deterministic`
                cannot be kept on this machine.
        """
        config = model.config
        layout = row_layout(kv_layout, config.kv_lora_rank, config.qk_rope_head_dim)
        self.model, self.page_size, self.deterministic = model, page_size, deterministic
        keys = None if config.indexer is None else _index_layout(index_layout_name, layout, config.indexer.head_dim)
        self.pool = _pool(config, layout, num_pages, page_size, model.device, keys)
        self.attention = MLAPagedAttention(attention_backend)
        self.counters = new_counters(model.device)
        self._decoder = with_fixed_rows(model) if deterministic else model
        # Where no request can have more tokens than it may select, attention is dense.
        longest = min(num_pages * page_size, config.max_position_embeddings)
        self._max_topk = config.indexer.topk if config.indexer is not None and config.indexer.topk < longest else 0
        self._plans: list[AttentionPlan] = []
        self._chunks: list[tuple[int, int]] = []
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
            arch=arch_of(self.model.device),
            batch_invariant=self.deterministic,
        )
        topk = self._max_topk
        name = self.attention.resolve(replace(spec, topk=topk))
        for wanted in {topk} if self.deterministic else {0, topk}:
            for max_q_len in (1,) if self.deterministic else (1, 8):
                result = probe_combination(name, replace(spec, max_q_len=max_q_len, topk=wanted))
                if not result.verified:
                    raise RunnerError(result.reason)
        if topk and config.indexer is not None and self.pool.index_layout is not None:
            wanted_spec = replace(spec, max_q_len=1 if self.deterministic else 8, topk=topk)
            fault = probe_indexer(name, wanted_spec, config.indexer.num_heads, self.pool.index_layout)
            if fault:
                raise RunnerError(fault)
        if self.deterministic:
            self._check_fixed_rows()
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
        batches = self._tiles(chunks, every_token) if self.deterministic else [self._whole(chunks, every_token)]
        self._plans = []
        with record_function(step_label([(sequence.cached + count, count) for sequence, count in chunks])):
            logits = [self._forward(batch, self.pool) for batch in batches]
        for sequence, count in chunks:
            sequence.cached += count
        self._chunks = [(sequence.cached, count) for sequence, count in chunks]
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def run_batch(self, batch: Batch) -> None:
        """Runs rows that another process's runner has laid out; the pages are that runner's concern."""
        self._plans = []
        self._forward(batch, self.pool)

    def last_step_bytes(self) -> StepBytes:
        """Cache bytes of the last step.

        Raises:
            RunnerError: no step was run.
        """
        if not self._plans:
            raise RunnerError("no step was run yet")
        return step_bytes(self.model.config, self.pool, self._plans, self._chunks)

    def _topk(self, batch: Batch) -> int:
        """0 where no request has more tokens than it may select: dense attention is the same then, and faster. In deterministic
        mode a row's code must not depend on its batch, so that every step is sparse."""
        return self._max_topk if self.deterministic or max(batch.kv_lens) > self._max_topk else 0

    def _slot(self, sequence: Sequence, position: int) -> int:
        return sequence.pages[position // self.page_size] * self.page_size + position % self.page_size

    def _whole(self, chunks: Seq[tuple[Sequence, int]], every_token: bool) -> Batch:
        """One batch in which each chunk is one request of `count` query rows."""
        batch = Batch()
        for sequence, count in chunks:
            end = sequence.cached + count
            for position in range(sequence.cached, end):
                batch.add(sequence.tokens[position], position, self._slot(sequence, position))
            batch.close(sequence.pages, end)
        batch.wanted = list(range(batch.ends[-1])) if every_token else [end - 1 for end in batch.ends[1:]]
        return batch

    def _tiles(self, chunks: Seq[tuple[Sequence, int]], every_token: bool) -> list[Batch]:
        """Batches of `ROW_TILE` rows, each row a request of its own, in the chunks' order; the last one is filled up."""
        tiles: list[Batch] = []
        for sequence, count in chunks:
            end = sequence.cached + count
            for position in range(sequence.cached, end):
                if not tiles or len(tiles[-1].ids) == ROW_TILE:
                    tiles.append(Batch())
                tile = tiles[-1]
                if every_token or position == end - 1:
                    tile.wanted.append(len(tile.ids))
                tile.add(sequence.tokens[position], position, self._slot(sequence, position))
                tile.close(sequence.pages, position + 1)
        while len(tiles[-1].ids) < ROW_TILE:
            tiles[-1].add(0, 0, -1)
            tiles[-1].close([], 0)
        return tiles

    def _forward(self, batch: Batch, pool: PagedPool) -> torch.Tensor:
        """Logits of the wanted rows; in deterministic mode the last projection, too, sees the whole tile or nothing."""
        device, config = self.model.device, self.model.config
        plan = self.attention.plan(
            torch.tensor(batch.ends, dtype=torch.int32, device=device),
            block_tables=pool.block_table(batch.tables),
            seq_lens=torch.tensor(batch.kv_lens, dtype=torch.int32, device=device),
            num_heads=config.num_heads,
            head_dim_ckv=config.kv_lora_rank,
            head_dim_kpe=config.qk_rope_head_dim,
            page_size=self.page_size,
            sm_scale=config.sm_scale,
            q_data_type=self.model.dtype,
            kv_layout=pool.layout.name,
            max_q_len=batch.max_q_len,
            total_q=batch.ends[-1],
            num_pages=pool.num_pages,
            batch_invariant=self.deterministic,
            topk=self._topk(batch),
        )
        self._plans.append(plan)
        index = None
        if pool.index_storage is not None and pool.index_layout is not None:
            index = IndexCache(pool.index_storage, pool.index_layout)
        whole = self.deterministic and bool(batch.wanted)
        logits = self._decoder.forward(
            ForwardBatch(
                token_ids=torch.tensor(batch.ids, device=device),
                positions=torch.tensor(batch.positions, device=device),
                slot_mapping=torch.tensor(batch.slots, device=device),
                attention=self.attention,
                cache=pool.storage,
                counters=self.counters,
                logit_rows=torch.tensor(
                    list(range(ROW_TILE)) if whole else batch.wanted, dtype=torch.int64, device=device
                ),
                index=index,
            )
        )
        return logits[torch.tensor(batch.wanted, device=device)] if whole else logits

    def _check_fixed_rows(self) -> None:
        """Raises `RunnerError` if a row's logits depend on its place in the tile or on its neighbours."""
        config, pool = self.model.config, self.pool
        pool = _pool(config, pool.layout, ROW_TILE, self.page_size, self.model.device, pool.index_layout)
        sequences = [Sequence([i * 7919 % self.model.config.vocab_size], [i]) for i in range(ROW_TILE)]
        together = self._forward(self._tiles([(s, 1) for s in sequences], False)[0], pool)
        for order in (range(ROW_TILE - 1, -1, -1), range(0, ROW_TILE, 3), range(1, ROW_TILE, 2), [ROW_TILE - 1]):
            again = self._forward(self._tiles([(sequences[i], 1) for i in order], False)[0], pool)
            if not torch.equal(again, together[list(order)]):
                raise RunnerError(
                    f"deterministic mode cannot be kept here: a row's bits depend on its place in a tile of {ROW_TILE} "
                    f"rows with {self.model.dtype} on {self.model.device}"
                )
        self._plans = []
        self.counters.zero_()
