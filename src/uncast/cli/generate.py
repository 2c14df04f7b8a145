"""`uncast generate PROMPT`: stream text, then say which cache bytes the last step needed, read and would have cast."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from uncast.attention import ProblemError, Refused
from uncast.attention.registry import UnknownBackend
from uncast.cache_folder import keep_kernels
from uncast.checkpoints.bundled import BUNDLED, model_folder
from uncast.checkpoints.files import CheckpointError, DamagedCheckpoint
from uncast.checkpoints.generation import read_generation_config
from uncast.checkpoints.kv_scales import apply_kv_scales
from uncast.checkpoints.layer_loader import cache_scale_note
from uncast.checkpoints.load import load_config, load_model
from uncast.cli.grammar import INCOMPLETE, add_grammar, following
from uncast.cli.kv_scales import HELP as KV_SCALES_HELP
from uncast.cli.kv_scales import take_kv_scales
from uncast.cli.main import UsageError, WorkError
from uncast.cli.parallel import ParallelError, Team
from uncast.cli.speculate import HELP as SPECULATE_HELP
from uncast.cli.speculate import speculate_of
from uncast.cli.summary import print_summary, summary
from uncast.cli.weight_cache import add_weight_cache, weight_cache_bytes
from uncast.engine.generate import Generation, stream
from uncast.engine.request import GenerationError, RequestError, check_lengths
from uncast.engine.runner import RunnerError
from uncast.engine.sampler import SamplingError, SamplingParams
from uncast.engine.tokenizer import TemplateError, Tokenizer
from uncast.latent.layouts import LAYOUT_NAMES, LayoutError
from uncast.models.config import ModelConfig
from uncast.models.decoder import MLADecoder
from uncast.models.parallel import Parallel
from uncast.quant.packed import DEFAULT_CACHE_BYTES

_ERRORS = (
    CheckpointError, LayoutError, ProblemError, Refused, RequestError, RunnerError, SamplingError, TemplateError,
    UnknownBackend, ValueError,
)  # fmt: skip


SMALL_HIDDEN_SIZE = 1024
"""Below it a CPU computes on one thread unless OMP_NUM_THREADS is set: the operations are too small to share out, and where
another process keeps a core busy every barrier waits for it (measured on two cores: 100 against 7 to 15 tokens/s)."""


def build_parser() -> argparse.ArgumentParser:
    """Options of the command."""
    parser = argparse.ArgumentParser(
        prog="uncast generate",
        description="Generate text from a prompt with an MLA model whose latent cache is read as it is stored.",
        epilog='example: uncast generate "It is a truth" --max-tokens 80 --kv-cache-dtype fp8_ds_mla --json',
    )
    parser.add_argument("prompt", help="the text to continue, or with --chat the user's message")
    parser.add_argument(
        "--model", default="tiny-glm", help=f"a Hugging Face folder, a GGUF file, or {' or '.join(BUNDLED)} (default)"
    )
    parser.add_argument("--chat", action="store_true", help="render the prompt with the model's chat template")
    parser.add_argument(
        "--kv-cache-dtype",
        default="auto",
        choices=("auto", *LAYOUT_NAMES),
        help="layout of the latent cache (default: auto)",
    )
    parser.add_argument("--kv-scales", type=Path, metavar="FILE", help=KV_SCALES_HELP)
    add_weight_cache(parser)
    parser.add_argument(
        "--attention-backend", default="auto", help="auto, torch_cpu, gather_cast:torch_cpu, pool_cast:torch_cpu, ..."
    )
    parser.add_argument("--speculate", default="off", metavar="auto|off|N", help=SPECULATE_HELP)
    parser.add_argument("--max-tokens", type=int, default=128, help="new tokens at most (default: 128)")
    parser.add_argument(
        "--temperature", type=float, help="0 is greedy (default: the model's generation_config.json, else 0)"
    )
    parser.add_argument("--top-k", type=int, help="sample from the k best tokens; 0 is off")
    parser.add_argument("--top-p", type=float, help="sample from the smallest set with this probability; 1 is off")
    parser.add_argument("--min-p", type=float, help="drop tokens under this share of the best one; 0 is off")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampler (default: 0)")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="stop before this text; may be repeated"
    )
    add_grammar(parser)
    parser.add_argument(
        "--page-size", type=int, default=64, help="cache rows per page, a power of two 1..128 (default: 64)"
    )
    parser.add_argument("--kv-pool-tokens", type=int, help="rows of the KV pool (default: what the request needs)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the text")
    return parser


def run(argv: Sequence[str]) -> int:
    """Runs the command; see `uncast generate --help`."""
    args = build_parser().parse_args(argv)
    try:
        return _run(args)
    except (DamagedCheckpoint, GenerationError, ParallelError) as error:
        raise WorkError(str(error)) from error
    except _ERRORS as error:
        raise UsageError(str(error)) from error


def _run(args: argparse.Namespace) -> int:
    folder = model_folder(args.model)
    config = load_config(folder)
    tokenizer = Tokenizer(folder, config.vocab_size)
    params = _sampling(args, folder, config.vocab_size)
    prompt, ids = _prompt(args, tokenizer)
    check_lengths(len(ids), args.max_tokens, context=config.max_position_embeddings)
    follow = following(args, prompt, tokenizer, config)
    pool_tokens = len(ids) + args.max_tokens if args.kv_pool_tokens is None else args.kv_pool_tokens
    if pool_tokens < 1:
        raise ValueError(f"kv_pool_tokens is {pool_tokens}: at least 1 is needed")
    if args.page_size < 1:
        raise ValueError(f"page_size is {args.page_size}: allowed are powers of two from 1 to 128")
    scales = take_kv_scales(args, folder, config)
    speculate = speculate_of(args.speculate, folder)

    def load(parallel: Parallel | None) -> MLADecoder:
        layout, cache = args.kv_cache_dtype if scales is None else "auto", weight_cache_bytes(args)
        model = load_with_bar(
            folder, config, quiet=args.json, kv_layout=layout, parallel=parallel, cache_bytes=cache,
            mtp=speculate.drafts,
        )  # fmt: skip
        if scales is not None:
            apply_kv_scales(model, scales)
        return model

    team = Team(
        config,
        load,
        lambda: -(-pool_tokens // args.page_size),
        kv_layout=args.kv_cache_dtype,
        attention_backend=args.attention_backend,
        page_size=args.page_size,
        drafts=speculate.drafts,
    )
    if team.follows:
        return team.follow()
    runner = team.runner()
    result = Generation(prompt_tokens=len(ids), speculation=_off(speculate.reason))
    pieces = stream(
        runner,
        tokenizer,
        ids,
        params,
        max_tokens=args.max_tokens,
        stop=args.stop,
        result=result,
        speculate=speculate.count,
        grammar=follow.grammar,
        shown_special=follow.shown,
    )
    for piece in pieces:
        if not args.json:
            print(piece, end="", flush=True)
    team.leave()
    facts = summary(runner, result)
    if follow.grammar is not None and result.finish_reason == "length":
        print(f"uncast: note: {INCOMPLETE}", file=sys.stderr)
    if args.json:
        print(json.dumps(facts, ensure_ascii=False))
    else:
        print()
        print_summary(facts, runner, result)
    return 0


def _prompt(args: argparse.Namespace, tokenizer: Tokenizer) -> tuple[str, list[int]]:
    """The text that the model continues, and its tokens."""
    if not args.chat:
        return args.prompt, tokenizer.encode(args.prompt)
    text = tokenizer.render([{"role": "user", "content": args.prompt}], add_generation_prompt=True)
    return text, tokenizer.encode(text, add_special_tokens=False)


def _off(reason: str | None) -> str:
    return "off" if reason is None else f"off: {reason.removesuffix(': speculation is off')}"


def _sampling(args: argparse.Namespace, folder: Path, vocab_size: int) -> SamplingParams:
    """The options, else the model's own defaults, else greedy."""
    model = read_generation_config(folder, vocab_size)
    off = {"temperature": 1.0 if model.sampled else 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    given = {name: getattr(args, name) for name in off if getattr(args, name) is not None}
    chosen = {**off, **model.sampling, **given}
    return SamplingParams(chosen["temperature"], int(chosen["top_k"]), chosen["top_p"], chosen["min_p"], seed=args.seed)


def load_with_bar(
    folder: Path,
    config: ModelConfig,
    *,
    quiet: bool = False,
    kv_layout: str = "auto",
    parallel: Parallel | None = None,
    cache_bytes: int = DEFAULT_CACHE_BYTES,
    mtp: bool = False,
) -> MLADecoder:
    """Loads a model in float32 on the CPU, in BF16 on a GPU, with a progress bar and the checkpoint's notes on stderr. On a GPU
    the kernels that it will compile are kept; on a CPU a small model is loaded and computed on one thread, unless
    OMP_NUM_THREADS is set.

    Args:
        config: the folder's.
        kv_layout: of the cache; with `fp8_e4m3` missing scales are noted.
        parallel: the group that shares the model; only rank 0 shows anything.
        mtp: load the MTP layer, too.
        cache_bytes: see `load_model`.

    Raises:
        CheckpointError: a checkpoint that is not supported. WorkError: a damaged one.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    if device == "cpu" and config.hidden_size < SMALL_HIDDEN_SIZE and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    notes: list[str] = []
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total} layers"))
    first = parallel is None or parallel.rank == 0
    if device == "cuda":
        keep_kernels(None if first else lambda sentence: None)
    console = Console(file=sys.stderr, quiet=quiet or not first)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"loading {folder.name}", total=config.num_layers)
        try:
            model = load_model(
                folder, dtype=dtype, device=device, note=notes.append, parallel=parallel, cache_bytes=cache_bytes,
                mtp=mtp, progress=lambda done, _: bar.update(task, completed=done),
            )  # fmt: skip
        except DamagedCheckpoint as error:
            raise WorkError(str(error)) from None
    if kv_layout == "fp8_e4m3" and (sentence := cache_scale_note(model.layers)) is not None:
        notes.append(sentence)
    for sentence in dict.fromkeys(notes) if first else ():
        print(f"uncast: note: {sentence}", file=sys.stderr)
    return model
