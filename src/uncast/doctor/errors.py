"""What the doctor refuses; every message is one sentence."""

from __future__ import annotations


class TraceError(ValueError):
    """A file that is no trace, or a trace from which nothing can be told."""


class LiveError(RuntimeError):
    """A server that cannot be profiled or asked."""


class EngineError(ValueError):
    """A path, a model or an option that says nothing about an engine."""
