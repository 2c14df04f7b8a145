"""Cases of the GPU indexer against float64; in Triton's interpreter: `python -m tests.kernels.index_select_cases`."""

from __future__ import annotations

import torch

from uncast.attention.indexer_oracle import index_scores as oracle_scores
from uncast.attention.indexer_oracle import select_oracle
from uncast.attention.metadata import normalise
from uncast.attention.problem import Problem, ProblemSpec
from uncast.kernels import index_select
from uncast.latent.index_keys import index_layout, load_keys, store_keys


def problem_of(
    kv_lens: list[int], q_lens: list[int], *, topk: int, page_size: int, device: str, causal: bool = True
) -> Problem:
    """Pages in a random order; entries past a request's live pages are garbage."""
    pages_of = [-(-n // page_size) for n in kv_lens]
    generator = torch.Generator().manual_seed(sum(kv_lens))
    order, width = torch.randperm(sum(pages_of) + 1, generator=generator).int(), max(pages_of) + 1
    tables, first = torch.full((len(kv_lens), width), 2**31 - 1, dtype=torch.int32), 0
    for request, count in enumerate(pages_of):
        tables[request, :count] = order[first : first + count]
        first += count
    ends = torch.tensor([0, *q_lens]).cumsum(0).int().to(device)
    spec = ProblemSpec(num_heads=8, page_size=page_size, causal=causal, topk=topk)
    lens = torch.tensor(kv_lens, dtype=torch.int32, device=device)
    return normalise(ends, None, None, None, tables.to(device), lens, spec, None, max(kv_lens), None, first + 1)


def check(
    layout_name: str, kv_lens: list[int], q_lens: list[int], *, heads: int, topk: int, page_size: int = 64,
    dtype: torch.dtype = torch.float32, device: str = "cpu", causal: bool = True, scratch: int | None = None,
) -> None:  # fmt: skip
    """Chosen tokens equal the oracle's where scores are apart; their scores are the oracle's topk within rounding."""
    layout = index_layout(layout_name)
    problem = problem_of(kv_lens, q_lens, topk=topk, page_size=page_size, device=device, causal=causal)
    assert problem.num_pages is not None
    cache = torch.full((problem.num_pages, page_size, layout.row_bytes), 0xFF, dtype=torch.uint8, device=device)
    generator = torch.Generator().manual_seed(topk)
    for request, kv_len in enumerate(kv_lens):
        slots = torch.arange(kv_len, device=device)
        pages = problem.kv_indices[int(problem.kv_indptr[request]) + slots // page_size]
        keys = torch.randn(kv_len, layout.head_dim, generator=generator).to(device)
        store_keys(cache, keys, pages.long() * page_size + slots % page_size, layout)
    q = torch.randn(problem.total_q, heads, layout.head_dim, generator=generator).to(dtype).to(device)
    weights = torch.randn(problem.total_q, heads, generator=generator).to(device)
    before = index_select.SCRATCH_BYTES
    index_select.SCRATCH_BYTES = before if scratch is None else scratch
    try:
        got = index_select.select_tokens(q, weights, cache, problem, layout)
    finally:
        index_select.SCRATCH_BYTES = before
    expected = select_oracle(problem, q, weights, cache, layout)
    assert torch.equal((got >= 0).sum(-1), (expected >= 0).sum(-1)), "how many are chosen"
    for request, kv_len in enumerate(kv_lens):
        pages = problem.kv_indices[int(problem.kv_indptr[request]) :][: -(-kv_len // page_size)]
        keys = load_keys(cache, pages, kv_len, layout, torch.float64)
        for row in range(int(problem.qo_indptr[request]), int(problem.qo_indptr[request + 1])):
            count = int((expected[row] >= 0).sum())
            mine, best = got[row, :count].long(), expected[row, :count].long()
            assert bool((got[row, count:] == -1).all()) and bool((mine[1:] > mine[:-1]).all()), "order"
            scores = oracle_scores(q[row : row + 1], weights[row : row + 1], keys)[0]
            slack = 1e-4 * float(scores.abs().max()) if count else 0.0
            assert count == 0 or float(scores[mine].min()) >= float(scores[best].min()) - slack, "a smaller score"


def check_ties(device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
    """Equal keys: the earliest tokens; a NaN key is chosen first of all."""
    layout = index_layout("fp8")
    problem = problem_of([300], [1], topk=20, page_size=16, device=device)
    assert problem.num_pages is not None
    cache = torch.zeros((problem.num_pages, 16, layout.row_bytes), dtype=torch.uint8, device=device)
    slots = torch.arange(300, device=device)
    at = problem.kv_indices[slots // 16].long() * 16 + slots % 16
    store_keys(cache, torch.ones(300, 128, device=device), at, layout)
    q, weights = torch.ones(1, 4, 128, dtype=dtype, device=device), torch.ones(1, 4, device=device)
    chosen = index_select.select_tokens(q, weights, cache, problem, layout)
    assert chosen.tolist() == [list(range(20))]
    codes = cache.view(problem.num_pages, -1)
    codes[int(at[250]) // 16, int(at[250]) % 16 * 128] = 0x7F
    chosen = index_select.select_tokens(q, weights, cache, problem, layout)
    assert chosen.tolist() == [[*range(19), 250]]


def main(device: str = "cpu", dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float16)) -> None:
    """Ragged, empty, short and long contexts, heads that are no power of two, pages of several sizes, pieces of rows."""
    for dtype in dtypes:
        check("fp8", [300, 0, 17, 140], [1, 1, 1, 1], heads=64, topk=64, dtype=dtype, device=device)
        check("fp8", [300, 33], [9, 33], heads=5, topk=40, page_size=16, dtype=dtype, device=device)
    check("bf16", [200, 7], [3, 2], heads=32, topk=70, page_size=1, device=device)
    check("fp32", [150], [4], heads=2, topk=100, page_size=128, device=device, causal=False)
    check("fp8", [260], [12], heads=4, topk=30, device=device, scratch=5 * 4 * 260)
    check_ties(device, dtypes[0])


if __name__ == "__main__":
    main()
