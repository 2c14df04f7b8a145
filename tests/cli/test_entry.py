"""The process: exit codes and no traceback, whatever happens to its signals and its output."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "uncast"]
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}
ENV.pop("PYTHONUNBUFFERED", None)  # argparse drops the error of an unbuffered write


PATIENT_S = 600.0
START = """
import os, signal, sys
from uncast.entry import run

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job inherits that it is ignored
"""
AT_IMPORT = """
name = sys.argv.pop(1)

class Interrupt:
    def find_spec(self, wanted, path=None, target=None):
        if wanted == name:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
"""
AT_LOAD = """
from uncast.cli import generate

load = generate.load_with_bar

def interrupted(*args, **options):
    os.kill(os.getpid(), signal.SIGINT)
    return load(*args, **options)

generate.load_with_bar = interrupted
"""
WARNS = """
import warnings

from uncast.attention import ClaimedCapabilityWarning
from uncast.cli import main
from uncast.cli.main import WorkError

def warns(arguments):
    warnings.warn("it is claimed but not verified", ClaimedCapabilityWarning)
    warnings.warn("of another package", UserWarning)
    raise WorkError("enough")

main.importlib.import_module = lambda _: type("Module", (), {"run": staticmethod(warns)})
"""
LONG = ["generate", "It was", "--max-tokens", "2000"]


def program(what: str = "") -> list[str]:
    """A command whose process does this before it begins."""
    return [sys.executable, "-c", START + what + "sys.exit(run())"]


@pytest.mark.parametrize("name", ["uncast.cli.main", "torch", "numpy", "torch.nn", "rich.progress", "tokenizers"])
def test_ctrl_c_is_130_while_a_module_is_imported(name: str) -> None:
    """There a KeyboardInterrupt becomes an ImportError or is lost."""
    done = subprocess.run([*program(AT_IMPORT), name, *LONG], capture_output=True, text=True, env=ENV)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_ctrl_c_is_130_while_a_model_is_loaded() -> None:
    done = subprocess.run([*program(AT_LOAD), *LONG], capture_output=True, text=True, env=ENV)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_ctrl_c_is_130_while_text_comes() -> None:
    """Into a pipe that is too small for the text, so that it cannot have come to its end."""
    process = subprocess.Popen([*program(), *LONG], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENV)
    assert process.stdout is not None
    fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, 4096)
    first = os.read(process.stdout.fileno(), 1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENT_S)
    assert (process.returncode, err) == (130, b"") and b"tokens/s" not in first + out


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


def test_its_own_warnings_are_one_sentence() -> None:
    done = subprocess.run([*program(WARNS), *LONG], capture_output=True, text=True, env=ENV)
    assert done.returncode == 1 and done.stderr.startswith("uncast: warning: it is claimed but not verified\n")
    assert "UserWarning: of another package" in done.stderr and done.stderr.endswith("uncast: enough\n")


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
