"""`AttentionPlan`: what `MLAPagedAttention.plan` decided, and the cache bytes of one layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from uncast.attention.backend import Backend
from uncast.attention.contents import visible_rows
from uncast.attention.problem import Problem


@dataclass(frozen=True)
class AttentionPlan:
    """What `plan` decided. Byte counts are per layer and of the lengths at planning: refilled buffers and later plans do not
    change them. They are lazy and read lengths from the device, so ask outside a step. Of sparse attention they are bounds:
    those of selections without empty entries, in which no two queries of a request share a token.

    Attributes:
        backend: the name of the backend that will run.
        status: "verified" or "claimed".
        problem: spec and metadata.
        validate: whether `run` and `write` check the contents of their metadata, too; always on a CPU.
    """

    backend: str
    status: str
    problem: Problem
    validate: bool
    _impl: Backend
    _counted: Problem

    def counting(self, problem: Problem) -> AttentionPlan:
        """The same plan whose byte counts are of `problem`'s lengths, as for buffers that were refilled since. If its tensors
        are on the host, no count waits for a device."""
        return replace(self, _counted=problem)

    @property
    def counted(self) -> Problem:
        """The problem whose lengths the byte counts are of."""
        return self._counted

    @cached_property
    def bytes_needed(self) -> int:
        """Cache bytes that attention over this batch must read once: live (sparse: selected) rows times row_bytes."""
        return needed_rows(self._counted) * self._counted.spec.layout.row_bytes

    @cached_property
    def bytes_read(self) -> int:
        """Bytes of the cache, and of copies of it, that the backend reads."""
        return self._impl.bytes_read(self._counted)

    @cached_property
    def bytes_written(self) -> int:
        """Bytes of copies of the cache that the backend writes; 0 when the cache is read as stored."""
        return self._impl.bytes_written(self._counted)

    @property
    def copy_layout(self) -> str | None:
        """The layout of the copy that the backend attends to; None when it reads the cache as stored."""
        return self._impl.copy_layout

    @property
    def rounded_layout(self) -> str | None:
        """The layout whose values attention is computed with where those are not the stored ones; else None."""
        return self._impl.rounded_layout(self.problem.spec)


def needed_rows(problem: Problem) -> int:
    """Rows to be read once: of each request all live ones or, where that is less, as many as its queries can select."""
    lengths, topk = problem.kv_len_arr.tolist(), problem.spec.topk
    if not topk:
        return sum(lengths)
    starts = problem.qo_indptr.tolist()
    selected = visible_rows(starts, lengths, problem.spec.causal).clamp_max(topk)
    sums = [int(selected[first:last].sum()) for first, last in pairwise(starts)]
    return sum(map(min, lengths, sums))
