"""The work split: every tile once, inside its bounds, balanced; and the device takes the same decisions as the reference."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
from triton.experimental import gluon  # noqa: E402
from triton.experimental.gluon import language as gl  # noqa: E402

from tests.kernels.gluon_cpu import OnCpu  # noqa: E402
from uncast.kernels.find_work import find_work  # noqa: E402
from uncast.kernels.schedule import (  # noqa: E402
    INVARIANT_SPLITS,
    ScheduleError,
    SplitPlan,
    plan_splits,
    reference_items,
)


def make_plan(q_lens: list[int], kv_lens: list[int], **kw: object) -> SplitPlan:
    given = {"num_heads": 16, "block_rows": 16, "num_ctas": 132, "max_kv_len": max([*kv_lens, 1])} | kw
    return plan_splits(batch=len(kv_lens), total_q=sum(q_lens), **given)  # type: ignore[arg-type]


def batches() -> list[tuple[list[int], list[int], dict[str, object]]]:
    rng = random.Random(5)
    cases: list[tuple[list[int], list[int], dict[str, object]]] = [
        ([1], [4096], {"num_heads": 64, "block_rows": 64, "min_chunk": 1}),
        ([1], [524288], {"num_heads": 8}),
        ([1], [0], {}),
        ([1] * 512, [2048] * 512, {}),
        ([1] * 4000, [100] * 4000, {"num_heads": 5}),
        ([1] * 120, [64] * 119 + [524288], {}),
        ([1] * 120, [300] * 119 + [9000], {"num_heads": 64, "block_rows": 64, "buckets": (32, 64, 128)}),
        ([2] * 33, [4000] * 33, {"num_heads": 64, "block_rows": 64, "min_chunk": 1, "buckets": (64, 4096)}),
        ([4096] + [1] * 31, [36864] + [500] * 31, {"num_heads": 64, "block_rows": 64}),
    ]
    for _ in range(60):
        batch = rng.choice([1, 2, 7, 31, 33, 300])
        kv = [rng.choice([0, 1, 63, 64, 65, rng.randint(0, 20000)]) for _ in range(batch)]
        q = [rng.choice([0, 1, 1, 1, 5, 8]) for _ in range(batch)]
        cases.append((q, kv, {"num_heads": rng.choice([1, 5, 20, 128]), "block_rows": rng.choice([8, 16, 32, 64]),
                              "num_ctas": rng.choice([20, 132, 264]), "batch_invariant": rng.random() < 0.3,
                              "min_chunk": rng.choice([1, 2])}))  # fmt: skip
    for rows, kv in ((1, [3000, 64]), (1, [9000] * 8), (3, [8448, 8449, 8450]), (9, [70000 + n for n in range(9)]),
                     (2, [100, 101, 40000, 40001]), (1, [0, 900, 0, 63]), (4, [64, 65, 66, 67, 0, 0, 0, 0])):  # fmt: skip
        for shape in ({"num_heads": 20, "block_rows": 32, "min_chunk": 1}, {"num_heads": 128, "block_rows": 64}):
            cases.append(([1] * len(kv), kv, {"alone_rows": rows, **shape}))
    return cases + alone_batches(rng, 40, [20, 132, 264])


def alone_batches(
    rng: random.Random, count: int, num_ctas: list[int]
) -> list[tuple[list[int], list[int], dict[str, object]]]:
    """Random ones with `alone_rows`, of one sequence's rows and of any lengths, that fit the grid and that do not."""
    cases: list[tuple[list[int], list[int], dict[str, object]]] = []
    for _ in range(count):
        batch, ctas = rng.randint(2, 32), rng.choice(num_ctas)
        top = rng.choice([64, 60 * ctas, 300 * ctas])
        kv = [rng.choice([0, 63, 64, 65, rng.randint(0, top)]) for _ in range(batch)]
        if rng.random() < 0.5:
            kv = list(range(top, top + batch))
        q = [1, *(rng.choice([1, 1, 1, 0]) for _ in kv[1:])]
        cases.append((q, kv, {"num_heads": rng.choice([1, 16, 20, 128]), "block_rows": rng.choice([16, 32, 64]),
                              "num_ctas": ctas, "alone_rows": rng.choice([1, 2, 3, 9, 40]), "max_q_len": 1,
                              "max_kv_len": rng.choice([max(*kv, 1), 1 << 18]), "min_chunk": rng.choice([1, 2])}))  # fmt: skip
    return cases


def test_every_tile_of_every_row_block_is_computed_once_and_within_bounds() -> None:
    for q_lens, kv_lens, kw in batches():
        plan = make_plan(q_lens, kv_lens, **kw)
        items = list(reference_items(plan, q_lens, kv_lens))
        assert len(items) <= plan.num_items
        parts = [i.part for i in items if i.part >= 0]
        assert parts == list(range(len(parts))) and len(parts) <= plan.partial_blocks
        groups = {(i.request, i.row0) for i in items if i.num_splits > 1}
        assert len(groups) <= plan.num_groups
        covered: dict[tuple[int, int], list[int]] = {}
        for i in items:
            assert i.tile0 < i.tile1 or kv_lens[i.request] == 0
            covered.setdefault((i.request, i.row0), []).extend(range(i.tile0, i.tile1))
        for b, (q, kv) in enumerate(zip(q_lens, kv_lens, strict=True)):
            for row0 in range(0, q * plan.num_heads, plan.block_rows):
                assert covered.pop((b, row0)) == list(range(-(-kv // 64)))
        assert not covered


def makespan(plan: SplitPlan, q_lens: list[int], kv_lens: list[int]) -> int:
    """Tiles on the busiest CTA slot when items start in order on the first free slot."""
    slots = [0] * plan.target
    for item in reference_items(plan, q_lens, kv_lens):
        slots[slots.index(min(slots))] += item.tile1 - item.tile0
    return max(slots)


@pytest.mark.parametrize(
    ("q_lens", "kv_lens", "limit"),
    [
        ([1], [524288], 1.1),
        ([1] * 512, [2048] * 512, 1.1),
        ([1] * 32, [8192] * 32, 1.1),
        ([1] * 128, [4096] * 128, 1.1),
        ([1] * 33, [512] * 32 + [131072], 1.3),
        ([1] * 120, [64] * 119 + [524288], 1.2),
        ([1] * 64, [1000 * (1 + i % 7) for i in range(64)], 1.6),
    ],
)
def test_balance(q_lens: list[int], kv_lens: list[int], limit: float) -> None:
    plan = make_plan(q_lens, kv_lens, max_kv_len=1 << 20)
    ideal = sum(-(-n // 64) for n in kv_lens) / plan.target
    assert makespan(plan, q_lens, kv_lens) <= limit * max(ideal, 2)


def test_scratch_does_not_grow_with_the_context() -> None:
    short, long = (make_plan([1] * 64, [n] * 64) for n in (8192, 1 << 20))
    assert short.partial_blocks == long.partial_blocks <= 2 * 132


def test_batch_invariant_splits_depend_on_the_own_length_only() -> None:
    def splits(q_lens: list[int], kv_lens: list[int]) -> list[int]:
        plan = make_plan(q_lens, kv_lens, max_kv_len=1 << 20, batch_invariant=True)
        return [i.num_splits for i in reference_items(plan, q_lens, kv_lens) if i.request == 0 and i.tile0 == 0]

    assert splits([1], [30000]) == splits([1] * 9, [30000, *range(1, 9)]) == [INVARIANT_SPLITS]


@pytest.mark.parametrize(("heads", "block_rows"), [(4, 16), (20, 32), (128, 64)])
def test_rows_of_one_sequence_are_split_as_each_is_alone(heads: int, block_rows: int) -> None:
    """Whatever the length, however many rows, and whatever bound of lengths the plan was given: the bits of a row depend on
    where it is split."""
    shape = {"num_heads": heads, "block_rows": block_rows, "min_chunk": 1}
    for last in (9, 64, 65, 700, 8448, 8449, 8452, 30000, 200_000):
        for rows in range(2, 10):
            lens = [last - more for more in range(rows - 1, -1, -1)]
            plan = make_plan([1] * rows, lens, alone_rows=rows, max_kv_len=1 << 18, **shape)
            together = list(reference_items(plan, [1] * rows, lens))
            for row, length in enumerate(lens):
                one = make_plan([1], [length], alone_rows=1, max_kv_len=length, **shape)
                alone = [(i.row0, i.tile0, i.tile1, i.num_splits) for i in reference_items(one, [1], [length])]
                assert alone == [(i.row0, i.tile0, i.tile1, i.num_splits) for i in together if i.request == row], (
                    last,
                    rows,
                    row,
                )


def test_requests_are_split_as_alone_while_that_fits_the_grid_of_a_batch() -> None:
    def chunk(kv_lens: list[int], **kw: int) -> int:
        plan = make_plan(
            [1] * len(kv_lens), kv_lens, max_kv_len=1 << 18, num_heads=20, block_rows=32, min_chunk=1, **kw
        )
        return next(i.tile1 - i.tile0 for i in reference_items(plan, [1] * len(kv_lens), kv_lens))

    assert chunk([4000, 4000], alone_rows=1) == 1
    assert chunk([8000] * 4, alone_rows=1) == chunk([8000] * 4) > 1
    grids = [make_plan([1] * 4, [8000] * 4, max_kv_len=1 << 18, alone_rows=k).num_items for k in (0, 1)]
    assert grids[0] == grids[1]


def test_batches_beyond_the_largest_bucket_are_refused() -> None:
    with pytest.raises(ScheduleError, match="schedule at most 4096 requests"):
        make_plan([1] * 4097, [1] * 4097)
    assert make_plan([1] * 64, [1] * 64, buckets=(32, 64)).batch_bucket == 64
    with pytest.raises(ScheduleError, match="schedule at most 64 requests"):
        make_plan([1] * 65, [1] * 65, buckets=(32, 64))
    with pytest.raises(ScheduleError, match="at most 32 requests can be split as if each were alone"):
        make_plan([1] * 33, [1] * 33, alone_rows=1)


@gluon.jit(do_not_specialize=["batch", "num_heads", "target", "causal", "invariant"])
def schedule_probe(
    out, qo_indptr, kv_len_arr, sched, batch, num_heads, target, causal, invariant,
    BLOCK_ROWS: gl.constexpr, BATCH: gl.constexpr, OVERHEAD: gl.constexpr, MIN: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    valid, b, _, _, _, row0, tile0, tile1, num_splits, part = find_work(
        gl.program_id(0), qo_indptr, kv_len_arr, sched, batch, num_heads, target, causal, invariant,
        BLOCK_ROWS, BATCH, OVERHEAD, num_warps, MIN,
    )  # fmt: skip
    p = out + gl.program_id(0) * 7
    gl.store(p, valid.to(gl.int32))
    gl.store(p + 1, b)
    gl.store(p + 2, row0)
    gl.store(p + 3, tile0)
    gl.store(p + 4, tile1)
    gl.store(p + 5, num_splits)
    gl.store(p + 6, part)


def check_device(probe: Any, cases: list[tuple[list[int], list[int], dict[str, object]]], device: str) -> None:
    for q_lens, kv_lens, kw in cases:
        plan = make_plan(q_lens, kv_lens, **kw)
        qo = torch.tensor([0, *torch.tensor(q_lens).cumsum(0).tolist()], dtype=torch.int32, device=device)
        kv = torch.tensor(kv_lens, dtype=torch.int32, device=device)
        out = torch.full((plan.num_items, 7), -7, dtype=torch.int32, device=device)
        sched = torch.full((1 + plan.num_groups, 8), -7, dtype=torch.int32, device=device)
        probe[(plan.num_items,)](
            out, qo, kv, sched, plan.batch, plan.num_heads, plan.target, 0, plan.mode,
            BLOCK_ROWS=plan.block_rows, BATCH=plan.batch_bucket, OVERHEAD=plan.overhead, MIN=plan.min_chunk,
            num_warps=4,
        )  # fmt: skip
        items = list(reference_items(plan, q_lens, kv_lens))
        got = out.tolist()
        assert [row[0] for row in got] == [1] * len(items) + [0] * (plan.num_items - len(items))
        groups = {}
        for row, item in zip(got, items, strict=False):
            part = item.part if item.num_splits > 1 else row[6]
            assert row[1:] == [item.request, item.row0, item.tile0, item.tile1, item.num_splits, part], item
            if item.num_splits > 1:
                groups.setdefault((item.request, item.row0), []).append(item)
        assert sched[0, 0].item() == len(groups)
        for entry, ((b, row0), members) in zip(sched[1:].tolist(), groups.items(), strict=False):
            rows = min(q_lens[b] * plan.num_heads - row0, plan.block_rows)
            stride = members[1].part - members[0].part
            first = sum(q_lens[:b]) * plan.num_heads + row0
            assert entry[:5] == [first, rows, len(members), members[0].part, stride]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_device_schedules_like_the_reference() -> None:
    check_device(schedule_probe, batches(), "cuda")


def test_rows_that_split_as_alone_are_scheduled_like_the_reference() -> None:
    """The device's code, executed on a CPU."""
    check_device(OnCpu(schedule_probe), alone_batches(random.Random(11), 16, [4, 7, 12]), "cpu")
