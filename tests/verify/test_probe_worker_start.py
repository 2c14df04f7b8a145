"""A worker that begins after its probe was interrupted."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from uncast.verify.probe_worker import worker_main


def test_a_worker_whose_probe_has_ended_ends_without_a_word(tmp_path: Path) -> None:
    ours, theirs = multiprocessing.Pipe()
    worker_main(theirs, {}, str(tmp_path / "gone" / "worker-0.log"))
    assert not ours.poll()


def children(pid: int) -> list[str]:
    """Command lines of the children of a process; Linux."""
    of = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode() for child in of]


@pytest.mark.skipif(
    not Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").exists(), reason="/proc lists no children"
)
def test_ctrl_c_while_the_workers_import_prints_nothing(tmp_path: Path) -> None:
    env = os.environ | {"UNCAST_CACHE_DIR": str(tmp_path)}
    probe = subprocess.Popen(
        [sys.executable, "-m", "uncast", "probe", "--quick"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, env=env,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not any("forkserver" in line for line in children(probe.pid)) and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.7)
    os.killpg(probe.pid, signal.SIGINT)
    out, err = probe.communicate(timeout=60)
    assert (probe.returncode, out, err) == (130, "", "")
