"""The indexer against its float64 oracle, on poisoned pages. A failure is a token chosen wrongly or read from elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.backends.helpers import planned
from uncast.attention import Problem, ProblemError, ProblemSpec
from uncast.attention.indexer_oracle import index_scores, select_oracle
from uncast.backends import lightning_indexer
from uncast.backends.lightning_indexer import choose, keys_read, select_tokens
from uncast.latent.index_keys import IndexLayout, index_layout, load_keys, store_keys
from uncast.verify.probe import make_case

SPEC = ProblemSpec(num_heads=2, page_size=16, kv_layout="fp32", q_data_type=torch.float32, topk=40, device="cpu")


def build(
    spec: ProblemSpec, kv_lens: list[int], q_lens: list[int], layout: IndexLayout, heads: int = 32, seed: int = 0
) -> tuple[Problem, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A planned problem, queries, weights, and an index cache whose unused places hold NaN."""
    case = make_case(spec, kv_lens, q_lens, seed=seed)
    _, plan = planned("torch_cpu", spec, case)
    generator = torch.Generator().manual_seed(seed)
    cache = torch.full((case.cache.shape[0], spec.page_size, layout.row_bytes), 0xFF, dtype=torch.uint8)
    for request, kv_len in enumerate(kv_lens):
        token = torch.arange(kv_len)
        slots = case.block_tables[request].long()[token // spec.page_size] * spec.page_size + token % spec.page_size
        store_keys(cache, torch.randn(kv_len, layout.head_dim, generator=generator), slots, layout)
    total = sum(q_lens)
    q = torch.randn(total, heads, layout.head_dim, generator=generator)
    return plan.problem, q, torch.randn(total, heads, generator=generator), cache


@pytest.mark.parametrize("name", ["fp8", "bf16", "fp32"])
@pytest.mark.parametrize(("page", "topk", "heads"), [(1, 1, 32), (16, 40, 64), (64, 512, 16), (128, 77, 5)])
def test_choices_match_the_oracle(name: str, page: int, topk: int, heads: int) -> None:
    spec, layout = replace(SPEC, page_size=page, topk=topk, max_q_len=70), index_layout(name)
    problem, q, weights, cache = build(spec, [0, 1, topk, topk + 1, 900, 130], [1, 1, 1, 1, 70, 3], layout, heads)
    got, expected = select_tokens(q, weights, cache, problem, layout), select_oracle(problem, q, weights, cache, layout)
    assert got.dtype == torch.int32 and torch.equal(got, expected)
    assert torch.equal(got, select_tokens(q, weights, cache, problem, layout))


def test_keys_of_other_widths_and_without_a_causal_mask() -> None:
    for name, width in (("fp8", 256), ("fp32", 80)):
        layout = index_layout(name, width)
        spec = replace(SPEC, max_q_len=4, causal=False)
        problem, q, weights, cache = build(spec, [300, 30], [4, 2], layout)
        assert torch.equal(
            select_tokens(q, weights, cache, problem, layout), select_oracle(problem, q, weights, cache, layout)
        )


def test_of_equal_scores_the_earlier_token_is_taken() -> None:
    scores = torch.tensor([[1.0, 3.0, 1.0, 2.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0, -1.0, -torch.inf]])
    got = choose(scores, torch.tensor([6, 5]), 4)
    assert got.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3]]
    problem, q, weights, cache = build(SPEC, [300], [1], index_layout("fp32"))
    assert select_tokens(q, weights * 0, cache, problem, index_layout("fp32")).tolist() == [list(range(40))]


def test_a_query_that_sees_few_tokens_takes_all_and_no_other() -> None:
    scores = torch.tensor([[5.0, -torch.inf, -torch.inf, -torch.inf], [-torch.inf, 1.0, 2.0, -torch.inf]])
    assert choose(scores, torch.tensor([1, 3]), 3).tolist() == [[0, -1, -1], [0, 1, 2]]


def test_nan_and_infinite_keys_are_chosen_first() -> None:
    layout = index_layout("fp32")
    problem, q, weights, cache = build(SPEC, [300], [1], layout)
    page = problem.kv_indices[200 // 16]
    store_keys(cache, torch.full((1, 128), torch.nan), page[None] * 16 + 200 % 16, layout)
    assert 200 in select_tokens(q, weights, cache, problem, layout)[0].tolist()


def test_scores_by_hand() -> None:
    q = torch.tensor([[[1.0, 0.0], [0.0, 2.0]]])
    keys = torch.tensor([[3.0, -1.0], [-1.0, 4.0]])
    assert index_scores(q, torch.tensor([[0.5, -1.0]]), keys).tolist() == [[1.5, -8.0]]


def test_a_query_is_independent_of_the_batch() -> None:
    """Requests of one query, as in deterministic mode: the same choice alone and in company."""
    layout = index_layout("fp8")
    problem, q, weights, cache = build(SPEC, [300, 700, 41], [1, 1, 1], layout)
    together = select_tokens(q, weights, cache, problem, layout)
    for row in range(3):
        start = int(problem.kv_indptr[row])
        alone = replace(
            problem,
            qo_indptr=torch.tensor([0, 1], dtype=torch.int32),
            kv_indptr=torch.tensor([start, int(problem.kv_indptr[row + 1])], dtype=torch.int32),
            kv_len_arr=problem.kv_len_arr[row : row + 1],
            total_q=1,
        )
        part = slice(row, row + 1)
        assert torch.equal(select_tokens(q[part], weights[part], cache, alone, layout)[0], together[row])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", ["fp8", "bf16", "fp32"])
def test_a_gpu_chooses_as_a_cpu_does(name: str) -> None:
    layout, spec = index_layout(name), replace(SPEC, max_q_len=70)
    problem, q, weights, cache = build(spec, [0, 1, 41, 900, 130], [1, 1, 1, 70, 3], layout)
    tensors = {
        field: getattr(problem, field).cuda() for field in ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
    }
    there = select_tokens(q.cuda(), weights.cuda(), cache.cuda(), replace(problem, **tensors), layout)
    here = select_tokens(q, weights, cache, problem, layout)
    assert there.is_cuda and float((there.cpu() == here).float().mean()) > 0.999


def test_long_contexts_take_smaller_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, spec = index_layout("fp8"), replace(SPEC, max_q_len=70)
    problem, q, weights, cache = build(spec, [900, 30, 0], [70, 20, 1], layout)
    whole = select_tokens(q, weights, cache, problem, layout)
    assert keys_read(problem, 32) == (900 - 70 + 64) + 900
    monkeypatch.setattr(lightning_indexer, "TILE_SCORES", 900 * 20)
    assert torch.equal(select_tokens(q, weights, cache, problem, layout), whole)
    assert keys_read(problem, 32) == 850 + 870 + 890 + 900
    monkeypatch.setattr(lightning_indexer, "TILE_SCORES", 1)
    assert torch.equal(select_tokens(q, weights, cache, problem, layout), whole)
    assert keys_read(problem, 32) == sum(range(831, 901))


def test_a_dense_plan_is_refused() -> None:
    layout = index_layout("fp8")
    problem, q, weights, cache = build(SPEC, [30], [1], layout)
    with pytest.raises(ProblemError, match="the plan is for dense attention"):
        select_tokens(q, weights, cache, replace(problem, spec=replace(SPEC, topk=0)), layout)


def test_fp8_keys_keep_most_of_the_choice() -> None:
    """e4m3 keys with one scale each choose nearly the tokens that exact keys do."""
    exact, fp8 = index_layout("fp32"), index_layout("fp8")
    problem, q, weights, cache = build(replace(SPEC, topk=256), [2048], [1], exact)
    keys = load_keys(cache, problem.kv_indices[:128], 2048, exact)
    coarse = torch.zeros(cache.shape[0], 16, fp8.row_bytes, dtype=torch.uint8)
    slots = problem.kv_indices[:128].long().repeat_interleave(16) * 16 + torch.arange(16).repeat(128)
    store_keys(coarse, keys, slots, fp8)
    chosen = [set(select_tokens(q, weights, c, problem, la)[0].tolist()) for c, la in ((cache, exact), (coarse, fp8))]
    assert len(chosen[0] & chosen[1]) >= 0.93 * 256
