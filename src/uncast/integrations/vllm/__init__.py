"""vLLM's attention backend `UNCAST`: dense MLA over the cache as vLLM stores it, FP8 included.

vLLM calls `register` through the entry point `vllm.general_plugins` in each of its processes; `--attention-backend UNCAST` then
finds the classes of `uncast.integrations.vllm.backend`. Importing this module imports neither vLLM nor torch.

    vllm serve MODEL --attention-backend UNCAST --kv-cache-dtype fp8
"""

from __future__ import annotations

import copyreg
import importlib.metadata
import logging
from typing import Any

__all__ = ["BACKEND_NAME", "CLASS_PATH", "register"]

BACKEND_NAME = "UNCAST"
CLASS_PATH = "uncast.integrations.vllm.backend.UncastMLABackend"

logger = logging.getLogger("vllm.uncast")
"""Below vLLM's own logger, so that its handlers and its level apply."""


def register() -> None:
    """Makes `--attention-backend UNCAST` known; safe to call any number of times, in any process.

    An error here would end vLLM even for those who never ask for UNCAST, so a vLLM without the interface, or a name that
    something else has taken, is a warning: vLLM then refuses the name when it is asked for.
    """
    error = _register()
    if error:
        logger.warning("--attention-backend %s is not available: %s", BACKEND_NAME, error)
    from uncast.integrations._common import plugin_state

    state = plugin_state("vllm")
    state.live, state.error = not error, error


def _register() -> str:
    """Why the name could not be registered, in one sentence; "" if it is."""
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError as error:
        return f"vLLM {vllm_version()} has no registry of attention backends where 0.33 has it ({error})"
    known = AttentionBackendEnum.__members__.get(BACKEND_NAME)
    if known is None:
        register_backend(BACKEND_NAME, CLASS_PATH)
    elif known.get_path() != CLASS_PATH:
        return f"{known.get_path()} was registered by that name before uncast: remove one of the two"
    copyreg.pickle(AttentionBackendEnum, _reduce)
    return ""


def _reduce(member: Any) -> tuple[Any, tuple[Any, ...]]:
    """How vLLM's enumeration is pickled: ours by a call that registers it first, the others as enumerations are, by value.

    A process that vLLM spawns unpickles its configuration before it loads plug-ins, and would not know the value.
    """
    return (_restore, ()) if member.name == BACKEND_NAME else (type(member), (member.value,))


def _restore() -> Any:
    register()
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return AttentionBackendEnum[BACKEND_NAME]


def vllm_version() -> str:
    """The installed vLLM's version; "of an unknown version" for sources that are not installed."""
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return "of an unknown version"
