"""The work split of sparse attention: whole coverage, bounded scratch, enough CTAs. A failure is a wrong or a slow launch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from uncast.attention.problem import ProblemSpec
from uncast.kernels import sparse_launch, wgmma_sparse_launch
from uncast.kernels.sparse_launch import sparse_plan


@pytest.mark.parametrize("topk", [1, 63, 64, 65, 512, 2048, 5000])
@pytest.mark.parametrize("total_q", [1, 3, 32, 100, 128, 192, 4096])
@pytest.mark.parametrize(("heads", "rows"), [(1, 8), (20, 16), (64, 64), (128, 64), (128, 16)])
def test_splits_cover_all_tiles_within_bounds(topk: int, total_q: int, heads: int, rows: int) -> None:
    work = sparse_plan(batch=total_q, total_q=total_q, num_heads=heads, block_rows=rows, topk=topk, num_ctas=132)
    tiles, blocks = -(-topk // 64), total_q * -(-heads // rows)
    assert work.per * (work.splits - 1) < tiles <= work.per * work.splits
    assert work.plan.num_items == blocks * work.splits
    assert work.plan.can_split == (work.splits > 1)
    assert work.plan.partial_blocks <= 2 * 132
    if work.splits > 1:
        assert work.plan.num_groups * work.splits == work.plan.partial_blocks


def test_a_lone_query_fills_the_gpu_and_a_full_batch_is_not_split() -> None:
    alone = sparse_plan(batch=1, total_q=1, num_heads=64, block_rows=16, topk=2048, num_ctas=132)
    assert alone.plan.num_items == 128
    full = sparse_plan(batch=128, total_q=128, num_heads=64, block_rows=64, topk=2048, num_ctas=132)
    assert (full.splits, full.per) == (1, 32)


def test_a_batch_invariant_plan_looks_at_topk_alone() -> None:
    splits = {
        sparse_plan(
            batch=n, total_q=n, num_heads=16, block_rows=16, topk=2048, num_ctas=132, batch_invariant=True
        ).splits
        for n in (1, 7, 500)
    }
    assert splits == {4}


@pytest.mark.parametrize("page_size", [1, 16, 64, 128])
def test_the_hopper_kernel_takes_any_page_size(page_size: int) -> None:
    spec = ProblemSpec(num_heads=64, page_size=page_size, arch=90, topk=2048)
    assert wgmma_sparse_launch.supports(spec) is None
    assert "not fp32" in str(sparse_launch.supports(replace(spec, kv_layout="fp32")))
    assert "compute capability 9.0" in str(wgmma_sparse_launch.supports(replace(spec, arch=89)))
    assert "only bfloat16 queries" in str(wgmma_sparse_launch.supports(replace(spec, q_data_type=torch.float16)))
