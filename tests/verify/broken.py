"""Backends that are broken in one way each; each computes right numbers first, so that only its own fault shows."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch

from uncast.attention import Capability, Problem, ProblemSpec
from uncast.backends.torch_cpu import TorchCpuBackend


class Abort(TorchCpuBackend):
    name = "abort"

    def run(self, *args: Any, **kwargs: Any) -> None:
        print("kernel.cu:143: no eligible operator", file=sys.stderr, flush=True)
        os.abort()


class Hang(TorchCpuBackend):
    name = "hang"

    def run(self, *args: Any, **kwargs: Any) -> None:
        while True:
            time.sleep(1)


class Nan(TorchCpuBackend):
    name = "nan"

    def run(self, *args: Any, **kwargs: Any) -> None:
        super().run(*args, **kwargs)
        kwargs["out"][-1, -1, -1] = torch.nan


class NanInBaseE(TorchCpuBackend):
    """Right in the first variants of a row."""

    name = "nan_in_base_e"

    def run(self, *args: Any, **kwargs: Any) -> None:
        super().run(*args, **kwargs)
        if self._problem.spec.lse_base == "e":
            kwargs["out"].fill_(torch.nan)


class Zeros(TorchCpuBackend):
    name = "zeros"

    def run(self, *args: Any, **kwargs: Any) -> None:
        super().run(*args, **kwargs)
        kwargs["out"].zero_()


class OutOfBounds(TorchCpuBackend):
    """Writes four values past the end of `out`."""

    name = "out_of_bounds"

    def run(self, *args: Any, **kwargs: Any) -> None:
        super().run(*args, **kwargs)
        out = kwargs["out"]
        out.as_strided((4,), (1,), out.storage_offset() + out.numel()).fill_(1.0)


class Before(TorchCpuBackend):
    """Writes one value before the start of `lse`."""

    name = "before"

    def run(self, *args: Any, **kwargs: Any) -> None:
        super().run(*args, **kwargs)
        lse = kwargs["lse"]
        lse.as_strided((1,), (1,), lse.storage_offset() - 1).fill_(1.0)


class Partial(TorchCpuBackend):
    """Does not write its last row: what was in `out` before shows through."""

    name = "partial"

    def run(self, *args: Any, **kwargs: Any) -> None:
        kept = kwargs["out"][-1].clone()
        super().run(*args, **kwargs)
        kwargs["out"][-1] = kept


class Scribbler(TorchCpuBackend):
    """Changes a byte of the cache after reading it."""

    name = "scribbler"

    def run(self, q_nope: torch.Tensor, q_pe: torch.Tensor, cache: torch.Tensor, **kwargs: Any) -> None:
        super().run(q_nope, q_pe, cache, **kwargs)
        cache.view(-1)[0] += 1


class QuantisesQueries(TorchCpuBackend):
    """Rounds the queries to FP8 in the caller's tensor: an oracle over what is left there would agree."""

    name = "quantises_queries"

    def run(self, q_nope: torch.Tensor, q_pe: torch.Tensor, cache: torch.Tensor, **kwargs: Any) -> None:
        q_nope.copy_(q_nope.to(torch.float8_e4m3fn).to(q_nope.dtype))
        super().run(q_nope, q_pe, cache, **kwargs)


class Neighbour(TorchCpuBackend):
    """A request's bits depend on the size of its batch."""

    name = "neighbour"

    def run(self, *args: Any, **kwargs: Any) -> None:
        super().run(*args, **kwargs)
        kwargs["out"].mul_(1 + 1e-4 * self._problem.batch_size)


class StaticAssertion(TorchCpuBackend):
    name = "static_assertion"

    def plan(self, problem: Problem) -> None:
        raise RuntimeError(
            "nvcc failed:\nmla_hopper.cuh(143): error: static assertion failed with no eligible GMMA operator\n1 error"
        )


class IllegalAccess(TorchCpuBackend):
    name = "illegal_access"

    def run(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with TORCH_USE_CUDA_DSA")


class Fickle(TorchCpuBackend):
    """Claims everything and refuses it when it counts."""

    name = "fickle"

    def plan(self, problem: Problem) -> None:
        from uncast.attention import ProblemError

        raise ProblemError("heads of 16 are not for me")


class DiesWhenAsked(TorchCpuBackend):
    name = "dies_when_asked"

    def capability(self, spec: ProblemSpec) -> Capability:
        os._exit(3)


class RaisesWhenAsked(TorchCpuBackend):
    name = "raises_when_asked"

    def capability(self, spec: ProblemSpec) -> Capability:
        raise ZeroDivisionError("\x1b[31mheads\x1b[0m by zero\nand more")


FIVE = {"abort": Abort, "hang": Hang, "nan": Nan, "zeros": Zeros, "out_of_bounds": OutOfBounds}
PATHS = {
    cls.name: f"{__name__}:{cls.__name__}"
    for cls in (
        *FIVE.values(), Before, Partial, Scribbler, QuantisesQueries, Neighbour, StaticAssertion, IllegalAccess, Fickle,
        DiesWhenAsked, RaisesWhenAsked, NanInBaseE,
    )
}  # fmt: skip
