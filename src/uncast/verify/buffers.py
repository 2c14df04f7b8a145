"""Which memory a tensor stands for: its parts, the storage that identifies it, and the addresses it covers."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """All tensors in nested arguments; of a sparse one, the tensors that hold its indices and values."""
    return [part for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) for part in _parts(leaf)]


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in _COMPRESSED:
        return [*(getattr(tensor, name)() for name in _COMPRESSED[tensor.layout]), tensor.values()]
    return [tensor]


def anchor(tensor: torch.Tensor) -> torch.UntypedStorage | torch.Tensor:
    """What lives as long as the memory: the storage, or the tensor itself where its layout has none (oneDNN's)."""
    try:
        return tensor.untyped_storage()
    except NotImplementedError:
        return tensor


def key_of(tensor: torch.Tensor) -> int:
    """A number that tensors of the same storage share while it lives."""
    return key_of_anchor(anchor(tensor))


def key_of_anchor(holder: torch.UntypedStorage | torch.Tensor) -> int:
    """`key_of` the tensors with this anchor."""
    return id(holder) if isinstance(holder, torch.Tensor) else int(holder._cdata)


def addresses(holder: torch.UntypedStorage | torch.Tensor) -> tuple[int, int]:
    """First address and the one after the last; (0, 0) if the memory has none (meta and fake tensors, oneDNN's)."""
    if isinstance(holder, torch.Tensor):
        return 0, 0
    try:
        start = holder.data_ptr()
    except RuntimeError:  # how torch says that there is none
        return 0, 0
    return (start, start + holder.nbytes()) if start else (0, 0)


def byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and the byte after the last of a tensor in its storage."""
    if not tensor.numel():
        return 0, 0
    size = tensor.element_size()
    if isinstance(anchor(tensor), torch.Tensor):
        return 0, tensor.numel() * size
    start = int(tensor.storage_offset()) * size
    reach = sum((int(extent) - 1) * int(stride) for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (reach + 1) * size


def distinct_elements(tensor: torch.Tensor) -> int:
    """Elements without those that an expanded dimension repeats."""
    if isinstance(anchor(tensor), torch.Tensor):
        return tensor.numel()
    count = 1
    for extent, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= extent if stride or not extent else 1
    return count
