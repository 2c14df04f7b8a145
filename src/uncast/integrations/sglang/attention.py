"""The forward paths of the SGLang backend, without SGLang: `backend.py` adds its base class and the objects it needs.

Every path writes the new rows first and attends to what is stored. Absorbed layers (one latent head of 576 channels) run on
uncast's kernels; un-absorbed prefill brings its own dense keys and values and touches no cache row here.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from uncast.attention import ProblemSpec
from uncast.integrations._common import EngineRefusal, kv_layout, serving_backend, warn_once
from uncast.integrations.sglang.metadata import MetadataBuilder, Shape, StepMetadata
from uncast.integrations.sglang.pool import PoolWriter, absorbed_layers, install_writer, layer_scale
from uncast.integrations.sglang.ragged import ragged_attention

FAST_PAGE_SIZE = 64


def check_speculation(algorithm: str | None, topk: int | None) -> None:
    """Raises `EngineRefusal` for speculation whose attention is not a causal chain of drafts."""
    if algorithm is None:
        return
    allowed = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")
    if str(algorithm).upper() not in allowed:
        raise EngineRefusal(
            f"uncast verifies chains of drafts: --speculative-algorithm {algorithm} is none of {allowed}"
        )
    if (topk or 1) > 1:
        raise EngineRefusal(
            f"uncast verifies chains of drafts, not trees: --speculative-eagle-topk is {topk}, start with 1"
        )


def choose_shape(runner: Any, num_heads: int) -> Shape:
    """What the runner's model and pool need, and which uncast backend serves it; warns once of slow choices.

    Raises:
        EngineRefusal: a model, pool or device that cannot be served, in one sentence.
    """
    config, pool, page_size = runner.model_config, runner.token_to_kv_pool, runner.page_size
    rank, rope = config.kv_lora_rank, config.qk_rope_head_dim
    if getattr(pool, "use_dsa", False):
        raise EngineRefusal("uncast serves dense MLA: for sparse attention (DSA) use --attention-backend dsa")
    if getattr(pool, "kv_lora_rank", None) != rank:
        raise EngineRefusal(
            f"uncast serves SGLang's MLATokenToKVPool, and this model's pool is a {type(pool).__name__}"
        )
    layout = kv_layout(runner.kv_cache_dtype)
    device = pool.get_key_buffer(pool.start_layer).device
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    spec = ProblemSpec(
        num_heads=num_heads, head_dim_ckv=rank, head_dim_kpe=rope, page_size=page_size, kv_layout=layout,
        q_data_type=runner.dtype, device=device.type, arch=major * 10 + minor,
    )  # fmt: skip
    spec.check()
    name = serving_backend(spec)
    if page_size != FAST_PAGE_SIZE and device.type == "cuda":
        warn_once(
            "page size",
            f"uncast: pages of {page_size} are read row by row by the portable kernel; --page-size {FAST_PAGE_SIZE} is faster",
        )
    return Shape(name, layout, page_size, rank, rope, runner.dtype)


def check_company(others: set[str], layers: dict[int, Any]) -> None:
    """Raises `EngineRefusal` where another backend reads the FP8 rows written here and a scale tells the two apart: SGLang's
    own do not agree on whether `k_scale` applies."""
    scaled = [i for i, layer in layers.items() if layer_scale(layer, torch.device("meta")) not in (None, 1.0)]
    if others and scaled:
        raise EngineRefusal(
            f"this checkpoint has a k_scale (layer {scaled[0]}) and {', '.join(sorted(others))} would read the rows, too: "
            "start with --attention-backend uncast alone"
        )


class MLAForward:
    """Metadata and forward paths of one runner.

    Args:
        num_heads: query heads on this rank.
        draft_step: which step of a multi-step draft this is, None for none.
        others: other backends that read this runner's pool.

    Attributes:
        forward_metadata: of the current batch. token_to_kv_pool, req_to_token_pool, kv_index_translator: the runner's.
        writer: puts FP8 rows into the pool; None for a BF16 cache, which SGLang writes itself.
    """

    forward_metadata: StepMetadata | None

    def __init__(
        self, runner: Any, *, num_heads: int, draft_step: int | None = None, others: set[str] | None = None
    ) -> None:
        args = runner.server_args
        check_speculation(args.speculative_algorithm, args.speculative_eagle_topk)
        self.shape = choose_shape(runner, num_heads)
        self.token_to_kv_pool, self.req_to_token_pool = runner.token_to_kv_pool, runner.req_to_token_pool
        self.kv_index_translator = getattr(runner, "kv_index_translator", None)
        self.kv_cache_dtype = self.data_type = runner.kv_cache_dtype
        self.page_size, self.max_context_len = runner.page_size, runner.model_config.context_len
        self.num_draft_tokens = int(args.speculative_num_draft_tokens or 0)
        self.forward_metadata = None
        self.builder = MetadataBuilder(
            self.shape, self.req_to_token_pool.req_to_token, self.max_context_len, self.num_draft_tokens, draft_step
        )
        self.writer: PoolWriter | None = None
        if self.shape.kv_layout != "bf16":
            rank = self.shape.head_dim_ckv
            layers = absorbed_layers(getattr(runner, "model", None), rank + self.shape.head_dim_kpe)
            check_company(others or set(), layers)
            self.writer = install_writer(self.token_to_kv_pool, rank, self.page_size, self.shape.backend, layers)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """An eager forward pass begins."""
        self.forward_metadata = self.builder.build(forward_batch, self.kv_index_translator)
        self._count_step()

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocates what captured graphs read.

        Raises:
            EngineRefusal: the backend that serves here looks at lengths on the host.
        """
        if self.shape.backend not in ("native", "torch_cpu"):
            raise EngineRefusal(
                f"{self.shape.backend} cannot be captured in a CUDA graph: start with --disable-cuda-graph"
            )
        self.builder.allocate(max_bs)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Before a capture, and before every replay: fills the buffers that the graph reads."""
        self.forward_metadata = self.builder.build_in_place(forward_batch, self.kv_index_translator)
        if not in_capture:
            self._count_step()

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Cached tokens of the requests that pad a captured batch."""
        return 1

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        q_rope: torch.Tensor | None = None,
        k_rope: torch.Tensor | None = None,
        **others: Any,
    ) -> torch.Tensor:
        """Absorbed attention of one layer.

        Args:
            q: [tokens, heads * 576] or [tokens, heads, 576]; with `q_rope` [tokens, heads, 64] only the 512 latent channels.
            k: [tokens, 1, 576] to be stored, with `k_rope` [tokens, 1, 64] the 512 latent channels; None stores nothing.

        Returns:
            [tokens, heads * 512].
        """
        _refuse(layer, others)
        shape, heads = self.shape, layer.tp_q_head_num
        rank, rope = shape.head_dim_ckv, shape.head_dim_kpe
        if k is not None and save_kv_cache:
            self._store(layer, forward_batch, k, k_rope)
        if q_rope is None:
            both = q.view(-1, heads, rank + rope)
            q_nope, q_pe = both[..., :rank], both[..., rank:]
        else:
            q_nope, q_pe = q.view(-1, heads, rank), q_rope.view(-1, heads, rope)
        return self._attend(q_nope, q_pe, layer)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        q_rope: torch.Tensor | None = None,
        k_rope: torch.Tensor | None = None,
        **others: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Extend, verify and draft-extend: absorbed as `forward_decode`; or un-absorbed, with k and v of every head, where
        SGLang takes that path: [tokens, heads * v], and with `mha_return_lse` the LSE [tokens, heads] (base e) beside
        [tokens, heads, v]."""
        if layer.head_dim == self.shape.head_dim_ckv + self.shape.head_dim_kpe:
            return self.forward_decode(
                q, k, v, layer, forward_batch, save_kv_cache, q_rope=q_rope, k_rope=k_rope, **others
            )
        _refuse(layer, others)
        assert k is not None and v is not None and not save_kv_cache
        return self._dense(q, k, v, layer, forward_batch)

    def _store(self, layer: Any, forward_batch: Any, k: torch.Tensor, k_rope: torch.Tensor | None) -> None:
        loc, rank = self.write_loc(forward_batch), self.shape.head_dim_ckv
        if k_rope is None:
            rows = k.view(-1, 1, rank + self.shape.head_dim_kpe)
            nope, rope = rows[..., :rank], rows[..., rank:]
        else:
            nope, rope = k.view(-1, 1, rank), k_rope.view(-1, 1, self.shape.head_dim_kpe)
        self.token_to_kv_pool.set_mla_kv_buffer(layer, loc, nope, rope)

    def write_loc(self, forward_batch: Any) -> Any:
        """Where this batch's rows go, as the pool takes it."""
        return forward_batch.out_cache_loc

    def _attend(self, q_nope: torch.Tensor, q_pe: torch.Tensor, layer: Any) -> torch.Tensor:
        metadata, shape = self.forward_metadata, self.shape
        assert metadata is not None, "init_forward_metadata comes before forward"
        tokens, heads, rank = q_nope.shape
        out = torch.empty(tokens, heads, rank, dtype=q_nope.dtype, device=q_nope.device)
        live = metadata.total_q
        if live < tokens:  # rows that pad a batch for other ranks or a graph
            out[live:].zero_()
        if min(live, tokens) > 0:
            rows = self.token_to_kv_pool.get_key_buffer(layer.layer_id).view(torch.uint8)
            whole = rows.shape[0] // shape.page_size * shape.page_size
            cache = rows[:whole].view(-1, shape.page_size, rows.shape[-1])
            scale = self.writer.scale(layer) if self.writer is not None else None
            metadata.attention(heads, float(layer.scaling)).run(
                q_nope[:live], q_pe[:live], cache, ckv_scale=scale, kpe_scale=scale, out=out[:live]
            )
        return out.view(tokens, heads * rank)

    def _dense(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, forward_batch: Any
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        metadata, heads = self.forward_metadata, layer.tp_q_head_num
        assert metadata is not None, "init_forward_metadata comes before forward"
        q_indptr = k_indptr = metadata.qo_indptr
        max_k_len, causal = metadata.max_q_len, True
        if forward_batch.attn_attend_prefix_cache:
            chunk = forward_batch.prefix_chunk_idx
            k_indptr, causal = forward_batch.prefix_chunk_cu_seq_lens[chunk], False
            max_k_len = forward_batch.prefix_chunk_max_seq_lens[chunk]
        out, lse = ragged_attention(
            q.view(-1, heads, layer.head_dim), k.view(-1, layer.tp_k_head_num, layer.head_dim),
            v.view(-1, layer.tp_k_head_num, layer.v_head_dim), q_indptr, k_indptr, max_q_len=metadata.max_q_len,
            max_k_len=max_k_len, causal=causal, sm_scale=float(layer.scaling),
        )  # fmt: skip
        return (out, lse) if forward_batch.mha_return_lse else out.view(out.shape[0], heads * layer.v_head_dim)

    def _count_step(self) -> None:
        if self.writer is not None:
            self.writer.counters.step()


class MultiStepDraft:
    """One backend per draft step but the last, which needs none; step i reads the committed prefix and i + 1 drafts.

    Attributes:
        attn_backends: the steps' backends. topk, speculative_num_steps: as SGLang reads them.
    """

    needs_cpu_seq_lens = False

    def __init__(self, backends: list[Any], topk: int, speculative_num_steps: int) -> None:
        check_speculation("EAGLE", topk)
        self.attn_backends, self.topk, self.speculative_num_steps = backends, topk, speculative_num_steps
        self.kv_index_translator = backends[0].kv_index_translator if backends else None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """An eager draft begins."""
        for backend in self.attn_backends:
            backend.init_forward_metadata(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocates what captured graphs read."""
        for backend in self.attn_backends:
            backend.init_cuda_graph_state(max_bs, max_num_tokens)

    def decode_view(self, forward_batch: Any) -> Any:
        """The batch as its steps see it: in decode mode."""
        return forward_batch

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Before a capture, and before every replay."""
        view = self.decode_view(forward_batch)
        for backend in self.attn_backends:
            backend.init_forward_metadata_out_graph(view, in_capture=in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Nothing is recorded in a graph: the buffers are filled before it."""


def _refuse(layer: Any, others: dict[str, Any]) -> None:
    """Raises for what a layer asks for and no kernel here does."""
    given = [name for name, value in others.items() if value is not None and value is not False]
    if given:
        raise EngineRefusal(f"uncast's attention takes no {', '.join(given)}: start with another --attention-backend")
    if getattr(layer, "logit_cap", 0.0) or not math.isfinite(layer.scaling):
        raise EngineRefusal("uncast's attention caps no logits: start with another --attention-backend")
