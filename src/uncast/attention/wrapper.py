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
from uncast.attention.backend import Backend, Capability
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
        problem = _normalise(
            qo_indptr, kv_indptr, kv_indices, kv_len_arr, block_tables, seq_lens,
            ProblemSpec(
                num_heads=num_heads, head_dim_ckv=head_dim_ckv, head_dim_kpe=head_dim_kpe, page_size=page_size,
                kv_layout=kv_layout, q_data_type=q_data_type, causal=causal, sm_scale=sm_scale, return_lse=return_lse,
                lse_base=lse_base, batch_invariant=batch_invariant,
            ),
            max_q_len, max_kv_len, total_q, num_pages,
        )  # fmt: skip
        impl, status = self._select(problem.spec)
        impl.plan(problem)
        self._impl, self._plan = impl, AttentionPlan(impl.name, status, problem, impl)
        return self._plan

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
        _check_run(self._plan.problem, q_nope, q_pe, cache)
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

    def _select(self, spec: ProblemSpec) -> tuple[Backend, str]:
        if self.requested != "auto":
            impl = self._impl if self._impl is not None else registry.create(self.requested)
            capability = impl.capability(spec)
            if not capability.ok:
                raise Refused(f"{impl.name} cannot run this: {capability.reason}{_alternatives(spec, impl.name)}")
            return impl, self._status(impl, spec)
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
        return able[0], self._status(able[0], spec)

    def _status(self, impl: Backend, spec: ProblemSpec) -> str:
        if is_verified(impl.name, spec):
            return "verified"
        what = f"{impl.name} for {spec.kv_layout}, {spec.num_heads} heads, page size {spec.page_size} on {spec.device}"
        if self.strict:
            raise Refused(f"{what} is claimed but not verified on this machine: run the probe, or pass strict=False")
        key = (impl.name, combination(spec))
        if key not in _warned:
            _warned.add(key)
            warnings.warn(
                f"{what} is claimed but not verified on this machine", ClaimedCapabilityWarning, stacklevel=4
            )
        return "claimed"


def _alternatives(spec: ProblemSpec, asked: str) -> str:
    others = []
    for name in registry.AUTO_ORDER[spec.device]:
        if name != asked and registry.create(name).capability(spec).ok:
            others.append(name)
    return f"; use {' or '.join(others)}" if others else "; no other backend here can either"


def _normalise(
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor | None,
    kv_indices: torch.Tensor | None,
    kv_len_arr: torch.Tensor | None,
    block_tables: torch.Tensor | None,
    seq_lens: torch.Tensor | None,
    spec: ProblemSpec,
    max_q_len: int | None,
    max_kv_len: int | None,
    total_q: int | None,
    num_pages: int | None,
) -> Problem:
    csr = (kv_indptr, kv_indices, kv_len_arr)
    if block_tables is not None and seq_lens is not None and all(t is None for t in csr):
        if block_tables.dim() != 2 or (block_tables.shape[1] > 1 and block_tables.stride(1) != 1):
            raise ProblemError(f"block_tables must be [batch, width] with contiguous rows, not {list(block_tables.shape)}")
        kv_len_arr, width = seq_lens, block_tables.shape[1]
        stride = block_tables.stride(0) if block_tables.shape[0] > 1 else width
        size = (block_tables.shape[0] - 1) * stride + width if block_tables.shape[0] else 0
        kv_indices = block_tables.as_strided((size,), (1,))
        kv_indptr = torch.arange(block_tables.shape[0] + 1, dtype=torch.int32, device=block_tables.device) * stride
        max_kv_len = width * spec.page_size if max_kv_len is None else max_kv_len
    elif block_tables is not None or seq_lens is not None or any(t is None for t in csr):
        raise ProblemError("give either kv_indptr, kv_indices and kv_len_arr, or block_tables and seq_lens")
    assert kv_indptr is not None and kv_indices is not None and kv_len_arr is not None
    _check_metadata(qo_indptr, kv_indptr, kv_indices, kv_len_arr)
    if max_kv_len is None:
        max_kv_len = kv_indices.shape[0] * spec.page_size
    if total_q is None or max_q_len is None:
        starts = qo_indptr.tolist()
        lengths = [b - a for a, b in zip(starts, starts[1:], strict=False)]
        if starts[0] != 0 or min(lengths, default=0) < 0:
            raise ProblemError("qo_indptr must start at 0 and not decrease")
        total_q = starts[-1] if total_q is None else total_q
        max_q_len = max(1, *lengths) if max_q_len is None and lengths else max_q_len or 1
    device = qo_indptr.device
    arch = 0
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        arch = major * 10 + minor
    spec = replace(spec, max_q_len=max_q_len, device=device.type, arch=arch)
    spec.check()
    if spec.device not in registry.AUTO_ORDER:
        raise ProblemError(f"device {spec.device!r} is not supported: use cpu or cuda")
    return Problem(spec, qo_indptr, kv_indptr, kv_indices, kv_len_arr, total_q, max_kv_len, num_pages)


def _check_metadata(qo: torch.Tensor, indptr: torch.Tensor, indices: torch.Tensor, lens: torch.Tensor) -> None:
    batch = lens.shape[0] if lens.dim() == 1 else -1
    named = {"qo_indptr": qo, "kv_indptr": indptr, "kv_indices": indices, "kv_len_arr": lens}
    for name, tensor in named.items():
        if tensor.dtype != torch.int32:
            raise ProblemError(f"{name} is {tensor.dtype}: it must be int32")
        if tensor.dim() != 1:
            raise ProblemError(f"{name} has shape {list(tensor.shape)}: it must have one dimension")
        if tensor.device != qo.device:
            raise ProblemError(f"{name} is on {tensor.device} and qo_indptr on {qo.device}: they must share a device")
    for name, tensor in (("qo_indptr", qo), ("kv_indptr", indptr)):
        if tensor.shape[0] != batch + 1:
            raise ProblemError(f"{name} has {tensor.shape[0]} entries: {batch} requests need {batch + 1}")


def _check_run(problem: Problem, q_nope: torch.Tensor, q_pe: torch.Tensor, cache: torch.Tensor) -> None:
    spec = problem.spec
    for name, tensor, width in (("q_nope", q_nope, spec.head_dim_ckv), ("q_pe", q_pe, spec.head_dim_kpe)):
        if tensor.dim() != 3 or tuple(tensor.shape[1:]) != (spec.num_heads, width):
            raise ProblemError(f"{name} is {list(tensor.shape)}: the plan is for [{problem.total_q}, {spec.num_heads}, {width}]")
        if tensor.shape[0] != problem.total_q:
            raise ProblemError(f"{name} has {tensor.shape[0]} rows: the plan is for {problem.total_q}")
        if tensor.dtype != spec.q_data_type:
            raise ProblemError(f"{name} is {tensor.dtype}: the plan is for {spec.q_data_type}")
        if width > 1 and tensor.stride(-1) != 1:
            raise ProblemError(f"{name}'s last dimension is not contiguous (stride {tensor.stride(-1)})")
        if tensor.device != problem.qo_indptr.device:
            raise ProblemError(f"{name} is on {tensor.device}: the plan is for {problem.qo_indptr.device}")
    row_bytes = spec.layout.row_bytes
    if cache.dim() != 3 or cache.shape[1] != spec.page_size or cache.shape[2] * cache.element_size() != row_bytes:
        raise ProblemError(
            f"cache is {cache.dtype} {list(cache.shape)}: {spec.kv_layout} needs [num_pages, {spec.page_size}, "
            f"{row_bytes} bytes]"
        )
    if not cache.is_contiguous():
        raise ProblemError("cache must be contiguous: [num_pages, page_size, row_bytes]")
    if cache.device != problem.qo_indptr.device:
        raise ProblemError(f"cache is on {cache.device}: the plan is for {problem.qo_indptr.device}")
