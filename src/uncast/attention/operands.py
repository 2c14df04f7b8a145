"""Checks of the tensors of `run` and `write` against the plan: shapes, dtypes, devices, strides; never a device sync."""

from __future__ import annotations

import torch

from uncast.attention.problem import QUERY_DTYPES, Problem, ProblemError


def check_run(
    problem: Problem,
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    cache: torch.Tensor,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    indices: torch.Tensor | None = None,
) -> None:
    """Raises `ProblemError` in one sentence if the tensors of `MLAPagedAttention.run` do not fit the plan."""
    spec = problem.spec
    for name, tensor, width in (("q_nope", q_nope, spec.head_dim_ckv), ("q_pe", q_pe, spec.head_dim_kpe)):
        _check_rows(problem, name, tensor, width)
    check_cache(problem, cache)
    _check_indices(problem, indices)
    if out is not None:
        _check_rows(problem, "out", out, spec.head_dim_ckv)
    if lse is not None:
        _check_tensor("lse", lse, problem.qo_indptr.device)
        if lse.dtype != torch.float32 or tuple(lse.shape) != (problem.total_q, spec.num_heads):
            raise ProblemError(
                f"lse is {lse.dtype} {list(lse.shape)}: the plan is for torch.float32 "
                f"[{problem.total_q}, {spec.num_heads}]"
            )
    inputs = [("q_nope", q_nope), ("q_pe", q_pe), ("cache", cache)]
    if indices is not None:
        inputs.append(("indices", indices))
    for name, target in (("out", out), ("lse", lse)):
        if target is not None:
            _check_written(name, target, inputs)
            inputs.append((name, target))


def check_cache(problem: Problem, cache: torch.Tensor) -> None:
    """Raises `ProblemError` unless cache is contiguous [num_pages, page_size, row_bytes] bytes in the planned layout."""
    spec = problem.spec
    row_bytes = spec.layout.row_bytes
    _check_tensor("cache", cache, problem.qo_indptr.device)
    if cache.dim() != 3 or cache.shape[1] != spec.page_size or cache.shape[2] * cache.element_size() != row_bytes:
        raise ProblemError(
            f"cache is {cache.dtype} {list(cache.shape)}: {spec.kv_layout} needs [num_pages, {spec.page_size}, "
            f"{row_bytes} bytes]"
        )
    if not cache.is_contiguous():
        raise ProblemError("cache must be contiguous: [num_pages, page_size, row_bytes]")
    if problem.num_pages is not None and cache.shape[0] != problem.num_pages:
        raise ProblemError(f"cache has {cache.shape[0]} pages: the plan is for {problem.num_pages}")


def check_write(
    problem: Problem,
    ckv: torch.Tensor,
    kpe: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    counters: torch.Tensor | None,
) -> None:
    """Raises `ProblemError` in one sentence if the tensors of `MLAPagedAttention.write` do not fit the plan."""
    spec, device = problem.spec, problem.qo_indptr.device
    check_cache(problem, cache)
    _check_tensor("slot_mapping", slot_mapping, device)
    if slot_mapping.dim() != 1 or slot_mapping.dtype not in (torch.int32, torch.int64):
        raise ProblemError(
            f"slot_mapping is {slot_mapping.dtype} {list(slot_mapping.shape)}: it must be int64 or int32 [n]"
        )
    rows = slot_mapping.shape[0]
    for name, tensor, width in (("ckv", ckv, spec.head_dim_ckv), ("kpe", kpe, spec.head_dim_kpe)):
        _check_tensor(name, tensor, device)
        if tuple(tensor.shape) != (rows, width) or tensor.dtype not in QUERY_DTYPES:
            raise ProblemError(
                f"{name} is {tensor.dtype} {list(tensor.shape)}: the plan is for [{rows}, {width}] (a row for each slot) "
                "of bfloat16, float16 or float32"
            )
    if counters is not None:
        _check_tensor("counters", counters, device)
        if counters.dtype != torch.int64 or tuple(counters.shape) != (3,) or not counters.is_contiguous():
            raise ProblemError(f"counters is {counters.dtype} {list(counters.shape)}: it must be contiguous int64 [3]")


def check_rope(problem: Problem, q_pe: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], rows: int) -> None:
    """Raises `ProblemError` if the queries and angles of `MLAPagedAttention.rope_write` do not fit `rows` rows of the plan."""
    spec, device = problem.spec, problem.qo_indptr.device
    _check_tensor("q_pe", q_pe, device)
    if q_pe.dim() != 3 or tuple(q_pe.shape) != (rows, spec.num_heads, spec.head_dim_kpe) or q_pe.stride(-1) != 1:
        raise ProblemError(
            f"q_pe is {list(q_pe.shape)}: the plan is for [{rows}, {spec.num_heads}, {spec.head_dim_kpe}], channels contiguous"
        )
    for name, part in zip(("cos", "sin"), angles, strict=True):
        _check_tensor(name, part, device)
        wanted = (rows, spec.head_dim_kpe // 2)
        if tuple(part.shape) != wanted or part.dtype != torch.float32 or not part.is_contiguous():
            raise ProblemError(
                f"{name} is {part.dtype} {list(part.shape)}: contiguous torch.float32 {list(wanted)} is needed"
            )


def _check_indices(problem: Problem, indices: torch.Tensor | None) -> None:
    topk = problem.spec.topk
    if indices is None or topk == 0:
        if indices is not None:
            raise ProblemError("indices were given, but the plan is for dense attention: pass topk to plan()")
        if topk:
            raise ProblemError(f"no indices were given: the plan is for topk {topk}")
        return
    _check_tensor("indices", indices, problem.qo_indptr.device)
    if indices.dtype != torch.int32 or tuple(indices.shape) != (problem.total_q, topk) or not indices.is_contiguous():
        raise ProblemError(
            f"indices is {indices.dtype} {list(indices.shape)}: the plan is for contiguous torch.int32 "
            f"[{problem.total_q}, {topk}]"
        )


def _check_tensor(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ProblemError(f"{name} is a {type(tensor).__name__}: it must be a torch.Tensor")
    if tensor.device != device:
        raise ProblemError(f"{name} is on {tensor.device}: the plan is for {device}")


def _check_rows(problem: Problem, name: str, tensor: torch.Tensor, width: int) -> None:
    """Queries and output: [total_q, num_heads, width] in the queries' dtype, channels contiguous."""
    spec = problem.spec
    _check_tensor(name, tensor, problem.qo_indptr.device)
    if tensor.dim() != 3 or tuple(tensor.shape[1:]) != (spec.num_heads, width):
        raise ProblemError(
            f"{name} is {list(tensor.shape)}: the plan is for [{problem.total_q}, {spec.num_heads}, {width}]"
        )
    if tensor.shape[0] != problem.total_q:
        raise ProblemError(f"{name} has {tensor.shape[0]} rows: the plan is for {problem.total_q}")
    if tensor.dtype != spec.q_data_type:
        raise ProblemError(f"{name} is {tensor.dtype}: the plan is for {spec.q_data_type}")
    if width > 1 and tensor.stride(-1) != 1:
        raise ProblemError(f"{name}'s last dimension is not contiguous (stride {tensor.stride(-1)})")


def _check_written(name: str, target: torch.Tensor, others: list[tuple[str, torch.Tensor]]) -> None:
    """`target` must hold each element once and share no bytes with what is read or written beside it."""
    if any(stride == 0 and size > 1 for stride, size in zip(target.stride(), target.shape, strict=True)):
        raise ProblemError(f"{name} is an expanded view: several of its rows are the same memory")
    begin, end = _span(target)
    for other, tensor in others:
        first, last = _span(tensor)
        if begin < last and first < end:
            raise ProblemError(f"{name} shares memory with {other}: give it a buffer of its own")


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses from the first to past the last byte; an empty tensor has none."""
    if tensor.numel() == 0:
        return 0, 0
    extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    begin = tensor.data_ptr()
    return begin, begin + extent * tensor.element_size()
