"""`uncast inspect PATH`: what a checkpoint is, what its cache costs, what fits, and the least a decode step can take."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from uncast.checkpoints.bundled import model_folder
from uncast.checkpoints.files import CheckpointError, DamagedCheckpoint
from uncast.checkpoints.gguf_file import gguf_path
from uncast.cli.main import UsageError, WorkError
from uncast.doctor.costs import peak_bandwidth
from uncast.engine.footprint import CacheCost, WeightCost, Workload, cache_costs, weight_cost
from uncast.engine.survey import FormatRow, Survey, survey
from uncast.models.indexer_config import IndexerConfig

GB = 1e9
_WIDTH = 132
"""Columns of the widest table."""
_CONTEXT = 4096


def build_parser() -> argparse.ArgumentParser:
    """Options of the command."""
    parser = argparse.ArgumentParser(
        prog="uncast inspect",
        description="Say what a checkpoint is, from its configuration and the headers of its files: formats by layer, cache "
        "bytes per token of each layout, what fits into a memory, and the bytes that a decode step cannot do without.",
        epilog="example: uncast inspect tiny-glm --memory 1 --bandwidth 0.05 --context 1000",
    )
    add = parser.add_argument
    add("path", help="a Hugging Face folder (config.json alone will do), a GGUF file, or tiny-glm")
    add("--memory", type=float, metavar="GB", help="memory for weights and cache, 10^9 bytes (default: this GPU's)")
    add(
        "--bandwidth", type=float, metavar="TB/s", help="of that memory, 10^12 bytes/s (default: this GPU's data sheet)"
    )
    add(
        "--context",
        type=int,
        help=f"rows of each request in the decode step (default: {_CONTEXT}, or all that the model allows if that is less)",
    )
    add("--batch", type=int, default=1, help="requests in the decode step (default: %(default)s)")
    add("--json", action="store_true", help="print one JSON object")
    return parser


def run(argv: Sequence[str]) -> int:
    """Runs the command; see `uncast inspect --help`. A damaged checkpoint is exit code 1; a wrong argument, or a model or
    format that is not supported, 2."""
    args = build_parser().parse_args(argv)
    _check(args)
    try:
        path = model_folder(args.path)
        if not path.is_dir() and gguf_path(path) is None:
            raise UsageError(f"{path} is neither a folder with a model in it nor a GGUF file")
        found = survey(path)
    except DamagedCheckpoint as error:
        raise WorkError(str(error)) from None
    except CheckpointError as error:
        raise UsageError(str(error)) from None
    longest = found.config.max_position_embeddings
    context = min(_CONTEXT, longest) if args.context is None else args.context
    if context > longest:
        raise UsageError(f"context is {context}: this model's is {longest}")
    memory, bandwidth = _machine(args)
    load = Workload(args.batch, context)
    weights, caches = weight_cost(found.modules, found.config, load), cache_costs(found.config, load)
    facts = _facts(found, load, weights, caches, memory, bandwidth)
    if args.json:
        print(json.dumps(facts))
    else:
        _show(found, facts)
    return 0


def _check(args: argparse.Namespace) -> None:
    for name, most in (("memory", 1e9), ("bandwidth", 1e6)):
        value = getattr(args, name)
        if value is not None and not 0 < value <= most:
            raise UsageError(f"{name} is {value}: allowed is above 0, up to {most:g}")
    for name in ("context", "batch"):
        value = getattr(args, name)
        if value is not None and not 1 <= value <= 10**9:
            raise UsageError(f"{name} is {value}: allowed is 1 to {10**9}")


def _machine(args: argparse.Namespace) -> tuple[float | None, float | None]:
    """Bytes, and bytes per second; None where neither an option nor a known GPU says so."""
    memory = None if args.memory is None else args.memory * GB
    bandwidth = None if args.bandwidth is None else args.bandwidth * 1e12
    if torch.cuda.is_available():
        memory = float(torch.cuda.get_device_properties(0).total_memory) if memory is None else memory
        peak = peak_bandwidth(torch.cuda.get_device_name())
        bandwidth = peak * 1e9 if bandwidth is None and peak is not None else bandwidth
    return memory, bandwidth


def _facts(
    found: Survey,
    load: Workload,
    weights: WeightCost,
    caches: list[CacheCost],
    memory: float | None,
    bandwidth: float | None,
) -> dict[str, Any]:
    config, moe = found.config, found.config.moe
    return {
        "path": str(found.path),
        "architecture": {
            "model_type": config.model_type,
            "layers": config.num_layers,
            "hidden_size": config.hidden_size,
            "heads": config.num_heads,
            "kv_lora_rank": config.kv_lora_rank,
            "qk_rope_head_dim": config.qk_rope_head_dim,
            "q_lora_rank": config.q_lora_rank,
            "max_position_embeddings": config.max_position_embeddings,
            "experts": None if moe is None else asdict(moe),
            "indexer": None if config.indexer is None else _indexer(config.indexer),
        },
        "weights": {
            "stored": found.stored,
            "parameters": found.parameters,
            "bytes": weights.total,
            "mtp_bytes": weights.mtp,
            "layers_with_kv_scale": found.kv_scales,
            "formats": [_row(row) for row in found.formats()],
        },
        "memory_bytes": memory,
        "bandwidth_bytes_per_s": bandwidth,
        "decode": {
            "batch": load.batch,
            "context": load.context,
            "weight_bytes_read": weights.touched,
            "experts_read_per_layer": weights.experts_touched,
        },
        "cache": [_cache(cache, weights, memory, bandwidth) for cache in caches],
        "notes": list(found.notes),
    }


def _indexer(indexer: IndexerConfig) -> dict[str, Any]:
    return {
        "heads": indexer.num_heads,
        "head_dim": indexer.head_dim,
        "topk": indexer.topk,
        "full_layers": list(indexer.full_layers),
    }


def _row(row: FormatRow) -> dict[str, Any]:
    return {**asdict(row), "formats": dict(row.formats)}


def _cache(cache: CacheCost, weights: WeightCost, memory: float | None, bandwidth: float | None) -> dict[str, Any]:
    total = weights.touched + cache.read_bytes
    return {
        "layout": cache.layout,
        "bytes_per_token_layer": cache.row_bytes,
        "index_bytes_per_token": cache.key_bytes,
        "bytes_per_token": cache.token_bytes,
        "tokens_that_fit": None if memory is None else cache.tokens_in(memory - weights.resident),
        "step_cache_bytes_read": cache.read_bytes,
        "step_bytes_read": total,
        "step_floor_ms": None if bandwidth is None else total / bandwidth * 1e3,
    }


def _show(found: Survey, facts: dict[str, Any]) -> None:
    console = Console(highlight=False)
    console.width = max(console.width, _WIDTH)
    for name, text in _lines(found, facts):
        console.print(f"{name:<12}  {text}", markup=False, soft_wrap=True)
    console.print()
    console.print(_format_table(found.formats()))
    console.print()
    console.print(_cache_table(facts))
    for note in facts["notes"]:
        console.print(f"note: {note}", markup=False, soft_wrap=True)


def _lines(found: Survey, facts: dict[str, Any]) -> list[tuple[str, str]]:
    config, moe, indexer, weights = found.config, found.config.moe, found.config.indexer, facts["weights"]
    shape = f"{config.num_layers} layers, hidden {config.hidden_size}, {config.num_heads} heads"
    row = f"latent {config.kv_lora_rank} + rope {config.qk_rope_head_dim}"
    lines = [("model", f"{facts['architecture']['model_type']}: {shape}, {row}, vocabulary {config.vocab_size:,}")]
    if moe is not None:
        count = sum(kind == "sparse" for kind in config.mlp_kinds)
        lines.append(
            ("experts", f"{moe.top_k} of {moe.num_experts} and {moe.num_shared} shared for each token, {count} layers")
        )
    if indexer is not None:
        where = f"{indexer.num_heads} heads x {indexer.head_dim} in {len(indexer.full_layers)} layers"
        lines.append(("sparse", f"{indexer.topk:,} rows a query, chosen by indexers of {where}"))
    mtp = f", {_gb(weights['mtp_bytes'])} of it multi-token prediction" if weights["mtp_bytes"] else ""
    stored = "as stored" if weights["stored"] else "as implied"
    lines.append(("weights", f"{_count(weights['parameters'])} parameters, {_gb(weights['bytes'])} {stored}{mtp}"))
    scales = weights["layers_with_kv_scale"]
    if scales:
        lines.append(("KV scales", f"in {scales} layers; layout fp8_e4m3 uses them"))
    decode = facts["decode"]
    experts = f", {decode['experts_read_per_layer']:.1f} experts a layer" if moe is not None else ""
    lines.append(
        (
            "decode step",
            f"{decode['batch']} x {decode['context']:,} rows: {_gb(decode['weight_bytes_read'])} of weights{experts}",
        )
    )
    if facts["memory_bytes"] is not None:
        left = facts["memory_bytes"] - weights["bytes"] + weights["mtp_bytes"]
        room = f"{_gb(left)} beside the weights" if left > 0 else f"{_gb(-left)} too little for the weights"
        lines.append(("memory", f"{_gb(facts['memory_bytes'])}: {room}"))
    return lines


def _format_table(rows: list[FormatRow]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("part", "layers", "format"):
        table.add_column(name)
    for name in ("parameters", "bytes"):
        table.add_column(name, justify="right")
    for row in rows:
        words = ", ".join(f"{name} {_gb(size)}" if len(row.formats) > 1 else name for name, size in row.formats.items())
        layers = "" if row.layers is None else _ranges(row.layers)
        table.add_row(row.part, layers, words, _count(row.parameters), _gb(row.nbytes))
    return table


def _cache_table(facts: dict[str, Any]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("cache")
    fits, timed = facts["memory_bytes"] is not None, facts["bandwidth_bytes_per_s"] is not None
    keys = any(cache["index_bytes_per_token"] for cache in facts["cache"])
    columns = [
        "B/token/layer",
        *(["index B/token"] if keys else []),
        "B/token",
        *(["tokens that fit"] if fits else []),
        "step reads of cache",
    ]
    for name in [*columns, "step reads in all", *(["floor ms", "tokens/s"] if timed else [])]:
        table.add_column(name, justify="right")
    for cache in facts["cache"]:
        cells = [cache["layout"], f"{cache['bytes_per_token_layer']:,}"]
        cells += [f"{cache['index_bytes_per_token']:,}"] if keys else []
        cells.append(f"{cache['bytes_per_token']:,}")
        if fits:
            cells.append(f"{cache['tokens_that_fit']:,}")
        cells += [_gb(cache["step_cache_bytes_read"]), _gb(cache["step_bytes_read"])]
        if timed:
            floor = cache["step_floor_ms"]
            cells += [f"{floor:.3f}", f"{facts['decode']['batch'] * 1e3 / floor:,.0f}"]
        table.add_row(*cells)
    return table


def _ranges(layers: tuple[int, ...]) -> str:
    """`0-2, 5, 7-9`."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _gb(size: float) -> str:
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:,.2f} {unit}"
    return f"{size:,.0f} B"


def _count(number: int) -> str:
    for unit, factor in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= factor:
            return f"{number / factor:,.2f} {unit}"
    return f"{number:,}"
