"""One of several processes of tests/kernels/test_compile_once.py: `compile_worker.py WHAT FOLDER`."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from filelock import FileLock, Timeout
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from uncast.kernels import compile_once
from uncast.kernels.compile_once import CompileOnce, counts

KEY = "ab" * 32


@triton.jit
def kernel(x, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at, mask=at < n) * 3 + 1, mask=at < n)


def compiles() -> None:
    """Compiles when all of them have started, and says what it did itself."""
    source = ASTSource(kernel, {"x": "*fp32", "n": "i32", "BLOCK": "constexpr"}, {(2,): 128})
    triton.compile(source, target=GPUTarget("cuda", 90, 32))
    print(*counts().values())


def holds() -> None:
    """Holds a kernel's lock until it is killed, or until nobody is there any more who could."""
    manager = CompileOnce(KEY)
    assert manager.get_group("kernel.json") is None
    print("holds", flush=True)
    sys.stdin.read()


class TellingLock(FileLock):
    """Says that it is held by another before it waits."""

    def acquire(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().acquire(blocking=False)
        except Timeout:
            print("waits", flush=True)
            return super().acquire(*args, **kwargs)


def waits() -> None:
    """Wants the lock that another holds."""
    compile_once.FileLock = TellingLock
    manager = CompileOnce(KEY)
    assert manager.get_group("kernel.json") is None
    print("holds" if compile_once._held else "goes on without", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)  # no better than the other


if __name__ == "__main__":
    what, folder = sys.argv[1:]
    (Path(folder) / f"started-{os.getpid()}").write_text("")
    wanted = int(os.environ.get("STARTED", "1"))
    while len(list(Path(folder).glob("started-*"))) < wanted:
        time.sleep(0.01)
    {"compiles": compiles, "holds": holds, "waits": waits}[what]()
