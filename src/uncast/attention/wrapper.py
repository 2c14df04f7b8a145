"""`MLAPagedAttention`: plan once per batch, run once per layer.

attention = MLAPagedAttention(backend="auto")
plan = attention.plan(qo_indptr, block_tables=tables, seq_lens=lens, num_heads=64, page_size=64, kv_layout="fp8_ds_mla",
                      sm_scale=0.0625)
out = attention.run(q_nope, q_pe, cache)       # absorbed queries [total_q, heads, 512] and [total_q, heads, 64]
"""

from __future__ import annotations

import threading
import warnings
from dataclasses import replace

import torch

from uncast.attention.backend import Backend, RopeWriter
from uncast.attention.contents import check_contents, check_indices, check_slots
from uncast.attention.metadata import normalise
from uncast.attention.operands import check_rope, check_run, check_write
from uncast.attention.plan import AttentionPlan
from uncast.attention.problem import Problem, ProblemError, ProblemSpec
from uncast.attention.select import Refused, Selector
from uncast.attention.verified import combination, is_verified
from uncast.latent.codec import Scale, check_scale


class ClaimedCapabilityWarning(UserWarning):
    """A combination runs that has not been verified on this machine."""


_warned: set[tuple[str, ProblemSpec]] = set()


class MLAPagedAttention:
    """MLA over a paged latent cache.

    An object holds one plan and its scratch. Threads may share a plan (calls take turns on the host; on a GPU they must be on
    one stream), but a thread that plans has an object of its own: `run` refuses where another thread has planned since.

    Args:
        backend: "auto" (the fastest verified, else the first that claims it; see `uncast.attention.select`) or a registered
            name.
        strict: refuse a combination that is only claimed; `uncast probe` verifies, see `uncast.attention.verified`.
        cuda_graph: `run` will be captured: refuse, and as "auto" pass over, backends that cannot be.
    """

    def __init__(self, backend: str = "auto", *, strict: bool = False, cuda_graph: bool = False) -> None:
        self.requested, self.strict = backend, strict
        self._selector = Selector(backend, cuda_graph)
        self._impl: Backend | None = None
        self._plan: AttentionPlan | None = None
        self._lock = threading.RLock()
        self._own = threading.local()

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
        return self.problem.spec.kv_layout

    @property
    def problem(self) -> Problem:
        """The planned problem.

        Raises:
            ProblemError: called before `plan`.
        """
        if self._plan is None:
            raise ProblemError("no problem is known before plan()")
        return self._plan.problem

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
        topk: int = 0,
        alone_rows: int = 0,
        validate: bool = False,
    ) -> AttentionPlan:
        """Chooses and prepares a backend for one batch.

        Args:
            qo_indptr: int32 [batch + 1], start of each request's query rows.
            kv_indptr, kv_indices, kv_len_arr: int32 page lists (CSR) and lengths [batch]; or instead
            block_tables, seq_lens: int32 [batch, width] (rows of any stride) and [batch].
            max_q_len, max_kv_len, total_q: bounds for launch grids. Left out, they come from shapes, and `max_q_len` and
                `total_q` from `qo_indptr`'s values (a device sync when it is on a GPU; give them under graph capture).
            num_pages: pages of the pool: bounds page numbers, and byte counts of backends that touch all of it.
            topk: sparse attention: every `run` gets `indices` int32 [total_q, topk]; see `uncast.attention.problem`.
            alone_rows: for requests of one query, see `Problem`.
            validate: the debug mode. Also checks the contents of metadata here and in every `run`, and slots in every `write`:
                query starts, lengths against pages and `max_kv_len`, numbers of live pages, selected tokens. On a CPU this is
                always done. On a GPU each check syncs with the device, so it cannot be captured in a graph.
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
                lse_base=lse_base, batch_invariant=batch_invariant, topk=topk,
            ),
            max_q_len, max_kv_len, total_q, num_pages, alone_rows,
        )  # fmt: skip
        validate = validate or problem.spec.device == "cpu"
        if validate:
            check_contents(problem)
        counted = replace(problem, qo_indptr=problem.qo_indptr.clone(), kv_len_arr=problem.kv_len_arr.clone())
        with self._lock:
            impl, status = self._prepare(problem)
            self._impl = impl
            self._plan = self._own.plan = AttentionPlan(impl.name, status, problem, validate, impl, counted)
            return self._plan

    def resolve(self, spec: ProblemSpec) -> str:
        """The name of the backend that `plan` would choose for `spec`, without a warning for a claimed one.

        Raises:
            Refused: as `plan`.
        """
        return next(self._selector.able(spec)).name

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
        indices: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of one layer; shapes as `Backend.run`. `indices` go with a plan of `topk`.

        Returns:
            out [total_q, num_heads, head_dim_ckv] in q's dtype; with `return_lse`, also lse [total_q, num_heads] fp32.

        Raises:
            ProblemError: called before `plan`, or with tensors that do not match it.
        """
        with self._lock:
            plan, impl = self._current("run")
            spec = plan.problem.spec
            check_run(plan.problem, q_nope, q_pe, cache, out, lse, indices)
            check_scale(spec.layout, "ckv_scale", ckv_scale)
            check_scale(spec.layout, "kpe_scale", kpe_scale)
            if plan.validate:
                check_contents(plan.problem, cache.shape[0])
                if indices is not None:
                    check_indices(plan.problem, indices)
            out = torch.empty_like(q_nope, memory_format=torch.contiguous_format) if out is None else out
            if lse is None and (return_lse or spec.return_lse):
                lse = torch.empty(q_nope.shape[:2], dtype=torch.float32, device=q_nope.device)
            cache = cache if cache.dtype == torch.uint8 else cache.view(torch.uint8)
            impl.run(q_nope, q_pe, cache, ckv_scale=ckv_scale, kpe_scale=kpe_scale, out=out, lse=lse, indices=indices)
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
        """Stores new rows in the planned layout; see `Backend.write`. Call it before `run`: attention reads what is stored.

        Raises:
            ProblemError: called before `plan`, or with tensors that do not match it or a slot past the cache.
        """
        with self._lock:
            plan, impl = self._current("write")
            check_write(plan.problem, ckv, kpe, cache, slot_mapping, counters)
            if plan.validate:
                check_slots(slot_mapping, cache.shape[0] * cache.shape[1])
            impl.write(
                ckv, kpe, cache, slot_mapping.contiguous(),
                kv_layout=plan.problem.spec.kv_layout, ckv_scale=ckv_scale, kpe_scale=kpe_scale, counters=counters,
            )  # fmt: skip

    @property
    def fuses_rope(self) -> bool:
        """Whether the planned backend has `rope_write`: on a GPU, with the project's own writer."""
        return isinstance(self._impl, RopeWriter) and self.problem.spec.device == "cuda"

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
        ckv_scale: Scale = None,
        kpe_scale: Scale = None,
        counters: torch.Tensor | None = None,
    ) -> None:
        """Rotates new keys and stores their rows, and rotates the queries in place; see `RopeWriter.rope_write`.

        Raises:
            ProblemError: as `write`; or the planned backend does not do it, see `fuses_rope`.
        """
        with self._lock:
            plan, impl = self._current("rope_write")
            if not isinstance(impl, RopeWriter) or not self.fuses_rope:
                raise ProblemError(f"{impl.name} does not rotate as it writes: rotate first and call write()")
            check_write(plan.problem, ckv, kpe, cache, slot_mapping, counters)
            check_rope(plan.problem, q_pe, angles, slot_mapping.shape[0])
            if plan.validate:
                check_slots(slot_mapping, cache.shape[0] * cache.shape[1])
            impl.rope_write(
                ckv, kpe, q_pe, angles, cache, slot_mapping.contiguous(), interleaved=interleaved,
                kv_layout=plan.problem.spec.kv_layout, ckv_scale=ckv_scale, kpe_scale=kpe_scale, counters=counters,
            )  # fmt: skip

    def _current(self, call: str) -> tuple[AttentionPlan, Backend]:
        if self._plan is None or self._impl is None:
            raise ProblemError(f"{call}() was called before plan()")
        if getattr(self._own, "plan", self._plan) is not self._plan:
            raise ProblemError(
                f"{call}() was called after another thread's plan(): a thread that plans needs an MLAPagedAttention of its own"
            )
        return self._plan, self._impl

    def _prepare(self, problem: Problem) -> tuple[Backend, str]:
        """The backend, planned, and its status. `auto` passes over one that takes its claim back for this batch's lengths."""
        taken_back: Refused | None = None
        for impl in self._selector.able(problem.spec):
            status = self._status(impl, problem.spec)
            self._plan = None  # a backend that fails half-way holds neither plan
            try:
                impl.plan(problem)
            except Refused as refusal:
                if self.requested != "auto":
                    raise
                taken_back = refusal
                continue
            return impl, status
        assert taken_back is not None  # able() gives a backend or raises
        raise taken_back

    def _status(self, impl: Backend, spec: ProblemSpec) -> str:
        if is_verified(impl.name, spec):
            return "verified"
        sparse = f", topk {spec.topk}" if spec.topk else ""
        what = f"{impl.name} for {spec.kv_layout}, {spec.num_heads} heads, page size {spec.page_size}{sparse} on {spec.device}"
        if self.strict:
            raise Refused(
                f"{what} is claimed but not verified on this machine: run `uncast probe`, or pass strict=False"
            )
        key = (impl.name, combination(spec))
        if key not in _warned:
            _warned.add(key)
            warnings.warn(f"{what} is claimed but not verified on this machine", ClaimedCapabilityWarning, stacklevel=4)
        return "claimed"
