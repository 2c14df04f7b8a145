"""Models without values: a source that has every tensor, and steps of a decoder on the pretended GPU of `tests.fake_cuda`."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch

from tests.fixtures import FAMILIES
from uncast.attention import MLAPagedAttention
from uncast.checkpoints.layer_loader import LayerLoader
from uncast.checkpoints.quantization import Quantization
from uncast.latent.index_keys import matching_layout
from uncast.latent.layouts import row_layout
from uncast.latent.pool import PagedPool
from uncast.models.config import ModelConfig
from uncast.models.decoder import ForwardBatch, MLADecoder
from uncast.models.indexer import IndexCache
from uncast.models.parallel import Parallel, local_config
from uncast.quant.packed import Fp8Blocks, Nvfp4, Packed

GLM_FLASH: dict[str, Any] = {
    "model_type": "glm4_moe_lite", "vocab_size": 154880, "hidden_size": 2048, "num_hidden_layers": 3,
    "intermediate_size": 10240, "moe_intermediate_size": 1536, "num_attention_heads": 20, "n_routed_experts": 64,
    "num_experts_per_tok": 4, "n_shared_experts": 1, "q_lora_rank": 768, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 192, "v_head_dim": 256, "routed_scaling_factor": 1.8, "first_k_dense_replace": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "max_position_embeddings": 202752,
}  # fmt: skip
"""GLM-4.7-Flash with 3 of its 47 layers."""


def config_of(family: str, **overrides: Any) -> ModelConfig:
    """Of a family of `FAMILIES`, or `glm_flash`, as transformers completes it."""
    from transformers import AutoConfig

    params = {**(GLM_FLASH if family == "glm_flash" else FAMILIES[family]), **overrides}
    raw = AutoConfig.for_model(params.pop("model_type"), **params).to_dict()
    return ModelConfig.from_hf({**raw, "model_type": "kimi_k2"} if family == "kimi_k2" else raw)


class MetaSource:
    """Every tensor, on the device `meta`.

    Args:
        packed: how matrices of linear layers are stored: "", "nvfp4" or "fp8"; of attention always in 16 bits with "nvfp4", as
            modelopt leaves them.
    """

    def __init__(self, packed: str = "") -> None:
        self.kind, self.quantization = packed, Quantization()

    def __contains__(self, name: str) -> bool:
        return True

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def fill(self, name: str, out: torch.Tensor) -> torch.Tensor:
        return out

    def scalar(self, name: str) -> float | None:
        return None

    def packed(self, name: str, shape: tuple[int, ...]) -> Packed | None:
        rows, columns = shape
        if self.kind == "nvfp4" and "self_attn" not in name:
            parts = ((rows, columns // 2), torch.uint8), ((rows, columns // 16), torch.uint8), ((rows,), torch.float32)
            return Nvfp4(*(torch.empty(size, dtype=dtype, device="meta") for size, dtype in parts))
        if self.kind == "fp8":
            blocks = -(-rows // 128), -(-columns // 128)
            codes = torch.empty(shape, dtype=torch.uint8, device="meta")
            return Fp8Blocks(codes, torch.empty(blocks, dtype=torch.float32, device="meta"))
        return None


def meta_model(
    config: ModelConfig, packed: str = "", *, parallel: Parallel | None = None, mtp: bool = False, prefill: str = "auto"
) -> MLADecoder:
    """What `load_model` makes, on the device `meta`."""
    return model_of(config, MetaSource(packed), "meta", parallel=parallel, mtp=mtp, prefill=prefill)


def model_of(
    config: ModelConfig, source: MetaSource, where: str, *, parallel: Parallel | None = None, mtp: bool = False,
    prefill: str = "auto",
) -> MLADecoder:  # fmt: skip
    """What `load_model` makes of a source's tensors, on the device `where`."""
    device = torch.device(where)
    loader = LayerLoader(config, source, torch.bfloat16, device, True, 0, parallel)  # type: ignore[arg-type]
    embed = loader.get("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
    layers = [loader.layer(i) for i in range(config.num_layers)]
    norm = loader.get("model.norm.weight", config.hidden_size)
    drafts = loader.mtp() if mtp else None
    head = embed
    if parallel is not None:
        rows = parallel.range_of(config.vocab_size)
        head, config = embed[rows.start : rows.stop].clone(), local_config(config, parallel)
    return MLADecoder(config, embed, layers, norm, head, prefill=prefill, parallel=parallel, mtp=drafts)


def pool_of(config: ModelConfig, layout: str, *, num_pages: int = 64, page_size: int = 64, more: int = 0) -> PagedPool:
    rows, indexer = row_layout(layout, config.kv_lora_rank, config.qk_rope_head_dim), config.indexer
    return PagedPool(
        rows,
        num_layers=config.num_layers + more,
        num_pages=num_pages,
        page_size=page_size,
        device="cuda",
        index_layout=None if indexer is None else matching_layout(rows, indexer.head_dim),
        num_index_layers=0 if indexer is None else len(indexer.full_layers),
    )


def batch_of(
    model: MLADecoder,
    pool: PagedPool,
    lens: list[tuple[int, int]],
    *,
    backend: str = "auto",
    sparse: bool = False,
    alone_rows: int = 0,
) -> ForwardBatch:
    """A planned step of requests of (q_len, kv_len), with the logits of each one's last token, as the engine builds it."""
    config, device = model.config, "cuda"
    q_lens, kv_lens = [q for q, _ in lens], [kv for _, kv in lens]
    ends, width = [0, *accumulate(q_lens)], -(-max(kv_lens) // pool.page_size)
    topk = config.indexer.topk if config.indexer is not None and sparse else 0
    attention = MLAPagedAttention(backend)
    attention.plan(
        torch.tensor(ends, dtype=torch.int32, device=device),
        block_tables=torch.zeros(len(lens), width, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(kv_lens, dtype=torch.int32, device=device),
        num_heads=config.num_heads,
        head_dim_ckv=config.kv_lora_rank,
        head_dim_kpe=config.qk_rope_head_dim,
        page_size=pool.page_size,
        sm_scale=config.sm_scale,
        q_data_type=model.dtype,
        kv_layout=pool.layout.name,
        max_q_len=max(q_lens),
        total_q=ends[-1],
        num_pages=pool.num_pages,
        topk=topk,
        alone_rows=alone_rows,
    )
    index = None
    if pool.index_storage is not None and pool.index_layout is not None:
        index = IndexCache(pool.index_storage, pool.index_layout)

    def numbers(count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int64, device=device)

    return ForwardBatch(
        token_ids=numbers(ends[-1]), positions=numbers(ends[-1]), slot_mapping=numbers(ends[-1]), attention=attention,
        cache=pool.storage, counters=torch.zeros(3, dtype=torch.int64, device=device), logit_rows=numbers(len(lens)),
        index=index,
    )  # fmt: skip
