"""Adapters of peers: what they refuse in `plan`, in a sentence, with stand-ins for their libraries; numbers are the probe's."""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from typing import Any

import pytest
import torch

from uncast.attention import Problem, ProblemSpec, Refused, registry
from uncast.backends._pages import block_table, clear_unseen, unseen_rows
from uncast.verify.cases import make_case


def problem_of(q_lens: list[int], kv_lens: list[int], *, total_q: int | None = None, **changes: Any) -> Problem:
    """A Hopper problem whose tensors lie on the CPU."""
    spec = replace(ProblemSpec(num_heads=16, kv_layout="bf16", arch=90, max_q_len=max(q_lens)), **changes)
    case = make_case(replace(spec, device="cpu"), kv_lens, q_lens)
    width = case.block_tables.shape[1]
    indptr = torch.arange(len(kv_lens) + 1, dtype=torch.int32) * width
    rows = sum(q_lens) if total_q is None else total_q
    return Problem(
        spec,
        case.qo_indptr,
        indptr,
        case.block_tables.reshape(-1),
        case.seq_lens,
        rows,
        width * spec.page_size,
        None,
        width,
    )


@pytest.fixture
def flash_mla(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_mla", types.ModuleType("flash_mla"))


@pytest.mark.usefixtures("flash_mla")
@pytest.mark.parametrize("name", ["flashmla", "flashmla_lossy_q"])
def test_flashmla_refuses_mixed_lengths_and_padding_rows(name: str) -> None:
    backend = registry.create(name)
    with pytest.raises(Refused, match=f"^{name} needs the same number of queries in every request of a batch: plan"):
        backend.plan(problem_of([1, 2], [70, 70]))
    with pytest.raises(Refused, match=f"^{name} needs all 5 query rows to belong to a request, not 4: give the exact"):
        backend.plan(problem_of([2, 2], [70, 70], total_q=5))
    backend.plan(problem_of([0, 0], [70, 70]))  # nothing to do


def test_rows_that_see_nothing_are_cleared_whatever_a_library_left_there() -> None:
    assert unseen_rows(problem_of([1, 3], [5, 3])) is None
    unseen = unseen_rows(problem_of([1, 3, 2], [0, 2, 0]))
    assert unseen is not None and unseen.tolist() == [True, True, False, False, True, True]
    full = unseen_rows(problem_of([1, 3], [1, 0], causal=False, total_q=6))
    assert full is not None and full.tolist() == [False, True, True, True, False, False]
    out, lse = torch.full((6, 2, 4), torch.nan), torch.full((6, 2), torch.nan)
    clear_unseen(unseen, out, lse)
    assert torch.equal(out.isnan().all(-1).all(-1), ~unseen) and bool((lse[unseen] == -torch.inf).all())


def test_block_tables_name_pages_that_exist_and_come_in_whole_groups() -> None:
    problem = problem_of([1, 1], [70, 200])
    table = block_table(problem, 8)
    assert table.shape == (2, 8) and bool((table[:, 4:] == 0).all()) and bool((table[0, 2:] == 0).all())
    assert table[1, :4].tolist() == problem.kv_indices.view(2, -1)[1, :4].tolist()
