"""Metadata of a batch, checked and brought to one form: the CSR page lists of `Problem`."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch

from uncast.attention.contents import check_query_starts
from uncast.attention.problem import Problem, ProblemError, ProblemSpec

DEVICES = ("cpu", "cuda")


def arch_of(device: torch.device) -> int:
    """Compute capability as major * 10 + minor, 0 on a CPU."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


def normalise(
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
    alone_rows: int = 0,
) -> Problem:
    """The problem of `MLAPagedAttention.plan`'s arguments, checked as far as shapes and dtypes go; see `contents` for values.

    Raises:
        ProblemError: inconsistent or impossible input.
    """
    spec.check()
    csr, pages_per_request = (kv_indptr, kv_indices, kv_len_arr), None
    if block_tables is not None and seq_lens is not None and all(t is None for t in csr):
        _check_tensor("block_tables", block_tables)
        if block_tables.dim() != 2 or (block_tables.shape[1] > 1 and block_tables.stride(1) != 1):
            raise ProblemError(
                f"block_tables must be [batch, width] with contiguous rows, not {list(block_tables.shape)}"
            )
        kv_len_arr, width = seq_lens, block_tables.shape[1]
        stride = block_tables.stride(0) if block_tables.shape[0] > 1 else width
        size = (block_tables.shape[0] - 1) * stride + width if block_tables.shape[0] else 0
        kv_indices = block_tables.as_strided((size,), (1,))
        if block_tables.shape[0] * stride >= 2**31:
            raise ProblemError(
                f"block_tables has {block_tables.shape[0]} rows {stride} entries apart: int32 cannot count them"
            )
        pages_per_request = width
        kv_indptr = torch.arange(block_tables.shape[0] + 1, dtype=torch.int32, device=block_tables.device) * stride
        max_kv_len = width * spec.page_size if max_kv_len is None else max_kv_len
    elif block_tables is not None or seq_lens is not None or any(t is None for t in csr):
        raise ProblemError("give either kv_indptr, kv_indices and kv_len_arr, or block_tables and seq_lens")
    assert kv_indptr is not None and kv_indices is not None and kv_len_arr is not None
    _check_metadata(qo_indptr, kv_indptr, kv_indices, kv_len_arr)
    if qo_indptr.device.type not in DEVICES:
        raise ProblemError(f"device {qo_indptr.device.type!r} is not supported: use cpu or cuda")
    if max_kv_len is None:
        max_kv_len = kv_indices.shape[0] * spec.page_size
    if total_q is None or max_q_len is None:
        starts = qo_indptr.tolist()
        check_query_starts(starts)
        total_q = starts[-1] if total_q is None else total_q
        max_q_len = max([1, *(b - a for a, b in pairwise(starts))]) if max_q_len is None else max_q_len
    for name, value in (("total_q", total_q), ("max_kv_len", max_kv_len), ("num_pages", num_pages)):
        if value is not None and not (isinstance(value, int) and value >= 0):
            raise ProblemError(f"{name} is {value}: it must be a whole number, 0 or more")
    device = qo_indptr.device
    spec = replace(spec, max_q_len=max_q_len, device=device.type, arch=arch_of(device))
    spec.check()
    _check_alone_rows(alone_rows, spec)
    return Problem(
        spec,
        qo_indptr,
        kv_indptr,
        kv_indices,
        kv_len_arr,
        total_q,
        max_kv_len,
        num_pages,
        pages_per_request,
        alone_rows,
    )


def _check_alone_rows(alone_rows: int, spec: ProblemSpec) -> None:
    if type(alone_rows) is not int or alone_rows < 0:
        raise ProblemError(f"alone_rows is {alone_rows!r}: it must be a whole number, 0 or more")
    if alone_rows and (spec.max_q_len != 1 or spec.topk or spec.batch_invariant):
        raise ProblemError(
            f"alone_rows is {alone_rows}: it is for dense attention of requests with one query that is not batch-invariant, "
            f"not for max_q_len {spec.max_q_len}, topk {spec.topk} and batch_invariant {spec.batch_invariant}"
        )


def _check_tensor(name: str, value: torch.Tensor) -> None:
    if not isinstance(value, torch.Tensor):
        raise ProblemError(f"{name} is a {type(value).__name__}: it must be an int32 torch.Tensor")


def _check_metadata(qo: torch.Tensor, indptr: torch.Tensor, indices: torch.Tensor, lens: torch.Tensor) -> None:
    named = {"qo_indptr": qo, "kv_indptr": indptr, "kv_indices": indices, "kv_len_arr": lens}
    for name, tensor in named.items():
        _check_tensor(name, tensor)
        if tensor.dtype != torch.int32:
            raise ProblemError(f"{name} is {tensor.dtype}: it must be int32")
        if tensor.dim() != 1:
            raise ProblemError(f"{name} has shape {list(tensor.shape)}: it must have one dimension")
        if tensor.device != qo.device:
            raise ProblemError(f"{name} is on {tensor.device} and qo_indptr on {qo.device}: they must share a device")
        if not tensor.is_contiguous():
            raise ProblemError(f"{name} is a strided view: it must be contiguous")
    batch = lens.shape[0]
    for name, tensor in (("qo_indptr", qo), ("kv_indptr", indptr)):
        if tensor.shape[0] != batch + 1:
            raise ProblemError(f"{name} has {tensor.shape[0]} entries: {batch} requests need {batch + 1}")
