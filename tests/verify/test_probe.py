"""The probe: what it verifies, what it measures a backend with a copy against, and its sentences."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from uncast.attention import ProblemSpec, registry
from uncast.backends.pool_cast import PoolCastBackend
from uncast.backends.torch_cpu import TorchCpuBackend
from uncast.verify.probe import probe_combination

BASELINES = ("gather_cast:torch_cpu", "pool_cast:torch_cpu")


def spec(**changes: Any) -> ProblemSpec:
    defaults: dict[str, Any] = {"num_heads": 8, "kv_layout": "fp8_e4m3", "q_data_type": torch.float32, "device": "cpu"}
    return ProblemSpec(**{**defaults, "sm_scale": 1 / 16, **changes})


@pytest.mark.parametrize("layout", ["fp8_e4m3", "fp8_ds_mla"])
@pytest.mark.parametrize("backend", ["torch_cpu", *BASELINES])
@pytest.mark.parametrize("max_q_len", [1, 8])
@pytest.mark.parametrize("heads", [1, 20, 128])
def test_every_cpu_backend_is_verified(backend: str, layout: str, max_q_len: int, heads: int) -> None:
    result = probe_combination(backend, spec(num_heads=heads, kv_layout=layout, max_q_len=max_q_len))
    assert result.verified, result.reason


class Off(TorchCpuBackend):
    """A backend with an error of a size that the tests choose, in the output, the LSE or between runs."""

    name = "off"
    factor, shift, drift = 1.0, 0.0, 0.0

    def run(self, *args: Any, **kwargs: Any) -> None:
        super().run(*args, **kwargs)
        kwargs["out"].mul_(self.factor)
        kwargs["lse"].add_(self.shift)
        self.shift += self.drift


class OffCast(PoolCastBackend):
    """A baseline whose copy is of other values than the cache's."""

    def __init__(self) -> None:
        super().__init__(TorchCpuBackend())
        self.name = "off_cast"

    def run(self, *args: Any, **kwargs: Any) -> None:
        kwargs["ckv_scale"] *= 1.01
        super().run(*args, **kwargs)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"factor": 1.02}, "off differs from the oracle: relative error "),
        ({"shift": 0.01}, "off differs from the oracle in its LSE: by 1.0e-02"),
        ({"drift": 1e-3}, "off gives different bits in two runs on the same input"),
    ],
)
def test_a_reason_is_a_sentence_about_the_backend(
    change: dict[str, float], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in change.items():
        monkeypatch.setattr(Off, name, value)
    registry.register("off", f"{__name__}:Off")
    try:
        result = probe_combination("off", spec())
    finally:
        registry._BACKENDS.pop("off")
    assert not result.verified and result.reason.startswith(reason)


def test_a_copy_of_wrong_values_is_not_forgiven() -> None:
    registry.register("off_cast", f"{__name__}:OffCast")
    try:
        assert "differs from the oracle" in probe_combination("off_cast", spec()).reason
    finally:
        registry._BACKENDS.pop("off_cast")
