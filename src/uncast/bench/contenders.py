"""Who takes part in `uncast bench attention`: the native kernels through the public interface, peers at their best case."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from uncast.attention import MLAPagedAttention
from uncast.backends.flashinfer import WORKSPACE_BYTES
from uncast.bench.attention import PAGE, Call, Inputs
from uncast.latent.layouts import RowLayout
from uncast.numerics.e4m3 import E4M3_MAX

Maker = Callable[..., Call]


def ours(backend: str, inputs: Inputs, layout: RowLayout, caches: list[torch.Tensor]) -> Call:
    """A backend through `MLAPagedAttention`, as an engine calls it."""
    attention, shape, scales = MLAPagedAttention(backend), inputs.shape, inputs.scales(layout)
    attention.plan(
        inputs.qo_indptr, block_tables=inputs.table, seq_lens=inputs.lens, num_heads=shape.heads, page_size=PAGE,
        sm_scale=inputs.sm_scale, kv_layout=layout.name, max_q_len=1, total_q=shape.batch,
    )  # fmt: skip
    q_nope, q_pe = inputs.query[..., :512], inputs.query[..., 512:]
    out = torch.empty((shape.batch, shape.heads, 512), dtype=torch.bfloat16, device=inputs.device)

    def call(index: int) -> torch.Tensor:
        attention.run(
            q_nope,
            q_pe,
            caches[index % len(caches)],
            out=out,
            ckv_scale=scales["ckv_scale"],
            kpe_scale=scales["kpe_scale"],
        )
        return out

    return call


def flashinfer(kernel: str, inputs: Inputs, layout: RowLayout, caches: list[torch.Tensor]) -> Call:
    """FlashInfer's planned MLA wrapper, without an LSE."""
    library: Any = importlib.import_module("flashinfer.mla")
    shape, fp8 = inputs.shape, layout.is_fp8
    dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
    wrapper = library.BatchMLAPagedAttentionWrapper(
        torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=inputs.device), backend=kernel
    )
    indptr = torch.arange(shape.batch + 1, dtype=torch.int32, device=inputs.device) * inputs.pages
    wrapper.plan(
        metadata=library.MLAPlanMetadata.csr(inputs.qo_indptr, indptr, inputs.table.view(-1), inputs.lens),
        num_heads=shape.heads, head_dim_ckv=512, head_dim_kpe=64, page_size=PAGE, causal=False, sm_scale=inputs.sm_scale,
        q_data_type=torch.bfloat16, kv_data_type=dtype, query_layout="split", kv_cache_layout="split",
        scale_mode="kv-per-tensor" if fp8 else "default",
    )  # fmt: skip
    typed = [cache.view(dtype) for cache in caches]
    query = (inputs.query[..., :512], inputs.query[..., 512:])
    out = torch.empty((shape.batch, shape.heads, 512), dtype=torch.bfloat16, device=inputs.device)
    scales = inputs.scales(layout) if fp8 else {}

    def call(index: int) -> torch.Tensor:
        cache = typed[index % len(typed)]
        wrapper.run(query=query, kv_cache=(cache[..., :512], cache[..., 512:]), out=out, **scales)
        return out

    return call


def flashmla(inputs: Inputs, layout: RowLayout, caches: list[torch.Tensor]) -> Call:
    """FlashMLA's dense Hopper kernel; on an FP8 cache with queries quantised beforehand (per tensor)."""
    library: Any = importlib.import_module("flash_mla")
    shape = inputs.shape
    schedule, query = library.get_mla_metadata()[0], inputs.query.unsqueeze(1)
    options: dict[str, Any] = {"is_fp8_kvcache": layout.is_fp8}
    if layout.is_fp8:
        made = library.get_mla_decoding_metadata(
            inputs.lens, shape.heads, 1, shape.heads, is_fp8_kvcache=True, use_legacy=True
        )
        schedule.tile_scheduler_metadata, schedule.num_splits = made
        descale = (query.float().abs().amax() / E4M3_MAX).view(1)
        query = (query.float() / descale).to(torch.float8_e4m3fn)
        options["descale_q"] = descale
        options["descale_k"] = torch.tensor(
            [inputs.scales(layout)["ckv_scale"]], dtype=torch.float32, device=inputs.device
        )
    typed = [cache.view(torch.float8_e4m3fn if layout.is_fp8 else torch.bfloat16).unsqueeze(2) for cache in caches]

    def call(index: int) -> torch.Tensor:
        out: torch.Tensor = library.flash_mla_with_kvcache(
            query, typed[index % len(typed)], inputs.table, inputs.lens, 512, schedule,
            softmax_scale=inputs.sm_scale, causal=False, use_legacy=True, **options,
        )[0]  # fmt: skip
        return out

    return call


CONTENDERS: dict[str, tuple[str, Maker]] = {
    "native": ("fp8_e4m3", partial(ours, "native")),
    "native fp8_ds_mla": ("fp8_ds_mla", partial(ours, "native")),
    "native bf16": ("bf16", partial(ours, "native")),
    "flashinfer fa2 bf16": ("bf16", partial(flashinfer, "fa2")),
    "flashinfer fa3 bf16": ("bf16", partial(flashinfer, "fa3")),
    "flashinfer fa3 fp8": ("fp8_e4m3", partial(flashinfer, "fa3")),
    "flashmla bf16": ("bf16", flashmla),
    "flashmla fp8 (lossy q)": ("fp8_e4m3", flashmla),
}


def installed() -> dict[str, tuple[str, Maker]]:
    """The contenders whose packages are here."""
    needs = {"flashinfer": "flashinfer", "flashmla": "flash_mla", "native": "triton"}
    return {
        name: entry
        for name, entry in CONTENDERS.items()
        if importlib.util.find_spec(needs[name.split()[0]]) is not None
    }
