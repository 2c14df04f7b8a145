"""MLA attention on an FP8 latent cache that is read as it is stored: never cast, never copied."""

from typing import TYPE_CHECKING, Any

from uncast.version import __version__

if TYPE_CHECKING:
    from uncast.verify.guard import CastError, guard

__all__ = ["CastError", "__version__", "guard"]


def __getattr__(name: str) -> Any:
    """`guard` and `CastError` need torch, so they are imported on first use."""
    if name in ("guard", "CastError"):
        from uncast.verify import guard as module

        return getattr(module, name)
    raise AttributeError(f"module 'uncast' has no attribute {name!r}")
