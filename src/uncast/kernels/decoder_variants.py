"""The named variants of a decoder's small kernels, for `variants`: GLM-4.7-Flash's shapes and DeepSeek-V3's."""

from __future__ import annotations

from collections.abc import Iterator

from uncast.kernels import few_tokens_moe, index_write, moe_rows, norm_rope, router
from uncast.kernels.variant import CHIPS, Variant, types_of
from uncast.latent.index_keys import INDEX_LAYOUT_NAMES, index_layout

_SHAPES = {"flash": (64, 4, 1, 2048, 1536, 768), "v3": (256, 8, 8, 7168, 2048, 1536)}
"""Experts, top_k, groups, hidden, experts' width, q_lora_rank."""
_BF16 = (
    "x",
    "residual",
    "weight",
    "out",
    "total",
    "q_row",
    "kv_row",
    "q_norm",
    "kv_norm",
    "c_q",
    "ckv",
    "kpe",
    "gate_up",
)
_TYPES = dict.fromkeys((*_BF16, "shared", "down", "act", "keys", "norm", "bias", "rows", "more"), "*bf16") | {
    "cos": "*fp32", "sin": "*fp32", "router": "*fp32", "logits": "*fp32", "weights": "*fp32", "words": "*fp32",
    "chosen": "*i64", "pairs": "*i64", "slots": "*i64", "ends": "*i32", "codes": "*u8", "shorts": "*i16", "eps": "fp32",
    "factor": "fp32", "scale": "fp32",
}  # fmt: skip


def _variant(name: str, kernel: object, args: dict[str, object], warps: int = 4, **types: str) -> Variant:
    return Variant(name, kernel, types_of(kernel, args, **{**_TYPES, **types}), args, CHIPS, warps)


def decoder_variants() -> Iterator[Variant]:
    """A list of its own, for what is between a layer's matrix products."""
    for label, (experts, top_k, groups, hidden, width, q_rank) in _SHAPES.items():
        block = 1 << (hidden - 1).bit_length()
        args: dict[str, object] = {"D": hidden, "BLOCK": block, "ADD": True}
        yield _variant(f"add_rms_norm_{label}", norm_rope.add_rms_norm_kernel, args, norm_rope.norm_warps(hidden))
        args = {
            "Q": q_rank, "RANK": 512, "HALF": 32, "Q_POW2": 1 << (q_rank - 1).bit_length(), "RANK_POW2": 512,
            "HALF_POW2": 32, "INTERLEAVED": label == "flash", "ROTATE": True,
        }  # fmt: skip
        yield _variant(f"latent_parts_{label}", norm_rope.latent_parts_kernel, args)
        args = {"HALF": 32, "HALF_POW2": 32, "HEADS": norm_rope.HEADS, "INTERLEAVED": label == "flash"}
        yield _variant(f"rotate_{label}", norm_rope.rotate_kernel, args, 1)
        yield _variant(f"silu_mul_{label}", norm_rope.silu_mul_kernel, {"N": width, "BLOCK": norm_rope.CHANNELS})
        yield _variant(f"router_logits_{label}", router.router_logits_kernel, {"D": hidden, "BLOCK": block})
        args = {
            "EXPERTS": experts, "GROUPS": groups, "TOP_GROUPS": -(-groups // 2), "TOP_K": top_k, "SIGMOID": True,
            "BIASED": True, "NORMALIZE": True, "GROUPS_POW2": groups, "SIZE_POW2": experts // groups, "TOP_K_POW2": top_k,
        }  # fmt: skip
        yield _variant(f"choose_{label}", router.choose_kernel, args, 1 if experts <= 64 else 4, bias="*fp32")
        args = {"EXPERTS": experts, "COUNT_POW2": router.MAX_PAIRS, "EXPERTS_POW2": experts}
        yield _variant(f"sort_{label}", router.sort_kernel, args, 8)
        args = few_tokens_moe.constexprs(experts, top_k, top_k + 1, hidden, width)
        yield _variant(f"few_tokens_gated_{label}", few_tokens_moe.gated_kernel, args)
        yield _variant(f"few_tokens_summed_{label}", few_tokens_moe.summed_kernel, args)
        sizes: dict[str, object] = {"N": hidden, "BLOCK": moe_rows.BLOCK}
        yield _variant(f"spread_{label}", moe_rows.spread_kernel, {**sizes, "TOP_K": top_k})
        yield _variant(f"collect_{label}", moe_rows.collect_kernel, {**sizes, "EXPERTS": experts})
        yield _variant(f"sum_parts_{label}", moe_rows.sum_parts_kernel, {**sizes, "COUNT": top_k, "ADD": True})
    for name in INDEX_LAYOUT_NAMES:
        args = index_write.constexprs(index_layout(name), 32, 64, name == "fp8")
        yield _variant(f"index_write_{name}", index_write.index_write_kernel, args, 1)
