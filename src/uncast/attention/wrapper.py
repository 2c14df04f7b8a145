"""`MLAPagedAttention`: plan once per batch, run once per layer.

attention = MLAPagedAttention(backend="auto")
plan = attention.plan(qo_indptr, block_tables=tables, seq_lens=lens, num_heads=64, page_size=64, kv_layout="fp8_ds_mla",
                      sm_scale=0.0625)
out = attention.run(q_nope, q_pe, cache)       # absorbed queries [total_q, heads, 512] and [total_q, heads, 64]
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from uncast.attention import registry
from uncast.attention.backend import Backend
from uncast.attention.metadata import check_run, normalise
from uncast.attention.problem import Problem, ProblemError, ProblemSpec
from uncast.latent.codec import Scale, check_scale


class Refused(ValueError):
    """No backend (or not the one asked for) can run the problem; the message is one sentence with the alternatives."""


class ClaimedCapabilityWarning(UserWarning):
    """A combination runs that has not been verified on this machine."""


_verified: set[tuple[str, ProblemSpec]] = set()
_warned: set[tuple[str, ProblemSpec]] = set()


def combination(spec: ProblemSpec) -> ProblemSpec:
    """The spec without what does not select code: scale and, beyond decode or not, the query length."""
    return replace(spec, sm_scale=1.0, max_q_len=min(spec.max_q_len, 2), return_lse=False)


def mark_verified(backend: str, spec: ProblemSpec) -> None:
    """Records that `backend` ran `spec` on this machine and matched the oracle."""
    _verified.add((backend, combination(spec)))


def is_verified(backend: str, spec: ProblemSpec) -> bool:
    return (backend, combination(spec)) in _verified


@dataclass(frozen=True)
class AttentionPlan:
    """What `plan` decided. Byte counts are per layer and lazy: they read lengths from the device, so ask outside a step.

    Attributes:
        backend: the name of the backend that will run.
        status: "verified" or "claimed".
        problem: spec and metadata.
    """

    backend: str
    status: str
    problem: Problem
    _impl: Backend

    @cached_property
    def bytes_needed(self) -> int:
        """Cache bytes that attention over this batch must read once: live rows times row_bytes."""
        return int(self.problem.kv_len_arr.sum().item()) * self.problem.spec.layout.row_bytes

    @cached_property
    def bytes_read(self) -> int:
        """Bytes of the cache, and of copies of it, that the backend reads."""
        return self._impl.bytes_read(self.problem)

    @cached_property
    def bytes_written(self) -> int:
        """Bytes of copies of the cache that the backend writes; 0 when the cache is read as stored."""
        return self._impl.bytes_written(self.problem)


class MLAPagedAttention:
    """MLA over a paged latent cache.

    Args:
        backend: "auto" (the first that can, verified before claimed) or a registered name.
        strict: refuse a combination that is only claimed.
    """

    def __init__(self, backend: str = "auto", *, strict: bool = False) -> None:
        self.requested, self.strict = backend, strict
        self._impl: Backend | None = None
        self._plan: AttentionPlan | None = None
        if backend != "auto":
            self._impl = registry.create(backend)

    @property
    def last_plan(self) -> AttentionPlan | None:
        """What the last `plan` decided, None before the first."""
        return self._plan

    @property
    def kv_layout(self) -> str:
        """The planned layout.

        Raises:
            ProblemError: called before `plan`.
        """
        if self._plan is None:
            raise ProblemError("no layout is known before plan()")
        return self._plan.problem.spec.kv_layout

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        *,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        num_heads: int,
        head_dim_ckv: int = 512,
        head_dim_kpe: int = 64,
        page_size: int = 64,
        causal: bool = True,
        sm_scale: float,
        q_data_type: torch.dtype = torch.bfloat16,
        kv_layout: str = "fp8_ds_mla",
        max_q_len: int | None = None,
        max_kv_len: int | None = None,
        total_q: int | None = None,
        num_pages: int | None = None,
        return_lse: bool = False,
        lse_base: str = "2",
        batch_invariant: bool = False,
    ) -> AttentionPlan:
        """Chooses and prepares a backend for one batch.

        Args:
            qo_indptr: int32 [batch + 1], start of each request's query rows.
            kv_indptr, kv_indices, kv_len_arr: int32 page lists (CSR) and lengths [batch]; or instead
            block_tables, seq_lens: int32 [batch, width] (rows of any stride) and [batch].
            max_q_len, max_kv_len, total_q: bounds for launch grids. Left out, they come from shapes, and `max_q_len` and
                `total_q` from `qo_indptr`'s values (a device sync when it is on a GPU; give them under graph capture).
            num_pages: pages of the pool, for byte counts of backends that touch all of it.
            others: see `ProblemSpec`.

        Raises:
            ProblemError: inconsistent or impossible input.
            Refused: the backend cannot run it; one sentence with the alternatives.
        """
        problem = normalise(
            qo_indptr, kv_indptr, kv_indices, kv_len_arr, block_tables, seq_lens,
            ProblemSpec(
                num_heads=num_heads, head_dim_ckv=head_dim_ckv, head_dim_kpe=head_dim_kpe, page_size=page_size,
                kv_layout=kv_layout, q_data_type=q_data_type, causal=causal, sm_scale=sm_scale, return_lse=return_lse,
                lse_base=lse_base, batch_invariant=batch_invariant,
            ),
            max_q_len, max_kv_len, total_q, num_pages,
        )  # fmt: skip
        impl = self._select(problem.spec)
        status = self._status(impl, problem.spec)
        impl.plan(problem)
        self._impl, self._plan = impl, AttentionPlan(impl.name, status, problem, impl)
        return self._plan

    def resolve(self, spec: ProblemSpec) -> str:
        """The name of the backend that `plan` would choose for `spec`, without a warning for a claimed one.

        Raises:
            Refused: as `plan`.
        """
        return self._select(spec).name

    def run(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        cache: torch.Tensor,
        *,
        ckv_scale: Scale = None,
        kpe_scale: Scale = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of one layer; shapes as `Backend.run`.

        Returns:
            out [total_q, num_heads, head_dim_ckv] in q's dtype; with `return_lse`, also lse [total_q, num_heads] fp32.

        Raises:
            ProblemError: called before `plan`, or with tensors that do not match it.
        """
        if self._plan is None or self._impl is None:
            raise ProblemError("run() was called before plan()")
        spec = self._plan.problem.spec
        check_run(self._plan.problem, q_nope, q_pe, cache)
        check_scale(spec.layout, "ckv_scale", ckv_scale)
        check_scale(spec.layout, "kpe_scale", kpe_scale)
        out = torch.empty_like(q_nope, memory_format=torch.contiguous_format) if out is None else out
        if lse is None and (return_lse or spec.return_lse):
            lse = torch.empty(q_nope.shape[:2], dtype=torch.float32, device=q_nope.device)
        cache = cache if cache.dtype == torch.uint8 else cache.view(torch.uint8)
        self._impl.run(q_nope, q_pe, cache, ckv_scale=ckv_scale, kpe_scale=kpe_scale, out=out, lse=lse)
        if return_lse or spec.return_lse:
            assert lse is not None
            return out, lse
        return out

    def write(
        self,
        ckv: torch.Tensor,
        kpe: torch.Tensor,
        cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        *,
        ckv_scale: Scale = None,
        kpe_scale: Scale = None,
        counters: torch.Tensor | None = None,
    ) -> None:
        """Stores new rows in the planned layout; see `Backend.write`. Call it before `run`: attention reads what is stored."""
        if self._plan is None or self._impl is None:
            raise ProblemError("write() was called before plan()")
        self._impl.write(
            ckv, kpe, cache, slot_mapping,
            kv_layout=self._plan.problem.spec.kv_layout, ckv_scale=ckv_scale, kpe_scale=kpe_scale, counters=counters,
        )  # fmt: skip

    def _select(self, spec: ProblemSpec) -> Backend:
        if self.requested != "auto":
            impl = self._impl if self._impl is not None else registry.create(self.requested)
            capability = impl.capability(spec)
            if not capability.ok:
                raise Refused(f"{impl.name} cannot run this: {capability.reason}{_alternatives(spec, impl.name)}")
            return impl
        reasons: list[str] = []
        able: list[Backend] = []
        for name in registry.AUTO_ORDER[spec.device]:
            impl = self._impl if self._impl is not None and self._impl.name == name else registry.create(name)
            capability = impl.capability(spec)
            if capability.ok:
                able.append(impl)
            else:
                reasons.append(f"{name}: {capability.reason}")
        if not able:
            raise Refused(f"no backend can run this on {spec.device} ({'; '.join(reasons)})")
        able.sort(key=lambda impl: not is_verified(impl.name, spec))
        return able[0]

    def _status(self, impl: Backend, spec: ProblemSpec) -> str:
        if is_verified(impl.name, spec):
            return "verified"
        what = f"{impl.name} for {spec.kv_layout}, {spec.num_heads} heads, page size {spec.page_size} on {spec.device}"
        if self.strict:
            raise Refused(f"{what} is claimed but not verified on this machine: run the probe, or pass strict=False")
        key = (impl.name, combination(spec))
        if key not in _warned:
            _warned.add(key)
            warnings.warn(f"{what} is claimed but not verified on this machine", ClaimedCapabilityWarning, stacklevel=3)
        return "claimed"


def _alternatives(spec: ProblemSpec, asked: str) -> str:
    others = []
    for name in registry.AUTO_ORDER[spec.device]:
        if name != asked and registry.create(name).capability(spec).ok:
            others.append(name)
    return f"; use {' or '.join(others)}" if others else "; no other backend here can either"
