"""Backends of tests, registered for a while."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from uncast.attention import registry


@contextmanager
def registered(paths: Mapping[str, str]) -> Iterator[None]:
    """`paths`: dotted paths by name."""
    for name, path in paths.items():
        registry.register(name, path)
    try:
        yield
    finally:
        for name in paths:
            registry._BACKENDS.pop(name)
