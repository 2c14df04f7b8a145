"""The pool of a runner: what it needs room for, and what is said where there is none."""

from __future__ import annotations

import torch

from uncast.latent.index_keys import IndexLayout, index_layout, matching_layout
from uncast.latent.layouts import RowLayout
from uncast.latent.pool import PagedPool
from uncast.models.config import ModelConfig

_NO_MEMORY = ("allocate memory", "out of memory", "overflow", "Overflow")


class RunnerError(RuntimeError):
    """The runner cannot be set up for this model, layout or backend; one sentence."""


def require_current(device: torch.device) -> None:
    """Kernels are launched on the current GPU.

    Raises:
        RunnerError: `device` is another one.
    """
    if device.type == "cuda" and device.index not in (None, torch.cuda.current_device()):
        now = f"the current device is cuda:{torch.cuda.current_device()}"
        raise RunnerError(f"the model is on {device} and {now}: call torch.cuda.set_device({device.index}) first")


def make_pool(
    config: ModelConfig,
    layout: RowLayout,
    num_pages: int,
    page_size: int,
    device: torch.device,
    keys: IndexLayout | None,
    more_layers: int = 0,
) -> PagedPool:
    """A pool for the model's rows and, with an indexer, its keys.

    Raises:
        RunnerError: it does not fit into memory.
    """
    try:
        return PagedPool(
            layout,
            num_layers=config.num_layers + more_layers,
            num_pages=num_pages,
            page_size=page_size,
            device=device,
            index_layout=keys,
            num_index_layers=0 if config.indexer is None else len(config.indexer.full_layers),
        )
    except (MemoryError, OverflowError, RuntimeError, TypeError) as error:
        # torch has a class for this on a GPU only, and refuses sizes beyond 64 bits in several ways.
        if isinstance(error, RuntimeError) and not any(words in str(error) for words in _NO_MEMORY):
            raise
        tokens = num_pages * page_size
        raise RunnerError(f"a KV pool of {tokens} tokens does not fit into memory: ask for fewer") from None


def index_layout_of(name: str, rows: RowLayout, head_dim: int) -> IndexLayout:
    """The layout of index keys beside `rows`; `auto` goes with them."""
    return matching_layout(rows, head_dim) if name == "auto" else index_layout(name, head_dim)
