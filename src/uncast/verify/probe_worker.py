"""The child process of a probe: asks and runs one backend, and answers over a pipe. It may die; its parent may not."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from uncast.attention import Capability, ProblemError, ProblemSpec, Refused, registry
from uncast.attention.registry import UnknownBackend
from uncast.attention.verified import ERRORS, Variant
from uncast.backends._recast import recast_capability
from uncast.verify.probe import ProbeInputs, ProbeResult, probe_combination
from uncast.verify.probe_claims import claims_row, refused_row
from uncast.verify.probe_grid import ProbeKey
from uncast.verify.probe_time import TimedInputs, time_backend

MAX_REASON = 240


def worker_main(pipe: Connection, backends: dict[str, str], log: str) -> None:
    """Answers messages until None: `("survey", keys)` with `survey`'s answer, `("claims", (backend, layout))` with a row of the
    matrix, `("probe", key)` with a row and whether this process can go on, `("time", (key, variant))` with microseconds and a
    reason why there are none.

    Args:
        backends: names and dotted paths to register, the parent's.
        log: a file that takes stdout and stderr of this process, libraries' and crashes' included.
    """
    try:
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    except FileNotFoundError:
        return  # interrupted while this process began: the probe has ended and taken its folder along
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    for name, path in backends.items():
        registry.register(name, path)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # small cases: on a busy core every thread's barrier would wait
    pipe.send(("ready", None))
    inputs: ProbeInputs | None = None
    timed: TimedInputs | None = None
    with contextlib.suppress(EOFError, KeyboardInterrupt):  # the parent is gone, or Ctrl-C, which it handles
        while (message := pipe.recv()) is not None:
            task, payload = message
            if task == "survey":
                pipe.send(("done", survey(payload)))
                continue
            if task == "claims":
                pipe.send(("done", claimed(*payload)))
                continue
            if task == "time":
                key, variant = payload
                answer, timed = time_key(key, variant, timed)
                pipe.send(("done", answer))
                continue
            row, inputs = probe_key(payload, inputs, lambda phase: pipe.send(("phase", phase)))
            usable = row["status"] == "verified" or not _is_broken(payload.device)
            pipe.send(("done", (row, usable)))
            if not usable:
                return


def _is_broken(device: str) -> bool:
    """Whether an error, such as an illegal access, has ended this process's CUDA context for good."""
    if device != "cuda":
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def survey(keys: list[ProbeKey]) -> tuple[list[str | None], str]:
    """The `refusal` of each key of one backend; and what its `capability` raised, if it did."""
    try:
        return [refusal(key) for key in keys], ""
    except Exception as error:  # whatever a backend raises is a row; that is what this process is for
        return [], explain(keys[0].backend, "capability", error)


def claimed(backend: str, kv_layout: str) -> dict[str, Any]:
    """A row of the matrix, also for a backend that raises when it is asked."""
    try:
        return claims_row(backend, kv_layout)
    except Exception as error:
        return refused_row(backend, kv_layout, explain(backend, "capability", error))


def refusal(key: ProbeKey) -> str | None:
    """None if the backend claims at least one variant of `key`, else why not. A library that is installed is not imported."""
    wrapper, _, inner = key.backend.rpartition(":")
    try:
        made = registry.asked_of(inner) if registry.is_installed(inner) else registry.create(inner)
    except UnknownBackend as error:
        return str(error)
    ask: Callable[[ProblemSpec], Capability] = made.capability  # type: ignore[assignment]
    specs = [spec for _, spec in key.specs()]
    reasons = [recast_capability(key.backend, ask, spec) if wrapper else ask(spec) for spec in specs]
    return None if any(capability.ok for capability in reasons) else reasons[0].reason


def probe_key(
    key: ProbeKey, inputs: ProbeInputs | None, tell: Callable[[str], None]
) -> tuple[dict[str, Any], ProbeInputs | None]:
    """The row of `key`: verified if every variant that the backend claims is; and the inputs, for the next key."""
    start, phase = time.perf_counter(), "create"
    results: list[ProbeResult] = []

    def on_phase(name: str) -> None:
        nonlocal phase
        phase = name
        tell(name)

    try:
        backend = registry.create(key.backend)
        variants = [(variant, spec) for variant, spec in key.specs() if backend.capability(spec).ok]
        for _, spec in variants:
            inputs = ProbeInputs.of(spec, backend.uniform_q_len, inputs)
            thorough = spec.lse_base == "2"  # neither graphs nor the split over a batch know of the base
            results.append(probe_combination(key.backend, spec, inputs=inputs, thorough=thorough, on_phase=on_phase))
            if not results[-1].verified:
                break
    except Exception as error:  # whatever a backend raises is a row; that is what this process is for
        return key.row("failed", explain(key.backend, phase, error), seconds=_since(start)), inputs
    more = {name: _largest([getattr(result, name) for result in results]) for name in ERRORS} | {
        "seconds": _since(start)
    }
    if not results:
        return key.row("failed", f"{key.backend} no longer claims what it claimed when asked first", **more), inputs
    if not results[-1].verified:
        causal, lse_base, invariant = variants[len(results) - 1][0]
        where = f"causal {causal}, LSE base {lse_base}, batch_invariant {invariant}"
        return key.row("failed", f"{results[-1].reason} ({where})", **more), inputs
    return key.row("verified", "", **more, variants=[list(variant) for variant, _ in variants]), inputs


def time_key(
    key: ProbeKey, variant: Variant, before: TimedInputs | None
) -> tuple[tuple[float | None, str], TimedInputs | None]:
    """Microseconds of one `run` of a verified key's variant, or None and why; and the inputs, for the next key."""
    try:
        spec = key.spec(variant)
        before = TimedInputs.of(spec, before)
        return (time_backend(key.backend, spec, before.case), ""), before
    except Exception as error:  # whatever a backend raises is a row
        return (None, explain(key.backend, "run", error)), before


def explain(backend: str, phase: str, error: Exception) -> str:
    """What an exception says about a backend, in one sentence."""
    message = str(error)
    lower = message.lower()
    line = next((line.strip() for line in message.splitlines() if line.strip()), type(error).__name__)
    if "static assert" in lower or "static_assert" in lower:
        line = next(x.strip() for x in message.splitlines() if "static" in x.lower() and "assert" in x.lower())
        what = f"fails to compile on a static assertion: {line}"
    elif "compil" in type(error).__name__.lower() or ("compil" in lower and phase == "plan"):
        what = f"fails to compile: {line}"
    elif "illegal memory access" in lower or "misaligned address" in lower:
        what = f"makes an illegal memory access: {line}"
    elif "out of memory" in lower or "out of resource" in lower:
        what = f"does not fit: {line}"
    elif isinstance(error, Refused | ProblemError) and phase == "plan":
        what = f"claims this and refuses it in plan(): {line}"
    else:
        what = f"raises {type(error).__name__} in {phase}(): {line}"
    return shorten(f"{backend} {what}")


def shorten(sentence: str) -> str:
    """At most `MAX_REASON` characters, each of which a terminal shows: libraries' errors may be in colour."""
    sentence = "".join(character if character.isprintable() else " " for character in sentence)
    return sentence if len(sentence) <= MAX_REASON else sentence[: MAX_REASON - 3] + "..."


def _largest(errors: list[float]) -> float | None:
    """None where there is none, or one is not finite."""
    return max(errors) if errors and all(map(math.isfinite, errors)) else None


def _since(start: float) -> float:
    return round(time.perf_counter() - start, 3)
