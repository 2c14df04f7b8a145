"""GLM-5's routed experts alone: our packed kernel, BF16 experts by torch's grouped product, and dequantising first.

    PYTHONPATH=src python3 benchmarks/packed_moe.py --out DIR               # one GPU
    PYTHONPATH=src python3 benchmarks/packed_moe.py --out DIR --tokens 1,32

Times are of a CUDA graph's replay, routing's sort and the final sum included. Floor: the packed bytes of the experts that were
chosen, over the bandwidth that a large copy reached on this machine (bytes read and written). File: packed-moe.csv.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from glm5_weights import GLM_5, Maker, copy_rate, graphed, write

from uncast.models.config import ModelConfig
from uncast.models.layers import route
from uncast.quant.packed import Packed


def measure_experts(raw: dict[str, Any], batches: list[int], rate: float) -> list[dict[str, object]]:
    """The routed experts of one layer: our kernel, BF16 experts by torch's grouped product, and dequantising what was chosen
    before that product."""
    from uncast.quant.grouped import moe

    maker, c = Maker("cuda", torch.bfloat16), ModelConfig.from_hf(raw | {"num_hidden_layers": 1})
    assert c.moe is not None
    shapes = (c.moe.num_experts, 2 * c.moe.intermediate_size, c.hidden_size), (
        c.moe.num_experts, c.hidden_size, c.moe.intermediate_size,
    )  # fmt: skip
    dense: list[torch.Tensor] = [maker.dense(*shape) for shape in shapes]
    rows: list[dict[str, object]] = []
    for name, make in (("nvfp4", maker.nvfp4), ("fp8", maker.fp8)):
        packed: list[Packed] = [make(*shape) for shape in shapes]
        for batch in batches:
            x = torch.randn(batch, c.hidden_size, device="cuda", dtype=torch.bfloat16)
            logits = torch.randn(batch, c.moe.num_experts, device="cuda")
            weights, chosen = route(c.moe, logits, torch.zeros(c.moe.num_experts, device="cuda"))
            distinct = chosen.unique().tolist()

            def product(
                w: list[Any], x: torch.Tensor = x, weights: torch.Tensor = weights, chosen: torch.Tensor = chosen
            ) -> torch.Tensor:
                return moe(x, weights, chosen, w[0], w[1])

            def dequantise_first(
                packed: list[Packed] = packed, distinct: list[int] = distinct, product: Callable[..., Any] = product
            ) -> None:
                for target, source in zip(dense, packed, strict=True):
                    for expert in distinct:
                        target[expert].copy_(source.expert(expert).dequantize(torch.bfloat16))
                product(dense)

            needed = sum(p.nbytes for p in packed) * len(distinct) / c.moe.num_experts
            row: dict[str, object] = {
                "format": name, "batch": batch, "experts_read": len(distinct),
                "packed_us": round(1e3 * graphed(lambda packed=packed, product=product: product(packed)), 1),
                "bf16_grouped_us": round(1e3 * graphed(lambda product=product: product(dense)), 1),
                "dequantise_then_grouped_us": round(1e3 * graphed(dequantise_first, 3), 1) if batch <= 64 else "",
                "floor_us": round(1e6 * needed / rate, 1), "gb_s_of_copy": round(rate / 1e9),
            }  # fmt: skip
            print(row, flush=True)
            rows.append(row)
        del packed
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the CSV file")
    parser.add_argument("--tokens", default="1,8,32,128,512", help="tokens of a step, comma-separated")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("it measures a CUDA GPU, and torch sees none here")
    args.out.mkdir(parents=True, exist_ok=True)
    batches = [int(batch) for batch in args.tokens.split(",")]
    write(args.out / "packed-moe.csv", measure_experts(GLM_5, batches, copy_rate("cuda")), "cuda")


if __name__ == "__main__":
    main()
