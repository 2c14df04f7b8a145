"""MLA attention on an FP8 latent cache that is read as it is stored: never cast, never copied."""

from uncast.version import __version__

__all__ = ["__version__"]
