"""A worker that begins after its probe was interrupted."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

from uncast.verify.probe_worker import worker_main


def test_a_worker_whose_probe_has_ended_ends_without_a_word(tmp_path: Path) -> None:
    ours, theirs = multiprocessing.Pipe()
    worker_main(theirs, {}, str(tmp_path / "gone" / "worker-0.log"))
    assert not ours.poll()
