"""Profiles a running SGLang, vLLM or uncast server for a few steps and finds the trace files that it wrote.

Traces are files on the *server's* disk. SGLang is told a folder and stops by itself after `num_steps`; uncast answers with the
file's path; vLLM writes to the folder it was started with.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from uncast.doctor.errors import LiveError
from uncast.doctor.http import HttpError, get, post

STOP_TIMEOUT_S = 900.0
SETTLE_S = 1.0
FLAGS = {
    "vllm": 'start vLLM with --profiler-config \'{"profiler": "torch", "torch_profiler_dir": "/tmp/vllm_profile", '
    '"torch_profiler_record_shapes": true, "torch_profiler_with_stack": true}\' (before 0.13: the variable '
    "VLLM_TORCH_PROFILER_DIR) and give the same folder with --profile-dir; for graph replays add "
    '"capture_torch_profiler": true',
    "uncast": "start uncast with: uncast serve --profile-dir FOLDER",
    "sglang": "SGLang profiles without a flag; for graph replays start it with SGLANG_GRAPH_BATCH_CAPTURE=1, "
    "SGLANG_TORCH_PROFILER_DIR=FOLDER and --enable-profile-cuda-graph",
}


@dataclass(frozen=True)
class Request:
    """`profile_dir`: a folder that the server can write to and this machine can read; `load`: whether to send a request that
    makes the server decode (else others must); `stacks`: whether SGLang records Python stacks. They name functions and slow
    the host. vLLM's are chosen when it starts; uncast records none."""

    url: str
    steps: int = 8
    profile_dir: Path | None = None
    api_key: str | None = None
    load: bool = True
    wait_s: float = 120.0
    stacks: bool = True


@dataclass(frozen=True)
class Server:
    """`kind`: sglang, vllm or uncast."""

    kind: str
    model: str


def profile(request: Request, say: Callable[[str], None]) -> list[Path]:
    """Trace files of a few steps.

    Args:
        say: told what happens, a sentence at a time.

    Raises:
        LiveError: no such server, one started without profiling (with the flags), or files that cannot be read here.
    """
    server = identify(request.url, request.api_key)
    say(f"{server.kind} serves {server.model}; profiling {request.steps} steps")
    start = {"sglang": _sglang, "vllm": _vllm, "uncast": _uncast}[server.kind]
    return start(request, server, say)


def identify(url: str, api_key: str | None = None) -> Server:
    """Which server answers at `url`.

    Raises:
        LiveError: none of the three.
    """
    try:
        models = json.loads(get(url.rstrip("/") + "/v1/models", api_key))
        first = models["data"][0]
        owner, model = str(first.get("owned_by", "")), str(first["id"])
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        raise LiveError(f"{url} does not list a model at /v1/models: is it SGLang, vLLM or uncast?") from None
    if owner in FLAGS:
        return Server(owner, model)
    raise LiveError(f"{url} is a server of {owner or 'unknown make'}: SGLang, vLLM and uncast can be profiled")


def _sglang(request: Request, server: Server, say: Callable[[str], None]) -> list[Path]:
    folder = request.profile_dir
    if folder is None:
        raise LiveError("SGLang writes its traces on its own disk: give a folder that both can use with --profile-dir")
    before = _files(folder)
    body = {
        "output_dir": str(folder.resolve()), "num_steps": request.steps, "activities": ["CPU", "GPU"],
        "with_stack": request.stacks, "record_shapes": True, "profile_by_stage": False,
    }  # fmt: skip
    post(request.url.rstrip("/") + "/start_profile", body, request.api_key, timeout_s=60.0)
    load = _start_load(request, server)
    files = _wait_for_files(folder, before, request.wait_s)
    load.join(timeout=request.wait_s)
    return files


def _vllm(request: Request, server: Server, say: Callable[[str], None]) -> list[Path]:
    folder = request.profile_dir
    base = request.url.rstrip("/")
    if not request.stacks:
        raise LiveError(
            'vLLM chooses stacks when it starts: leave --no-stacks out and give "torch_profiler_with_stack": false in its '
            "--profiler-config"
        )
    if folder is None:
        raise LiveError(f"vLLM writes its traces to the folder it was started with: {FLAGS['vllm']}")
    before = _files(folder)
    try:
        post(base + "/start_profile", None, request.api_key, timeout_s=60.0)
    except HttpError as error:
        if error.status in (404, 405, 400, 500):
            raise LiveError(f"this vLLM was started without profiling: {FLAGS['vllm']}") from None
        raise
    _run_load(request, server)
    say("writing the trace; a large model may take minutes")
    post(base + "/stop_profile", None, request.api_key, timeout_s=STOP_TIMEOUT_S)
    return _wait_for_files(folder, before, request.wait_s)


def _uncast(request: Request, server: Server, say: Callable[[str], None]) -> list[Path]:
    base = request.url.rstrip("/")
    try:
        post(base + "/start_profile", None, request.api_key, timeout_s=60.0)
    except HttpError as error:
        if "no_profile_dir" in error.body or "profile-dir" in error.body:
            raise LiveError(f"this server was started without profiling: {FLAGS['uncast']}") from None
        raise
    try:
        _run_load(request, server)
    finally:
        answer = json.loads(post(base + "/stop_profile", None, request.api_key, timeout_s=STOP_TIMEOUT_S))
    path = Path(str(answer.get("path", "")))
    if not path.is_file():
        raise LiveError(f"the server wrote {path} on its own disk: run `uncast doctor {path.name}` there")
    return [path]


def _start_load(request: Request, server: Server) -> threading.Thread:
    thread = threading.Thread(target=_quiet_load, args=(request, server), daemon=True)
    thread.start()
    return thread


def _quiet_load(request: Request, server: Server) -> None:
    try:
        _run_load(request, server)
    except LiveError:
        return  # the trace that does not appear says so


def _run_load(request: Request, server: Server) -> None:
    if not request.load:
        time.sleep(SETTLE_S)
        return
    body: dict[str, Any] = {
        "model": server.model, "prompt": "It is a truth universally acknowledged, that", "temperature": 0,
        "max_tokens": request.steps + 4,
    }  # fmt: skip
    if server.kind != "uncast":
        body["ignore_eos"] = True
    post(request.url.rstrip("/") + "/v1/completions", body, request.api_key, timeout_s=request.wait_s)


def _files(folder: Path) -> dict[Path, int]:
    if not folder.is_dir():
        raise LiveError(f"{folder} is not a folder on this machine")
    found = [*folder.glob("**/*.json"), *folder.glob("**/*.json.gz")]
    return {p: p.stat().st_size for p in found if p.is_file()}


def _wait_for_files(folder: Path, before: dict[Path, int], wait_s: float) -> list[Path]:
    """New trace files, once their sizes stand still."""
    deadline = time.monotonic() + wait_s
    last: dict[Path, int] = {}
    while time.monotonic() < deadline:
        now = {p: size for p, size in _files(folder).items() if p not in before and size}
        if now and now == last:
            return sorted(now)
        last = now
        time.sleep(SETTLE_S)
    raise LiveError(
        f"no trace appeared in {folder} within {wait_s:.0f} s: does the server see this folder, and decode?"
    )
