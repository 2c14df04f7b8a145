"""The classes that vLLM 0.33 takes for `--attention-backend UNCAST`: backend, metadata builder, implementation.

Resolved by class path, so only where vLLM is. Prefill (`forward_mha`), the absorption of W_UK and the V up-projection are
vLLM's; here are decode, verify and draft steps (`forward_mqa`) and the cache writer.

Scales: vLLM stores x / k_scale for latent and rope alike, so scores are softmax_scale * k_scale * (q . stored) and the output
is k_scale * (P . stored); both are `ckv_scale = kpe_scale = k_scale` here. Queries stay bfloat16. The scale is read from the
layer's device tensor, so a graph replays with its present value.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from uncast.attention import registry
from uncast.attention.backend import Backend
from uncast.integrations._common import EngineRefusal, WriteCounters
from uncast.integrations.vllm import BACKEND_NAME, vllm_version
from uncast.integrations.vllm.serving import (
    BLOCK_SIZE,
    HEAD_SIZE,
    LAYOUTS,
    device_arch,
    planned_spec,
    refusal,
    row_layout_name,
    runs_in_graphs,
    serving,
)
from uncast.integrations.vllm.step import DecodeStep, LayerShape, is_capturing

try:
    import vllm.envs as envs
    from vllm.model_executor.layers.attention.mla_attention import (
        MLACommonBackend,
        MLACommonDecodeMetadata,
        MLACommonImpl,
        MLACommonMetadata,
        MLACommonMetadataBuilder,
        QueryLenSupport,
    )
    from vllm.v1.attention.backend import AttentionCGSupport, AttentionType
    from vllm.v1.kv_cache_layout import KVCacheLayout
except ImportError as error:
    raise ImportError(
        f"{BACKEND_NAME} is written for vLLM 0.33, and vLLM {vllm_version()} lacks a part of its MLA interface: {error}"
    ) from error

logger = logging.getLogger("vllm.uncast")


@functools.cache
def write_counters(device: torch.device) -> WriteCounters:
    """The counters of all FP8 cache writes on `device` in this process."""
    return WriteCounters(device)


@functools.cache
def cache_writer(device_type: str) -> Backend:
    """The backend that writes rows: the fused kernel on a GPU, whatever serves attention there."""
    return registry.create("native" if device_type == "cuda" else "torch_cpu")


@functools.cache
def log_serving(kv_layout: str, name: str) -> None:
    logger.info("%s: %s reads %s rows as vLLM stores them, blocks of %d", BACKEND_NAME, name, kv_layout, BLOCK_SIZE)


@dataclass
class UncastDecodeMetadata(MLACommonDecodeMetadata):
    """vLLM's decode metadata and the step planned from it."""

    step: DecodeStep


class UncastMLABuilder(MLACommonMetadataBuilder):
    """Metadata of one batch. A full CUDA graph holds decode requests of one query length, padded with empty ones."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # A plan holds vLLM's own tensors, so nothing has to be refreshed between draft steps; under DCP vLLM does not
        # advance the local lengths.
        self.supports_draft_decode_metadata_update = self.dcp_world_size == 1

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        dtype = vllm_config.cache_config.cache_dtype
        spec = planned_spec(dtype, arch=device_arch(), batch_invariant=envs.VLLM_BATCH_INVARIANT)
        return cls._cudagraph_support if runs_in_graphs(spec) else AttentionCGSupport.NEVER

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> MLACommonMetadata:
        if not is_capturing(self.device):
            write_counters(self.device).step()
        return super().build(common_prefix_len, common_attn_metadata, fast_build)

    def _build_decode(
        self,
        block_table_tensor: torch.Tensor,
        seq_lens_device: torch.Tensor,
        max_seq_len: int,
        query_start_loc_cpu: torch.Tensor,
        query_start_loc_device: torch.Tensor,
        num_decode_tokens: int,
        max_query_len: int,
        dcp_tot_seq_lens_device: torch.Tensor | None,
    ) -> UncastDecodeMetadata:
        step = DecodeStep(
            block_table_tensor, seq_lens_device, query_start_loc_device, num_decode_tokens, max_query_len, max_seq_len,
            batch_invariant=envs.VLLM_BATCH_INVARIANT,
        )  # fmt: skip
        return UncastDecodeMetadata(block_table_tensor, seq_lens_device, dcp_tot_seq_lens_device, step)

    def update_draft_decode_metadata(self, metadata: MLACommonMetadata) -> None:
        """Nothing to do: see `__init__`."""


class UncastMLABackend(MLACommonBackend):
    """What vLLM asks before a layer exists."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(LAYOUTS)

    @staticmethod
    def get_name() -> str:
        return BACKEND_NAME

    @staticmethod
    def get_impl_cls() -> type[UncastMLAImpl]:
        return UncastMLAImpl

    @staticmethod
    def get_builder_cls() -> type[UncastMLABuilder]:
        return UncastMLABuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int]:
        return [BLOCK_SIZE]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [HEAD_SIZE]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """A layer's blocks must be one contiguous array: layouts with the layer outermost (there is one head)."""
        return (KVCacheLayout.LBNHC, KVCacheLayout.LBHNC)

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Uniform batches are planned from the host's query length."""
        return False

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        return refusal(
            head_size=head_size, dtype=dtype, kv_cache_dtype=kv_cache_dtype, block_size=block_size, use_mla=use_mla,
            use_sparse=use_sparse, arch=device_capability.major * 10 + device_capability.minor,
            batch_invariant=envs.VLLM_BATCH_INVARIANT,
        )  # fmt: skip


class UncastMLAImpl(MLACommonImpl):
    """One layer: writes its rows and attends to them as they are stored."""

    can_return_lse_for_decode: bool = True
    lse_base_on_e: bool = True
    supports_dcp: bool = True
    supports_pcp: bool = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **mla_args: Any,
    ) -> None:
        super().__init__(
            num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, logits_soft_cap,
            attn_type, kv_sharing_target_layer_name, **mla_args,
        )  # fmt: skip
        for name, value in (
            ("ALiBi slopes", alibi_slopes), ("a sliding window", sliding_window), ("a logits soft cap", logits_soft_cap),
        ):  # fmt: skip
            if value is not None:
                raise EngineRefusal(f"{BACKEND_NAME} has no {name}, and this layer asks for {value}")
        if attn_type != AttentionType.DECODER:
            raise EngineRefusal(f"{BACKEND_NAME} serves decoder attention, not {attn_type}")
        spec = planned_spec(kv_cache_dtype, arch=device_arch(), batch_invariant=envs.VLLM_BATCH_INVARIANT)
        log_serving(spec.kv_layout, serving(spec))
        self.kv_layout = spec.kv_layout
        self.supports_quant_query_input = False

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: MLACommonMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Absorbed attention of the batch's decode requests.

        Args:
            q: bfloat16 (q_nope [tokens, heads, 512], q_pe [tokens, heads, 64]), or both in one [tokens, heads, 576], as under
                decode context parallelism, with the heads of all ranks.
            kv_c_and_k_pe_cache: [blocks, block_size, 576], new rows written.
            layer: the owner of `_k_scale`, fp32, on the cache's device.

        Returns:
            out [tokens, heads, 512] bfloat16 and, where vLLM needs it, LSE [tokens, heads] fp32 base e; requests of length 0
            give 0 and -inf.
        """
        q_nope, q_pe = q if isinstance(q, tuple) else (q[..., : self.kv_lora_rank], q[..., self.kv_lora_rank :])
        shape = LayerShape(
            q_nope.shape[1], self.kv_layout, kv_c_and_k_pe_cache.shape[1], self.scale, self.kv_lora_rank,
            self.qk_rope_head_dim, self.need_to_return_lse_for_decode,
        )  # fmt: skip
        attention = attn_metadata.decode.step.attention(shape)
        scale = layer._k_scale if self.kv_layout == "fp8_e4m3" else None
        result = attention.run(q_nope, q_pe, kv_c_and_k_pe_cache, ckv_scale=scale, kpe_scale=scale)
        return result if isinstance(result, tuple) else (result, None)

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
        skip_scale: bool = False,
    ) -> None:
        """Stores new rows; saturates at +-448 * k_scale and counts such values.

        Args:
            kv_c_normed: [rows, 512]; k_pe: [rows, 1, 64], rope applied; rows past `slot_mapping` are a graph's padding.
            kv_cache: [blocks, block_size, 576]; empty while vLLM profiles memory.
            slot_mapping: [n], block * block_size + offset; negative slots are skipped.
            skip_scale: k_scale is known to be 1.
        """
        if kv_cache.numel() == 0:
            return
        if not kv_cache.is_contiguous():
            raise EngineRefusal(
                f"{BACKEND_NAME} needs a layer's blocks in one contiguous array, and their strides are {kv_cache.stride()}: "
                "set VLLM_KV_CACHE_LAYOUT=LBNHC"
            )
        slots = slot_mapping.flatten()
        rows, layout = slots.shape[0], row_layout_name(kv_cache_dtype)
        fp8 = layout == "fp8_e4m3"
        scale = k_scale if fp8 and not skip_scale else None
        cache_writer(kv_cache.device.type).write(
            kv_c_normed[:rows], k_pe.squeeze(1)[:rows], kv_cache.view(torch.uint8), slots, kv_layout=layout,
            ckv_scale=scale, kpe_scale=scale, counters=write_counters(kv_cache.device).values if fp8 else None,
        )  # fmt: skip
