"""What is verified on this machine: combinations that ran here and matched the oracle, remembered between processes.

`uncast probe` writes its rows to one JSON file per machine and versions; `is_verified` reads that file once per device type,
on the first question, and only if it is of exactly these versions:

    <folder>/<digest>.json    {"machine": {...}, "rows": [{"backend": ..., "status": "verified", "variants": [...], ...}]}

`<folder>` is the probe's part of `uncast.cache_folder`. `<digest>` is of the `machine` entry: chip, driver, and the versions of
torch, triton, the peers and uncast, its sources included.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import itertools
import json
import os
import platform
import re
import tempfile
import threading
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from uncast.attention.problem import ProblemSpec
from uncast.cache_folder import cache_folder
from uncast.version import __version__

PACKAGES = ("torch", "triton", "flashinfer-python", "flashinfer-jit-cache", "flashinfer-cubin", "sgl-flash-mla")
DECODE, EXTEND, SPARSE_DECODE, SPARSE_EXTEND = "decode", "extend", "sparse_decode", "sparse_extend"
EXTEND_QUERIES, SPARSE_TOPK = 8, 64
"""Queries of a request in a probe's extend modes, rows that a query selects in its sparse ones."""
SM_SCALE = 192**-0.5
"""Of probes: DeepSeek's, with 128 un-absorbed and 64 rope channels. A kernel of `flashinfer_cutlass` has it built in."""
Variant = tuple[bool, str, bool]
"""(causal, lse_base, batch_invariant): what one row of the probe covers several of."""
VARIANTS: tuple[Variant, ...] = tuple(itertools.product((True, False), ("2", "e"), (False, True)))
ERRORS = ("row_error", "tensor_error", "stored_error", "few_rows_error", "many_rows_error")
NUMBERS = (*ERRORS, "seconds", "run_us")
"""Fields of a row, None where nothing was measured."""
_SOURCES = ("attention", "backends", "kernels", "latent", "numerics", "verify")

_verified: set[tuple[str, ProblemSpec]] = set()
_times: dict[tuple[str, ProblemSpec], float] = {}
_loaded: set[str] = set()
_lock = threading.Lock()


def combination(spec: ProblemSpec) -> ProblemSpec:
    """The spec, its layout by its own name, without what does not select code: scale and, beyond decode or not and sparse
    or not, the numbers of queries and of selected rows."""
    return replace(
        spec,
        kv_layout=spec.layout.name,
        sm_scale=1.0,
        max_q_len=min(spec.max_q_len, 2),
        return_lse=False,
        topk=min(spec.topk, 1),
    )


def mark_verified(backend: str, spec: ProblemSpec) -> None:
    """Records, for this process, that `backend` ran `spec` on this machine and matched the oracle."""
    _verified.add((backend, combination(spec)))


def is_verified(backend: str, spec: ProblemSpec) -> bool:
    """Whether `backend` matched the oracle for `spec`'s combination, in this process or in a probe of these versions."""
    if (backend, combination(spec)) in _verified:
        return True
    if spec.device not in _loaded:
        _load(spec.device)
    return (backend, combination(spec)) in _verified


def time_of(backend: str, spec: ProblemSpec) -> float | None:
    """Microseconds of one `run` that a probe of these versions measured for `spec`'s combination; None if it did not."""
    if spec.device not in _loaded:
        _load(spec.device)
    return _times.get((backend, combination(spec)))


def learn(rows: Iterable[dict[str, Any]]) -> None:
    """Takes a probe's rows into the memory of this process: verified ones in, with their times, others out."""
    for row in rows:
        keys = [(row["backend"], combination(row_spec(row, variant))) for variant in row["variants"]]
        time = row.get("run_us")
        if isinstance(time, int | float):
            _times.update(dict.fromkeys(keys, float(time)))
        if row["status"] != "verified":
            if row["device"] not in _loaded:
                _load(row["device"])  # before, so that the file does not bring it back
            _verified.difference_update((row["backend"], combination(row_spec(row, variant))) for variant in VARIANTS)
        _verified.update(keys)


def forget() -> None:
    """Empties the memory of this process; the file is read again on the next question."""
    with _lock:
        _verified.clear()
        _times.clear()
        _loaded.clear()


def _load(device: str) -> None:
    with _lock:
        if device in _loaded:
            return
        learn(row for row in read_rows(device) if row["status"] == "verified")
        _loaded.add(device)


def row_spec(row: dict[str, Any], variant: Iterable[Any]) -> ProblemSpec:
    """The spec of one variant of a row of the file."""
    causal, lse_base, batch_invariant = variant
    return ProblemSpec(
        num_heads=row["num_heads"], head_dim_ckv=row["head_dim_ckv"], head_dim_kpe=row["head_dim_kpe"],
        page_size=row["page_size"], kv_layout=row["kv_layout"], q_data_type=getattr(torch, row["q_data_type"]),
        causal=causal, max_q_len=EXTEND_QUERIES if row["mode"] in (EXTEND, SPARSE_EXTEND) else 1,
        topk=SPARSE_TOPK if row["mode"] in (SPARSE_DECODE, SPARSE_EXTEND) else 0, device=row["device"], arch=row["arch"],
        sm_scale=SM_SCALE,
        lse_base=lse_base, batch_invariant=batch_invariant,
    )  # fmt: skip


def machine(device: str) -> dict[str, str]:
    """What a verified result holds for, by name: "device" (chip), "driver", "python", "uncast" (with its sources), packages."""
    chip, driver = _gpu() if device == "cuda" else (_cpu(), platform.system())
    versions = {name: _version(name) for name in PACKAGES}
    return {
        "device": chip,
        "driver": driver,
        "python": platform.python_version(),
        "uncast": f"{__version__}+{_source_digest()}",
        "cuda": torch.version.cuda or "none",
        **versions,
    }


def cache_path(device: str) -> Path:
    """The file of this machine's rows; it need not exist."""
    key = json.dumps(machine(device), sort_keys=True)
    return cache_folder("probe") / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def read_rows(device: str) -> list[dict[str, Any]]:
    """The rows of this machine's file; none if there is no file or it does not hold rows of these versions."""
    try:
        stored = json.loads(cache_path(device).read_text(encoding="utf-8"))
        if stored["machine"] != machine(device):
            return []
        return [row for row in stored["rows"] if _is_row(row, device)]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []  # not there, not readable or not written by us: nothing is verified


def _is_row(row: Any, device: str) -> bool:
    """Whether a row has all that a probe gives it; a verified one at least one variant that it holds for."""
    try:
        variants = [tuple(variant) for variant in row["variants"]]
        for variant in variants or VARIANTS[:1]:
            spec = row_spec(row, variant)
            spec.check()
            hash(spec)
        numbers = [row[name] for name in NUMBERS]
        return bool(
            row["device"] == device
            and row["mode"] in (DECODE, EXTEND, SPARSE_DECODE, SPARSE_EXTEND)
            and all(isinstance(row[name], str) for name in ("backend", "status", "reason"))
            and all(number is None or isinstance(number, int | float) for number in numbers)
            and set(variants) <= set(VARIANTS)
            and bool(variants) == (row["status"] == "verified")
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return False


def write_rows(device: str, rows: list[dict[str, Any]]) -> None:
    """Replaces this machine's file in one step.

    Raises:
        OSError: the folder or the file cannot be written.
    """
    path = cache_path(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"machine": machine(device), "rows": rows})
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


@functools.cache
def _source_digest() -> str:
    """Of the sources that a result depends on: an edited checkout is another version."""
    digest, root = hashlib.sha256(), Path(__file__).parents[1]
    for path in sorted(path for room in _SOURCES for path in (root / room).glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def _gpu() -> tuple[str, str]:
    if not torch.cuda.is_available():
        return "no GPU", "none"
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    name = f"{properties.name} sm_{properties.major}{properties.minor} {properties.multi_processor_count} SMs"
    with contextlib.suppress(OSError):
        found = re.search(r"\s(\d+\.\d+[.\d]*)\s", Path("/proc/driver/nvidia/version").read_text())
        if found:
            return name, found[1]
    return name, "unknown"


def _cpu() -> str:
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if found:
            model = found[1].strip()
    return f"{model} ({torch.backends.cpu.get_cpu_capability()})"
