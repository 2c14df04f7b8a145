"""Times an extend over a stored prefix on a GPU, un-absorbed and absorbed: rows of benchmarks/results/extend-h200.csv.

    python benchmarks/extend_bench.py OUT.csv [--prefix 32768] [--quick]

GLM-5's head dimensions: 192 + 64 channels a query, 256 a value, latent 512 + 64. Un-absorbed: by every flash attention library
that this machine has. Absorbed: with its two projections. Each output is compared with float64 at four of its queries. With
DRY=1 and TRITON_INTERPRET=1 the same steps run on a CPU, small.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
from pathlib import Path

import torch

from uncast.attention import MLAPagedAttention
from uncast.backends import flash_libraries
from uncast.backends.native_extend import ExtendChunk, unabsorbed_extend
from uncast.bench.environment import device_name, versions
from uncast.latent.codec import decode_rows, encode_rows
from uncast.latent.layouts import row_layout

DRY = "DRY" in os.environ
DEVICE = "cpu" if DRY else "cuda"
LIBRARIES = ("cudnn", "flashinfer")
FIELDS = (
    *("new_tokens", "kv_len", "heads", "layout", "path", "heads_at_a_time", "scratch_mib", "ms"),
    *("error_tensor", "error_row", "gpu", "versions"),
)
NOPE, ROPE, VALUE, PAGE = 192, 64, 256, 64
SM_SCALE = 1.7 / 16


class Extend:
    """One request: a prefix in shuffled pages, then `new` tokens, in rows of `layout`."""

    def __init__(self, layout: str, new: int, prefix: int, heads: int) -> None:
        torch.manual_seed(new)
        self.layout, self.new, self.kv_len, self.heads = row_layout(layout), new, prefix + new, heads
        self.scales = (0.037, 0.05) if layout == "fp8_e4m3" else (None, None)
        ckv, kpe = torch.randn(self.kv_len, 512, device=DEVICE), torch.randn(self.kv_len, ROPE, device=DEVICE)
        rows = encode_rows(ckv, kpe, self.layout, ckv_scale=self.scales[0], kpe_scale=self.scales[1]).view(torch.uint8)
        pages = -(-self.kv_len // PAGE)
        self.block_table = torch.randperm(pages, device=DEVICE).int()
        stored = torch.full((pages * PAGE, self.layout.row_bytes), 255, dtype=torch.uint8, device=DEVICE)
        stored[: self.kv_len] = rows.view(self.kv_len, -1)
        self.cache = torch.empty_like(stored).view(pages, PAGE, -1)
        self.cache[self.block_table.long()] = stored.view(pages, PAGE, -1)
        q = torch.randn(new, heads, NOPE + ROPE, device=DEVICE).bfloat16()
        kv_b = (torch.randn(heads, NOPE + VALUE, 512, device=DEVICE) * 0.02).bfloat16()
        self.q_nope, self.q_pe, self.w_uk, self.w_uv = q[..., :NOPE], q[..., NOPE:], kv_b[:, :NOPE], kv_b[:, NOPE:]
        self.out = torch.empty(new, heads, VALUE, dtype=torch.bfloat16, device=DEVICE)

    def unabsorbed(self, library: str, heads_at_a_time: int | None, scratch_mib: int) -> torch.Tensor:
        unabsorbed_extend(
            self.q_nope, self.q_pe, self.cache, [ExtendChunk(0, self.new, self.kv_len, self.block_table)], self.w_uk, self.w_uv,
            layout=self.layout, sm_scale=SM_SCALE, ckv_scale=self.scales[0], kpe_scale=self.scales[1], out=self.out,
            library=library, heads_per_group=heads_at_a_time, scratch_bytes=scratch_mib * 2**20,
        )  # fmt: skip
        return self.out

    def plan(self) -> None:
        self.attention = MLAPagedAttention("torch_cpu" if DRY else "native")
        self.attention.plan(
            torch.tensor([0, self.new], dtype=torch.int32, device=DEVICE), block_tables=self.block_table[None],
            seq_lens=torch.tensor([self.kv_len], dtype=torch.int32, device=DEVICE), num_heads=self.heads, sm_scale=SM_SCALE,
            kv_layout=self.layout.name, max_q_len=self.new, total_q=self.new,
        )  # fmt: skip

    def absorbed(self) -> torch.Tensor:
        q = torch.bmm(self.q_nope.transpose(0, 1), self.w_uk).transpose(0, 1)
        out = self.attention.run(q, self.q_pe, self.cache, ckv_scale=self.scales[0], kpe_scale=self.scales[1])
        assert isinstance(out, torch.Tensor)
        return torch.bmm(out.transpose(0, 1), self.w_uv.transpose(1, 2)).transpose(0, 1)

    def errors(self, out: torch.Tensor) -> tuple[float, float]:
        """Relative error of the whole and of the worst (token, head), of four queries."""
        rows = self.cache[self.block_table.long()].view(-1, self.layout.row_bytes)[: self.kv_len]
        ckv, kpe = decode_rows(
            rows, self.layout, ckv_scale=self.scales[0], kpe_scale=self.scales[1], dtype=torch.float64
        )
        at = torch.tensor([0, self.new // 3, self.new - 2, self.new - 1], device=DEVICE)
        hidden = torch.arange(self.kv_len, device=DEVICE)[None] > (self.kv_len - self.new + at)[:, None]
        heads = []
        for head in range(self.heads):
            keys, values = (ckv @ w[head].double().T for w in (self.w_uk, self.w_uv))
            scores = self.q_nope[at, head].double() @ keys.T + self.q_pe[at, head].double() @ kpe.T
            heads.append((scores * SM_SCALE).masked_fill_(hidden, -torch.inf).softmax(-1) @ values)
        expected = torch.stack(heads, 1)
        difference = out[at].double() - expected
        rows_error = (difference.norm(dim=-1) / expected.norm(dim=-1)).max()
        return float(difference.norm() / expected.norm()), float(rows_error)


def median_ms(call: object, repeats: int) -> float:
    """Median milliseconds of a call, after two that compile and warm up."""
    assert callable(call)
    call()
    if DRY:
        return 0.0
    call()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--prefix", type=int, default=200 if DRY else 32768, help="tokens stored before (default: 32768)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="only the planned choices, not 4, 8 and 16 heads at a time"
    )
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("it measures a CUDA GPU, and torch sees none here")
    libraries = ["reference"] if DRY else [x for x in LIBRARIES if flash_libraries.refusal(x, 90, 256, 256) is None]
    wide, many, few = (16, 4, 2) if DRY else (4096, 64, 16)
    named = f"{versions()} cudnn={torch.backends.cudnn.version()}"
    with args.out.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(FIELDS)

        def record(case: Extend, path: str, ms: float, out: torch.Tensor, *choice: object) -> None:
            whole, row = case.errors(out)
            cells = [case.new, case.kv_len, case.heads, case.layout.name, path, *choice, f"{ms:.3f}"]
            writer.writerow([*cells, f"{whole:.2e}", f"{row:.2e}", device_name(), named])
            file.flush()
            print(*cells, f"error {whole:.1e}", flush=True)

        def measure(case: Extend, choices: list[tuple[int | None, int]]) -> None:
            for library in libraries:
                for group, mib in choices:
                    ms = median_ms(
                        lambda library=library, group=group, mib=mib: case.unabsorbed(library, group, mib), 5
                    )
                    record(case, f"un-absorbed {library}", ms, case.out, group or "planned", mib)
            case.plan()
            record(case, "absorbed", median_ms(case.absorbed, 3), case.absorbed(), "", "")

        sweep: list[tuple[int | None, int]] = [] if args.quick or DRY else [(8, 320), (16, 256), (4, 256)]
        layouts = (
            ("fp8_e4m3", "fp8_ds_mla") if DRY else ("fp8_e4m3", "fp8_ds_mla", "bf16")
        )  # interpreted: no bf16 products
        for layout in layouts:
            measure(Extend(layout, wide, args.prefix, many), [(None, 256), *(sweep if layout == "fp8_e4m3" else [])])
        for heads in (many, few):
            for new in (8,) if DRY else (256, 384, 512, 768, 1024, 2048):
                measure(Extend("fp8_e4m3", new, args.prefix, heads), [(None, 256)])


if __name__ == "__main__":
    main()
