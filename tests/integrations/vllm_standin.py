"""Stand-ins for the parts of vLLM 0.33 that the backend UNCAST is built on, put into `sys.modules` for a test.

They have vLLM's names, parameters and defaults (`test_vllm_contract` compares them with the recorded interface) and only as
much behaviour as decoding needs: which requests of a batch are decodes, and what they hand to `_build_decode`.
"""

from __future__ import annotations

import enum
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch


class QueryLenSupport(enum.Enum):
    SINGLE_ONLY = "single_only"
    UNIFORM = "uniform"
    VARLEN = "varlen"


class AttentionCGSupport(enum.Enum):
    ALWAYS = 3
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


class AttentionType(enum.StrEnum):
    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


class KVCacheLayout(enum.Enum):
    LBHNC = 0
    LBNHC = 1
    LHBNC = 2
    BLHNC = 3
    BLNHC = 4
    BHLNC = 5


@dataclass
class MLACommonDecodeMetadata:
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    dcp_tot_seq_lens: torch.Tensor | None


@dataclass
class MLACommonMetadata:
    num_reqs: int
    max_query_len: int
    max_seq_len: int
    num_actual_tokens: int
    query_start_loc: torch.Tensor
    slot_mapping: torch.Tensor
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int
    causal: bool = True
    head_dim: int | None = None
    prefill: Any = None
    decode: Any = None


class MLACommonBackend:
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        return "TRITON_MLA"

    @staticmethod
    def get_builder_cls() -> type:
        return MLACommonMetadataBuilder

    @staticmethod
    def get_impl_cls() -> type:
        raise NotImplementedError

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int]:
        return [1]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [320, 512, 576]

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...] | None:
        return None

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return False

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return False

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: Any, kv_cache_dtype: Any, block_size: Any, use_mla: bool, has_sink: bool, use_sparse: bool,
        use_mm_prefix: bool, device_capability: Any,
    ) -> str | None:  # fmt: skip
        return None


class MLACommonMetadataBuilder:
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.SINGLE_ONLY
    reorder_batch_threshold: int = 1
    supports_draft_decode_metadata_update: bool = False

    def __init__(
        self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any, metadata_cls: Any = None,
        supports_dcp_with_varlen: bool = False,
    ) -> None:  # fmt: skip
        self.device, self.vllm_config = device, vllm_config
        self.dcp_world_size = vllm_config.parallel_config.decode_context_parallel_size
        speculative = vllm_config.speculative_config
        if speculative is not None and self.query_len_support != QueryLenSupport.SINGLE_ONLY:
            self.reorder_batch_threshold = 1 + speculative.num_speculative_tokens
        if self.dcp_world_size > 1 and not supports_dcp_with_varlen:
            self.reorder_batch_threshold = 1

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        return cls._cudagraph_support

    def update_draft_decode_metadata(self, metadata: Any) -> None:
        raise NotImplementedError

    def _build_decode(
        self, block_table_tensor: Any, seq_lens_device: Any, max_seq_len: int, query_start_loc_cpu: Any,
        query_start_loc_device: Any, num_decode_tokens: int, max_query_len: int, dcp_tot_seq_lens_device: Any,
    ) -> Any:  # fmt: skip
        return MLACommonDecodeMetadata(block_table_tensor, seq_lens_device, dcp_tot_seq_lens_device)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        return self.build(0, common_attn_metadata)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """Decodes first: the leading requests of at most `reorder_batch_threshold` query rows."""
        m, threshold = common_attn_metadata, self.reorder_batch_threshold
        lens = m.query_start_loc_cpu.diff().tolist()
        decodes = next((i for i, n in enumerate(lens) if n > threshold), len(lens))
        tokens = m.num_actual_tokens if decodes == len(lens) else int(m.query_start_loc_cpu[decodes])
        seq_lens = m.seq_lens if self.dcp_world_size == 1 else m.dcp_local_seq_lens
        decode = None
        if decodes:
            decode = self._build_decode(
                block_table_tensor=m.block_table_tensor[:decodes],
                seq_lens_device=seq_lens[:decodes],
                max_seq_len=m.max_seq_len,
                query_start_loc_cpu=m.query_start_loc_cpu[: decodes + 1],
                query_start_loc_device=m.query_start_loc[: decodes + 1],
                num_decode_tokens=tokens,
                max_query_len=min(m.max_query_len, threshold),
                dcp_tot_seq_lens_device=m.seq_lens[:decodes] if self.dcp_world_size > 1 else None,
            )
        return MLACommonMetadata(
            num_reqs=len(lens), max_query_len=m.max_query_len, max_seq_len=m.max_seq_len, num_actual_tokens=m.num_actual_tokens,
            query_start_loc=m.query_start_loc, slot_mapping=m.slot_mapping, num_decodes=decodes, num_decode_tokens=tokens,
            num_prefills=len(lens) - decodes, decode=decode,
        )  # fmt: skip


class MLACommonImpl:
    can_return_lse_for_decode: bool = False
    lse_base_on_e: bool = True
    supports_dcp: bool = False
    supports_pcp: bool = True
    supports_quant_query_input: bool = False
    dcp_world_size: ClassVar[int] = 1

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        self = super().__new__(cls)
        self.need_to_return_lse_for_decode = cls.dcp_world_size > 1 and cls.can_return_lse_for_decode
        return self

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, alibi_slopes: Any, sliding_window: Any,
        kv_cache_dtype: str, logits_soft_cap: Any, attn_type: Any, kv_sharing_target_layer_name: Any, q_lora_rank: Any,
        kv_lora_rank: int, qk_nope_head_dim: int, qk_rope_head_dim: int, qk_head_dim: int, v_head_dim: int, kv_b_proj: Any,
        indexer: Any = None, q_pad_num_heads: Any = None,
    ) -> None:  # fmt: skip
        self.num_heads, self.head_size, self.scale, self.kv_cache_dtype = num_heads, head_size, scale, kv_cache_dtype
        self.kv_lora_rank, self.qk_rope_head_dim = kv_lora_rank, qk_rope_head_dim
        self.supports_quant_query_input = True

    def forward_mqa(self, q: Any, kv_c_and_k_pe_cache: Any, attn_metadata: Any, layer: Any) -> Any:
        raise NotImplementedError

    def do_kv_cache_update(
        self, kv_c_normed: Any, k_pe: Any, kv_cache: Any, slot_mapping: Any, kv_cache_dtype: str, k_scale: Any,
        skip_scale: bool = False,
    ) -> None:  # fmt: skip
        raise NotImplementedError("the stand-in has no writer")

    def reserve_workspace(self) -> None:
        return


class AttentionBackendEnum:
    """As much of the registry as `register` touches; `__members__` by name, a member knows its path."""

    __members__: ClassVar[dict[str, Any]] = {}


def register_backend(backend: Any, class_path: Any = None, is_mamba: bool = False) -> Callable[[type], type]:
    if backend in AttentionBackendEnum.__members__:
        raise ValueError(f"Backend {backend} already exists")
    AttentionBackendEnum.__members__[backend] = types.SimpleNamespace(get_path=lambda: class_path)
    return lambda cls: cls


def modules() -> dict[str, types.ModuleType]:
    """A fresh set of stand-in modules by name, parents included."""
    AttentionBackendEnum.__members__.clear()
    here = sys.modules[__name__]
    contents = {
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
        "vllm.model_executor.layers.attention.mla_attention": (
            "MLACommonBackend", "MLACommonDecodeMetadata", "MLACommonImpl", "MLACommonMetadata", "MLACommonMetadataBuilder",
            "QueryLenSupport",
        ),
        "vllm.v1.attention.backend": ("AttentionCGSupport", "AttentionType"),
        "vllm.v1.attention.backends.registry": ("AttentionBackendEnum", "register_backend"),
        "vllm.v1.kv_cache_layout": ("KVCacheLayout",),
    }  # fmt: skip
    made: dict[str, types.ModuleType] = {}
    for name, content in contents.items():
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            path = ".".join(parts[:depth])
            if path not in made:
                made[path] = types.ModuleType(path)
                if depth > 1:
                    setattr(made[".".join(parts[: depth - 1])], parts[depth - 1], made[path])
        values = content if isinstance(content, dict) else {key: getattr(here, key) for key in content}
        for key, value in values.items():
            setattr(made[name], key, value)
    return made
