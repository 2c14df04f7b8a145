"""The portable kernel's plan of rows that split as alone: sized by the kernel of one request, run by that of its batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.test_wgmma import make_problem, spec_of
from uncast.kernels import combine, mma_launch

RESIDENT = {1: 264, 32: 132}
"""CTAs that the device holds of the kernel for a batch of one, and of up to 32."""


@pytest.mark.parametrize("layout", ["bf16", "fp8_e4m3", "fp8_ds_mla"])
def test_a_plan_that_splits_as_alone(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    """Splits of a request that is alone; and what will be launched is compiled in `plan`, not at the first step."""
    compiled: list[int] = []

    def compile_variant(*given: object) -> int:
        *_, bucket, _ = given
        assert isinstance(bucket, int)
        compiled.append(bucket)
        return RESIDENT[bucket]

    monkeypatch.setattr(mma_launch, "compile_variant", compile_variant)

    def plan(requests: int, kv_len: int, alone_rows: int) -> mma_launch.MmaPlan:
        spec = spec_of(num_heads=20, kv_layout=layout, q_data_type=torch.bfloat16)
        problem = make_problem([kv_len] * requests, [1] * requests, spec, "cpu")
        compiled.clear()
        made = mma_launch.make_plan(replace(problem, alone_rows=alone_rows), 132)
        assert made.splits.batch_bucket in compiled
        return made

    def of(made: mma_launch.MmaPlan) -> tuple[object, ...]:
        return (
            made.config,
            made.splits.target,
            made.splits.own_slots,
            combine.unit_shape(made.splits, made.scratch.partial_o.dtype),
        )

    assert of(plan(1, 70, 1)) == of(plan(4, 70, 4)) == of(plan(16, 9000, 1)) == of(plan(9, 70000, 9))
    assert plan(4, 70, 2).splits.target == RESIDENT[1] and plan(4, 70, 0).splits.target == RESIDENT[32]
