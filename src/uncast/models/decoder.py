"""The MLA decoder: latent rows are written first, then attention reads what is stored.

Per layer, with W_UK [heads, nope, rank] and W_UV [heads, v, rank] cut from kv_b_proj:

    c = norm(kv_a(x)[:rank]), k_pe = rope(kv_a(x)[rank:])       the cached row
    q_nope = q[:nope] W_UK, q_pe = rope(q[nope:])               absorbed query, one 576-wide dot product per head
    out = W_UV attention(q_nope, q_pe, cache), y = o_proj(out)

Chunks of a prompt go un-absorbed where that is cheaper: see `uncast.models.unabsorbed`. A model with an indexer attends to the
tokens that it selects (`uncast.models.indexer`); in a step that is planned dense its keys are stored and nothing is selected.
Source: DeepSeek-V2 (arXiv 2405.04434) section 2.1 and appendix C.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.nn import functional as F

from uncast.attention import MLAPagedAttention
from uncast.kernels.row_tile import new_rows, tile_linear
from uncast.latent.codec import Scale
from uncast.models.attend import absorbed, by_chunk, project_down
from uncast.models.config import ModelConfig
from uncast.models.experts import MLP
from uncast.models.fused import add_norm, latent_parts, on_kernels, rms_norm, rotate, scaled
from uncast.models.indexer import IndexCache, Indexer, IndexerWeights
from uncast.models.layers import MoE
from uncast.models.parallel import Parallel, ShardedMLP, ShardedMoE
from uncast.models.rope import Rope
from uncast.models.unabsorbed import PREFILL_MODES, PrefillSplit, split_prefill
from uncast.quant.matmul import linear
from uncast.quant.packed import Weight


@dataclass
class MLAWeights:
    """Attention weights of one layer; a `q_a` of None means q_b projects the hidden state itself.

    Attributes:
        q_a [q_lora_rank, hidden], q_a_norm [q_lora_rank], q_b [heads * (nope + rope), q_lora_rank or hidden],
        kv_a [rank + rope, hidden], kv_a_norm [rank], w_uk [heads, nope, rank], w_uv [heads, v, rank], o [hidden, heads * v].
        q_a, q_b, kv_a and o may be packed.
        qkv_a: q_a above kv_a as one matrix, of which these two are views; None where they are apart.
        ckv_scale, kpe_scale: the checkpoint's k_scale, used by layout `fp8_e4m3`.
        indexer: of a full layer of sparse attention.
    """

    q_a: Weight | None
    q_a_norm: torch.Tensor | None
    q_b: Weight
    kv_a: Weight
    kv_a_norm: torch.Tensor
    w_uk: torch.Tensor
    w_uv: torch.Tensor
    o: Weight
    ckv_scale: Scale = None
    kpe_scale: Scale = None
    indexer: IndexerWeights | None = None
    qkv_a: Weight | None = None


AnyMLP = MLP | MoE | ShardedMLP | ShardedMoE


@dataclass
class Layer:
    """One decoder layer: norms [hidden], attention, MLP or MoE."""

    input_norm: torch.Tensor
    attention: MLAWeights
    post_norm: torch.Tensor
    mlp: AnyMLP


@dataclass
class MTPLayer:
    """The layer that predicts the token after the next (multi-token prediction); embedding and LM head are the model's.

    Row i takes the hidden state of position i, as the LM head reads it, and token i + 1, and predicts token i + 2:

        x_i = eh_proj [enorm(embed(token i + 1)), hnorm(hidden i)]      then the decoder layer at rope position i, then `norm`

    For a further token its own normed output takes the hidden state's place. Source: DeepSeek-V3 (arXiv 2412.19437), section
    2.2; that the hidden state is the normed one: vLLM's and SGLang's models.

    Attributes:
        enorm, hnorm, norm: [hidden]; eh_proj: [hidden, 2 * hidden].
        layer: the decoder layer; its rows are in a cache layer of its own, after the decoder's.
    """

    enorm: torch.Tensor
    hnorm: torch.Tensor
    eh_proj: Weight
    layer: Layer
    norm: torch.Tensor


@dataclass
class ForwardBatch:
    """One step's tokens, flattened over requests.

    Attributes:
        token_ids, positions: int64 [n].
        slot_mapping: int64 [n], where each token's row goes; negative skips.
        attention: planned for these n query rows; for a model with an indexer with its topk, or dense if no request has more
            cached tokens than that.
        cache: uint8 [num_layers, num_pages, page_size, row_bytes]; with an MTP layer that runs, one layer more.
        counters: int64 [3] or None, see `uncast.latent.codec.new_counters`.
        logit_rows: int64 [m], the rows whose logits are wanted.
        index: the index cache of a model with an indexer.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    attention: MLAPagedAttention
    cache: torch.Tensor
    counters: torch.Tensor | None
    logit_rows: torch.Tensor
    index: IndexCache | None = None


@dataclass
class _Step:
    """What the layers of one step share; `indices` is what the last full layer selected."""

    batch: ForwardBatch
    angles: tuple[torch.Tensor, torch.Tensor]
    split: PrefillSplit | None
    indices: torch.Tensor | None = None


class MLADecoder:
    """A loaded model. Weights share one dtype; router weights, norms' arithmetic and logits are float32.

    Attributes:
        prefill: "auto" (un-absorbed where it is cheaper), "absorbed" or "unabsorbed" (every request with several queries).
        parallel: the group whose ranks have the model's parts, `config` then names this rank's heads; None for a whole model.
        mtp: the layer that drafts; None if the checkpoint has none or it was not loaded.
    """

    def __init__(
        self,
        config: ModelConfig,
        embed: torch.Tensor,
        layers: list[Layer],
        final_norm: torch.Tensor,
        lm_head: torch.Tensor,
        prefill: str = "auto",
        parallel: Parallel | None = None,
        mtp: MTPLayer | None = None,
    ) -> None:
        if prefill not in PREFILL_MODES:
            raise ValueError(f"prefill is {prefill!r}: allowed are {', '.join(PREFILL_MODES)}")
        self.config, self.prefill, self.parallel = config, prefill, parallel
        self.embed, self.layers, self.final_norm, self.lm_head = embed, layers, final_norm, lm_head
        self.mtp = mtp
        self.rope = Rope(config.rope, embed.device)
        self.indexer: Indexer | None = None
        if config.indexer is not None:
            rope = replace(config.rope, interleaved=config.indexer.interleaved)
            self.indexer = Indexer(config.indexer, Rope(rope, embed.device))

    @property
    def device(self) -> torch.device:
        return self.embed.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.dtype

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits float32 [m, vocab] of `batch.logit_rows`; the batch's rows are in the cache afterwards."""
        return self.forward_hidden(batch)[0]

    @torch.inference_mode()
    def forward_hidden(self, batch: ForwardBatch, *, every: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """As `forward`, and the hidden states after the final norm: [m, hidden] of these rows, [n, hidden] of `every` row."""
        hidden = scaled(F.embedding(batch.token_ids, self.embed), self.config.embed_scale)
        step, pending = self._step(batch), None
        for index, layer in enumerate(self.layers):
            hidden, pending = self._layer(layer, hidden, pending, batch.cache[index], step)
        return self._head(hidden, pending, self.final_norm, batch.logit_rows, every)

    @torch.inference_mode()
    def draft(
        self, batch: ForwardBatch, hidden: torch.Tensor, *, every: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One pass of the MTP layer.

        Args:
            batch: row i's token is token i + 1 of its request, its position is i.
            hidden: [n, hidden] of the positions, as `forward_hidden` or this function returns it.

        Returns:
            As `forward_hidden`: logits of token i + 2, and the normed output.
        """
        mtp, eps = self.mtp, self.config.rms_norm_eps
        if mtp is None:
            raise ValueError("this model has no MTP layer")
        embedded = F.embedding(batch.token_ids, self.embed)
        both = new_rows(hidden, hidden.shape[0], 2 * hidden.shape[1])
        torch.cat([rms_norm(embedded, mtp.enorm, eps), rms_norm(hidden, mtp.hnorm, eps)], dim=-1, out=both)
        x = linear(both, mtp.eh_proj)
        x, pending = self._layer(mtp.layer, x, None, batch.cache[len(self.layers)], self._step(batch))
        return self._head(x, pending, mtp.norm, batch.logit_rows, every)

    def _step(self, batch: ForwardBatch) -> _Step:
        split = split_prefill(self.config, self.prefill, batch.attention)
        return _Step(batch, self.rope.angles(batch.positions), split)

    def _layer(
        self, layer: Layer, hidden: torch.Tensor, pending: torch.Tensor | None, cache: torch.Tensor, step: _Step
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The hidden states, and what is still to be added to them: one step does it together with the next norm."""
        eps, branch = self.config.rms_norm_eps, self.config.residual_scale
        normed, hidden = add_norm(hidden, pending, layer.input_norm, eps, branch)
        attended = self._attend(layer.attention, normed, cache, step)
        normed, hidden = add_norm(hidden, attended, layer.post_norm, eps, branch)
        return hidden, layer.mlp(normed)

    def _head(
        self,
        hidden: torch.Tensor,
        pending: torch.Tensor | None,
        norm: torch.Tensor,
        rows: torch.Tensor,
        every: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not every:
            hidden, pending = hidden[rows], None if pending is None else pending[rows]
        normed, _ = add_norm(hidden, pending, norm, self.config.rms_norm_eps, self.config.residual_scale)
        wanted = normed
        if every:
            wanted = torch.index_select(normed, 0, rows, out=new_rows(normed, rows.shape[0], normed.shape[1]))
        logits = tile_linear(scaled(wanted, self.config.logit_scale), self.lm_head)
        if self.parallel is not None:
            logits = self.parallel.gather(logits, self.config.vocab_size)
        return logits.to(torch.float32), normed

    def _attend(self, weights: MLAWeights, x: torch.Tensor, cache: torch.Tensor, step: _Step) -> torch.Tensor:
        config, tokens = self.config, x.shape[0]
        batch, angles = step.batch, step.angles
        external = batch.attention.kv_layout == "fp8_e4m3"
        ckv_scale, kpe_scale = (weights.ckv_scale, weights.kpe_scale) if external else (None, None)
        q_row, kv_row = project_down(weights, x, config.q_lora_rank)
        turns = batch.attention.fuses_rope and on_kernels(kv_row)  # keys and queries are rotated as rows are written
        c_q, ckv, kpe = latent_parts(
            q_row,
            kv_row,
            weights.q_a_norm,
            weights.kv_a_norm,
            config.latent_norm_eps,
            self.rope,
            None if turns else angles,
        )
        if not turns:
            batch.attention.write(
                ckv, kpe, cache, batch.slot_mapping, ckv_scale=ckv_scale, kpe_scale=kpe_scale, counters=batch.counters
            )

        c_q = x if c_q is None else c_q
        if self.indexer is not None and weights.indexer is not None:
            step.indices = self._select(self.indexer, weights.indexer, x, c_q, step)
        query = linear(c_q, weights.q_b).view(tokens, config.num_heads, -1)
        q_nope, q_pe = query[..., : config.qk_nope_head_dim], query[..., config.qk_nope_head_dim :]
        scales = (ckv_scale, kpe_scale)
        if turns:
            batch.attention.rope_write(
                ckv, kpe, q_pe, angles, cache, batch.slot_mapping, interleaved=self.rope.config.interleaved,
                ckv_scale=ckv_scale, kpe_scale=kpe_scale, counters=batch.counters,
            )  # fmt: skip
        else:
            q_pe = rotate(self.rope, q_pe, angles)
        if step.split is None:
            values = absorbed(weights, q_nope, q_pe, cache, batch.attention, scales, step.indices)
        else:
            values = by_chunk(config, weights, q_nope, q_pe, cache, step.split, scales)
        project = linear if self.parallel is None else self.parallel.project
        return project(values.reshape(tokens, -1), weights.o)

    def _select(
        self, indexer: Indexer, weights: IndexerWeights, x: torch.Tensor, c_q: torch.Tensor, step: _Step
    ) -> torch.Tensor | None:
        """Stores the layer's keys; what its queries attend to, None in a dense step."""
        batch, problem = step.batch, step.batch.attention.problem
        if batch.index is None:
            raise ValueError("this model has an indexer: give ForwardBatch its index cache")
        indexer.store(weights, x, step.angles, batch.index, batch.slot_mapping)
        if problem.spec.topk == 0:
            return None
        return indexer.select(weights, x, c_q, step.angles, batch.index, problem)
