"""Times SGLang's MLA backends and ours inside SGLang's own objects: pool, request pool, RadixAttention, graph hooks.

    python benchmarks/sglang_attention.py --backends uncast,flashinfer,flashmla,triton --out sglang-attention.csv

Needs SGLang and a GPU; no server, no weights. A step is what a server does for attention in one decode step of `--layers`
layers: metadata outside the graph, then a replay that writes each layer's new row and attends to what is stored. The errors
are against float64: `error_stored` on the cache values as stored (what the kernel adds), `error_unquantised` on the values
before they were quantised (what the user gets).
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import statistics
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

RANK, ROPE = 512, 64
COLUMNS = (
    "engine", "engine_version", "attention_backend", "kv_cache_dtype", "num_heads", "layers", "batch", "context",
    "page_size", "pool_tokens", "ms_per_step", "error_stored", "error_unquantised", "gpu", "torch", "note",
)  # fmt: skip
SPLIT_QUERIES = ("uncast", "flashinfer")
"""Backends in SGLang's list of those that take q and q_rope apart; others get them concatenated, as its model does."""


class Stage:
    """One backend with `layers` layers over a pool of its own."""

    def __init__(self, backend: str, args: argparse.Namespace, batch: int, kv_dtype: torch.dtype, scale: float) -> None:
        from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
        from sglang.srt.layers.radix_attention import RadixAttention
        from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
        from sglang.srt.model_executor.forward_batch_info import ForwardMode
        from sglang.test.kits.attention_unittest.attention_methods import mla_attention as kit

        self.name, self.args, self.batch, self.device = backend, args, batch, args.device
        page = args.page_size
        context = args.context
        case = kit.MLAAttentionCase("bench", backend, ForwardMode.DECODE, args.heads, page, (context - 1,) * batch)
        config = kit.TinyMLAModelConfig(
            num_heads=args.heads, kv_lora_rank=RANK, qk_rope_head_dim=ROPE, hidden_size=1024, context_len=context + page
        )
        self.runner = kit.MockMLAModelRunner(
            case=case, model_config=config, dtype=torch.bfloat16, device=args.device, max_context_len=context + page,
            kv_lora_rank=RANK, qk_rope_head_dim=ROPE, disable_cuda_graph=False,
            fp8_kv_cache=kv_dtype == torch.float8_e4m3fn,
        )  # fmt: skip
        self.runner.token_to_kv_pool = MLATokenToKVPool(
            size=args.pool_tokens // page * page, page_size=page, dtype=kv_dtype, kv_lora_rank=RANK, qk_rope_head_dim=ROPE,
            layer_num=args.layers, device=args.device, enable_memory_saver=False,
        )  # fmt: skip
        self.runner.init_kv_index_translator()
        self.layers = [
            RadixAttention(args.heads, RANK + ROPE, (RANK + ROPE) ** -0.5, 1, layer_id=i, v_head_dim=RANK)
            for i in range(args.layers)
        ]
        for layer in self.layers if scale != 1.0 else ():
            layer.k_scale = torch.tensor(scale, dtype=torch.float32, device=args.device)
            layer.k_scale_float = scale
        self.backend = ATTENTION_BACKENDS[backend](self.runner)
        self.forward_batch = self._batch(kit, case)
        self._fill(context)
        q = torch.randn(batch, args.heads, RANK + ROPE, device=args.device).bfloat16()
        self.q, self.k = q, self.rows[:, -1].unsqueeze(1).contiguous()

    def _batch(self, kit: Any, case: Any) -> Any:
        order = torch.randperm(self.args.pool_tokens // self.args.page_size - 1).add_(1)
        span = -(-self.args.context // self.args.page_size)

        def slot(request: int, position: int) -> int:
            page = int(order[request * span + position // self.args.page_size])
            return page * self.args.page_size + position % self.args.page_size

        table = self.runner.req_to_token_pool.req_to_token
        self.slots = torch.stack(
            [
                (order[r * span : (r + 1) * span, None] * self.args.page_size + torch.arange(self.args.page_size))
                .flatten()[: self.args.context]
                for r in range(self.batch)
            ]
        ).to(self.device)  # fmt: skip
        short = kit.MLAAttentionCase(
            "short", case.backend, case.forward_mode, case.num_heads, case.page_size, (0,) * self.batch
        )
        made = kit._make_forward_batch(short, self.runner, max_context_len=0, device=self.device, loc_fn=lambda *_: 0)
        table[: self.batch, : self.args.context] = self.slots.int()
        made.seq_lens.fill_(self.args.context)
        made.seq_lens_cpu.fill_(self.args.context)
        made.seq_lens_sum = self.batch * self.args.context
        made.positions.fill_(self.args.context - 1)
        made.out_cache_loc.copy_(self.slots[:, -1])
        return made

    def _fill(self, context: int) -> None:
        """Random rows through the pool's writer, the same values for every backend and layer."""
        generator = torch.Generator(self.device).manual_seed(7)
        rows = torch.randn(self.batch, context, RANK + ROPE, device=self.device, generator=generator)
        self.rows = rows.mul_(0.7).bfloat16()
        flat, slots = self.rows.view(-1, 1, RANK + ROPE), self.slots.flatten()
        for layer in self.layers:
            self.runner.token_to_kv_pool.set_mla_kv_buffer(
                layer, slots, flat[..., :RANK].contiguous(), flat[..., RANK:].contiguous()
            )

    def step(self) -> torch.Tensor:
        """The attention of every layer; returns the last layer's output [batch, heads, rank]."""
        nope, rope = self.q[..., :RANK].contiguous(), self.q[..., RANK:].contiguous()
        out = nope
        for layer in self.layers:
            if self.name in SPLIT_QUERIES:
                k_nope, k_rope = self.k[..., :RANK].contiguous(), self.k[..., RANK:].contiguous()
                out = layer(nope, k_nope, k_nope, self.forward_batch, q_rope=rope, k_rope=k_rope)
            else:
                q, k = torch.cat([nope, rope], -1), torch.cat([self.k[..., :RANK], self.k[..., RANK:]], -1)
                out = layer(q.flatten(1), k, k[..., :RANK], self.forward_batch)
        return out.view(self.batch, -1, RANK)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

        with torch.no_grad(), forward_context(ForwardContext(attn_backend=self.backend)):
            yield

    def errors(self) -> tuple[float, float]:
        """Relative error of an eager step's last layer for request 0: on stored values, on unquantised values."""
        with self.active():
            self.backend.init_forward_metadata(self.forward_batch)
            out = self.step()[0].double()
        pool, layer = self.runner.token_to_kv_pool, self.layers[-1]
        stored = pool.get_key_buffer(layer.layer_id)[self.slots[0]].view(-1, RANK + ROPE).double()
        if layer.k_scale_float is not None and pool.dtype == torch.float8_e4m3fn:
            stored = stored * layer.k_scale_float
        return _error(out, self.q[0].double(), stored), _error(out, self.q[0].double(), self.rows[0].double())

    def milliseconds(self, repeats: int = 30) -> float:
        """Median of a step: metadata, then a graph's replay."""
        with self.active():
            self.backend.init_cuda_graph_state(self.batch, self.batch)
            self.backend.init_forward_metadata_out_graph(self.forward_batch, in_capture=True)
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):
                    self.step()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.backend.init_forward_metadata_in_graph(self.forward_batch)
                self.step()
            times = []
            for i in range(repeats + 3):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                self.backend.init_forward_metadata_out_graph(self.forward_batch)
                graph.replay()
                end.record()
                torch.cuda.synchronize()
                if i >= 3:
                    times.append(start.elapsed_time(end))
        return statistics.median(times)

    def trace(self, path: Path) -> None:
        """A profile of three eager steps, labelled as SGLang labels them."""
        from torch.profiler import ProfilerActivity, profile, record_function

        with (
            self.active(),
            profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True) as prof,
        ):
            for _ in range(3):
                with record_function(f"step[DECODE bs={self.batch} g_sk={self.batch * self.args.context}]"):
                    self.backend.init_forward_metadata(self.forward_batch)
                    self.step()
                torch.cuda.synchronize()
        prof.export_chrome_trace(str(path))


def _error(out: torch.Tensor, q: torch.Tensor, rows: torch.Tensor) -> float:
    scores = (q @ rows.T) * (RANK + ROPE) ** -0.5
    expected = torch.softmax(scores, -1) @ rows[:, :RANK]
    return float((out - expected).norm() / expected.norm())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", default="uncast,flashinfer,flashmla,triton")
    parser.add_argument("--batches", default="1,32")
    parser.add_argument("--kv-dtypes", default="fp8_e4m3,bfloat16")
    parser.add_argument("--heads", type=int, default=20)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--pool-tokens", type=int, default=495_552)
    parser.add_argument("--k-scale", type=float, default=1.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--traces", type=Path, help="folder for a profile of each FP8 backend at the first batch")
    args = parser.parse_args()
    import sglang
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import get_parallel

    load_plugins()
    get_parallel().override_permanently(attn_tp_size=1, attn_tp_rank=0, attn_dcp_size=1, attn_dcp_rank=0)
    gpu = torch.cuda.get_device_name(0) if args.device == "cuda" else "cpu"
    rows = []
    for backend in args.backends.split(","):
        for dtype in args.kv_dtypes.split(","):
            for batch in map(int, args.batches.split(",")):
                kv = torch.float8_e4m3fn if dtype == "fp8_e4m3" else torch.bfloat16
                result: dict[str, object] = dict.fromkeys(
                    ("ms_per_step", "error_stored", "error_unquantised", "note"), ""
                )
                try:
                    stage = Stage(backend, args, batch, kv, args.k_scale)
                    stored, plain = stage.errors()
                    result |= {"error_stored": f"{stored:.2e}", "error_unquantised": f"{plain:.2e}"}
                    if args.device == "cuda":
                        result["ms_per_step"] = f"{stage.milliseconds():.4f}"
                    if args.traces and kv == torch.float8_e4m3fn and batch == int(args.batches.split(",")[0]):
                        stage.trace(args.traces / f"{backend}.json.gz")
                    del stage
                except Exception as error:  # one backend's failure is a row of the table, not the end of it
                    traceback.print_exc()
                    result["note"] = f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"
                rows.append(
                    {
                        "engine": "sglang", "engine_version": sglang.__version__, "attention_backend": backend,
                        "kv_cache_dtype": dtype, "num_heads": args.heads, "layers": args.layers, "batch": batch,
                        "context": args.context, "page_size": args.page_size, "pool_tokens": args.pool_tokens, "gpu": gpu,
                        "torch": torch.__version__, **result,
                    }
                )  # fmt: skip
                print(
                    {k: rows[-1][k] for k in COLUMNS[2:14] if k not in ("layers", "context", "gpu")},
                    rows[-1]["note"],
                    flush=True,
                )
    if args.out:
        with args.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
