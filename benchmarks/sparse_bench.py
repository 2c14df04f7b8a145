"""Checks and times the sparse kernels of one source tree on a GPU; `sparse_run.sh` runs it for main and the candidates.

    python benchmarks/sparse_bench.py check JOB          # a job of CHECKS, or warm0, warm1: prints ok and FAIL lines, then done
    python benchmarks/sparse_bench.py time TREE OUT.csv  # rows of benchmarks/results/sparse-h200.csv, `note` says the tree

Every output is compared with the float64 oracle. With DRY=1 the same steps run on a CPU with `torch_cpu` and tiny shapes.
"""

from __future__ import annotations

import csv
import functools
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from uncast.attention import MLAPagedAttention
from uncast.kernels import index_select, wgmma_sparse_launch
from uncast.latent.codec import decode_rows, encode_rows
from uncast.latent.index_keys import index_layout
from uncast.latent.layouts import row_layout

DRY = "DRY" in os.environ
DEVICE, TOPK, PAGES = ("cpu", 96, 256) if DRY else ("cuda", 2048, 8192)
SM_SCALE, SCALES = 576**-0.5, (0.037, 0.05)
SETS = {1: 48, 8: 8, 16: 8, 32: 8, 128: 4, 1024: 1}
DS, E4M3 = "fp8_ds_mla", "fp8_e4m3"
MAIN = [(128, 64, DS), (128, 128, DS), (32, 64, DS), (1, 64, DS), (16, 64, DS), (8, 64, DS), (1024, 64, DS)]
NARROW = [(128, 16, DS), (32, 16, DS), (1, 16, DS), (128, 64, E4M3), (128, 128, E4M3), (32, 64, E4M3)]
SHAPES = {"main": MAIN, "gather": [*MAIN[:4], *NARROW], "wide": MAIN}
INDEXED = [(1, 32768, 256, 64), (32, 32768, 1, 64), (1, 32768, 1, 64)]
"""Requests, context, new tokens, index heads."""
FIELDS = (
    *("queries", "topk", "heads", "layout", "backend", "note", "us", "error_tensor", "error_row", "floor_us", "gpu"),
    "versions",
)
START = time.time()


@functools.cache
def pool(layout: str) -> torch.Tensor:
    """uint8 [PAGES, 64, row_bytes] of random rows, 512 pages of them over and over."""
    row, n = row_layout(layout), min(PAGES, 512)
    torch.manual_seed(1)
    latent, rope = SCALES if row.has_external_scales else (None, None)
    ckv, kpe = torch.randn(n * 64, 512, device=DEVICE), torch.randn(n * 64, 64, device=DEVICE)
    rows = encode_rows(ckv, kpe, row, ckv_scale=latent, kpe_scale=rope)
    return rows.view(torch.uint8).view(n, 64, -1).repeat(PAGES // n, 1, 1)


class Case:
    """`queries` requests of one query each over the whole pool, or 1,024 queries of one request; `SETS` random selections."""

    def __init__(self, queries: int, heads: int, layout: str, sets: int) -> None:
        torch.manual_seed(queries * 1000 + heads)
        self.batch = 1 if queries == 1024 else queries
        self.heads, self.layout, self.cache = heads, layout, pool(layout)
        pages = min(PAGES // self.batch, 4096 if not DRY else 64)
        self.kv_len, self.q_len = pages * 64, queries // self.batch
        self.tables = torch.randperm(PAGES, device=DEVICE)[: self.batch * pages].view(self.batch, pages).int()
        self.q = [torch.randn(queries, heads, 576, device=DEVICE).bfloat16() for _ in range(2)]
        room = min(self.kv_len, 16384) if queries == 1024 else self.kv_len
        seen = room - self.q_len + 1
        self.sets = [
            torch.rand(queries, seen, device=DEVICE).topk(TOPK, sorted=False).indices.int() for _ in range(sets)
        ]
        self.scales = SCALES if layout == E4M3 else (None, None)
        self.out = torch.empty(queries, heads, 512, dtype=torch.bfloat16, device=DEVICE)
        self.attention = MLAPagedAttention("torch_cpu" if DRY else "native")
        self.attention.plan(
            torch.arange(0, queries + 1, self.q_len, dtype=torch.int32, device=DEVICE), block_tables=self.tables,
            seq_lens=torch.full((self.batch,), self.kv_len, dtype=torch.int32, device=DEVICE), num_heads=heads,
            sm_scale=SM_SCALE, kv_layout=layout, max_q_len=self.q_len, total_q=queries, topk=TOPK,
        )  # fmt: skip

    def run(self, i: int = 0) -> None:
        q = self.q[i % 2]
        self.attention.run(
            q[..., :512], q[..., 512:], self.cache, ckv_scale=self.scales[0], kpe_scale=self.scales[1], out=self.out,
            indices=self.sets[i],
        )  # fmt: skip

    def errors(self) -> tuple[float, float]:
        """Relative error over the tensor and of the worst head, of three queries of the first selection."""
        self.out.fill_(float("nan"))
        self.run()
        worst, worst_row = 0.0, 0.0
        for i in sorted({0, len(self.out) // 2, len(self.out) - 1}):
            at = self.sets[0][i].long()
            rows = self.cache[self.tables[i // self.q_len, at // 64].long(), at % 64]
            ckv, kpe = decode_rows(
                rows, row_layout(self.layout), ckv_scale=self.scales[0], kpe_scale=self.scales[1], dtype=torch.float64
            )
            q = self.q[0][i].double()
            expected = ((q[:, :512] @ ckv.T + q[:, 512:] @ kpe.T) * SM_SCALE).softmax(-1) @ ckv
            away = self.out[i].double() - expected
            worst = max(worst, float(away.norm() / expected.norm()))
            worst_row = max(worst_row, float((away.norm(dim=-1) / expected.norm(dim=-1)).max()))
        if not (worst <= 2.5e-3 and worst_row <= 1e-2):
            raise AssertionError(f"errors {worst:.2e} {worst_row:.2e}")
        return worst, worst_row


def graph_us(run: Callable[[int], object], n: int) -> float:
    """Microseconds a call: median of 7 replays of a graph of calls 0 .. n - 1."""
    if DRY:
        run(0)
        return 1.0
    side, graph, times = torch.cuda.Stream(), torch.cuda.CUDAGraph(), []
    with torch.cuda.stream(side):
        run(0)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for i in range(n):
            run(i)
    graph.replay()
    for _ in range(7):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        graph.replay()
        b.record()
        b.synchronize()
        times.append(a.elapsed_time(b) * 1e3 / n)
    return float(statistics.median(times))


def attention_row(queries: int, heads: int, layout: str, note: str) -> list[object]:
    case = Case(queries, heads, layout, 1 if DRY else SETS[queries])
    us = graph_us(case.run, len(case.sets))
    error, error_row = case.errors()
    size = queries * 2048
    floor = max(size * row_layout(layout).row_bytes / 4.4e6, 2 * 1088 * heads * size / 770e6)
    print(
        f"{note:7s}{queries:5d} {heads:4d} {layout:10s} {us:8.1f} us, floor {floor:6.1f}, errors {error:.1e} {error_row:.1e}"
    )
    note = f"{note}, one request" if queries == 1024 else note
    return [
        queries,
        2048,
        heads,
        layout,
        "native",
        note,
        f"{us:.1f}",
        f"{error:.2e}",
        f"{error_row:.2e}",
        f"{floor:.1f}",
    ]


def index_row(batch: int, kv_len: int, q_len: int, heads: int, note: str) -> list[object]:
    from tests.kernels.index_select_cases import problem_of

    kv_len = 256 if DRY else kv_len
    layout, rows = index_layout("fp8"), batch * q_len
    problem = problem_of([kv_len] * batch, [q_len] * batch, topk=TOPK, page_size=64, device=DEVICE)
    cache = torch.randint(0, 120, (problem.num_pages or 1, 64, 132), dtype=torch.uint8, device=DEVICE)
    cache.view(cache.shape[0], -1)[:, 64 * 128 :].view(torch.float32).fill_(0.01)
    q, weights = torch.randn(rows, heads, 128, device=DEVICE).bfloat16(), torch.randn(rows, heads, device=DEVICE)
    args = (q, weights, cache, problem, layout)
    if DRY:
        return []
    scores = graph_us(lambda i: index_select.index_scores(*args, 0, rows, max(kv_len, TOPK)), 3)
    total = graph_us(lambda i: index_select.select_tokens(*args), 3)
    floor = max(batch * kv_len * 132 / 4.4e6, 2 * heads * 128 * rows * kv_len / 770e6)
    print(
        f"{note:7s}{rows:5d} {heads:4d} index of {kv_len} keys: scores {scores:.1f} us, floor {floor:.1f}, all {total:.1f}"
    )
    kind = f"index fp8, {kv_len} keys"
    return [
        rows,
        2048,
        heads,
        kind,
        "native indexer",
        f"{note}, scores {scores:.1f}",
        f"{total:.1f}",
        "",
        "",
        f"{floor:.1f}",
    ]


def time_tree(tree: str, path: Path) -> None:
    """All rows of a tree; one that fails is printed and left out."""
    gpu = "cpu" if DRY else torch.cuda.get_device_name()
    import triton

    versions = f"torch={torch.__version__} triton={triton.__version__} python={platform.python_version()}"
    versions += f" uncast={os.environ.get('UNCAST_COMMIT', 'unknown')}"
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        if file.tell() == 0:
            writer.writerow(FIELDS)
        jobs = [functools.partial(attention_row, *shape, tree) for shape in SHAPES[tree]]
        jobs += [functools.partial(index_row, *shape, tree) for shape in INDEXED if tree != "wide"]
        for job in jobs:
            try:
                row = job()
                writer.writerow([*row, gpu, versions])
                file.flush()
            except Exception as error:
                print(f"FAIL {tree} {job.args} {str(error)[:200]}", flush=True)


def warm(queries: int, heads: int, layout: str) -> None:
    Case(queries, heads, layout, 1).errors()


def checks(job: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """Named calls of a job."""
    from tests.backends import test_native_sparse_gpu as g
    from tests.kernels import index_select_cases

    native = functools.partial
    if job == "wide0":
        for heads in (64, 128):
            for queries in (1, 150):
                yield f"latents {heads} {queries}", native(g.test_ds_mla_latents_beyond_fp16, "native", heads, queries)
        yield "tiles", native(g.test_tiles_without_a_selected_row, "native", DS, 64)
        yield "poison", native(g.test_rows_that_are_not_selected_are_not_read, "native", DS)
    elif job == "wide1":
        yield "graph", native(g.test_a_graph_follows_indices_lengths_and_rows, "native", DS)
        yield "odd scales", native(g.test_ds_mla_scales_that_are_no_powers_of_two, "native", 64)
        for heads in (64, 128):
            yield f"lone {heads}", native(g.test_a_lone_query_is_split_and_combined, "native", DS, heads)
        for case in g.COVER:
            if case[0] == DS and case[1] > 32 and case[5] == torch.bfloat16 and case[6] == "native":
                yield f"cover {case}", native(g.test_pairwise_cover_matches_the_oracle, case)
    elif job == "narrow":
        for queries in (1, 150):
            yield f"latents 8 {queries}", native(g.test_ds_mla_latents_beyond_fp16, "native", 8, queries)
        yield "tiles", native(g.test_tiles_without_a_selected_row, "native", DS, 16)
        yield "odd scales", native(g.test_ds_mla_scales_that_are_no_powers_of_two, "native", 8)
    elif job == "batches":
        yield "extend", native(g.test_sparse_extend_and_large_batches, "native", DS)
        yield "invariant", native(g.test_batch_invariant_bits, "native")
    elif job == "e4m3":
        for heads in (16, 64):
            yield f"tiles {heads}", native(g.test_tiles_without_a_selected_row, "native", E4M3, heads)
        for heads in (8, 64, 128):
            yield f"lone {heads}", native(g.test_a_lone_query_is_split_and_combined, "native", E4M3, heads)
        yield "poison", native(g.test_rows_that_are_not_selected_are_not_read, "native", E4M3)
        yield "graph", native(g.test_a_graph_follows_indices_lengths_and_rows, "native", E4M3)
    elif job == "index":
        yield "cases", native(index_select_cases.main, DEVICE, (torch.bfloat16, torch.float16))
        long = native(index_select_cases.check, "fp8", heads=64, topk=2048, dtype=torch.bfloat16, device=DEVICE)
        yield "long", native(long, [40000, 5000, 0, 2048], [1, 1, 1, 1])
        yield "prefill", native(long, [3000], [200])
    else:  # warmN of a tree: compiles what `time` will run
        tree, part = job.split(".")
        for shape in SHAPES[tree][int(part) :: 2]:
            yield f"warm {shape}", native(warm, *shape)
        if tree != "wide" and part == "0":
            for index in INDEXED[:2]:
                yield f"warm {index}", native(index_row, *index, "warm")


def check(job: str) -> None:
    if job.startswith("wide") and hasattr(wgmma_sparse_launch, "WIDE_TILES") and "." not in job:
        wgmma_sparse_launch.WIDE_TILES = 0
    for name, call in checks(job):
        if DRY and "warm" not in name:
            print("dry", job, name)
            continue
        try:
            call()
            print(f"ok {job} {name} [{time.time() - START:.0f} s]", flush=True)
        except BaseException as error:
            print(
                f"FAIL {job} {name} [{time.time() - START:.0f} s] {type(error).__name__} {' '.join(str(error).split())[:300]}",
                flush=True,
            )
    print(f"done {job}", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "check":
        check(sys.argv[2])
    else:
        time_tree(sys.argv[2], Path(sys.argv[3]))
