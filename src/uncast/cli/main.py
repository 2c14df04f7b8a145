"""`uncast COMMAND`: finds the command, turns known errors into one sentence on stderr and exit code 1 or 2."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from uncast.version import __version__

COMMANDS = {
    "generate": ("uncast.cli.generate", "generate text from a prompt and account for the cache bytes"),
    "serve": ("uncast.cli.serve", "serve a model with the OpenAI API"),
    "doctor": ("uncast.cli.doctor", "name the wasted bytes in a profiler trace of any server"),
    "inspect": ("uncast.cli.inspect", "say what a checkpoint is, what fits beside it and what a decode step must read"),
    "probe": ("uncast.cli.probe", "run what attention backends claim on this machine, and keep what is verified"),
    "kv-error": ("uncast.cli.kv_error", "measure what each cache layout costs on your own prompts, layer by layer"),
    "bench": ("uncast.cli.bench", "measure attention and decoding"),
}
TORCH_HINT = "this command needs torch: pip install 'uncast[torch]'"
SERVER_HINT = "this command needs a web server: pip install 'uncast[torch,server]'"


class UsageError(Exception):
    """Bad input that a command found; the message is one sentence."""


class WorkError(Exception):
    """Work that failed although the input was good; the message is one sentence."""


def build_parser() -> argparse.ArgumentParser:
    """The top-level parser; a command's own options live in its module."""
    parser = argparse.ArgumentParser(
        prog="uncast",
        description="MLA models with an FP8 latent cache read as it is stored: never cast, never copied.",
        epilog='example: uncast generate "It was a dark night" --max-tokens 100',
    )
    parser.add_argument("--version", action="version", version=f"uncast {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (_, help_text) in COMMANDS.items():
        commands.add_parser(name, help=help_text, add_help=False)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command. Returns the exit code: 0, 1 for an error of the work, 2 for bad usage, 130 for an interrupt,
    141 for a closed pipe."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    known, rest = build_parser().parse_known_args(arguments)
    if known.command is None:
        build_parser().print_help(sys.stderr)
        return 2
    try:
        module = importlib.import_module(COMMANDS[known.command][0])
        code: int = module.run(rest)
        return code
    except ModuleNotFoundError as error:
        if error.name in ("torch", "numpy", "safetensors", "tokenizers", "jinja2"):
            return _fail(TORCH_HINT, 1)
        if error.name in ("starlette", "uvicorn", "pydantic", "prometheus_client"):
            return _fail(SERVER_HINT, 1)
        raise
    except UsageError as error:
        return _fail(str(error), 2)
    except WorkError as error:
        return _fail(str(error), 1)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 141
    except OSError as error:
        if error.filename is not None:
            return _fail(f"cannot use {error.filename}: {error.strerror or error}", 1)
        return _fail(f"cannot write the output: {error.strerror or error}", 1)  # only writing has no file's name


def _fail(sentence: str, code: int) -> int:
    print(f"uncast: {sentence}", file=sys.stderr)
    return code
