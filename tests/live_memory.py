"""Peak bytes of tensors created inside a `with` block, counted per storage as operations return them."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Tracks storages that appear inside the block until they are freed.

    Attributes:
        peak: the largest number of bytes alive at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self.alive and key not in known:
                    self.alive[key] = storage.nbytes()
                    weakref.finalize(storage, self.alive.pop, key, None)
        self.peak = max(self.peak, sum(self.alive.values()))
        return result
