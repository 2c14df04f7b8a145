"""Processes that want one kernel compile it once, whatever happens to the one that does."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("triton")

from uncast.cache_folder import COMPILE_ONCE
from uncast.kernels import compile_once
from uncast.kernels.compile_once import CompileOnce

ROOT = Path(__file__).parents[2]


def start(what: str, folder: Path, started: int = 1) -> subprocess.Popen[str]:
    environment = {
        **os.environ, "TRITON_CACHE_DIR": str(folder / "kernels"), "TRITON_CACHE_MANAGER": COMPILE_ONCE,
        "STARTED": str(started), "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]),
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.kernels.compile_worker", what, str(folder)]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)


def test_of_three_processes_one_compiles(tmp_path: Path) -> None:
    processes = [start("compiles", tmp_path, 3) for _ in range(3)]
    said = [process.communicate(timeout=120)[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert sorted(said) == [["0", "1"], ["0", "1"], ["1", "0"]], "(compiled, found) of each process"
    later = start("compiles", tmp_path)
    assert later.communicate(timeout=120)[0].split() == ["0", "1"]


def test_a_process_that_dies_while_it_compiles_blocks_nobody(tmp_path: Path) -> None:
    first = start("dies", tmp_path)
    assert first.stdout is not None and first.stdout.readline() == "holds\n"
    second = start("waits", tmp_path, 2)
    time.sleep(1)
    assert second.poll() is None, "the second one waits"
    first.kill()
    waited = float(second.communicate(timeout=60)[0])
    first.communicate()
    assert waited > 0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile_once, "WAIT_S", 0.2)
    return tmp_path


def test_the_lock_is_given_back(folder: Path) -> None:
    """By storing what was looked for, by a compilation that fails, and not by anything else that is stored."""
    first = CompileOnce("cd" * 32)
    assert first.get_group("k.json") is None and len(compile_once._held) == 1
    first.put("text", "k.ttir")
    assert len(compile_once._held) == 1, "not all of the kernel is there yet"
    path = first.put("{}", "k.json")
    first.put_group("k.json", {"k.json": path})
    assert not compile_once._held and CompileOnce("cd" * 32).get_group("k.json") == {"k.json": path}
    library = CompileOnce("ef" * 32)
    assert library.get_file("launcher.so") is None and len(compile_once._held) == 1
    library.put(b"code", "launcher.so")
    assert not compile_once._held and library.get_file("launcher.so") is not None
    failed = CompileOnce("01" * 32)
    assert failed.get_group("k.json") is None
    del failed
    assert not compile_once._held


def test_one_process_does_not_wait_for_itself_and_a_cache_that_is_only_read_still_serves(folder: Path) -> None:
    first, again = CompileOnce("cd" * 32), CompileOnce("cd" * 32)
    began = time.monotonic()
    assert first.get_group("k.json") is None and again.get_group("k.json") is None
    assert time.monotonic() - began < 0.2
    del again
    assert len(compile_once._held) == 1
    path = first.put("{}", "k.json")
    first.put_group("k.json", {"k.json": path})
    override = CompileOnce("cd" * 32, override=True)
    assert override.get_file("k.ttir") is None and not compile_once._held


def test_a_process_that_waits_too_long_goes_on(folder: Path) -> None:
    holder = start("dies", folder)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "holds\n"
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_CACHE_DIR", str(folder / "kernels"))
            began = time.monotonic()
            manager = CompileOnce("ab" * 32)
            assert manager.get_group("kernel.json") is None
            assert 0.2 <= time.monotonic() - began < 5
    finally:
        holder.kill()
        holder.communicate()
