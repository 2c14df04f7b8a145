"""The process: exit codes and no traceback, whatever happens to its signals and its output."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "uncast"]
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}
ENV.pop("PYTHONUNBUFFERED", None)  # argparse drops the error of an unbuffered write


def interrupted(after_s: float, *arguments: str) -> tuple[int, str]:
    process = subprocess.Popen(
        [*COMMAND, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=ENV
    )
    time.sleep(after_s)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    return process.returncode, err


@pytest.mark.parametrize("after_s", [0.15, 0.4, 0.8, 1.3, 2.0])
def test_ctrl_c_is_130_at_any_time(after_s: float) -> None:
    """The first ones hit the imports of torch, where a KeyboardInterrupt becomes an ImportError or is lost."""
    code, err = interrupted(after_s, "generate", "It was", "--max-tokens", "2000")
    assert (code, err) == (130, "")


def test_a_full_disk_is_one_sentence() -> None:
    for arguments in (["--help"], ["--version"], ["generate", "--help"], ["generate", "It was", "--max-tokens", "2"]):
        with Path("/dev/full").open("w") as full:
            done = subprocess.run([*COMMAND, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, env=ENV)
        assert done.returncode == 1, arguments
        assert done.stderr == "uncast: cannot write the output: No space left on device\n"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([*COMMAND, *arguments], stdout=full, stderr=full, env=ENV)
    assert done.returncode == 1, "stderr is full, too"


def test_a_closed_pipe_is_silent() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as out:
        done = subprocess.run([*COMMAND, "--help"], stdout=out, stderr=subprocess.PIPE, text=True, env=ENV)
    assert (done.returncode, done.stderr) == (141, "")


def test_codes_of_the_command_come_through() -> None:
    for arguments, code in ((["--version"], 0), (["nonsense"], 2), (["generate", "x", "--model", "/nowhere"], 2)):
        done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, env=ENV)
        assert done.returncode == code and "Traceback" not in done.stderr


def test_prompts_of_raw_bytes_and_a_terminal_without_unicode() -> None:
    done = subprocess.run([*COMMAND, "generate", b"\xff\xfe"], capture_output=True, text=True, env=ENV)
    assert done.returncode == 2 and done.stderr.startswith("uncast: the prompt is not valid Unicode")
    ascii_only = {**ENV, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([*COMMAND, "generate", "é", "--max-tokens", "2"], capture_output=True, env=ascii_only)
    assert done.returncode == 0 and done.stderr == b""
