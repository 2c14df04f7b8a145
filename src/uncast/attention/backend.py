"""What a backend is: `capability`, `plan`, `run`, `write`, and the bytes it moves.

A backend instance belongs to one `MLAPagedAttention`; `plan` may keep state on it (scratch, launch parameters), `run` and
`write` may be captured in a CUDA graph. `capability` is asked first and answers from the spec alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass

import torch

from uncast.attention.contents import visible_rows
from uncast.attention.problem import Problem, ProblemSpec
from uncast.latent.codec import Scale, encode_rows, store_rows
from uncast.latent.layouts import row_layout


@dataclass(frozen=True)
class Capability:
    """Whether a backend can run a spec. `claimed`: its contract covers it; `refused`: `reason` says why in one sentence.

    `verified` is not a backend's to give: a probe on this machine raises `claimed` to it.
    """

    status: str
    reason: str = ""

    @classmethod
    def claimed(cls) -> Capability:
        return cls("claimed")

    @classmethod
    def refused(cls, reason: str) -> Capability:
        return cls("refused", reason)

    @property
    def ok(self) -> bool:
        return self.status != "refused"


class Backend(ABC):
    """One way to compute MLA over a paged latent cache.

    Attributes:
        name: as registered.
        copy_layout: None for a backend that reads the cache as stored; else the layout of the copy that it attends to, whose
            rounded values, not the stored ones, are what its accuracy is measured against.
        rounds_fp8: rounds the scaled values of an FP8 cache to BF16 as it reads them: measured like a copy in `bf16`, and
            `auto` takes it for 16-bit caches only.
        requires: the package it needs beyond torch, by its name in an installation; "" for none.
        cuda_graph: whether `run` may be captured in a CUDA graph and replayed.
        uniform_q_len: whether all requests of a batch must have the same number of query rows.
        splits_alone: whether it grants `Problem.alone_rows`.
        lossy: rounds queries to FP8. Such a backend is measured against wider bounds, its name says so, and `auto` never takes
            it.
        bf16_probabilities: layouts over which the probabilities P are rounded to BF16 before P x V, as tensor cores want it
            where V is BF16.
        bf16_partials: layouts over which the result of a piece of a context that is split is rounded to BF16 before pieces are
            merged, and then once more. A probe allows for these two what `uncast.verify.accuracy` derives, and for no other
            rounding on the way to the output.
    """

    name: str
    copy_layout: str | None = None
    rounds_fp8: bool = False
    requires: str = ""
    cuda_graph: bool = False
    uniform_q_len: bool = False
    splits_alone: bool = False
    lossy: bool = False
    bf16_probabilities: Collection[str] = ()
    bf16_partials: Collection[str] = ()

    def rounded_layout(self, spec: ProblemSpec) -> str | None:
        """The layout whose values attention is computed with where those are not the stored ones; else None."""
        return "bf16" if self.rounds_fp8 and spec.layout.is_fp8 else self.copy_layout

    @abstractmethod
    def capability(self, spec: ProblemSpec) -> Capability:
        """Whether this backend can run `spec`; no device access, no compile."""

    @abstractmethod
    def plan(self, problem: Problem) -> None:
        """Prepares `run` for `problem`: compiles, allocates scratch. Looks at metadata only."""

    @abstractmethod
    def run(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        cache: torch.Tensor,
        *,
        ckv_scale: Scale,
        kpe_scale: Scale,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        indices: torch.Tensor | None = None,
    ) -> None:
        """Attention of one layer.

        q_nope [total_q, num_heads, head_dim_ckv], q_pe [total_q, num_heads, head_dim_kpe] (spec.q_data_type; the last
        dimension is contiguous), cache [num_pages, page_size, row_bytes] uint8; writes out (like q_nope) and, if given, lse
        [total_q, num_heads] fp32. `indices` int32 [total_q, topk], contiguous, if `spec.topk`, else None; see
        `uncast.attention.problem`.
        """

    def write(
        self,
        ckv: torch.Tensor,
        kpe: torch.Tensor,
        cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        *,
        kv_layout: str,
        ckv_scale: Scale,
        kpe_scale: Scale,
        counters: torch.Tensor | None,
    ) -> None:
        """Stores rows: ckv [n, head_dim_ckv], kpe [n, head_dim_kpe] into slot `page * page_size + offset`; a negative slot
        is skipped. Saturates. `counters` int64 [3] gains the numbers of saturated, subnormal and NaN values.

        This is the reference writer; a backend with a fused kernel overrides it.
        """
        layout = row_layout(kv_layout, ckv.shape[-1], kpe.shape[-1])
        keep = slot_mapping >= 0
        if not bool(keep.all()):
            ckv, kpe, slot_mapping = ckv[keep], kpe[keep], slot_mapping[keep]
        rows = encode_rows(ckv, kpe, layout, ckv_scale=ckv_scale, kpe_scale=kpe_scale, counters=counters)
        store_rows(cache.view(torch.uint8), rows, slot_mapping)

    def bytes_read(self, problem: Problem) -> int:
        """Cache bytes (and bytes of copies of the cache) one `run` of `problem` reads, whatever was planned since; of sparse
        attention those of full selections, each query's read for itself.

        Reads lengths, so it may sync: never in a step.
        """
        spec = problem.spec
        if not spec.topk:
            return int(problem.kv_len_arr.sum().item()) * spec.layout.row_bytes
        visible = visible_rows(problem.qo_indptr.tolist(), problem.kv_len_arr.tolist(), spec.causal)
        return int(visible.clamp_max(spec.topk).sum()) * spec.layout.row_bytes

    def bytes_written(self, problem: Problem) -> int:
        """Bytes of copies of the cache one `run` of `problem` writes; 0 for a backend that reads it as stored."""
        return 0


class RopeWriter(Backend):
    """A backend that on a GPU rotates as it writes."""

    @abstractmethod
    def rope_write(
        self,
        ckv: torch.Tensor,
        kpe: torch.Tensor,
        q_pe: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        *,
        interleaved: bool,
        kv_layout: str,
        ckv_scale: Scale,
        kpe_scale: Scale,
        counters: torch.Tensor | None,
    ) -> None:
        """`write` of a kpe that is not rotated yet, and q_pe [n, heads, head_dim_kpe] rotated in place.

        angles: cos and sin, contiguous fp32 [n, head_dim_kpe / 2]; interleaved: channels (0, 1), (2, 3), ... turn together,
        otherwise (0, head_dim_kpe / 2), ... The results are those of rotating in fp32 and rounding before anything else.
        """
