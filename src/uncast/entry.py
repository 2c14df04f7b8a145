"""The process around `uncast.cli.main`: signals, a full or closed stdout, and an exit code whatever happens.

It imports nothing large, so that Ctrl-C is in its hands before the slow imports begin.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import warnings
from types import FrameType
from typing import TextIO

INTERRUPTED = 130
CLOSED_PIPE = 141
_python_format = warnings.formatwarning


def run() -> int:
    """Runs the command line. Returns the exit code: that of the command, 130 after Ctrl-C, 141 after a closed pipe."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else whoever started it wants it ignored
        signal.signal(signal.SIGINT, _on_interrupt)
    try:
        code = _run()
    except KeyboardInterrupt:
        code = INTERRUPTED
    if signal.getsignal(signal.SIGINT) is _on_interrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    return _flushed(code)


def _run() -> int:
    from uncast.cli.main import main

    for stream in (sys.stdout, sys.stderr):
        if stream is not None and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # half a surrogate pair, or a terminal without Unicode
    warnings.formatwarning = _formatted
    try:
        return main()
    except SystemExit as error:  # argparse, after its own message
        return error.code if isinstance(error.code, int) else 1
    except OSError:  # not even the message could be written
        return 1


def _formatted(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """uncast's own warnings are one line; others keep the place in the code that they are about."""
    if category.__module__.partition(".")[0] == "uncast":
        return f"uncast: warning: {message}\n"
    return _python_format(message, category, filename, lineno, line)


def _flushed(code: int) -> int:
    """Flushes stdout and stderr; what cannot be written is dropped, so that the interpreter does not try again at its end."""
    error = _flush(sys.stdout)
    if isinstance(error, BrokenPipeError):
        code = code or CLOSED_PIPE
    elif error is not None and code == 0:
        code = 1
        with contextlib.suppress(OSError):
            print(f"uncast: cannot write the output: {error.strerror or error}", file=sys.stderr)
    _flush(sys.stderr)
    return code


def _flush(stream: TextIO | None) -> OSError | None:
    try:
        if stream is not None:
            stream.flush()
    except OSError as error:
        assert stream is not None
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return error
    return None


def _on_interrupt(_: int, frame: FrameType | None) -> None:
    """Ctrl-C ends the process at once while something is being imported: modules turn a KeyboardInterrupt there into an
    ImportError, or go on without what they wanted. Elsewhere it is a KeyboardInterrupt as usual."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os._exit(INTERRUPTED)
        frame = frame.f_back
    raise KeyboardInterrupt
