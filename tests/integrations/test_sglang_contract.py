"""The plug-in's side of SGLang's interface: pinned signatures against our methods, and the real modules where they import."""

from __future__ import annotations

import importlib
import inspect
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from uncast.doctor.engines_interface import FILES
from uncast.integrations import _common, sglang
from uncast.integrations._common import EngineRefusal
from uncast.integrations.sglang.attention import MLAForward, MultiStepDraft
from uncast.integrations.sglang.gates import add_draft_backends
from uncast.integrations.sglang.pool import PoolWriter

PINNED = {name: parameters for names in FILES["sglang"].values() for name, parameters in names.items()}


def shape(function: Any) -> str:
    """Parameters as `FILES` writes them."""
    parts, starred = [], False
    for p in inspect.signature(function).parameters.values():
        if p.kind is p.KEYWORD_ONLY and not starred:
            parts.append("*")
        starred |= p.kind in (p.KEYWORD_ONLY, p.VAR_POSITIONAL)
        mark = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        parts.append(mark + p.name + ("" if p.default is p.empty else "="))
    return ", ".join(parts)


@pytest.mark.parametrize("method", ["set_mla_kv_buffer", "set_kv_buffer", "get_mla_kv_buffer"])
def test_the_writer_takes_what_the_pools_methods_take(method: str) -> None:
    assert shape(getattr(PoolWriter, method)) == PINNED[f"MLATokenToKVPool.{method}"]


@pytest.mark.parametrize("cls", [MLAForward, MultiStepDraft])
@pytest.mark.parametrize(
    "method",
    [
        "init_forward_metadata",
        "init_forward_metadata_out_graph",
        "init_cuda_graph_state",
        "init_forward_metadata_in_graph",
    ],
)
def test_metadata_hooks_are_the_base_classs(cls: type, method: str) -> None:
    if cls is MLAForward and method == "init_forward_metadata_in_graph":
        assert not hasattr(cls, method), "inherited: the base class records nothing"
        return
    assert shape(getattr(cls, method)) == PINNED[f"AttentionBackend.{method}"]


@pytest.mark.parametrize("method", ["forward_decode", "forward_extend"])
def test_forward_takes_the_base_classs_parameters_and_the_absorbed_ones(method: str) -> None:
    ours, base = shape(getattr(MLAForward, method)), PINNED[f"AttentionBackend.{method}"]
    assert ours == base.replace("**kwargs", "q_rope=, k_rope=, **others")


def test_the_draft_hook_passes_on_what_the_factory_is_given() -> None:
    assert (
        PINNED["DraftBackendFactory._create_backend"]
        == "self, backend_name, backend_map, error_template, stamps_children="
    )
    assert shape(add_draft_backends) == "original, factory, backend_name, backend_map, *args, **kwargs"


def test_the_entry_point_names_the_function() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    path = project["entry-points"]["sglang.srt.plugins"]["uncast"]
    module, _, name = path.partition(":")
    assert getattr(importlib.import_module(module), name) is sglang.register


def test_an_error_of_the_plugin_is_kept_and_the_factory_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_common, "_states", {})

    def broken() -> None:
        raise ModuleNotFoundError("No module named 'sglang.srt.gone'")

    monkeypatch.setattr(sglang, "_register", broken)
    with pytest.raises(ModuleNotFoundError):
        sglang.register()
    state = _common.plugin_state("sglang")
    assert not state.live and "sglang.srt.gone" in state.error
    monkeypatch.setitem(sys.modules, "uncast.integrations.sglang.backend", _Anything())
    with pytest.raises(EngineRefusal, match="not live: ModuleNotFoundError"):
        sglang.create_backend(object())
    state.live = True
    with pytest.raises(EngineRefusal, match="models with MLA"):
        sglang.create_backend(_Anything(use_mla_backend=False))
    sglang.register()  # a second call in a process changes nothing


class _Anything:
    """Has every attribute."""

    def __init__(self, **values: object) -> None:
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Any:
        return self


def _modules() -> Any:
    """SGLang's registry, if SGLang imports here."""
    pytest.importorskip("sglang", reason="SGLang is not installed here", exc_type=ImportError)
    return pytest.importorskip("sglang.srt.layers.attention.attention_registry", exc_type=ImportError)


def test_register_is_seen_by_sglang() -> None:
    registry = _modules()
    from sglang.srt.arg_groups import choices
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES

    sglang.register()
    assert registry.ATTENTION_BACKENDS["uncast"] is sglang.create_backend
    assert ATTENTION_BACKEND_CHOICES.count("uncast") == 1, "the parser holds the same list"
    assert choices.DRAFT_ATTENTION_BACKEND_CHOICES.count("uncast") == 1
    assert choices.CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS.count("uncast") == 1
    hooks = HookRegistry._hooks[sglang.DRAFT_FACTORY]
    assert [hook for _, hook, _ in hooks].count(add_draft_backends) == 1


def test_the_backend_is_sglangs_and_leaves_no_hook_to_the_base_class_that_raises() -> None:
    _modules()
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

    from uncast.integrations.sglang.backend import UncastAttentionBackend

    assert issubclass(UncastAttentionBackend, AttentionBackend) and UncastAttentionBackend.needs_cpu_seq_lens is False
    for method in ("init_cuda_graph_state", "get_cuda_graph_seq_len_fill_value", "forward_decode", "forward_extend"):
        assert getattr(UncastAttentionBackend, method) is not getattr(AttentionBackend, method)
    assert UncastAttentionBackend.forward is AttentionBackend.forward


def test_gates_open_once_in_the_real_tables() -> None:
    _modules()
    from types import SimpleNamespace

    handlers = pytest.importorskip("sglang.srt.models.deepseek_common.attention_backend_handler", exc_type=ImportError)
    import torch
    from sglang.srt.models.deepseek_common.utils import FORWARD_ABSORB_CORE_ATTENTION_BACKENDS

    from uncast.integrations.sglang.gates import open_gates

    config = SimpleNamespace(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    for _ in range(2):
        open_gates(SimpleNamespace(model_config=config, device="cpu", dtype=torch.bfloat16))
    assert FORWARD_ABSORB_CORE_ATTENTION_BACKENDS.count("uncast") == 1
    handler = handlers.AttentionBackendRegistry.get_handler("uncast")
    assert handler is not handlers.AttentionBackendRegistry.get_handler("triton")
    for name in (
        "is_in_tc_piecewise_cuda_graph",
        "is_in_breakable_cuda_graph",
        "is_cp_active",
        "get_exec",
        "AttnForwardMethod",
    ):
        assert hasattr(handlers, name), name
