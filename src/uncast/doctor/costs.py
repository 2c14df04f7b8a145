"""What moving bytes costs: the memory bandwidth of known GPUs, and the step's time without a movement."""

from __future__ import annotations

import re

MIN_KERNEL_US = 3.0
"""A kernel's least time on the GPU, launch and drain included (2 to 4 us on chips of today)."""

_PEAKS = (
    ("B300", 8000.0), ("B200", 8000.0), ("GB200", 8000.0), ("H200", 4800.0), ("GH200", 4000.0), ("H100 NVL", 3900.0),
    ("H100 PCIe", 2000.0), ("H100", 3350.0), ("H800", 3350.0), ("H20", 4000.0), ("A100-SXM4-80GB", 2039.0),
    ("A100 80GB", 1935.0), ("A100", 1555.0), ("A800", 2039.0), ("L40S", 864.0), ("L40", 864.0), ("L4", 300.0),
    ("A10", 600.0), ("V100", 900.0), ("T4", 320.0), ("RTX 5090", 1792.0), ("RTX 4090", 1008.0), ("RTX 3090", 936.0),
    ("RTX 2080 Ti", 616.0), ("MI355X", 8000.0), ("MI350X", 8000.0), ("MI325X", 6000.0), ("MI300X", 5300.0),
    ("MI300", 5300.0), ("MI250", 3277.0), ("MI210", 1638.0),
)  # fmt: skip
"""GB/s by vendors' data sheets; the first name that occurs as words wins."""


def peak_bandwidth(gpu: str) -> float | None:
    """GB/s of the named GPU's memory by its data sheet, None if unknown."""
    for name, peak in _PEAKS:
        if re.search(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![0-9])", gpu, re.IGNORECASE):
            return peak
    return None


def bandwidth(bytes_moved: float, us: float) -> float:
    """GB/s."""
    return bytes_moved / us / 1e3 if us > 0 else 0.0


def predict(
    step_us: float,
    exposed_us: float,
    calls: float,
    bytes_needed_per_call: float,
    gb_per_s: float,
    least: float | None = None,
) -> tuple[float, float]:
    """(low, high) microseconds of a step without a movement.

    Low: its exposed time is gone. High: each call still moves the bytes that are needed at the bandwidth it reached, in a
    kernel of its own (`least` microseconds, by default `MIN_KERNEL_US`). A call never gets dearer than it was.
    """
    low = max(0.0, step_us - exposed_us)
    if bytes_needed_per_call <= 0:
        return low, low
    each = bytes_needed_per_call / gb_per_s / 1e3 if gb_per_s > 0 else 0.0
    return low, low + min(exposed_us, calls * max(MIN_KERNEL_US if least is None else least, each))
