"""What `gather_cast` and `pool_cast` share: an inner backend over a BF16 copy of FP8 rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

import torch

from uncast.attention.backend import Backend, Capability
from uncast.attention.problem import ProblemSpec
from uncast.backends._write import FusedWriter
from uncast.latent.codec import Scale, decode_rows
from uncast.latent.layouts import LAYOUT_NAMES, RowLayout, row_layout

CHUNK_ROWS = 4096
_FP8_LAYOUTS = tuple(name for name in LAYOUT_NAMES if row_layout(name).is_fp8)


class RecastBackend(FusedWriter):
    """What both are: an inner backend, its traits, and no CUDA graph (pages are counted when planned)."""

    copy_layout = "bf16"
    wrapper: ClassVar[str]

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.name = f"{self.wrapper}:{inner.name}"
        self.requires, self.uniform_q_len, self.lossy = inner.requires, inner.uniform_q_len, inner.lossy
        self.bf16_probabilities = _FP8_LAYOUTS if "bf16" in inner.bf16_probabilities else ()
        self.bf16_partials = _FP8_LAYOUTS if "bf16" in inner.bf16_partials else ()
        self._scratch: torch.Tensor | None = None


def inner_spec(spec: ProblemSpec) -> ProblemSpec:
    """The problem the inner backend sees: the same over `bf16` rows."""
    return replace(spec, kv_layout="bf16")


def recast_capability(name: str, inner: Callable[[ProblemSpec], Capability], spec: ProblemSpec) -> Capability:
    """Whether a cast in front of an inner backend with this capability can run `spec`."""
    if not spec.layout.is_fp8:
        return Capability.refused(f"{name} casts FP8 rows to BF16, and layout {spec.kv_layout} is not FP8")
    return inner(inner_spec(spec))


def cast_rows(rows: torch.Tensor, layout: RowLayout, ckv_scale: Scale, kpe_scale: Scale, out: torch.Tensor) -> None:
    """Writes the BF16 values of rows (uint8 [n, row_bytes]) to out (uint8 [n, bf16 row_bytes]), in chunks."""
    rank = layout.kv_lora_rank
    target = out.view(torch.bfloat16)
    for start in range(0, rows.shape[0], CHUNK_ROWS):
        part = slice(start, start + CHUNK_ROWS)
        ckv, kpe = decode_rows(rows[part], layout, ckv_scale=ckv_scale, kpe_scale=kpe_scale)
        target[part, :rank] = ckv
        target[part, rank:] = kpe


def bf16_row_bytes(spec: ProblemSpec) -> int:
    return row_layout("bf16", spec.head_dim_ckv, spec.head_dim_kpe).row_bytes
