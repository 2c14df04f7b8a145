"""The founding step on one GPU: 78 layers of decode attention, 64 heads, 4,096 live tokens in a pool of 495,552."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch

from uncast.attention import MLAPagedAttention
from uncast.attention.oracle import mla_oracle, relative_errors
from uncast.bench.attention import PAGE, graph_us
from uncast.bench.environment import device_name, versions

LAYERS = 78
HEADS = 64
LIVE_TOKENS = 4096
POOL_TOKENS = 495_552
POOLS = 4
"""Pools of 285 MB that the layers take turns on: together far beyond the L2."""


@dataclass(frozen=True)
class FoundingResult:
    """One CSV row: a step's milliseconds for all layers, and cache bytes moved a step."""

    what: str
    ms_per_step: float
    bytes_per_step: int
    error: float
    gpu: str
    versions: str

    def row(self) -> dict[str, object]:
        return asdict(self)


def founding_step(backend: str = "native") -> list[FoundingResult]:
    """Attention of a step by `backend`, reading the pool as stored, and the cast of the pool that servers put before it."""
    generator = torch.Generator("cuda").manual_seed(0)
    num_pages, pages = POOL_TOKENS // PAGE, LIVE_TOKENS // PAGE
    shape = (num_pages, PAGE, 576)
    pools = []
    for _ in range(POOLS):
        pool = torch.empty(shape, dtype=torch.float8_e4m3fn, device="cuda")
        for start in range(0, num_pages, 1024):
            part = pool[start : start + 1024]
            part.copy_(torch.randn(part.shape, generator=generator, device="cuda"))
        pools.append(pool)
    table = torch.randperm(num_pages, generator=generator, device="cuda")[None, :pages].to(torch.int32)
    attention = MLAPagedAttention(backend)
    plan = attention.plan(
        torch.tensor([0, 1], dtype=torch.int32, device="cuda"),
        block_tables=table,
        seq_lens=torch.tensor([LIVE_TOKENS], dtype=torch.int32, device="cuda"),
        num_heads=HEADS, page_size=PAGE, sm_scale=1 / 16, kv_layout="fp8_e4m3", max_q_len=1, total_q=1,
    )  # fmt: skip
    q_nope = torch.randn((1, HEADS, 512), generator=generator, device="cuda").to(torch.bfloat16)
    q_pe = torch.randn((1, HEADS, 64), generator=generator, device="cuda").to(torch.bfloat16)
    out = torch.empty_like(q_nope)

    def layer(index: int) -> torch.Tensor:
        attention.run(q_nope, q_pe, pools[index % POOLS], out=out)
        return out

    copy = torch.empty(shape, dtype=torch.bfloat16, device="cuda")

    def cast(index: int) -> torch.Tensor:
        return copy.copy_(pools[index % POOLS])

    expected, _ = mla_oracle(plan.problem, q_nope, q_pe, pools[0].view(torch.uint8))
    error = relative_errors(layer(0), expected)[1]
    moved = POOL_TOKENS * 576 * 3 * LAYERS
    return [
        FoundingResult(f"{backend} attention, {LAYERS} layers", round(graph_us(layer, LAYERS) / 1e3, 3),
                       plan.bytes_needed * LAYERS, error, device_name(), versions()),
        FoundingResult(f"pool cast alone, {LAYERS} layers", round(graph_us(cast, LAYERS) / 1e3, 3),
                       moved, 0.0, device_name(), versions()),
    ]  # fmt: skip
