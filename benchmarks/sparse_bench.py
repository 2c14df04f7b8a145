"""Times sparse attention and the indexer on one GPU; every output is compared with float64 on the stored values.

    python benchmarks/sparse_bench.py OUT.csv        # rows of benchmarks/results/sparse-h200.csv, about 20 s

Random rows in a pool of 8,192 pages, random tokens of long contexts, graphs over rotating selections.
"""

from __future__ import annotations

import argparse
import csv
import functools
import os
import platform
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import triton

from uncast.attention import MLAPagedAttention
from uncast.attention.problem import Problem, ProblemSpec
from uncast.kernels import index_select
from uncast.latent.codec import decode_rows, encode_rows
from uncast.latent.index_keys import index_layout
from uncast.latent.layouts import row_layout

DEVICE, TOPK, PAGES = "cuda", 2048, 8192
SM_SCALE, SCALES = 576**-0.5, (0.037, 0.05)
SETS = {1: 48, 8: 8, 16: 8, 32: 8, 128: 4, 1024: 1}
"""Selections that calls of a number of queries rotate over."""
DS, E4M3 = "fp8_ds_mla", "fp8_e4m3"
SHAPES = [(128, 64, DS), (128, 128, DS), (32, 64, DS), (1, 64, DS), (16, 64, DS), (8, 64, DS), (1024, 64, DS)]
SHAPES += [(128, 16, DS), (32, 16, DS), (1, 16, DS), (128, 64, E4M3), (128, 128, E4M3), (32, 64, E4M3)]
"""Queries (1,024: of one request, else of one each), heads, layout."""
INDEXED = [(1, 32768, 256, 64), (32, 32768, 1, 64), (1, 32768, 1, 64)]
"""Requests, context, new tokens, index heads."""
FIELDS = (
    *("queries", "topk", "heads", "layout", "backend", "note", "us", "error_tensor", "error_row", "floor_us", "gpu"),
    "versions",
)


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
        pages = min(PAGES // self.batch, 4096)
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
        self.attention = MLAPagedAttention("native")
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
    case = Case(queries, heads, layout, SETS[queries])
    us = graph_us(case.run, len(case.sets))
    error, error_row = case.errors()
    size = queries * TOPK
    floor = max(size * row_layout(layout).row_bytes / 4.4e6, 2 * 1088 * heads * size / 770e6)
    if queries == 1024:
        note = f"{note}, one request".removeprefix(", ")
    errors = [f"{error:.2e}", f"{error_row:.2e}"]
    return [queries, TOPK, heads, layout, "native", note, f"{us:.1f}", *errors, f"{floor:.1f}"]


def index_row(batch: int, kv_len: int, q_len: int, heads: int, note: str) -> list[object]:
    layout, rows = index_layout("fp8"), batch * q_len
    pages = kv_len // 64
    starts = torch.arange(batch + 1, dtype=torch.int32, device=DEVICE)
    spec = ProblemSpec(num_heads=heads, page_size=64, max_q_len=q_len, topk=TOPK, device="cuda", arch=arch())
    problem = Problem(
        spec=spec, qo_indptr=starts * q_len, kv_indptr=starts * pages,
        kv_indices=torch.randperm(batch * pages, device=DEVICE).int(),
        kv_len_arr=torch.full((batch,), kv_len, dtype=torch.int32, device=DEVICE), total_q=rows, max_kv_len=kv_len,
        num_pages=batch * pages,
    )  # fmt: skip
    cache = torch.randint(0, 120, (batch * pages, 64, 132), dtype=torch.uint8, device=DEVICE)
    cache.view(batch * pages, -1)[:, 64 * 128 :].view(torch.float32).fill_(0.01)
    q, weights = torch.randn(rows, heads, 128, device=DEVICE).bfloat16(), torch.randn(rows, heads, device=DEVICE)
    args = (q, weights, cache, problem, layout)
    scores = graph_us(lambda i: index_select.index_scores(*args, 0, rows, max(kv_len, TOPK)), 3)
    total = graph_us(lambda i: index_select.select_tokens(*args), 3)
    floor = max(batch * kv_len * 132 / 4.4e6, 2 * heads * 128 * rows * kv_len / 770e6)
    note = f"{note}, scores {scores:.1f}".removeprefix(", ")
    kind = f"index fp8, {kv_len} keys"
    return [rows, TOPK, heads, kind, "native indexer", note, f"{total:.1f}", "", "", f"{floor:.1f}"]


def arch() -> int:
    major, minor = torch.cuda.get_device_capability()
    return major * 10 + minor


def main() -> int:
    """Appends all rows; one that fails is printed and left out, then the exit code is 1."""
    parser = argparse.ArgumentParser(description="times sparse attention and the indexer on one GPU")
    parser.add_argument("csv", type=Path, help="file to append the rows to")
    parser.add_argument("--note", default="", help="what the rows' note says")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("it measures a CUDA GPU, and torch sees none here")
    gpu, failed = torch.cuda.get_device_name(), 0
    versions = f"torch={torch.__version__} triton={triton.__version__} python={platform.python_version()}"
    versions += f" uncast={os.environ.get('UNCAST_COMMIT', 'unknown')}"
    jobs = [functools.partial(attention_row, *shape, args.note) for shape in SHAPES]
    jobs += [functools.partial(index_row, *shape, args.note) for shape in INDEXED]
    with args.csv.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if file.tell() == 0:
            writer.writerow(FIELDS)
        for job in jobs:
            try:
                row = job()
            except Exception as error:
                failed += 1
                print(f"FAIL {job.args} {' '.join(str(error).split())[:200]}", flush=True)
                continue
            writer.writerow([*row, gpu, versions])
            file.flush()
            print(*row, flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
