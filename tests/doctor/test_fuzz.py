"""Damaged traces: no traceback, bounded time. UNCAST_FUZZ=2000 runs as many mutations as the acceptance asks for."""

from __future__ import annotations

import gzip
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest

from tests.doctor.synthetic import capture, decode, decode_graph
from uncast.doctor.diagnose import Options, diagnose
from uncast.doctor.errors import TraceError
from uncast.doctor.page import render
from uncast.doctor.report import to_json

MUTATIONS = int(os.environ.get("UNCAST_FUZZ", "160"))
MAX_SECONDS = 5.0
"""Of CPU time of one trace (most take 0.02). The shortest of `TRIES` counts: a machine that stalls does not count."""
TRIES = 4
STRANGE: tuple[Any, ...] = (
    None, -1, 0, 10**30, 1e300, "", "x", "\u0000", [], {}, [[[]]], True, 2**63, "9" * 50, -1e18, [1, "a", None], {"a": []},
)  # fmt: skip


def bases() -> list[dict[str, Any]]:
    small = {"layers": 5, "steps": 3}
    return [
        decode(cast_us=800.0, **small).document(),  # type: ignore[arg-type]
        decode_graph(**small).document(),  # type: ignore[arg-type]
        decode(label="ProfilerStep#1", cast_us=800.0, **small).document(),  # type: ignore[arg-type]
        capture(layers=5).document(),
    ]


def mutate(random_: random.Random, document: dict[str, Any]) -> bytes:
    kind = random_.randrange(6)
    events = [dict(e) for e in document["traceEvents"]]
    if kind == 0:
        random_.shuffle(events)
    if kind == 1:
        for _ in range(random_.randrange(1, 60)):
            event = random_.choice(events)
            event.pop(random_.choice(list(event) or ["ts"]), None)
    if kind == 2:
        for _ in range(random_.randrange(1, 60)):
            event = random_.choice(events)
            event[random_.choice([*event, "args"])] = random_.choice(STRANGE)
    if kind == 3:
        for _ in range(random_.randrange(1, 60)):
            event = random_.choice(events)
            if isinstance(event.get("args"), dict):
                event["args"] = event["args"] | {
                    random_.choice(["Input Dims", "Input type", "Input Strides", "grid", "block", "correlation", "bytes",
                                    "stream", "Call stack", "kernel", "Concrete Inputs"]): random_.choice(STRANGE)
                }  # fmt: skip
    data = bytearray(json.dumps(document | {"traceEvents": events}, indent=random_.choice([None, None, 1])).encode())
    if kind == 4:
        for _ in range(random_.randrange(1, 200)):
            data[random_.randrange(len(data))] ^= 1 << random_.randrange(8)
    if random_.random() < 0.3:
        data = bytearray(gzip.compress(bytes(data), 1, mtime=0))
        if kind == 4:
            for _ in range(random_.randrange(1, 5)):
                data[random_.randrange(len(data))] ^= 1 << random_.randrange(8)
    if kind == 5:
        del data[random_.randrange(len(data)) :]
    return bytes(data)


def test_mutated_traces(tmp_path: Path) -> None:
    originals = bases()
    path, joined = tmp_path / "m.json", tmp_path / "capture.json"
    outcomes = {"report": 0, "sentence": 0}

    def run(seed: int) -> tuple[str, float]:
        """What became of the trace and the CPU seconds that it took."""
        start = time.process_time()
        try:
            diagnosis = diagnose(path, Options(capture=joined if seed % 4 < 2 else None))
            to_json(diagnosis.report)
            render(diagnosis)
            return "report", time.process_time() - start
        except TraceError as error:  # fit for a terminal
            assert "\n" not in str(error) and len(str(error)) < 500
            return "sentence", time.process_time() - start
        except Exception as error:
            pytest.fail(f"seed {seed}: {type(error).__name__}: {error}")

    for seed in range(MUTATIONS):
        random_ = random.Random(seed)
        path.write_bytes(mutate(random_, random_.choice(originals[:3])))
        joined.write_bytes(mutate(random_, originals[3]) if seed % 2 else json.dumps(originals[3]).encode())
        outcome, seconds = run(seed)
        for _ in range(TRIES - 1):
            if seconds >= MAX_SECONDS:
                seconds = min(seconds, run(seed)[1])
        assert seconds < MAX_SECONDS, seed
        outcomes[outcome] += 1
    assert outcomes["report"] > MUTATIONS / 2 and outcomes["sentence"] > 0, outcomes
