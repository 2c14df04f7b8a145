"""`native` without a GPU: what it claims and what it refuses, and that each refusal says what to change."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from uncast.attention import ProblemSpec
from uncast.attention.problem import ProblemError
from uncast.backends.native import NativeBackend
from uncast.kernels.mma_launch import LAYOUTS, choose_config, shared_memory_limit

SPEC = ProblemSpec(num_heads=16, kv_layout="fp8_e4m3", device="cuda", arch=90)


@pytest.mark.parametrize("arch", [80, 86, 89, 90, 100, 120])
def test_every_layout_page_and_head_count_is_claimed_since_ampere(arch: int) -> None:
    for layout, page, heads in product(LAYOUTS, [1, 2, 4, 8, 16, 32, 64, 128], [1, 5, 12, 20, 64, 96, 128]):
        spec = replace(SPEC, arch=arch, kv_layout=layout, page_size=page, num_heads=heads)
        assert NativeBackend().capability(spec).ok, spec


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"arch": 75}, "need compute capability 8.0 or newer, and this GPU has 7.5"),
        ({"device": "cpu", "arch": 0}, "run on cuda, not on cpu"),
        ({"kv_layout": "fp32"}, "read bf16, fp8_e4m3, fp8_ds_mla, not fp32"),
        ({"q_data_type": torch.float32}, "take bfloat16 or float16 queries, not float32"),
        ({"head_dim_ckv": 256, "head_dim_kpe": 32}, r"are for 512 \+ 64 channels, not 256 \+ 32"),
    ],
)
def test_refusals_are_one_sentence(change: dict[str, object], reason: str) -> None:
    capability = NativeBackend().capability(replace(SPEC, **change))  # type: ignore[arg-type]
    assert not capability.ok and capability.reason.count(". ") == 0
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(capability.reason)


def test_unknown_kernel_is_refused() -> None:
    with pytest.raises(ProblemError, match="kernel is 'cutlass': allowed are auto, mma and wgmma"):
        NativeBackend("cutlass")


def test_batch_invariant_variants_do_not_depend_on_the_batch() -> None:
    for layout in LAYOUTS:
        one = replace(SPEC, kv_layout=layout, batch_invariant=True, num_heads=5)
        assert choose_config(one) == choose_config(replace(one, max_q_len=8))


def test_shared_memory_limits() -> None:
    assert [shared_memory_limit(a) // 1024 for a in (80, 86, 89, 90, 100, 120)] == [163, 99, 99, 227, 227, 99]
