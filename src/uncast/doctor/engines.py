"""`uncast doctor --engines`: the engines of this environment, whether the plug-in is live in them, what runs and what casts.

Engines are found by their package, never imported here; whether the plug-in is live is asked of a child process that loads
plug-ins as the engine does, since SGLang logs an error of a plug-in and goes on.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from uncast.doctor.engines_audit import Audit, Cast, audit
from uncast.doctor.engines_interface import interface_changes
from uncast.doctor.engines_rules import RULES_OF, SOURCES, Model, Setting, engine_default, uncast_backend
from uncast.doctor.errors import EngineError

ENGINES = ("sglang", "vllm")
GROUPS = {"sglang": "sglang.srt.plugins", "vllm": "vllm.general_plugins"}
ALLOW = {"sglang": "SGLANG_PLUGINS", "vllm": "VLLM_PLUGINS"}
FLAGS = {"sglang": "--attention-backend uncast", "vllm": "--attention-backend UNCAST"}
PLUGIN = "uncast"
CHILD_SECONDS = 180.0
_LOAD = {
    "sglang": "from sglang.srt.plugins import load_plugins; load_plugins()",
    "vllm": "from vllm.plugins import load_general_plugins; load_general_plugins()",
}
_REPORT = (
    "; import json; from uncast.integrations._common import plugin_state; s = plugin_state({engine!r})"
    "; print('UNCAST_PLUGIN ' + json.dumps([s.live, s.error]))"
)


class Plugin(msgspec.Struct, frozen=True):
    """status: "live", "not live", "not installed" or "not checked"; `reason`: one sentence, "" when live."""

    status: str
    reason: str = ""


class Choice(msgspec.Struct, frozen=True):
    """What would run for one model and setting.

    Attributes:
        default: the engine's own choice; `default_casts`: where that backend's file casts the pool with this cache.
        uncast: what serves behind the plug-in, "" for nothing; `reason`: why it is not `native`.
    """

    default: str
    default_casts: tuple[Cast, ...]
    uncast: str
    reason: str


class EngineReport(msgspec.Struct, frozen=True):
    """One engine. `changes`: where its interface is not the one the plug-in was written for."""

    engine: str
    version: str
    package: str
    plugin: Plugin
    changes: tuple[str, ...]
    audit: Audit
    choice: Choice | None = None
    rules_of: str = ""


def installed(engine: str) -> Path | None:
    """The package folder of an engine in this environment, None if there is none."""
    try:
        spec = importlib.util.find_spec(engine)
    except (ImportError, ValueError):
        return None
    places = list(spec.submodule_search_locations or []) if spec is not None else []
    return next((Path(p) for p in places if (Path(p) / "__init__.py").exists()), None)


def unpacked(path: Path) -> list[tuple[str, Path]]:
    """(engine, package folder) of the engines in a folder: an unpacked wheel, a checkout's `python` folder or a package.

    Raises:
        EngineError: there is none.
    """
    found = []
    for engine in ENGINES:
        for folder in (path, path / engine, path / "python" / engine):
            if folder.name == engine and (folder / "__init__.py").is_file():
                found.append((engine, folder))
                break
    if not found:
        raise EngineError(
            f"{path} holds neither an sglang nor a vllm package: give the folder that a wheel was unpacked into"
        )
    return found


def version_of(engine: str, package: Path) -> str:
    """From the metadata beside the package, or its version file; "unknown" if neither tells."""
    for metadata in sorted(package.parent.glob(f"{engine}-*.dist-info/METADATA")):
        match = re.search(r"^Version: (\S+)", metadata.read_text(encoding="utf-8", errors="replace"), re.M)
        if match:
            return match[1]
    for name in ("_version.py", "version.py"):
        file = package / name
        match = (
            re.search(r"""^__version__ = version = ['"]([^'"]+)""", file.read_text(), re.M) if file.is_file() else None
        )
        if match:
            return match[1]
    return "unknown"


def check_plugin(engine: str, seconds: float = CHILD_SECONDS) -> Plugin:
    """Whether the plug-in is live in an installed engine; starts a child process that imports the engine."""
    entry = [e for e in importlib.metadata.entry_points(group=GROUPS[engine]) if e.name == PLUGIN]
    if not entry:
        return Plugin(
            "not installed",
            f"this environment has no entry point {PLUGIN!r} in {GROUPS[engine]}: pip install 'uncast[torch]' in it",
        )
    allowed = os.environ.get(ALLOW[engine])
    if allowed and PLUGIN not in [name.strip() for name in allowed.split(",")]:
        return Plugin("not live", f"{ALLOW[engine]}={allowed} leaves it out: add {PLUGIN}")
    code = _LOAD[engine] + _REPORT.format(engine=engine)
    try:
        child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return Plugin("not checked", f"{engine} did not load its plug-ins within {seconds:.0f} seconds")
    match = re.search(r"^UNCAST_PLUGIN (.*)$", child.stdout, re.M)
    if match is None:
        last = (child.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        return Plugin("not checked", f"{engine} could not be imported: {last}")
    live, error = json.loads(match[1])
    return Plugin("live") if live else Plugin("not live", error or f"{engine} did not call it")


def inspect_engine(
    engine: str, package: Path, plugin: Plugin, model: Model | None = None, setting: Setting | None = None
) -> EngineReport:
    """Everything about one engine; reads its sources."""
    found = audit(engine, package)
    choice = None
    if model is not None and setting is not None:
        default = engine_default(engine, model, setting)
        here = f"/{SOURCES.get(default, default)}"
        casts = tuple(
            c for c in found.casts if c.kind == "pool" and c.file.endswith(here) and "/hardware_backend/" not in c.file
        )
        choice = Choice(default, casts if setting.fp8 else (), *uncast_backend(model, setting))
    version = version_of(engine, package)
    rules = RULES_OF[engine] if choice is not None and version != RULES_OF[engine] else ""
    return EngineReport(
        engine, version, str(package), plugin, tuple(interface_changes(engine, package)), found, choice, rules
    )  # fmt: skip


def inspect_all(path: Path | None, model: Model | None, setting: Setting | None) -> Sequence[EngineReport]:
    """Reports of the installed engines, or of those in `path`, whose plug-in is not checked."""
    if path is not None:
        unchecked = Plugin("not checked", "these are sources, not an installed engine")
        return [inspect_engine(engine, package, unchecked, model, setting) for engine, package in unpacked(path)]
    here = [(engine, package) for engine in ENGINES if (package := installed(engine)) is not None]
    return [inspect_engine(engine, package, check_plugin(engine), model, setting) for engine, package in here]
