"""A step that another rank never does its part of ends the process that waits for it, and no other step does."""

from __future__ import annotations

import queue
import threading
import time

import pytest

from uncast.engine import pace
from uncast.engine.pace import Pace


class Event:
    def __init__(self, done: bool) -> None:
        self.done, self.asked = done, threading.Event()

    def query(self) -> bool:
        self.asked.set()
        return self.done


class Fails(Event):
    def query(self) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore of it")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> queue.SimpleQueue[str]:
    monkeypatch.setattr(pace, "INTERVAL_S", 0.01)
    return queue.SimpleQueue()


def make(said: queue.SimpleQueue[str], limit_s: float) -> Pace:
    return Pace(limit_s, said.put, "rank 0 of 2")


def test_a_step_that_does_not_end_is_given_up(said: queue.SimpleQueue[str]) -> None:
    watched = make(said, 0.2)
    watched.note(Event(done=True))
    began = time.monotonic()
    watched.note(Event(done=False))
    assert "rank 0 of 2: a step has not ended in 0.2 s" in said.get(timeout=60.0)
    assert time.monotonic() - began >= 0.2


def test_steps_that_end_are_not_however_many(said: queue.SimpleQueue[str]) -> None:
    watched, late = make(said, 60.0), Event(done=False)
    for _ in range(100):
        watched.note(Event(done=True))
    watched.note(late)
    assert late.asked.wait(60.0)
    late.done = True
    last = Event(done=True)
    watched.note(last)
    assert last.asked.wait(60.0)
    watched.close()
    assert said.empty()


def test_a_step_that_fails_says_why(said: queue.SimpleQueue[str]) -> None:
    make(said, 60.0).note(Fails(done=False))
    assert said.get(timeout=60.0).endswith("a step failed (CUDA error: an illegal memory access was encountered)")
