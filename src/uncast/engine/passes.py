"""Eager passes of a model over a paged pool: what a row's pass is planned as, and what it takes and gives."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from uncast.attention import AttentionPlan, MLAPagedAttention, registry
from uncast.engine.batch import Batch
from uncast.engine.fixed_rows import with_fixed_rows
from uncast.engine.planning import Planning
from uncast.engine.runner_pool import RunnerError, index_layout_of, make_pool, require_current
from uncast.engine.sequence import Rows, Sequence, few_rows, tiles, whole
from uncast.engine.step_bytes import DraftPasses, counted_at, lengths_of_passes
from uncast.kernels import row_tile
from uncast.kernels.row_tile import ROW_TILE
from uncast.latent.codec import new_counters
from uncast.latent.layouts import row_layout
from uncast.latent.pool import PagedPool
from uncast.models.decoder import ForwardBatch, MLADecoder
from uncast.models.indexer import IndexCache


class PassRunner:
    """A model, its pool and its attention.

    Attributes:
        pool: the paged latent cache of all layers; with `drafts` the MTP layer's is the last.
        drafts: whether the model's MTP layer is run.
        hidden: with `drafts`, of each chunk of the last step the hidden states [count, hidden_size] after the final norm.
        counters: int64 [3], saturated, subnormal and NaN values written so far.
        deterministic: a sequence's logits are the same bits in every batch; see `fixed_rows`.
        alone: outside of it, whether a row of a pass of up to `ROW_TILE` rows has the bits that it has alone: on a GPU with a
            backend that `splits_alone` and dense attention, so that drafts change no greedy text.
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
        drafts: bool = False,
    ) -> None:
        """Builds the pool and probes decode and extend of its own shapes.

        Args:
            drafts: room for the MTP layer's rows, and hidden states for it; see `uncast.engine.drafter`.
            index_layout_name: of the indexer's keys, if the model has one; `auto` goes with `kv_layout`.

        Raises:
            LayoutError, Refused, UnknownBackend: layout or backend cannot serve this model.
            RunnerError: the pool does not fit into memory, the backend runs but does not match the oracle, `deterministic`
                cannot be kept on this machine, or the model is on another GPU than the current one.
        """
        require_current(model.device)
        config = model.config
        layout = row_layout(kv_layout, config.kv_lora_rank, config.qk_rope_head_dim)
        self.model, self.page_size, self.deterministic = model, page_size, deterministic
        keys = None if config.indexer is None else index_layout_of(index_layout_name, layout, config.indexer.head_dim)
        if drafts and (model.mtp is None or config.indexer is not None):
            raise RunnerError(
                "this model cannot draft: speculation needs an MTP layer and attention that is not sparse"
            )
        self.drafts, self.hidden = drafts, list[torch.Tensor]()
        self.pool = make_pool(config, layout, num_pages, page_size, model.device, keys, int(drafts))
        self.attention = MLAPagedAttention(attention_backend)
        self._planning = Planning.of(model, self.pool, deterministic=deterministic)
        self.counters = new_counters(model.device)
        self._decoder = with_fixed_rows(model) if deterministic else model
        # Where no request can have more tokens than it may select, attention is dense.
        longest = min(num_pages * page_size, config.max_position_embeddings)
        self._max_topk = config.indexer.topk if config.indexer is not None and config.indexer.topk < longest else 0
        self._plans: list[AttentionPlan] = []
        self._draft_passes = DraftPasses()
        self.attention_backend = self._warm_up()
        self.alone = (
            model.device.type in row_tile.DEVICES
            and registry.create(self.attention_backend).splits_alone
            and config.indexer is None
            and model.parallel is None
            and not deterministic
        )

    def _warm_up(self) -> str:
        for max_q_len in (1,) if self.deterministic else (1, 8):
            self._probe(max_q_len)
        if self.deterministic:
            self._check_fixed_rows()
        return self.attention.resolve(self._planning.spec(1, self._max_topk))

    def probe(self, max_q_len: int) -> None:
        """Checks attention of requests with up to so many queries, dense and sparse as this model's steps are, and of one query
        also as steps of few rows plan it if `alone`: against the oracle, in deterministic mode each request also alone, and on
        a GPU in a CUDA graph where the backend can be in one.

        Raises:
            RunnerError: it differs; one sentence.
        """
        self._probe(1 if self.deterministic else max_q_len, thorough=True)
        if self.alone and max_q_len == 1:
            self._planning.check(self.attention, 1, {0}, thorough=True, alone=True)

    def _probe(self, max_q_len: int, *, thorough: bool = False) -> None:
        topk = self._max_topk
        self._planning.check(self.attention, max_q_len, {topk} if self.deterministic else {0, topk}, thorough=thorough)
        self._planning.check_indexer(self.attention, max_q_len, topk, self.model, self.pool)

    def batches(self, rows: Seq[Rows], shift: int = 0) -> list[Batch]:
        """What passes these rows take, in order: one (row by row if they are few and `alone`) or, in deterministic mode, tiles
        of which the last is filled up.

        Args:
            shift: the row at position i holds token i + shift.
        """
        if self.deterministic:
            return tiles(rows, shift, self.page_size)
        if self.alone and 0 < sum(row.end - row.start for row in rows) <= ROW_TILE:
            return [few_rows(rows, shift, self.page_size)]
        return [whole(rows, shift, self.page_size)]

    def run_batch(self, batch: Batch) -> None:
        """Runs rows that another process's runner has laid out; the pages are that runner's concern."""
        self._plans = []
        self._forward(batch, self.pool)

    def _topk(self, batch: Batch) -> int:
        """0 where no request has more tokens than it may select: dense attention is the same then, and faster. In deterministic
        mode a row's code must not depend on its batch, so that every step is sparse."""
        return self._max_topk if self.deterministic or max(batch.kv_lens) > self._max_topk else 0

    def _forward(self, batch: Batch, pool: PagedPool) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of the wanted rows and, with `drafts`, hidden states of every row; in deterministic mode the last projection,
        too, sees the whole tile or nothing."""
        self._plans.append(self._plan(batch, pool))
        logits, hidden = self._decoder.forward_hidden(self._inputs(batch, pool), every=self.drafts)
        return self._wanted(batch, logits), hidden

    def begin_drafts(self) -> None:
        """Begins a step of which passes of the MTP layer are a part; its bytes are counted from here on."""
        self._draft_passes = DraftPasses()

    def take_draft_passes(self) -> DraftPasses:
        """The passes of the MTP layer since then, for another count than that of the next step."""
        found, self._draft_passes = self._draft_passes, DraftPasses()
        return found

    def count_draft_rows(self, rows: int) -> None:
        """Counts rows that a pass of the MTP layer needs, each sequence's once."""
        self._draft_passes.rows += rows

    def draft_forward(self, batch: Batch, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One pass of the MTP layer over rows of `batches(..., shift=1)` with the hidden states [rows, hidden_size] of their
        positions: logits of the wanted rows, and its outputs for every row."""
        self._draft_passes.plans.append(self._plan(batch, self.pool))
        logits, output = self._decoder.draft(self._inputs(batch, self.pool), hidden, every=True)
        return self._wanted(batch, logits), output

    def draft_chain(self, batch: Batch, hidden: torch.Tensor, slots: Seq[Seq[int]]) -> torch.Tensor:
        """Drafts one token after another with one plan: lengths are refilled, everything else of it holds for every pass.

        Args:
            batch: one row per sequence, as planned for the first pass; its ids are the first drafts.
            hidden: [rows, hidden_size], the MTP layer's outputs that gave these.
            slots: of each pass, where each row goes; negative: that row's sequence drafts no more.

        Returns:
            int64 [passes, rows] on the host: each pass's likeliest tokens; of rows that draft no more they mean nothing.
        """
        lengths = torch.tensor(batch.kv_lens, dtype=torch.int32, device=self.model.device)
        plan = self._plan(batch, self.pool, lengths)
        self._draft_passes.plans += [
            counted_at(plan, batch.ends, kv_lens) for kv_lens in lengths_of_passes(batch.kv_lens, slots)
        ]
        inputs, found = self._inputs(batch, self.pool), list[torch.Tensor]()
        for number, places in enumerate(slots):
            inputs.slot_mapping = torch.tensor(places, device=self.model.device)
            if number:
                goes_on = (inputs.slot_mapping >= 0).to(torch.int32)
                lengths += goes_on
                inputs.positions = inputs.positions + goes_on
                inputs.token_ids = found[-1]
            logits, hidden = self._decoder.draft(inputs, hidden, every=True)
            found.append(logits.argmax(-1))
        return torch.stack(found).cpu()

    def _wanted(self, batch: Batch, logits: torch.Tensor) -> torch.Tensor:
        if not self.deterministic or not batch.wanted:
            return logits
        return logits[torch.tensor(batch.wanted, device=logits.device)]

    def _plan(self, batch: Batch, pool: PagedPool, lengths: torch.Tensor | None = None) -> AttentionPlan:
        return self._planning.plan_batch(self.attention, batch, pool, self._topk(batch), lengths, batch.alone_rows)

    def _inputs(self, batch: Batch, pool: PagedPool) -> ForwardBatch:
        device = self.model.device
        index = None
        if pool.index_storage is not None and pool.index_layout is not None:
            index = IndexCache(pool.index_storage, pool.index_layout)
        wanted = list(range(ROW_TILE)) if self.deterministic and batch.wanted else batch.wanted
        return ForwardBatch(
            token_ids=torch.tensor(batch.ids, device=device),
            positions=torch.tensor(batch.positions, device=device),
            slot_mapping=torch.tensor(batch.slots, device=device),
            attention=self.attention,
            cache=pool.storage,
            counters=self.counters,
            logit_rows=torch.tensor(wanted, dtype=torch.int64, device=device),
            index=index,
        )

    def _check_fixed_rows(self) -> None:
        """Raises `RunnerError` if a row's logits depend on its place in the tile or on its neighbours."""
        config, pool = self.model.config, self.pool
        pool = make_pool(config, pool.layout, ROW_TILE, self.page_size, self.model.device, pool.index_layout)
        sequences = [Sequence([i * 7919 % self.model.config.vocab_size], [i]) for i in range(ROW_TILE)]
        rows = [Rows(sequence, 0, 1, 0) for sequence in sequences]
        together, _ = self._forward(tiles(rows, 0, self.page_size)[0], pool)
        for order in (range(ROW_TILE - 1, -1, -1), range(0, ROW_TILE, 3), range(1, ROW_TILE, 2), [ROW_TILE - 1]):
            again, _ = self._forward(tiles([rows[i] for i in order], 0, self.page_size)[0], pool)
            if not torch.equal(again, together[list(order)]):
                raise RunnerError(
                    f"deterministic mode cannot be kept here: a row's bits depend on its place in a tile of {ROW_TILE} "
                    f"rows with {self.model.dtype} on {self.model.device}"
                )
        self._plans = []
        self.counters.zero_()
