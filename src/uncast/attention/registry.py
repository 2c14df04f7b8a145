"""Backends by name. A backend is registered by a dotted path and imported on first use, so a missing extra costs nothing.

`gather_cast:<inner>` and `pool_cast:<inner>` are built around another backend's name.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from typing import Any

from uncast.attention.backend import Backend

_BACKENDS: dict[str, str] = {
    "flashinfer_cutlass": "uncast.backends.flashinfer_dense:FlashInferCutlass",
    "flashinfer_fa2": "uncast.backends.flashinfer:FlashInferFa2",
    "flashinfer_fa3": "uncast.backends.flashinfer:FlashInferFa3",
    "flashinfer_trtllm_gen": "uncast.backends.flashinfer_dense:FlashInferTrtllmGen",
    "flashinfer_xqa": "uncast.backends.flashinfer_dense:FlashInferXqa",
    "flashmla": "uncast.backends.flashmla:FlashMLABackend",
    "flashmla_lossy_q": "uncast.backends.flashmla:FlashMLALossyQ",
    "native": "uncast.backends.native:NativeBackend",
    "torch_cpu": "uncast.backends.torch_cpu:TorchCpuBackend",
}
_WRAPPERS: dict[str, str] = {
    "gather_cast": "uncast.backends.gather_cast:GatherCastBackend",
    "pool_cast": "uncast.backends.pool_cast:PoolCastBackend",
}
AUTO_ORDER = {
    "cuda": ("flashinfer_trtllm_gen", "native", "flashmla"),
    "cpu": ("torch_cpu",),
}
"""What `auto` may take on each device, fastest first as far as is known before a probe. None of them casts the cache or rounds
queries. `flashinfer_trtllm_gen` claims sm_10x only, where it is tuned for the chip and `native` is portable code. On an H200
`native` is the only one that reads FP8 unrounded; over BF16 caches `flashmla` is faster (`benchmarks/results/probe-h200.json`),
so that a probe with it installed makes `auto` take it there. FlashInfer's fa2 and fa3 miss the default accuracy where contexts
are split (2.9e-3 in that probe), so they are taken by name only."""


class UnknownBackend(ValueError):
    """A backend name that is not registered, or one whose package is not installed."""


def register(name: str, path: str) -> None:
    """Adds a backend: `path` is "package.module:Class", a subclass of `Backend`.

    Raises:
        ValueError: the name has a colon, or is auto or one of uncast's own, whose verified rows another class would inherit.
    """
    if ":" in name:
        raise ValueError(f"a backend name has no colon: {name!r}")
    if name == "auto" or (is_own(name) and _BACKENDS[name] != path):
        raise ValueError(f"{name!r} is a name of uncast's own: choose another")
    _BACKENDS[name] = path


def is_own(name: str) -> bool:
    """Whether the backend `name`, or the one inside a wrapped form, is of this package."""
    return _BACKENDS.get(name.rpartition(":")[2], "").startswith("uncast.")


def names() -> list[str]:
    """Registered names, wrapped forms included."""
    return [*_BACKENDS, *(f"{wrapper}:{inner}" for wrapper in _WRAPPERS for inner in _BACKENDS)]


def choices() -> str:
    """The names for a sentence; wrapped forms by their rule."""
    wrapped = " or ".join(f"{wrapper}:NAME" for wrapper in _WRAPPERS)
    return f"{', '.join(_BACKENDS)} (or {wrapped} of one of them)"


def paths() -> dict[str, str]:
    """Registered backends and their dotted paths, without wrapped forms."""
    return dict(_BACKENDS)


def backend_class(name: str) -> type[Backend]:
    """The class registered as `name` (no wrapped form), not made: its library need not be installed.

    Raises:
        UnknownBackend: as `create`.
    """
    if name not in _BACKENDS:
        raise UnknownBackend(f"unknown attention backend {name!r}: use one of {', '.join(_BACKENDS)}")
    found = _find(name, _BACKENDS[name])
    if not (isinstance(found, type) and issubclass(found, Backend)):
        raise UnknownBackend(f"{name!r} is registered as {_BACKENDS[name]}, which is not a class of attention Backend")
    return found


def asked_of(name: str) -> Backend | type[Backend]:
    """What `capability` can be asked of: the class where that is a class method, so that no library is imported; else an
    instance.

    Raises:
        UnknownBackend: as `create`.
    """
    if name in _BACKENDS:
        made = backend_class(name)
        if inspect.ismethod(made.capability):
            return made
    return create(name)


def is_installed(name: str) -> bool:
    """Whether the package that the backend `name` requires is installed; nothing is imported."""
    try:
        package = backend_class(name).requires
        return not package or bool(importlib.metadata.version(package))
    except (UnknownBackend, importlib.metadata.PackageNotFoundError):
        return False


def create(name: str) -> Backend:
    """A new instance of the backend `name`.

    Raises:
        UnknownBackend: in one sentence, with the known names.
    """
    wrapper, _, inner = name.partition(":") if isinstance(name, str) else ("", "", "")
    if inner and wrapper in _WRAPPERS:
        if inner not in _BACKENDS:
            raise UnknownBackend(
                f"attention backend {name!r}: {wrapper} takes one of {', '.join(_BACKENDS)}, and {inner!r} is none of them"
            )
        backend = _make(name, _WRAPPERS[wrapper], create(inner))
    elif name in _BACKENDS:
        backend = _make(name, _BACKENDS[name])
    else:
        raise UnknownBackend(f"unknown attention backend {name!r}: use auto or one of {choices()}")
    if not isinstance(backend, Backend):
        raise UnknownBackend(f"{name!r} is registered as {type(backend).__name__}, which is not an attention Backend")
    return backend


def _make(name: str, path: str, *inner: Backend) -> Any:
    """An instance of the class at `path`; a backend imports its library in its module or when it is made."""
    made = _find(name, path)
    try:
        return made(*inner)
    except (ImportError, OSError) as error:  # OSError: a shared library that does not load
        raise UnknownBackend(f"the attention backend {name!r} cannot be imported: {error}") from None


def _find(name: str, path: str) -> Any:
    module, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, OSError, AttributeError) as error:
        raise UnknownBackend(f"the attention backend {name!r} cannot be imported: {error}") from None
    except (Exception, SystemExit) as error:  # a module from elsewhere may raise anything
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise UnknownBackend(f"the attention backend {name!r} cannot be imported: {why}") from error
