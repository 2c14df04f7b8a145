"""What of a buffer came from a watched one: byte spans, and how each operation hands them on.

Rules, by kind of operation (`derived_bytes`):

| kind | examples | bytes of the output that are derived |
|---|---|---|
| views | view, select, transpose | no new buffer: they share the storage and its spans |
| contractions | mm, bmm, addmm, attention, convolution | none: the output is a product of the cache, not a copy of it |
| reductions to less than half the elements | sum, amax, logsumexp | none |
| predicates | gt, isnan: outputs of dtype bool, unless bool is how the input's bytes are viewed | none |
| makers that take only the shape | empty_like, new_zeros, rand_like | none |
| gathers and copies | index_select, gather, clone, cast, copy_ | all elements |
| concatenations | cat, stack | the elements of the derived inputs |
| everything else, unknown operations too | mul, shifts, exp, sort | as many elements as the derived inputs have, at most all |
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from uncast.verify.buffers import distinct_elements


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


CONTRACTIONS = _names("""
    mm bmm addmm baddbmm addbmm mv addmv dot vdot addr linear convolution _scaled_mm _grouped_mm
    _scaled_grouped_mm _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention
    _scaled_dot_product_fused_attention_overrideable scaled_dot_product_attention mkldnn_linear
    _weight_int8pack_mm _cdist_forward _sparse_mm _sparse_addmm sspaddmm hspmm _sparse_mm_reduce_impl
    """)
REDUCTIONS = _names("""
    sum nansum mean prod amax amin aminmax max min argmax argmin all any var std var_mean std_mean norm
    linalg_vector_norm logsumexp count_nonzero median nanmedian mode equal histc bincount
    """)
SHAPED_LIKE = _names("""
    empty_like zeros_like ones_like full_like rand_like randn_like randint_like new_empty new_empty_strided
    new_zeros new_ones new_full empty_permuted resize_as_ resize_as_sparse_
    """)
COPIES = _names("""
    copy copy_ clone contiguous _to_copy to index index_select gather take take_along_dim embedding
    masked_select repeat repeat_interleave expand_copy view_copy unfold_copy _copy_from _reshape_copy
    as_strided_copy
    """)
CONCATENATIONS = _names("""
    cat stack hstack vstack concat _foreach_copy
    """)
OVERWRITES = _names("""
    copy_ fill_ zero_ _foreach_copy_ _foreach_zero_ normal_ uniform_ random_ set_
    exponential_ cauchy_ log_normal_ geometric_ bernoulli_
    """)
"""In-place operations that do not read what they write to. `out=` variants do not either."""
PARTIAL_WRITES = _names("""
    index_put_ _index_put_impl_ index_copy_ index_fill_ scatter_ scatter_add_ scatter_reduce_ index_add_
    index_reduce_ masked_scatter_ masked_fill_ put_
    """)
"""In-place operations that write to places that other arguments name."""


@dataclass
class Spans:
    """Derived bytes of one storage: disjoint ranges with the share of derived bytes in each.

    A strided write counts with its density over its whole range, so a row-wise slice of a scratch and the rest of its rows add
    up to the scratch. Writing the same dense range again does not count twice.
    """

    ranges: list[tuple[int, int, float]] = field(default_factory=list)

    def add(self, start: int, end: int, count: float) -> None:
        """`count` derived bytes somewhere in [start, end)."""
        if end <= start or count <= 0:
            return
        density, cursor = min(1.0, count / (end - start)), start
        merged: list[tuple[int, int, float]] = []
        for a, b, share in self.ranges:
            if b <= start or a >= end:
                merged.append((a, b, share))
                continue
            merged.append((a, min(b, start), share))
            merged.append((cursor, a, density))
            low, high = max(a, start), min(b, end)
            merged.append((low, high, min(1.0, share + density)))
            merged.append((max(a, end), b, share))
            cursor = high
        merged.append((cursor, end, density))
        self.ranges = _joined(merged)

    def clear(self, start: int, end: int) -> None:
        """[start, end) was overwritten with something else."""
        kept = []
        for a, b, share in self.ranges:
            kept += [(a, min(b, start), share), (max(a, end), b, share)]
        self.ranges = _joined(kept)

    def touches(self, start: int, end: int) -> bool:
        return any(a < end and b > start for a, b, _ in self.ranges)

    @property
    def total(self) -> int:
        return round(sum((b - a) * share for a, b, share in self.ranges))


def _joined(ranges: list[tuple[int, int, float]]) -> list[tuple[int, int, float]]:
    joined: list[tuple[int, int, float]] = []
    for a, b, share in sorted(r for r in ranges if r[0] < r[1]):
        if joined and joined[-1][1] == a and joined[-1][2] == share:
            joined[-1] = (joined[-1][0], b, share)
        else:
            joined.append((a, b, share))
    return joined


def derived_bytes(name: str, output: torch.Tensor, derived: list[torch.Tensor]) -> int:
    """How many bytes of `output` come from `derived`, the tensors with derived bytes that operation `name` read."""
    if not derived or name in SHAPED_LIKE:
        return 0
    if output.dtype == torch.bool and all(tensor.dtype != torch.bool for tensor in derived):
        return 0
    base = name.removesuffix("_")
    if name in CONTRACTIONS or base in CONTRACTIONS:
        return 0
    elements = sum(distinct_elements(tensor) for tensor in derived)
    if base in REDUCTIONS and 2 * output.numel() < max(tensor.numel() for tensor in derived):
        return 0
    if name in COPIES:
        elements = output.numel()
    elif name in CONCATENATIONS:
        elements = sum(tensor.numel() for tensor in derived)
    return min(elements, output.numel()) * output.element_size()


def schema_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Any, Any]]:
    """(schema argument, value) of each argument that was given."""
    positional = list(zip(func._schema.arguments, args, strict=False))
    named = {argument.name: argument for argument in func._schema.arguments}
    return positional + [(named[key], value) for key, value in kwargs.items() if key in named]
