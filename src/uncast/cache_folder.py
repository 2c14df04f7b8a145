"""Where uncast keeps what need not be made twice.

    <folder>/probe/     what was verified on this machine, and the times that `auto` chooses by: see `uncast.attention.verified`
    <folder>/triton/    compiled kernels, as Triton stores them, unless TRITON_CACHE_DIR or TRITON_HOME names another place

`<folder>` is `$UNCAST_CACHE_DIR`, else `$XDG_CACHE_HOME/uncast`, else `~/.cache/uncast`.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

NO_HOME = Path("/nonexistent")
"""The home of users who have none, as in Debian's list of users; it cannot be written."""
COMPILE_ONCE = "uncast.kernels.compile_once:CompileOnce"


def cache_folder(part: str) -> Path:
    """The folder of one part; never created here."""
    own = os.environ.get("UNCAST_CACHE_DIR")
    if own:
        return Path(own) / part
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(xdg) if os.path.isabs(xdg) else _home() / ".cache") / "uncast" / part


def keep_kernels(warn: Callable[[str], None] | None = None) -> Path:
    """Has Triton keep compiled kernels where uncast does and processes of one host compile each only once.

    Works by Triton's environment variables, which child processes inherit; those that the user has set stay. Where nothing can
    be kept, kernels go to a folder that is removed at the end, and `warn` is told in a sentence (None: stderr).

    Returns:
        The folder of the kernels.
    """
    warn = _to_stderr if warn is None else warn
    given = os.environ.get("TRITON_CACHE_DIR")
    if not given and os.environ.get("TRITON_HOME"):
        given = os.path.join(os.environ["TRITON_HOME"], ".triton", "cache")
    if given:
        folder, fault = Path(given), why_not_writable(Path(given))
        if fault is not None:
            warn(f"{folder} cannot be written ({fault}): of Triton's kernels only those that are there already can run")
    else:
        folder = cache_folder("triton").absolute()
        fault = why_not_writable(folder)
        if fault is not None:
            warn(
                f"{folder} cannot be written ({fault}): compiled kernels are not kept; UNCAST_CACHE_DIR can name another"
            )
            folder = Path(tempfile.mkdtemp(prefix="uncast-triton-"))
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
        os.environ["TRITON_CACHE_DIR"] = str(folder)
    os.environ.setdefault("TRITON_CACHE_MANAGER", COMPILE_ONCE)
    return folder


def why_not_writable(folder: Path) -> str | None:
    """Makes the folder if need be; why no file can be made there, or None."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror or str(error)


def _to_stderr(sentence: str) -> None:
    print(f"uncast: warning: {sentence}", file=sys.stderr)


def _home() -> Path:
    home = Path(os.path.expanduser("~"))
    return home if home.is_absolute() else NO_HOME
