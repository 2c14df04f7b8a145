"""`native` as on a Hopper GPU of few multiprocessors, its decode kernels executed on a CPU (`gluon_cpu`): registered names."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import torch

from tests.kernels.gluon_cpu import OnCpu
from uncast.attention import registry
from uncast.attention.backend import Capability
from uncast.attention.problem import Problem, ProblemSpec
from uncast.backends.native import NativeBackend
from uncast.kernels import combine, mma_decode, mma_launch, wgmma_decode, wgmma_launch


def on_hopper(spec: ProblemSpec) -> ProblemSpec:
    return replace(spec, device="cuda", arch=90)


class Emulated(NativeBackend):
    """To be planned and run inside `emulator`."""

    name = "emulated"

    def capability(self, spec: ProblemSpec) -> Capability:
        return super().capability(on_hopper(spec))

    def plan(self, problem: Problem) -> None:
        super().plan(replace(problem, spec=on_hopper(problem.spec)))


class EmulatedPortable(Emulated):
    name = "emulated_mma"

    def __init__(self) -> None:
        super().__init__("mma")


registry.register("emulated", "tests.kernels.native_on_cpu:Emulated")
registry.register("emulated_mma", "tests.kernels.native_on_cpu:EmulatedPortable")


@contextmanager
def emulator(rng: random.Random) -> Iterator[None]:
    """A drawn number of multiprocessors and order of turns; Hopper blocks and loop as a drawn amount of work would choose."""
    num_sms, overlap = rng.randint(1, 8) * rng.choice([1, 4]), rng.random() < 0.5
    tiles = rng.choice([0, 1000, wgmma_launch.MANY_TILES])
    block_rows = wgmma_launch.block_rows
    patches = [
        (torch.cuda, "device", nullcontext),
        (torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=num_sms)),
        (mma_launch, "compile_variant", lambda *args: num_sms),
        (mma_launch, "mma_decode_kernel", OnCpu(mma_decode.mma_decode_kernel)),
        (wgmma_launch, "wgmma_decode_kernel", OnCpu(wgmma_decode.wgmma_decode_kernel, rng.getrandbits(20))),
        (wgmma_launch, "block_rows", lambda rows, few: block_rows(rows, max(few, tiles))),
        (combine, "combine_kernel", OnCpu(combine.combine_kernel)),
        *([(wgmma_launch, "OVERLAP_BATCH", 1), (wgmma_launch, "OVERLAP_TILES", 0)] if overlap else []),
    ]
    with ExitStack() as stack:
        for owner, name, new in patches:
            stack.enter_context(patch.object(owner, name, new))
        yield
