"""`uncast serve`: an OpenAI-compatible server over the engine."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from uncast.attention import ProblemError, Refused
from uncast.attention.registry import UnknownBackend, create
from uncast.cache_folder import COMPILE_ONCE
from uncast.checkpoints.bundled import BUNDLED, model_folder
from uncast.checkpoints.files import CheckpointError, DamagedCheckpoint
from uncast.checkpoints.generation import read_generation_config
from uncast.checkpoints.kv_scales import apply_kv_scales
from uncast.checkpoints.load import load_config
from uncast.cli.generate import load_with_bar
from uncast.cli.kv_scales import HELP as KV_SCALES_HELP
from uncast.cli.kv_scales import model_name, take_kv_scales
from uncast.cli.main import UsageError, WorkError
from uncast.cli.parallel import ParallelError, Team
from uncast.cli.speculate import HELP as SPECULATE_HELP
from uncast.cli.speculate import Speculate, speculate_of
from uncast.cli.weight_cache import add_weight_cache, weight_cache_bytes
from uncast.engine.async_engine import AsyncEngine
from uncast.engine.core import Engine, EngineConfig
from uncast.engine.runner import RunnerError
from uncast.engine.sampler import SamplingError
from uncast.engine.step_bytes import token_bytes
from uncast.engine.tokenizer import Tokenizer
from uncast.engine.warm_up import WarmUpError, warm_up
from uncast.latent.layouts import LAYOUT_NAMES, LayoutError, row_layout
from uncast.latent.pool import check_page_size
from uncast.models.config import ModelConfig
from uncast.models.decoder import MLADecoder
from uncast.models.parallel import Parallel
from uncast.server.chat_format import REASONING_PARSERS, TOOL_PARSERS
from uncast.server.run import ListenError, bind, url_of
from uncast.server.run import run as run_server
from uncast.server.start import StartClock
from uncast.server.state import ServerConfig

_ERRORS = (CheckpointError, LayoutError, ProblemError, Refused, RunnerError, SamplingError, UnknownBackend, ValueError)
_CPU_POOL_BYTES = 1 << 30
_GPU_POOL_SHARE = 0.8
# A step of 256 rows reads the same weights as one of 2,048 and keeps a GPU waiting for them; on an H200 8,192 tokens of a
# prompt take half the time in one step that they take in four. The indexer's scores of a step are tokens x context numbers.
_GPU_STEP_TOKENS, _LARGE_GPU_STEP_TOKENS, _LARGE_GPU_BYTES = 2048, 8192, 70 << 30
_LOCAL_HOSTS = ("127.0.0.1", "::1", "localhost")


def build_parser() -> argparse.ArgumentParser:
    """Options of the command."""
    limits, config = EngineConfig(), ServerConfig("")
    parser = argparse.ArgumentParser(
        prog="uncast serve",
        description="Serve an MLA model with the OpenAI API. The latent cache is read as it is stored. The port opens after a "
        "warm-up of every path.",
        epilog="example: uncast serve --model tiny-glm --port 8000 --kv-cache-dtype fp8_ds_mla --api-key secret",
    )
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    add("--port", type=int, default=8000, help="0 takes a free one (default: 8000)")
    add("--model", default="tiny-glm", help=f"a Hugging Face folder, a GGUF file, or {' or '.join(BUNDLED)} (default)")
    add("--served-model-name", metavar="NAME", help="the name in the API (default: the folder's)")
    add(
        "--kv-cache-dtype",
        default="auto",
        choices=("auto", *LAYOUT_NAMES),
        help="layout of the latent cache (default: auto)",
    )
    add("--kv-scales", type=Path, metavar="FILE", help=KV_SCALES_HELP)
    add_weight_cache(parser)
    add("--attention-backend", default="auto", help="auto, torch_cpu, gather_cast:torch_cpu, pool_cast:torch_cpu, ...")
    add("--deterministic", action="store_true", help="a seeded request's text is the same in every batch, bit for bit")
    add("--speculate", default="off", metavar="auto|off|N", help=SPECULATE_HELP)
    add("--page-size", type=int, default=64, help="cache rows per page, a power of two 1..128 (default: 64)")
    add(
        "--kv-pool-tokens",
        type=int,
        help="rows of the KV pool (default: what memory allows, 1 GiB on a CPU; no more than full contexts of --max-running)",
    )
    add("--max-running", type=int, default=limits.max_running, help="requests in one batch (default: %(default)s)")
    add(
        "--max-step-tokens",
        type=int,
        metavar="N",
        help="tokens of one step: a long prompt is computed in chunks of what its decodes leave of them (default: "
        f"{limits.max_step_tokens}, on a GPU {_GPU_STEP_TOKENS}, on one of 70 GiB and more {_LARGE_GPU_STEP_TOKENS} but for "
        "models with sparse attention; at least --max-running)",
    )
    add(
        "--max-queue",
        type=int,
        default=limits.max_waiting,
        help="waiting requests; more get 429 (default: %(default)s)",
    )
    add("--max-body-bytes", type=int, default=config.max_body_bytes, help="larger get 413 (default: %(default)s)")
    add("--api-key", help="key that clients must send (default: UNCAST_API_KEY, else none)")
    add(
        "--grace-seconds",
        type=float,
        default=config.grace_s,
        help="time that running requests get after SIGTERM (default: %(default)g)",
    )
    add(
        "--tool-call-parser",
        default="auto",
        choices=TOOL_PARSERS,
        help="format of the model's tool calls (default: auto, as its chat template shows)",
    )
    add(
        "--reasoning-parser",
        default="auto",
        choices=REASONING_PARSERS,
        help="how its reasoning begins; all end with </think> (default: auto, as its chat template shows)",
    )
    add("--profile-dir", type=Path, help="folder for traces of /start_profile (default: profiling is off)")
    return parser


def run(argv: Sequence[str]) -> int:
    """Runs the command; see `uncast serve --help`."""
    args = build_parser().parse_args(argv)
    clock = StartClock()
    clock.mark("imports")
    try:
        return _run(args, clock)
    except (ListenError, _FolderError) as error:
        print(f"uncast: {error}", file=sys.stderr)
        return 1
    except (DamagedCheckpoint, ParallelError, WarmUpError) as error:
        raise WorkError(str(error)) from error
    except _ERRORS as error:
        raise UsageError(str(error)) from error


class _FolderError(OSError):
    """A folder that cannot be written; one sentence."""


def _run(args: argparse.Namespace, clock: StartClock) -> int:
    folder = model_folder(args.model)
    config = load_config(folder)
    tokenizer = Tokenizer(folder, config.vocab_size)
    if not 0 <= args.port < 2**16:
        raise ValueError(f"port is {args.port}: allowed are 0 to {2**16 - 1}")
    scales, cache = take_kv_scales(args, folder, config), weight_cache_bytes(args)
    _check_cache_options(args, config)
    if args.max_queue < 1:
        raise ValueError(f"max_queue is {args.max_queue}: at least 1 is needed")
    speculate = speculate_of(args.speculate, folder)
    limits = EngineConfig(
        max_running=args.max_running,
        max_waiting=args.max_queue,
        max_step_tokens=_step_tokens(args, config),
        speculate=speculate.count,
    )
    server_config = ServerConfig(
        model_name=args.served_model_name or model_name(args.model, folder),
        max_body_bytes=args.max_body_bytes,
        api_key=os.environ.get("UNCAST_API_KEY") or None if args.api_key is None else args.api_key,
        grace_s=args.grace_seconds,
        profile_dir=None if args.profile_dir is None else _writable(args.profile_dir),
        tool_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
        sampling_defaults=dict(read_generation_config(folder, config.vocab_size).sampling),
    )

    def load_model(parallel: Parallel | None) -> MLADecoder:
        layout = args.kv_cache_dtype if scales is None else "auto"
        model = load_with_bar(
            folder, config, kv_layout=layout, parallel=parallel, cache_bytes=cache, mtp=speculate.drafts
        )
        if scales is not None:
            apply_kv_scales(model, scales)
        clock.mark("weights")
        return model

    team = Team(
        config,
        load_model,
        lambda: _pool_pages(args, config, speculate),
        kv_layout=args.kv_cache_dtype,
        attention_backend=args.attention_backend,
        page_size=args.page_size,
        deterministic=args.deterministic,
        drafts=speculate.drafts,
    )
    if team.follows:
        return team.follow()
    sock = bind(args.host, args.port)
    _say(f"loading {server_config.model_name} for {url_of(sock)}")
    if args.host not in _LOCAL_HOSTS and server_config.api_key is None:
        _say("warning: other machines can use this server without an API key")

    if speculate.reason is not None:
        _say(f"note: --speculate auto: {speculate.reason}")

    def load() -> AsyncEngine:
        engine = Engine(team.runner(), tokenizer, limits)
        clock.kernels = _kernel_counts()
        clock.mark("probe")
        note = warm_up(engine).note
        clock.mark("warm_up")
        if note is not None:
            _say(f"note: {note}")
        if engine.speculation is not None:
            engine.speculation.say = _say
        return AsyncEngine(engine)

    code = asyncio.run(run_server(server_config, sock, load, _say, clock))
    team.leave()
    return code


def _kernel_counts() -> Callable[[], Mapping[str, int]] | None:
    """Tells how many kernels were compiled; None on a CPU, and with another cache of Triton's than ours."""
    if not torch.cuda.is_available() or os.environ.get("TRITON_CACHE_MANAGER") != COMPILE_ONCE:
        return None
    from uncast.kernels.compile_once import counts  # needs Triton

    return counts


def _step_tokens(args: argparse.Namespace, config: ModelConfig) -> int:
    if args.max_step_tokens is not None:
        return int(args.max_step_tokens)
    usual = EngineConfig.max_step_tokens
    if torch.cuda.is_available():
        large = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory >= _LARGE_GPU_BYTES
        usual = _LARGE_GPU_STEP_TOKENS if large and config.indexer is None else _GPU_STEP_TOKENS
    return max(int(args.max_running), usual)


def _check_cache_options(args: argparse.Namespace, config: ModelConfig) -> None:
    """Refuses, before anything listens, what only the loaded model's runner would refuse."""
    check_page_size(args.page_size)
    if args.kv_pool_tokens is not None and args.kv_pool_tokens < 1:
        raise ValueError(f"kv_pool_tokens is {args.kv_pool_tokens}: at least 1 is needed")
    row_layout(args.kv_cache_dtype, config.kv_lora_rank, config.qk_rope_head_dim)
    if args.attention_backend != "auto":
        create(args.attention_backend)


def _pool_pages(args: argparse.Namespace, config: ModelConfig, speculate: Speculate) -> int:
    """Pages for `--kv-pool-tokens`, else for the memory there is, but no more than a full batch of full contexts."""
    tokens = args.kv_pool_tokens
    if tokens is None:
        layout = row_layout(args.kv_cache_dtype, config.kv_lora_rank, config.qk_rope_head_dim)
        free = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0
        budget = int(free * _GPU_POOL_SHARE) if torch.cuda.is_available() else _CPU_POOL_BYTES
        full = int(args.max_running) * config.max_position_embeddings
        tokens = min(budget // token_bytes(config, layout, drafts=speculate.drafts), full)
    return max(1, -(-int(tokens) // int(args.page_size)))


def _writable(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _FolderError(f"cannot write to {folder}: {error.strerror or error}") from None
    return folder.resolve()


def _say(line: str) -> None:
    print(f"uncast: {line}", flush=True)
