"""`uncast kv-error`: what each cache layout costs a model on the user's own prompts, layer by layer, and advice."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from uncast.attention import ProblemError, Refused
from uncast.bench.environment import device_name, versions
from uncast.bench.kv_advice import advice
from uncast.bench.kv_error import REFERENCE, ContenderError, KVErrorMeter, NotFinite, calibrated
from uncast.bench.kv_plot import plot_kv_error
from uncast.bench.mixed_attention import Contender, LayerScales
from uncast.bench.plot import check_matplotlib
from uncast.bench.prompts import read_prompts
from uncast.checkpoints.bundled import BUNDLED, model_folder
from uncast.checkpoints.files import DamagedCheckpoint
from uncast.checkpoints.kv_scales import LAYOUT, write_kv_scales
from uncast.checkpoints.load import load_config
from uncast.cli.csv_file import check_writable
from uncast.cli.generate import load_with_bar
from uncast.cli.kv_scales import model_name
from uncast.cli.main import UsageError, WorkError
from uncast.engine.runner import RunnerError
from uncast.engine.tokenizer import TemplateError, Tokenizer
from uncast.latent.layouts import LAYOUT_NAMES, LayoutError, row_layout
from uncast.models.config import ModelConfig
from uncast.models.decoder import MLADecoder

_LAYOUTS = tuple(name for name in LAYOUT_NAMES if name != REFERENCE)
_ERRORS = (LayoutError, ProblemError, Refused, RunnerError, TemplateError, ValueError)
"""CheckpointError and the tokenizer's own errors are ValueErrors."""


def build_parser() -> argparse.ArgumentParser:
    """Options of the command."""
    parser = argparse.ArgumentParser(
        prog="uncast kv-error",
        description="Measure what each layout of the latent cache costs a model on your own prompts, against BF16: attention "
        "error and KL by layer, saturated and subnormal numbers, calibrated scales, advice.",
        epilog="example: uncast kv-error --model tiny-glm --prompts prompts.txt --write-scales scales.json --plot error.png",
    )
    add = parser.add_argument
    add("--model", default="tiny-glm", help=f"a Hugging Face folder, a GGUF file, or {' or '.join(BUNDLED)} (default)")
    add("--prompts", type=Path, required=True, metavar="FILE", help="a prompt a line; a .jsonl file: strings, or objects with "
        "prompt, text or messages")  # fmt: skip
    add("--layouts", nargs="+", choices=_LAYOUTS, metavar="LAYOUT", help=f"of {', '.join(_LAYOUTS)} (default: the FP8 ones "
        "that fit the model)")  # fmt: skip
    add(
        "--context",
        type=int,
        default=1024,
        help="tokens of a prompt at most; longer ones are cut (default: %(default)s)",
    )
    add("--max-prompts", type=int, default=64, help="prompts read at most (default: %(default)s)")
    add(
        "--no-layer-kl",
        action="store_true",
        help="leave out the KL of single layers: a forward pass per layer and layout",
    )
    add("--write-scales", type=Path, metavar="FILE", help="write calibrated scales for fp8_e4m3, for --kv-scales")
    add("--plot", type=Path, metavar="FILE.png", help="draw the errors by layer")
    add("--json", action="store_true", help="print one JSON object")
    return parser


def run(argv: Sequence[str]) -> int:
    """Runs the command; see `uncast kv-error --help`."""
    args = build_parser().parse_args(argv)
    try:
        return _run(args)
    except (NotFinite, DamagedCheckpoint) as error:
        raise WorkError(str(error)) from error
    except _ERRORS as error:
        raise UsageError(str(error)) from error


def _run(args: argparse.Namespace) -> int:
    _check(args)
    folder = model_folder(args.model)
    name = model_name(args.model, folder)
    config = load_config(folder)
    prompts, cut = _prompts(args, Tokenizer(folder, config.vocab_size), config)
    layouts = _layouts(args, config)
    model = load_with_bar(folder, config, quiet=args.json)
    meter = KVErrorMeter(model, layouts, max_tokens=max(map(len, prompts)))
    scales = calibrated(meter.largest(prompts)) if LAYOUT in layouts or args.write_scales is not None else None
    contenders = _contenders(layouts, model, scales)
    results = _measure(meter, prompts, contenders, args)
    reference_bytes = row_layout(REFERENCE, config.kv_lora_rank, config.qk_rope_head_dim).row_bytes
    facts = {
        "model": name,
        "reference": REFERENCE,
        "prompts": len(prompts),
        "prompts_cut": cut,
        "tokens": sum(map(len, prompts)),
        "layouts": [_fact(result) for result in results],
        "calibrated_scales": None if scales is None else [{"ckv_scale": s.ckv, "kpe_scale": s.kpe} for s in scales],
        "advice": advice(results, reference_bytes),
        "device": device_name(),
        "versions": versions(),
    }
    if args.json:
        print(json.dumps(facts))
    else:
        _show(facts, results)
    writers: list[Callable[[], None]] = []
    if args.write_scales is not None:
        assert scales is not None
        pairs = [(s.ckv, s.kpe) for s in scales]
        writers.append(lambda: write_kv_scales(args.write_scales, config, name, pairs))
    if args.plot is not None:
        writers.append(lambda: plot_kv_error(results, name, args.plot))
    _write(writers)
    return 0


def _write(writers: Sequence[Callable[[], None]]) -> None:
    """Writes the files, after the report: one that cannot be written takes neither the figures nor the other file along."""
    failed = []
    for writer in writers:
        try:
            writer()
        except ValueError as error:
            failed.append(str(error))
    if failed:
        raise WorkError("; ".join(failed))


def _check(args: argparse.Namespace) -> None:
    """What can be refused before a model is loaded."""
    if args.context < 2:
        raise ValueError(f"context is {args.context}: at least 2 is needed")
    if args.max_prompts < 1:
        raise ValueError(f"max_prompts is {args.max_prompts}: at least 1 is needed")
    if args.plot is not None:
        check_matplotlib()
    for path in (args.write_scales, args.plot):
        check_writable(path)
    given = [("--prompts", args.prompts), ("--write-scales", args.write_scales), ("--plot", args.plot)]
    names: dict[Path, str] = {}
    for option, path in given:
        if path is not None and (other := names.setdefault(path.resolve(), option)) != option:
            raise ValueError(f"{other} and {option} are both {str(path)!r}: each needs a file of its own")


def _prompts(args: argparse.Namespace, tokenizer: Tokenizer, config: ModelConfig) -> tuple[list[list[int]], int]:
    """Prompts of 2 tokens or more, cut to the context, and how many were cut."""
    longest = min(args.context, config.max_position_embeddings)
    found = [ids for ids in read_prompts(args.prompts, tokenizer) if len(ids) > 1][: args.max_prompts]
    if not found:
        raise ValueError(f"{args.prompts} holds no prompt of 2 tokens or more")
    return [ids[:longest] for ids in found], sum(len(ids) > longest for ids in found)


def _layouts(args: argparse.Namespace, config: ModelConfig) -> list[str]:
    if args.layouts:
        for name in args.layouts:
            row_layout(name, config.kv_lora_rank, config.qk_rope_head_dim)
        return list(dict.fromkeys(args.layouts))
    fits = (config.kv_lora_rank, config.qk_rope_head_dim) == (512, 64)
    return ["fp8_ds_mla", LAYOUT] if fits else [LAYOUT]


def _contenders(layouts: Sequence[str], model: MLADecoder, scales: tuple[LayerScales, ...] | None) -> list[Contender]:
    """Each layout, `fp8_e4m3` with the checkpoint's own scales (else 1) and with calibrated ones."""
    found = []
    for name in layouts:
        if name != LAYOUT:
            found.append(Contender(name, name, None, "none"))
            continue
        own = tuple(LayerScales(_value(w.ckv_scale), _value(w.kpe_scale)) for w in (x.attention for x in model.layers))
        source = "1" if all(scale == LayerScales() for scale in own) else "checkpoint"
        found.append(Contender(name, name, own, source))
        assert scales is not None
        found.append(Contender(f"{name} calibrated", name, scales, "calibrated"))
    return found


def _value(scale: Any) -> float:
    return 1.0 if scale is None else float(scale)


def _measure(
    meter: KVErrorMeter, prompts: list[list[int]], contenders: list[Contender], args: argparse.Namespace
) -> list[ContenderError]:
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total} passes"))
    console = Console(file=sys.stderr, quiet=args.json)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("measuring", total=None)
        return meter.measure(
            prompts,
            contenders,
            per_layer_kl=not args.no_layer_kl,
            progress=lambda done, passes: bar.update(task, completed=done, total=passes),
        )


def _fact(result: ContenderError) -> dict[str, Any]:
    contender = result.contender
    scales = contender.scales or (None,) * len(result.layers)
    return {
        "name": contender.name,
        "kv_layout": contender.kv_layout,
        "scales": contender.source,
        "row_bytes": result.row_bytes,
        "kl": result.kl,
        "kl_max": result.kl_max,
        "top1_changed": result.top1_changed,
        "nll_change": result.nll_change,
        "layers": [
            {
                "layer": index,
                **asdict(layer),
                "ckv_scale": None if scale is None else scale.ckv,
                "kpe_scale": None if scale is None else scale.kpe,
            }
            for index, (layer, scale) in enumerate(zip(result.layers, scales, strict=True))
        ],
    }


def _show(facts: dict[str, Any], results: Sequence[ContenderError]) -> None:
    console = Console(highlight=False)
    console.width = max(console.width, 120)
    cut = f", {facts['prompts_cut']} of them cut" if facts["prompts_cut"] else ""
    console.print(
        f"{facts['model']}: {facts['prompts']} prompts of {facts['tokens']:,} tokens{cut}, against {REFERENCE}\n"
    )
    console.print(_summary(results))
    for result in results:
        console.print(f"\n{result.contender.name}")
        console.print(_layer_table(result))
    console.print()
    for sentence in facts["advice"]:
        console.print(f"- {sentence}", markup=False, soft_wrap=True)


def _summary(results: Sequence[ContenderError]) -> Table:
    table = Table("cache", box=None, padding=(0, 2, 0, 0))
    for name in ("B a row", "KL, nats", "largest KL", "top-1 changed", "NLL change", "saturated", "subnormal"):
        table.add_column(name, justify="right")
    for result in results:
        values = sum(layer.values for layer in result.layers)
        subnormal = sum(layer.subnormal for layer in result.layers)
        table.add_row(
            result.contender.name,
            str(result.row_bytes),
            f"{result.kl:.2e}",
            f"{result.kl_max:.2e}",
            f"{100 * result.top1_changed:.2f} %",
            f"{result.nll_change:+.1e}",
            f"{sum(layer.saturated for layer in result.layers):,}",
            f"{100 * subnormal / values:.1f} %" if values else "-",
        )
    return table


def _layer_table(result: ContenderError) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    scaled = result.contender.scales is not None
    names = ["layer", "attention error", "with all layers so", "KL, nats", "saturated", "subnormal"]
    for name in [*names, *(["ckv_scale", "kpe_scale"] if scaled else [])]:
        table.add_column(name, justify="right")
    for index, layer in enumerate(result.layers):
        cells = [
            str(index),
            f"{100 * layer.attention_error:.2f} %",
            f"{100 * layer.attention_error_stack:.2f} %",
            "-" if layer.kl is None else f"{layer.kl:.1e}",
            f"{layer.saturated:,}",
            f"{100 * layer.subnormal / layer.values:.1f} %" if layer.values else "-",
        ]
        if result.contender.scales is not None:
            own = result.contender.scales[index]
            cells += [f"{own.ckv:g}", f"{own.kpe:g}"]
        table.add_row(*cells)
    return table
