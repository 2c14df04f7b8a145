"""Processes that want one kernel compile it once, whatever happens to the one that does."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from uncast.cache_folder import COMPILE_ONCE
from uncast.kernels import compile_once
from uncast.kernels.compile_once import CompileOnce

ROOT = Path(__file__).parents[2]
LONG_S = 600
"""For what ends by itself; reached only if it does not."""


def start(what: str, folder: Path, started: int = 1) -> subprocess.Popen[str]:
    environment = {
        **os.environ, "TRITON_CACHE_DIR": str(folder / "kernels"), "TRITON_CACHE_MANAGER": COMPILE_ONCE,
        "STARTED": str(started), "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]),
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.kernels.compile_worker", what, str(folder)]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


@contextmanager
def holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock until it is killed, at the latest when this block ends."""
    process = start("holds", folder)
    try:
        assert process.stdout is not None and process.stdout.readline() == "holds\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_of_three_processes_one_compiles(tmp_path: Path) -> None:
    processes = [start("compiles", tmp_path, 3) for _ in range(3)]
    said = [process.communicate(timeout=LONG_S)[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert sorted(said) == [["0", "1"], ["0", "1"], ["1", "0"]], "(compiled, found) of each process"
    later = start("compiles", tmp_path)
    assert later.communicate(timeout=LONG_S)[0].split() == ["0", "1"]


def test_a_process_that_dies_while_it_compiles_blocks_nobody(tmp_path: Path) -> None:
    """The second one finds the lock taken, waits, and has it itself once the first is dead."""
    with holder(tmp_path) as first:
        second = start("waits", tmp_path)
        assert second.stdout is not None and second.stdout.readline() == "waits\n"
        assert first.poll() is None
        first.kill()
        assert second.communicate(timeout=LONG_S)[0] == "holds\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr(compile_once, "_held", set())
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


def test_one_process_does_not_wait_for_itself_and_a_cache_that_is_only_read_still_serves(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    class Counted(compile_once.FileLock):  # type: ignore[misc]
        def acquire(self, *args: Any, **kwargs: Any) -> Any:
            asked.append(self.lock_file)
            return super().acquire(*args, **kwargs)

    monkeypatch.setattr(compile_once, "FileLock", Counted)
    first, again = CompileOnce("cd" * 32), CompileOnce("cd" * 32)
    assert first.get_group("k.json") is None and again.get_group("k.json") is None
    assert len(asked) == 1, "the second asks for no lock, so that it cannot wait for it"
    del again
    assert len(compile_once._held) == 1
    path = first.put("{}", "k.json")
    first.put_group("k.json", {"k.json": path})
    override = CompileOnce("cd" * 32, override=True)
    assert override.get_file("k.ttir") is None and not compile_once._held


def test_a_process_that_waits_too_long_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_once, "WAIT_S", 0.2)
    with holder(folder) as first:
        began = time.monotonic()
        manager = CompileOnce("ab" * 32)
        assert manager.get_group("kernel.json") is None
        assert time.monotonic() - began >= 0.2 and not compile_once._held
        assert first.poll() is None, "the other still holds it"
