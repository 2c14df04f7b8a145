"""Records the traces that the doctor's tests read: the founding case at full size on one GPU.

    PYTHONPATH=src python3 benchmarks/record_founding.py --out DIR
    PYTHONPATH=src python3 benchmarks/record_founding.py --out DIR --cpu     # tiny, to try the script

One weight-shared layer runs 78 times a step: a BF16 projection to 64 heads of 576, attention over 4,096 live tokens of a
paged BF16 cache, a BF16 projection back. With `cast` the BF16 cache is `pool.to(bfloat16)` of an FP8 pool of 495,552 tokens,
made anew in every layer. Weights of 856 MB pass between two layers, so both variants find a cold L2.

Files in DIR: founding_{eager,graph,graph.capture,clean_eager,clean_graph}.json.gz and founding.json with the milliseconds a
step that CUDA events measured without a profiler.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from uncast.attention import MLAPagedAttention

PAGE = 64
CKV, KPE = 512, 64
MAX_FILE_BYTES = 400_000
DROPPED_CATEGORIES = {"ac2g", "overhead", "fwdbwd", "cpu_instant_event", "Trace"}


@dataclass(frozen=True)
class Sizes:
    """The founding case, or its shape in small."""

    layers: int = 78
    hidden: int = 6144
    heads: int = 64
    live_tokens: int = 4096
    pool_tokens: int = 495_552
    steps: int = 2


TINY = Sizes(layers=3, hidden=64, heads=4, live_tokens=256, pool_tokens=4096)


class TokenToKVPool:
    """The latent cache [pool_tokens, 1, 576], FP8 e4m3 or BF16; all layers share it."""

    def __init__(self, sizes: Sizes, dtype: torch.dtype, device: str) -> None:
        self.buffer = torch.empty((sizes.pool_tokens, 1, CKV + KPE), dtype=dtype, device=device)
        for start in range(0, sizes.pool_tokens, 65_536):
            part = self.buffer[start : start + 65_536]
            part.copy_(torch.randn(part.shape, device=device))

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.buffer


class PagedAttention:
    """Attention over a BF16 cache by the native kernel, else by plain torch over the gathered live rows."""

    def __init__(self, sizes: Sizes, device: str, backend: str) -> None:
        self.sizes, self.backend, self.note = sizes, backend, ""
        pages = sizes.live_tokens // PAGE
        self.table = torch.randperm(sizes.pool_tokens // PAGE, device=device)[None, :pages].to(torch.int32)
        self.scale = (CKV + KPE) ** -0.5
        self.attention = MLAPagedAttention(backend) if backend != "torch" else None
        if self.attention is not None:
            self.attention.plan(
                torch.tensor([0, 1], dtype=torch.int32, device=device),
                block_tables=self.table,
                seq_lens=torch.tensor([sizes.live_tokens], dtype=torch.int32, device=device),
                num_heads=sizes.heads, page_size=PAGE, sm_scale=self.scale, kv_layout="bf16", max_q_len=1, total_q=1,
            )  # fmt: skip

    def forward_decode(self, q: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        """q [1, heads, 576], cache [pool_tokens, 1, 576] -> [1, heads, 512], all BF16."""
        pages = cache.view(-1, PAGE, CKV + KPE)
        if self.attention is not None:
            return self.attention.run(q[..., :CKV], q[..., CKV:], pages)
        rows = pages[self.table[0].long()].view(-1, CKV + KPE)
        weights = torch.softmax(q[0].float() @ rows.float().T * self.scale, dim=-1)
        return (weights @ rows[:, :CKV].float())[None].to(q.dtype)


class MLALayer(torch.nn.Module):
    """x -> x + o_proj(attention(q_proj(norm(x))))."""

    def __init__(self, sizes: Sizes, pool: TokenToKVPool, attention: PagedAttention, device: str) -> None:
        super().__init__()
        bf16 = {"dtype": torch.bfloat16, "device": device, "bias": False}
        self.q_proj = torch.nn.Linear(sizes.hidden, sizes.heads * (CKV + KPE), **bf16)
        self.o_proj = torch.nn.Linear(sizes.heads * CKV, sizes.hidden, **bf16)
        self.sizes, self.pool, self.attention = sizes, pool, attention

    def get_bf16_cache(self, dtype: torch.dtype, layer_id: int) -> torch.Tensor:
        """The founding line: a copy of the whole pool in the queries' dtype."""
        return self.pool.get_key_buffer(layer_id).to(dtype)

    def forward(self, x: torch.Tensor, layer_id: int) -> torch.Tensor:
        normed = torch.nn.functional.rms_norm(x, (self.sizes.hidden,))
        q = self.q_proj(normed).view(1, self.sizes.heads, CKV + KPE)
        out = self.attention.forward_decode(q, self.get_bf16_cache(q.dtype, layer_id))
        return x + self.o_proj(out.flatten(1))


class Model(torch.nn.Module):
    """The one layer, `layers` times."""

    def __init__(self, layer: MLALayer) -> None:
        super().__init__()
        self.layer = layer
        self.x = torch.randn(1, layer.sizes.hidden, device=layer.q_proj.weight.device).to(torch.bfloat16)

    def forward(self) -> torch.Tensor:
        x = self.x
        for layer_id in range(self.layer.sizes.layers):
            x = self.layer(x, layer_id)
        return x


def capture(step: Callable[[], Any], out: Path | None) -> torch.cuda.CUDAGraph:
    """`step` as a CUDA graph; with `out`, a trace of the capture pass, as servers write it."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    if out is None:
        with torch.cuda.graph(graph):
            step()
        return graph
    with profiler() as trace, torch.cuda.graph(graph):
        step()
    write(trace, out)
    return graph


def profiler() -> profile:
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    return profile(activities=activities, record_shapes=True, with_stack=True)


def record(step: Callable[[], Any], sizes: Sizes, out: Path) -> None:
    """A trace of `steps` decode steps with the labels that SGLang writes, after one that starts the profiler."""
    label = f"step[DECODE bs=1 g_sk={sizes.live_tokens}]"
    with profiler() as trace:
        for number in range(sizes.steps + 1):
            with record_function(f"ProfilerStep#{number}"), record_function(label):
                step()
            synchronize()
    write(trace, out)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def write(trace: profile, out: Path) -> None:
    """Exports, drops what the doctor does not read and the first step, and shortens until the file is small."""
    raw = out.with_suffix(".raw")
    trace.export_chrome_trace(str(raw))
    document = json.loads(raw.read_text(encoding="utf-8", errors="replace"), strict=False)
    raw.unlink()
    events = [e for e in document["traceEvents"] if e.get("cat") not in DROPPED_CATEGORIES]
    starts = [e["ts"] for e in events if e.get("name") == "ProfilerStep#1" and e.get("cat") == "user_annotation"]
    if starts:
        events = [e for e in events if "ts" not in e or e["ts"] + e.get("dur", 0) >= starts[0] or e.get("ph") == "M"]
    for keep in (lambda e: True, has_file, in_this_file):
        kept = [e for e in events if e.get("cat") != "python_function" or keep(e)]
        document["traceEvents"] = kept
        out.write_bytes(gzip.compress(json.dumps(document, separators=(",", ":")).encode(), 9, mtime=0))
        if out.stat().st_size <= MAX_FILE_BYTES:
            break
    print(f"{out.name}: {len(kept)} of {len(events)} events, {out.stat().st_size:,} bytes", flush=True)


def has_file(event: dict[str, Any]) -> bool:
    return ".py(" in event["name"] or event["name"].startswith("nn.Module")


def in_this_file(event: dict[str, Any]) -> bool:
    return "record_founding.py(" in event["name"] or event["name"].startswith("nn.Module")


def milliseconds(step: Callable[[], Any], steps: int = 6) -> float:
    """Mean milliseconds a step by CUDA events (by the clock on a CPU), after two steps to warm up."""
    for _ in range(2):
        step()
    synchronize()
    if not torch.cuda.is_available():
        start = time.perf_counter()
        for _ in range(steps):
            step()
        return (time.perf_counter() - start) / steps * 1e3
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(steps):
        step()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / steps


def choose_attention(sizes: Sizes, device: str, backend: str, facts: dict[str, Any]) -> PagedAttention:
    """`backend` if it runs here, else plain torch, and the reason in the facts."""
    try:
        attention = PagedAttention(sizes, device, backend)
        q = torch.zeros(1, sizes.heads, CKV + KPE, dtype=torch.bfloat16, device=device)
        attention.forward_decode(q, torch.zeros(sizes.pool_tokens, 1, CKV + KPE, dtype=torch.bfloat16, device=device))
        synchronize()
    except Exception as error:  # whatever a kernel may raise: the recording goes on and says so
        facts["fallback"] = f"{type(error).__name__}: {error}"[:500]
        attention = PagedAttention(sizes, device, "torch")
    facts["attention"] = attention.backend
    return attention


def run(sizes: Sizes, device: str, backend: str, out: Path) -> None:
    started = time.perf_counter()
    facts: dict[str, Any] = {"sizes": asdict(sizes), "torch": torch.__version__, "ms_per_step": {}}
    facts["gpu"] = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    torch.manual_seed(0)
    attention = choose_attention(sizes, device, backend, facts)
    for prefix, dtype in (("founding", torch.float8_e4m3fn), ("founding_clean", torch.bfloat16)):
        model = Model(MLALayer(sizes, TokenToKVPool(sizes, dtype, device), attention, device))
        short = prefix.removeprefix("founding").strip("_")
        eager, graph_name = (f"{short}_eager", f"{short}_graph") if short else ("eager", "graph")
        facts["ms_per_step"][eager] = milliseconds(model)
        record(model, sizes, out / f"founding_{eager}.json.gz")
        if device == "cuda":
            graph = capture(model, None if short else out / f"founding_{graph_name}.capture.json.gz")
            facts["ms_per_step"][graph_name] = milliseconds(graph.replay)
            record(graph.replay, sizes, out / f"founding_{graph_name}.json.gz")
            del graph
        del model
    facts["seconds"] = round(time.perf_counter() - started, 1)
    (out / "founding.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(facts), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Record the founding case's traces.")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the files go")
    parser.add_argument("--cpu", action="store_true", help="tiny sizes on the CPU, without graphs")
    args = parser.parse_args()
    if not args.cpu and not torch.cuda.is_available():
        parser.error("there is no CUDA GPU here: use --cpu to try the script")
    args.out.mkdir(parents=True, exist_ok=True)
    with torch.inference_mode():
        if args.cpu:
            run(TINY, "cpu", "torch_cpu", args.out)
        else:
            run(Sizes(), "cuda", "native", args.out)


if __name__ == "__main__":
    main()
