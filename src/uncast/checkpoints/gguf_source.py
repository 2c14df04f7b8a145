"""A GGUF file as a source of tensors under Hugging Face's names.

GGUF keeps the routed experts of a layer in one tensor, and W_UK and W_UV apart: `attn_k_b` [heads, rank, nope] (transposed) and
`attn_v_b` [heads, v, rank]; older files have them together as `attn_kv_b`. Rope channels are in the models' own order.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

from uncast.checkpoints.files import DamagedCheckpoint
from uncast.checkpoints.gguf_file import GgufFile
from uncast.checkpoints.quantization import Quantization
from uncast.quant.packed import Packed

_OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_IN_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.o_proj": "attn_output",
    "self_attn.indexer.wq_b": "indexer.attn_q_b",
    "self_attn.indexer.wk": "indexer.attn_k",
    "self_attn.indexer.k_norm": "indexer.k_norm",
    "self_attn.indexer.weights_proj": "indexer.proj",
    "mlp.gate": "ffn_gate_inp",
} | {
    f"mlp.{where}{part}_proj": f"ffn_{part}{suffix}"
    for where, suffix in (("", ""), ("shared_experts.", "_shexp"))
    for part in ("gate", "up", "down")
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)$")
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj$")
_CORRECTION = re.compile(r"model\.layers\.(\d+)\.mlp\.gate\.e_score_correction_bias$")


class GgufSource:
    """Named tensors of a GGUF file; everything is multiplied out.

    Attributes:
        quantization: nothing is declared; types are each tensor's own.
    """

    def __init__(self, path: Path) -> None:
        """Raises `CheckpointError` as `GgufFile`."""
        self.file = GgufFile(path)
        self.quantization = Quantization()

    def __contains__(self, name: str) -> bool:
        return _place(name)[0] in self.file.tensors

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The tensor `name` as `dtype`.

        Raises:
            CheckpointError: missing, of another shape, or of a type that cannot be dequantised.
        """
        return self.fill(name, torch.empty(shape, dtype=dtype))

    def fill(self, name: str, out: torch.Tensor) -> torch.Tensor:
        """As `get`, into a tensor of the right shape; returns it."""
        place, index = _place(name)
        if place.endswith(".attn_kv_b.weight") and place not in self.file.tensors:
            return self._fill_kv_b(place.removesuffix("kv_b.weight"), out)
        return self.file.fill(place, out, index)

    def packed(self, name: str, shape: tuple[int, ...]) -> Packed | None:
        """None: GGUF's block types are multiplied out."""
        return None

    def scalar(self, name: str) -> float | None:
        """None: there are no cache scales in GGUF."""
        return None

    def _fill_kv_b(self, prefix: str, out: torch.Tensor) -> torch.Tensor:
        """kv_b_proj [heads * (nope + v), rank] from its halves."""
        names = f"{prefix}k_b.weight", f"{prefix}v_b.weight"
        for name in names:
            if name not in self.file.tensors:
                raise DamagedCheckpoint(f"{self.file.path} has neither {prefix}kv_b.weight nor {name}")
        heads, _, nope = self.file.tensors[names[0]].shape
        v = self.file.tensors[names[1]].shape[1]
        if heads * (nope + v) != out.shape[0]:
            raise DamagedCheckpoint(
                f"{names[0]} and {names[1]} in {self.file.path} are for {heads} heads of {nope} + {v} rows: "
                f"{out.shape[0]} rows in all are needed"
            )
        rows = out.view(heads, nope + v, out.shape[1])
        up_k = self.file.fill(names[0], torch.empty(heads, out.shape[1], nope, dtype=out.dtype))
        rows[:, :nope].copy_(up_k.transpose(1, 2))
        rows[:, nope:].copy_(self.file.fill(names[1], torch.empty(heads, v, out.shape[1], dtype=out.dtype)))
        return out


def _place(name: str) -> tuple[str, int | None]:
    """GGUF's name, and the expert's number where it is one of a stack; an unknown name stays itself, which no file has."""
    if (correction := _CORRECTION.match(name)) is not None:
        return f"blk.{correction[1]}.exp_probs_b.bias", None
    outside = _OUTSIDE.get(name.removesuffix(".weight"))
    if outside is not None:
        return f"{outside}.weight", None
    layer = _LAYER.match(name)
    if layer is None:
        return name, None
    expert = _EXPERT.match(layer[2])
    if expert is not None:
        return f"blk.{layer[1]}.ffn_{expert[2]}_exps.weight", int(expert[1])
    return f"blk.{layer[1]}.{_IN_LAYER.get(layer[2], layer[2])}.{layer[3]}", None
