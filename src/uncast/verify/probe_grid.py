"""Which combinations a probe looks at: keys (one row of its report each) and the specs that a key stands for."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any

from uncast.attention import ProblemSpec
from uncast.attention.verified import DECODE, EXTEND, NUMBERS, SPARSE_DECODE, SPARSE_EXTEND, VARIANTS, Variant, row_spec
from uncast.latent.layouts import LAYOUT_NAMES

DENSE_MODES, SPARSE_MODES = (DECODE, EXTEND), (SPARSE_DECODE, SPARSE_EXTEND)
MODES = (*DENSE_MODES, *SPARSE_MODES)
DTYPES = ("bfloat16", "float16", "float32")
GPU_HEADS = (1, 5, 8, 10, 12, 16, 20, 32, 64, 96, 128)
"""Heads per rank of DeepSeek, Kimi and GLM models under tensor parallelism, and the smallest."""
CPU_HEADS = (1, 16, 128)
GPU_PAGES, CPU_PAGES = (1, 16, 32, 64, 128), (1, 64)
CROSS_HEADS, CROSS_PAGE = (5, 16, 128), 64
"""On a GPU all heads meet one page size, and these heads all page sizes, unless either is given."""
CAST_HEADS, CAST_PAGES = (16, 64, 128), (64,)
"""Of casts in front of a backend: what is theirs does not depend on heads or pages."""
SPARSE_HEADS, SPARSE_PAGES = {"cuda": (5, 16, 64, 128), "cpu": (16,)}, {"cuda": (1, 64), "cpu": (64,)}
"""Of sparse attention, whose rows are gathered one by one."""
QUICK_HEADS, QUICK_PAGES = (16,), (64,)


@dataclass(frozen=True)
class ProbeKey:
    """One row: a backend and all of a spec but what `VARIANTS` runs through."""

    backend: str
    kv_layout: str
    q_data_type: str
    num_heads: int
    page_size: int
    mode: str
    device: str
    arch: int
    head_dim_ckv: int = 512
    head_dim_kpe: int = 64

    @classmethod
    def of(cls, row: dict[str, Any]) -> ProbeKey:
        return cls(**{field.name: row[field.name] for field in fields(cls)})

    def spec(self, variant: Variant) -> ProblemSpec:
        return row_spec(asdict(self), variant)

    def specs(self) -> Iterable[tuple[Variant, ProblemSpec]]:
        return ((variant, self.spec(variant)) for variant in VARIANTS)

    def row(self, status: str, reason: str, **more: Any) -> dict[str, Any]:
        """A row of the report and of the file of `uncast.attention.verified`."""
        empty: dict[str, Any] = {"variants": [], **dict.fromkeys(NUMBERS)}
        return {**asdict(self), "status": status, "reason": reason, **empty, **more}


@dataclass(frozen=True)
class Filters:
    """What the user wants to see; None is everything of the grid."""

    backends: tuple[str, ...] | None = None
    layouts: tuple[str, ...] | None = None
    heads: tuple[int, ...] | None = None
    page_sizes: tuple[int, ...] | None = None
    dtypes: tuple[str, ...] | None = None
    modes: tuple[str, ...] | None = None
    quick: bool = False


def keys(backend: str, kv_layout: str, device: str, arch: int, filters: Filters) -> list[ProbeKey]:
    """The grid of one backend and layout; `quick` keeps 16 heads, pages of 64 and the dtypes that models use."""
    heads: tuple[int, ...] = GPU_HEADS if device == "cuda" else CPU_HEADS
    pages: tuple[int, ...] = GPU_PAGES if device == "cuda" else CPU_PAGES
    dtypes: tuple[str, ...] = DTYPES
    dense = [mode for mode in DENSE_MODES if mode in (filters.modes or MODES)]
    sparse = [mode for mode in SPARSE_MODES if mode in (filters.modes or MODES) and ":" not in backend]
    if ":" in backend:
        heads, pages = CAST_HEADS, CAST_PAGES
    parts: list[tuple[tuple[int, ...], tuple[int, ...], list[str]]] = [
        (heads, pages, dense), (SPARSE_HEADS[device], SPARSE_PAGES[device], sparse),
    ]  # fmt: skip
    if filters.quick:
        dtypes = ("bfloat16",) if device == "cuda" else ("bfloat16", "float32")
        parts = [(QUICK_HEADS, QUICK_PAGES, dense + sparse)]
    wanted = [
        choice
        for some_heads, some_pages, modes in parts
        for choice in itertools.product(
            filters.dtypes or dtypes, filters.heads or some_heads, filters.page_sizes or some_pages, modes
        )
    ]
    if device == "cuda" and not (filters.heads or filters.page_sizes):
        wanted = [choice for choice in wanted if choice[1] in CROSS_HEADS or choice[2] == CROSS_PAGE]
    return [ProbeKey(backend, kv_layout, *choice, device, arch) for choice in wanted]


def layouts(filters: Filters) -> tuple[str, ...]:
    """Layouts in the order of the report: FP8 first."""
    return filters.layouts or tuple(reversed(LAYOUT_NAMES))
