"""What a caller can get wrong in contents, outputs, writes and threads: a sentence, never another request's rows."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.attention.test_wrapper import int32, plan, spec
from uncast.attention import Capability, MLAPagedAttention, Problem, ProblemError, wrapper
from uncast.attention.contents import check_contents
from uncast.attention.metadata import normalise
from uncast.backends.torch_cpu import TorchCpuBackend
from uncast.verify.probe import make_case, plan_case, run_case

pytestmark = pytest.mark.filterwarnings("ignore::uncast.attention.ClaimedCapabilityWarning")


@pytest.mark.parametrize(
    ("indptr", "indices", "sentence"),
    [
        ((0, 2), (0,), "kv_indptr ends at 2, but kv_indices has 1 entries"),
        ((-2, 3), (0, 1, 2), "kv_indptr must not be negative"),
        ((3, 1), (0, 1, 2), "kv_indptr must not be negative and not decrease"),
        ((0, 1), (0, 1), "request 0 has 70 cached tokens: its 1 pages of 64 hold 0 to 64"),
    ],
)
def test_page_lists_that_do_not_hold_their_lengths(
    indptr: tuple[int, ...], indices: tuple[int, ...], sentence: str
) -> None:
    with pytest.raises(ProblemError, match=sentence):
        plan(
            MLAPagedAttention("torch_cpu"), block_tables=None, seq_lens=None, kv_indptr=int32(*indptr),
            kv_indices=int32(*indices), kv_len_arr=int32(70),
        )  # fmt: skip


def test_a_length_beyond_a_padded_row_of_the_table_is_not_read_from_the_next_request() -> None:
    tables = int32(*range(12)).view(2, 6)[:, :2]
    with pytest.raises(ProblemError, match="request 1 has 129 cached tokens: its 2 pages of 64"):
        plan(MLAPagedAttention("torch_cpu"), qo_indptr=int32(0, 1, 2), block_tables=tables, seq_lens=int32(9, 129))


def test_contents_are_checked_again_at_run_with_refilled_buffers_and_the_cache() -> None:
    attention, case = MLAPagedAttention("torch_cpu"), make_case(spec(), [70, 3], [1, 1])
    problem = plan_case(attention, spec(), case)
    with pytest.raises(ProblemError, match="cache has 1 pages: the plan is for"):
        attention.run(case.q_nope, case.q_pe, case.cache[:1])
    last = int(case.block_tables[0, 1])
    case.block_tables[0, 1] = case.cache.shape[0]
    with pytest.raises(ProblemError, match=f"is {case.cache.shape[0]}: the pool has {case.cache.shape[0]} pages"):
        attention.run(case.q_nope, case.q_pe, case.cache)
    case.block_tables[0, 1] = last
    problem.kv_len_arr[1] = 10_000
    with pytest.raises(ProblemError, match="request 1 has 10000 cached tokens"):
        attention.run(case.q_nope, case.q_pe, case.cache)
    plan(attention, block_tables=int32(0, 1)[None])
    with pytest.raises(ProblemError, match="the pool has 0 pages"):
        attention.run(case.q_nope[:1], case.q_pe[:1], case.cache[:0])


def test_byte_counts_are_those_of_their_plan() -> None:
    """Neither refilled lengths nor a later plan on the same object changes what an earlier plan says."""
    for backend in ("torch_cpu", "gather_cast:torch_cpu", "pool_cast:torch_cpu"):
        attention, lens = MLAPagedAttention(backend), int32(70)
        first = plan(attention, seq_lens=lens, num_pages=8)
        lens.fill_(3)
        second = plan(attention, seq_lens=int32(1), num_pages=8)
        again = plan(MLAPagedAttention(backend), seq_lens=int32(70), num_pages=8)
        for name in ("bytes_needed", "bytes_read", "bytes_written"):
            assert getattr(first, name) == getattr(again, name)
        assert first.bytes_needed == 70 * 656 and second.bytes_needed == 656
    with pytest.raises(ProblemError, match="give num_pages to plan"):
        _ = plan(MLAPagedAttention("pool_cast:torch_cpu")).bytes_read


def test_a_graphs_buffers_may_be_larger_than_the_batch_where_there_are_graphs() -> None:
    problem = plan(MLAPagedAttention("torch_cpu")).problem
    for device in ("cuda", "cpu"):
        padded = replace(problem, total_q=5, spec=replace(problem.spec, device=device))
        if device == "cuda":
            check_contents(padded, 2)
        else:
            with pytest.raises(ProblemError, match="total_q is 5, but qo_indptr ends at 1"):
                check_contents(padded, 2)


def test_contents_of_a_gpus_problem_are_looked_at_in_debug_mode_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan and a run read nothing back (a sync on a GPU) unless `validate` asks for it."""
    calls: list[int | None] = []
    monkeypatch.setattr(wrapper, "check_contents", lambda problem, num_pages=None: calls.append(num_pages))
    monkeypatch.setattr(wrapper, "normalise", lambda *args: on_gpu(normalise(*args)))
    monkeypatch.setattr(TorchCpuBackend, "capability", lambda self, spec: Capability.claimed())

    def on_gpu(problem: Problem) -> Problem:
        return replace(problem, spec=replace(problem.spec, device="cuda"))

    case, attention = make_case(spec(), [70], [1]), MLAPagedAttention("torch_cpu")
    for validate, expected in ((False, []), (True, [None, 2])):
        plan(attention, validate=validate)
        attention.run(case.q_nope, case.q_pe, case.cache[:2])
        assert calls == expected


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (lambda q: {"out": q.double()}, "out is torch.float64: the plan is for torch.float32"),
        (lambda q: {"out": q[:, :, :64].clone()}, r"out is \[2, 4, 64\]: the plan is for \[2, 4, 512\]"),
        (lambda q: {"out": q[:1].clone()}, "out has 1 rows: the plan is for 2"),
        (lambda q: {"out": torch.empty(2, 4, 1024)[..., ::2]}, "out's last dimension is not contiguous"),
        (lambda q: {"out": q.to("meta")}, "out is on meta: the plan is for cpu"),
        (lambda q: {"out": q}, "out shares memory with q_nope: give it a buffer of its own"),
        (lambda q: {"out": q[:1].clone().expand(2, -1, -1)}, "out is an expanded view"),
        (lambda q: {"lse": torch.empty(2, 4, dtype=torch.bfloat16)}, "lse is torch.bfloat16"),
        (lambda q: {"lse": torch.empty(4, 2)}, r"lse is torch.float32 \[4, 2\]: the plan is for torch.float32 \[2, 4\]"),
        (lambda q: (lambda o: {"out": o, "lse": o[0, :, :2].view(4, 2).T})(torch.empty_like(q)), "lse shares memory with out"),
        (lambda q: {"out": [1]}, "out is a list: it must be a torch.Tensor"),
    ],
)  # fmt: skip
def test_run_checks_what_it_writes_to(wrong: Callable[[torch.Tensor], dict[str, Any]], sentence: str) -> None:
    attention, case = MLAPagedAttention("torch_cpu"), make_case(spec(), [70, 3], [1, 1])
    plan_case(attention, spec(), case)
    with pytest.raises(ProblemError, match=sentence):
        attention.run(case.q_nope, case.q_pe, case.cache, **wrong(case.q_nope))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"ckv": torch.ones(2, 511), "kpe": torch.ones(2, 65)}, r"ckv is torch.float32 \[2, 511\]: the plan is for \[2, 512\]"),
        ({"ckv": torch.ones(1, 512)}, r"ckv is torch.float32 \[1, 512\]"),
        ({"kpe": torch.ones(2, 1)}, r"kpe is torch.float32 \[2, 1\]: the plan is for \[2, 64\]"),
        ({"kpe": torch.ones(2, 64, dtype=torch.int32)}, "kpe is torch.int32"),
        ({"slot_mapping": torch.tensor([0.0, 1.0])}, "slot_mapping is torch.float32"),
        ({"slot_mapping": torch.tensor([[0], [1]])}, r"slot_mapping is torch.int64 \[2, 1\]"),
        ({"slot_mapping": torch.tensor([0, 999])}, "slot_mapping holds 999: the cache has 128 slots"),
        ({"counters": torch.zeros(3)}, "counters is torch.float32"),
        ({"counters": torch.zeros(2, dtype=torch.int64)}, r"counters is torch.int64 \[2\]"),
        ({"cache": torch.zeros(4, 64, 656, dtype=torch.uint8)[::2]}, "cache must be contiguous"),
        ({"cache": torch.zeros(2, 64, 576, dtype=torch.uint8)}, "fp8_ds_mla needs"),
    ],
)  # fmt: skip
def test_write_checks_its_tensors_against_the_plan(changes: dict[str, Any], sentence: str) -> None:
    attention = MLAPagedAttention("torch_cpu")
    plan(attention)
    tensors = {
        "ckv": torch.ones(2, 512), "kpe": torch.ones(2, 64), "cache": torch.zeros(2, 64, 656, dtype=torch.uint8),
        "slot_mapping": torch.tensor([3, 1]),
    }  # fmt: skip
    attention.write(**tensors)
    before = tensors["cache"].clone()
    with pytest.raises(ProblemError, match=sentence):
        attention.write(**{**tensors, **changes})
    assert torch.equal(tensors["cache"], before)


@pytest.mark.parametrize("layout", ["fp32", "bf16", "fp8_e4m3", "fp8_ds_mla"])
def test_write_of_no_rows_and_of_skipped_rows_changes_nothing(layout: str) -> None:
    attention = MLAPagedAttention("torch_cpu")
    problem = plan(attention, kv_layout=layout).problem
    cache = torch.full((2, 64, problem.spec.layout.row_bytes), 7, dtype=torch.uint8)
    attention.write(torch.ones(0, 512), torch.ones(0, 64), cache, torch.ones(0, dtype=torch.int64))
    attention.write(torch.ones(2, 512), torch.ones(2, 64), cache, torch.tensor([-1, -1]))
    assert bool((cache == 7).all())


def test_a_thread_does_not_run_another_threads_plan() -> None:
    """Threads that share one plan get its result, in turns; one that planned itself is told when it was overtaken."""
    attention, case = MLAPagedAttention("torch_cpu"), make_case(spec(page_size=16), [700, 50], [1, 1])
    plan_case(attention, spec(page_size=16), case)
    expected, results = run_case(attention, case)[0], []

    def shares() -> None:
        results.extend(run_case(attention, case)[0] for _ in range(20))

    threads = [threading.Thread(target=shares) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 80 and all(torch.equal(result, expected) for result in results)

    overtaking = threading.Thread(target=plan_case, args=(attention, spec(page_size=16), case))
    overtaking.start()
    overtaking.join()
    with pytest.raises(ProblemError, match=r"run\(\) was called after another thread's plan\(\)"):
        run_case(attention, case)
    plan_case(attention, spec(page_size=16), case)
    assert torch.equal(run_case(attention, case)[0], expected)
