"""What a recorded figure must name: the machine and the versions of everything that computed it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

import torch

PACKAGES = ("torch", "triton", "flashinfer-python", "sgl-flash-mla")


def versions() -> str:
    """`uncast=0.1.0 python=3.11.7 torch=2.13.0 ...`, installed packages only; an uncast run from its source is named by its
    commit, where the environment variable UNCAST_COMMIT tells it."""
    found = {
        "uncast": _version("uncast") or os.environ.get("UNCAST_COMMIT", "source"),
        "python": platform.python_version(),
    }
    found.update({name: version for name in PACKAGES if (version := _version(name))})
    return " ".join(f"{name}={version}" for name, version in found.items())


def device_name() -> str:
    """The GPU's name, or the CPU's model with the number of cores torch uses."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{_cpu_model()} x{torch.get_num_threads()}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or f"{os.cpu_count()} cores"
