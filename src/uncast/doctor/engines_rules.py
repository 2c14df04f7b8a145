"""Which attention backend an engine takes by itself, and what uncast's plug-in would run, from a model's config alone.

The engines' rules are those of SGLang 0.5.23 (`arg_groups/model_override_base.py`, `model_overrides/deepseek_v2.py`) and
vLLM 0.33 (`platforms/cuda.py`); the plug-in's are the contract of uncast's kernels. Nothing is imported: a test compares.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from uncast.doctor.errors import EngineError

FP8 = ("fp8", "fp8_e4m3")
BF16 = ("auto", "bf16", "bfloat16")
KV_DTYPES = (*BF16, *FP8)
RULES_OF = {"sglang": "0.5.23", "vllm": "0.33.0"}
TRTLLM_FAMILY = ("DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration", "MistralLarge3ForCausalLM")
"""Dense models for which SGLang takes `trtllm_mla` on compute capability 10.0 and 10.3."""
SOURCES = {
    "fa3": "flashattention_backend.py", "flashinfer": "flashinfer_mla_backend.py", "triton": "triton_backend.py",
    "trtllm_mla": "trtllm_mla_backend.py", "dsa": "dsa_backend.py", "FLASH_ATTN_MLA": "flashattn_mla.py",
    "FLASHMLA": "flashmla.py", "FLASHINFER_MLA": "flashinfer_mla.py", "TRITON_MLA": "triton_mla.py",
}  # fmt: skip
"""The file that holds a backend's forward paths."""


class Model(msgspec.Struct, frozen=True):
    """What the rules ask of a model."""

    architecture: str
    kv_lora_rank: int
    qk_rope_head_dim: int
    num_heads: int
    sparse: bool


class Setting(msgspec.Struct, frozen=True):
    """A GPU's compute capability (major * 10 + minor), the KV cache's dtype as the engine's flag names it, rows a page."""

    arch: int
    kv_dtype: str
    page_size: int = 64

    @property
    def fp8(self) -> bool:
        return self.kv_dtype in FP8


def read_model(path: Path) -> Model:
    """The model of a `config.json`, or of the folder that holds one.

    Raises:
        EngineError: no such file, no JSON, or a model without MLA.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise EngineError(f"cannot read {file}: {error.strerror or error}") from error
    except ValueError as error:
        raise EngineError(f"{file} is no JSON: {error}") from error
    if isinstance(config, dict) and isinstance(config.get("text_config"), dict):
        config = {**config, **config["text_config"]}
    if not isinstance(config, dict) or not all(
        isinstance(config.get(k), int) for k in ("kv_lora_rank", "qk_rope_head_dim", "num_attention_heads")
    ):
        raise EngineError(
            f"{file} describes no model with MLA: kv_lora_rank, qk_rope_head_dim and num_attention_heads are needed"
        )
    return _model(config)


def _model(config: Mapping[str, Any]) -> Model:
    names = config.get("architectures") or [""]
    return Model(
        str(names[0]), config["kv_lora_rank"], config["qk_rope_head_dim"], config["num_attention_heads"],
        bool(config.get("index_topk")),
    )  # fmt: skip


def engine_default(engine: str, model: Model, setting: Setting) -> str:
    """The backend that the engine takes when no flag names one."""
    if engine == "sglang":
        if model.sparse:
            return "dsa"
        if setting.arch == 90:
            return "fa3"
        if setting.arch in (100, 103):
            return "trtllm_mla" if model.architecture in TRTLLM_FAMILY else "flashinfer"
        return "triton"
    if model.sparse:
        return "one of its sparse backends"
    if setting.arch // 10 == 10:
        return "FLASHINFER_MLA"
    if setting.arch // 10 == 9:
        return "FLASHMLA" if setting.fp8 else "FLASH_ATTN_MLA"
    return "TRITON_MLA"


def uncast_backend(model: Model, setting: Setting) -> tuple[str, str]:
    """(what serves behind the plug-in, "" if nothing does; the reason where it is not `native`)."""
    if model.sparse:
        return "", "sparse attention (DSA) is not in the plug-in: dense MLA is"
    if not 1 <= model.num_heads <= 128:
        return "", f"{model.num_heads} query heads: 1 to 128 are served on one GPU"
    reason = ""
    if (model.kv_lora_rank, model.qk_rope_head_dim) != (512, 64):
        reason = f"the native kernels are for 512 + 64 channels, not {model.kv_lora_rank} + {model.qk_rope_head_dim}"
    elif setting.arch < 80:
        reason = f"the native kernels need compute capability 8.0 or newer, not {setting.arch / 10}"
    if not reason:
        return "native", ""
    if setting.arch >= 80 and model.kv_lora_rank % 128 == 0 and model.qk_rope_head_dim % 64 == 0:
        return ("gather_cast:flashinfer_fa2" if setting.fp8 else "flashinfer_fa2"), reason
    return "", f"{reason}, and nothing else here reads such a cache"
