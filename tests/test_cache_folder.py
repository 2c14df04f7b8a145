"""Where compiled kernels are kept, and what happens where nothing can be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from uncast.cache_folder import COMPILE_ONCE, NO_HOME, cache_folder, keep_kernels

NAMES = ("TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_CACHE_MANAGER")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that what is set is taken back
        monkeypatch.delenv(name)


def test_kernels_are_kept_beside_the_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNCAST_CACHE_DIR", str(tmp_path / "new"))
    said: list[str] = []
    assert keep_kernels(said.append) == cache_folder("triton") == tmp_path / "new" / "triton"
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "new" / "triton")
    assert os.environ["TRITON_CACHE_MANAGER"] == COMPILE_ONCE
    assert keep_kernels(said.append) == tmp_path / "new" / "triton" and not said


@pytest.mark.parametrize(("name", "inside"), [("TRITON_CACHE_DIR", "."), ("TRITON_HOME", ".triton/cache")])
def test_the_users_own_places_stay(name: str, inside: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_MANAGER", "mine:Manager")
    said: list[str] = []
    assert keep_kernels(said.append) == tmp_path / inside and not said
    assert os.environ[name] == str(tmp_path) and os.environ["TRITON_CACHE_MANAGER"] == "mine:Manager"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file"))
    keep_kernels(said.append)
    assert len(said) == 1 and "cannot be written (File exists)" in said[0]


def test_where_nothing_can_be_kept_one_sentence_says_so(tmp_path: Path) -> None:
    """In a process of its own: the folder lasts as long as it."""
    (tmp_path / "file").write_text("")
    code = (
        "from uncast.cache_folder import keep_kernels; import os; said = []\n"
        "folder = keep_kernels(said.append); keep_kernels(said.append)\n"
        "print(folder, folder.is_dir(), os.environ['TRITON_CACHE_DIR'] == str(folder)); print('\\n'.join(said))"
    )
    environment = {**os.environ, "UNCAST_CACHE_DIR": str(tmp_path / "file")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    first, *said = done.stdout.splitlines()
    folder, *facts = first.split()
    assert facts == ["True", "True"] and not Path(folder).exists()
    assert len(said) == 1 and "compiled kernels are not kept; UNCAST_CACHE_DIR can name another" in said[0]


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("UNCAST_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as it does without HOME and without an entry
    assert cache_folder("probe") == NO_HOME / ".cache/uncast/probe"
