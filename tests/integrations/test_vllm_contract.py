"""The backend UNCAST fits vLLM's interface, and so do the stand-ins that its tests run on.

`vllm_interface.json` is the interface of vLLM 0.33.0 as `vllm_interface.py` reads it. It is compared with the sources of an
installed vLLM, or of an unpacked wheel that `UNCAST_VLLM_SOURCE` names; a failure says what vLLM has changed,
and the file is written anew once the backend follows.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
import json
import os
import pickle
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.integrations import vllm_standin
from tests.integrations.vllm_interface import read_interface
from tests.integrations.vllm_scene import load
from uncast.integrations import vllm as plugin
from uncast.integrations._common import plugin_state

INTERFACE: dict[str, Any] = json.loads(Path(__file__).with_name("vllm_interface.json").read_text(encoding="utf-8"))
OURS = {
    "UncastMLABackend": ("MLACommonBackend", "AttentionBackend"),
    "UncastMLABuilder": ("MLACommonMetadataBuilder", "AttentionMetadataBuilder"),
    "UncastMLAImpl": ("MLACommonImpl", "MLAAttentionImpl", "AttentionImplBase"),
}
"""Our classes and the classes of vLLM that each inherits from."""


def source() -> Path | None:
    named = os.environ.get("UNCAST_VLLM_SOURCE")
    if named:
        package = inner if (inner := Path(named) / "vllm").is_dir() else Path(named)
        assert (package / "v1").is_dir(), (
            f"UNCAST_VLLM_SOURCE={named} is neither an unpacked wheel of vLLM nor its package"
        )
        return package
    found = importlib.util.find_spec("vllm")
    return Path(found.submodule_search_locations[0]) if found and found.submodule_search_locations else None


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load("stand-in", monkeypatch)


def recorded(owners: tuple[str, ...], name: str) -> list[str] | None:
    return next((INTERFACE["methods"][f"{o}.{name}"] for o in owners if f"{o}.{name}" in INTERFACE["methods"]), None)


def parameters(function: Any) -> list[str]:
    """As `vllm_interface` writes them."""
    found = []
    for parameter in inspect.signature(inspect.unwrap(getattr(function, "__func__", function))).parameters.values():
        star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        found.append(star + parameter.name + ("" if parameter.default is parameter.empty else "="))
    return found


def test_vllm_has_not_changed() -> None:
    root = source()
    if root is None:
        pytest.skip("vLLM is not installed and UNCAST_VLLM_SOURCE names no unpacked wheel")
    found = read_interface(root)
    for kind, facts in INTERFACE.items():
        for name, fact in facts.items():
            assert found[kind][name] == fact, f"vLLM changed {name}"


def test_the_recorded_interface_is_whole() -> None:
    """Nothing that is read was missing when the file was written."""
    assert all(INTERFACE[kind] for kind in ("methods", "fields", "flags", "functions", "calls"))
    for kind in ("methods", "functions"):
        assert None not in INTERFACE[kind].values()
    assert all(calls for calls in INTERFACE["calls"].values()) and all(INTERFACE["fields"].values())


@pytest.mark.parametrize("ours", OURS)
def test_our_methods_have_vllms_parameters(module: ModuleType, ours: str) -> None:
    """Every method that vLLM's classes have, too, takes what vLLM passes, by position and by keyword."""
    compared = 0
    for name, member in vars(getattr(module, ours)).items():
        expected = recorded(OURS[ours], name) if callable(getattr(module.__dict__[ours], name)) else None
        if expected is None:
            continue
        mine = parameters(member)
        compared += 1
        if name == "__init__":  # the rest of vLLM's parameters goes through **mla_args or has defaults
            mine = [p for p in mine if not p.startswith("**")]
            assert mine == expected[: len(mine)]
        else:
            assert mine == expected, name
    assert compared >= 3


def test_nothing_of_ours_is_unknown_to_vllm(module: ModuleType) -> None:
    """A method or flag that vLLM would never look at is a name it has dropped, or a typo."""
    own = {"kv_layout"}
    for ours, owners in OURS.items():
        known = {name.split(".")[1] for name in INTERFACE["methods"] if name.split(".")[0] in owners}
        known |= {flag for owner in owners for flag in INTERFACE["flags"].get(owner, [])}
        public = {n for n in vars(getattr(module, ours)) if not n.startswith("__") and n != "_abc_impl"}
        assert public - known - own == set()


def test_the_implementation_takes_vllms_call(module: ModuleType) -> None:
    """`MLAAttention` makes the implementation by keywords, and calls it by position."""
    signature = inspect.signature(module.UncastMLAImpl.__init__)
    keywords = [k for k in INTERFACE["calls"]["impl_cls"][0] if not k.startswith(("#", "**"))]
    signature.bind(None, **dict.fromkeys(keywords))
    for name in ("forward_mqa", "do_kv_cache_update"):
        (call,) = INTERFACE["calls"][name]
        inspect.signature(getattr(module.UncastMLAImpl, name)).bind(None, *range(int(call[0][1:])))


def test_stand_ins_have_vllms_interface() -> None:
    owners = {"MLACommonBackend": "AttentionBackend", "MLACommonMetadataBuilder": "AttentionMetadataBuilder"}
    owners |= {"MLACommonImpl": "MLAAttentionImpl"}
    for name, base in owners.items():
        for method, member in vars(getattr(vllm_standin, name)).items():
            expected = recorded((name, base), method)
            if expected is not None:
                assert parameters(member) == expected, f"{name}.{method}"
    for name, fields in INTERFACE["fields"].items():
        kind = getattr(vllm_standin, name)
        mine = list(getattr(kind, "__dataclass_fields__", None) or kind.__members__)
        assert mine == fields, name
    assert parameters(vllm_standin.register_backend) == INTERFACE["functions"]["register_backend"]


def test_register_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM loads plug-ins in each of its processes, and tests repeat it."""
    for name, module in vllm_standin.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    plugin.register()
    plugin.register()
    assert vllm_standin.AttentionBackendEnum.__members__["UNCAST"].get_path() == plugin.CLASS_PATH
    assert plugin_state("vllm").live


def test_register_with_vllm_itself() -> None:
    registry = pytest.importorskip("vllm.v1.attention.backends.registry")
    plugin.register()
    plugin.register()
    backend = registry.AttentionBackendEnum["UNCAST"]
    assert backend.get_path() == plugin.CLASS_PATH
    config = pytest.importorskip("vllm.config").AttentionConfig(backend="uncast")
    assert config.backend is backend
    assert backend.get_class().get_name() == "UNCAST" and not backend.get_class().get_impl_cls().__abstractmethods__


def test_a_spawned_process_knows_the_name() -> None:
    """vLLM's configuration is unpickled in a spawned process before plug-ins are loaded there."""
    registry = pytest.importorskip("vllm.v1.attention.backends.registry")
    plugin.register()
    members = [registry.AttentionBackendEnum["UNCAST"], registry.AttentionBackendEnum["TRITON_MLA"]]
    code = "import pickle, sys; print([m.name for m in pickle.load(sys.stdin.buffer)])"
    done = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(members), capture_output=True, timeout=600)
    assert done.stdout.decode().splitlines()[-1:] == ["['UNCAST', 'TRITON_MLA']"], done.stderr.decode()
    assert pickle.loads(pickle.dumps(members)) == members and copy.deepcopy(members) == members


def test_register_never_raises(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """An error of a plug-in ends vLLM; a missing registry or a taken name is a warning that says so."""
    modules = vllm_standin.modules()
    del modules["vllm.v1.attention.backends.registry"]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "vllm.v1.attention.backends.registry", raising=False)
    plugin.register()
    assert "has no registry" in caplog.text and not plugin_state("vllm").live and plugin_state("vllm").error
    for name, module in vllm_standin.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    vllm_standin.register_backend("UNCAST", "someone.Elses")
    plugin.register()
    assert "someone.Elses" in caplog.text and not plugin_state("vllm").live


def test_entry_point() -> None:
    text = Path(__file__).parents[2].joinpath("pyproject.toml").read_text(encoding="utf-8")
    target = tomllib.loads(text)["project"]["entry-points"]["vllm.general_plugins"]["uncast"]
    assert target == f"{plugin.__name__}:{plugin.register.__name__}"


def test_without_vllm() -> None:
    """The plug-in imports and registers nothing; the backend says in one sentence what it lacks."""
    code = """
import sys
sys.modules["vllm"] = None
import uncast.integrations.vllm as plugin
assert "torch" not in sys.modules
plugin.register()
try:
    import uncast.integrations.vllm.backend
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("UNCAST is written for vLLM 0.33") and done.stdout.count("\n") == 1
    assert "--attention-backend UNCAST is not available" in done.stderr
