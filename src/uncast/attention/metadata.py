"""Metadata of a batch, checked and brought to one form: the CSR page lists of `Problem`."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch

from uncast.attention.problem import Problem, ProblemError, ProblemSpec

DEVICES = ("cpu", "cuda")


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
) -> Problem:
    csr = (kv_indptr, kv_indices, kv_len_arr)
    if block_tables is not None and seq_lens is not None and all(t is None for t in csr):
        if block_tables.dim() != 2 or (block_tables.shape[1] > 1 and block_tables.stride(1) != 1):
            raise ProblemError(
                f"block_tables must be [batch, width] with contiguous rows, not {list(block_tables.shape)}"
            )
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
        lengths = [b - a for a, b in pairwise(starts)]
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
    if spec.device not in DEVICES:
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


def check_run(problem: Problem, q_nope: torch.Tensor, q_pe: torch.Tensor, cache: torch.Tensor) -> None:
    spec = problem.spec
    for name, tensor, width in (("q_nope", q_nope, spec.head_dim_ckv), ("q_pe", q_pe, spec.head_dim_kpe)):
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
