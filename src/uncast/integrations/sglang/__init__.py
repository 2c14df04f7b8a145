"""SGLang's plug-in: `--attention-backend uncast` (entry point group `sglang.srt.plugins`, SGLang 0.5.23).

SGLang logs an error of a plug-in and goes on without it, so `register` keeps what happened in `plugin_state("sglang")`, which
`uncast doctor --engines` reads.
"""

from __future__ import annotations

from typing import Any

from uncast.integrations._common import plugin_state

NAME = "uncast"
DRAFT_FACTORY = "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend"


def register() -> None:
    """Adds the backend to SGLang's registry and choices; called once in every process of a server."""
    state = plugin_state("sglang")
    if state.live:
        return
    try:
        _register()
    except Exception as error:
        state.error = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
        raise
    state.live = True


def _register() -> None:
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from uncast.integrations.sglang.gates import add_draft_backends

    if NAME not in choices.ATTENTION_BACKEND_CHOICES:
        choices.add_attention_backend_choices([NAME])
    if NAME not in choices.DRAFT_ATTENTION_BACKEND_CHOICES:
        choices.add_draft_attention_backend_choices([NAME])
    if NAME not in choices.CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS:
        choices.add_chunked_prefix_cache_attention_backend(NAME)
    register_attention_backend(NAME)(create_backend)
    HookRegistry.register(DRAFT_FACTORY, add_draft_backends, HookType.AROUND)


def create_backend(runner: Any) -> Any:
    """The factory that SGLang calls with its model runner.

    Raises:
        EngineRefusal: the plug-in is not live in this process, or this model or device cannot be served.
    """
    from uncast.integrations._common import EngineRefusal
    from uncast.integrations.sglang.backend import UncastAttentionBackend
    from uncast.integrations.sglang.gates import open_gates

    state = plugin_state("sglang")
    if not state.live:
        raise EngineRefusal(f"uncast's SGLang plug-in is not live: {state.error or 'register() did not run'}")
    if not runner.use_mla_backend:
        raise EngineRefusal("uncast serves models with MLA, and this one has none: use another --attention-backend")
    open_gates(runner)
    return UncastAttentionBackend(runner)
