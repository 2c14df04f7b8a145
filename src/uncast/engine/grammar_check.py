"""A process that compiles grammars first, and may die of it.

A client's grammar goes to native code. Some end a process there (a chain of 5,000 rules overflows its stack), some take for
ever (an intersection of 14 expressions with counters). What this process has compiled in time is compiled again by the server.

Run as a script, with standard input and output as frames: 4 bytes of length, little-endian, then UTF-8. In: the tokenizer, then
grammars. Out: for each grammar why it cannot be compiled, empty if it can. Only llguidance is imported beside the library.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLParserLimits

_STACK_BYTES = 16 << 20
"""Less than the thread has that compiles for the server."""


class CheckFailed(Exception):
    """The process ended: the grammar took its time or its stack."""


class GrammarChecker:
    """The process as the server sees it; it starts on first use, and again after its end. Not safe from several threads."""

    def __init__(self, tokenizer: str, vocab_size: int, ends: list[int], seconds: int) -> None:
        """Args: tokenizer: text of a tokenizer.json; seconds: for one grammar."""
        self._first = json.dumps({"tokenizer": tokenizer, "vocab": vocab_size, "ends": ends, "seconds": seconds})
        self._process: subprocess.Popen[bytes] | None = None

    def check(self, grammar: str) -> str:
        """Why a grammar cannot be compiled, as llguidance says it; empty if it can.

        Raises:
            CheckFailed: the process ended before it knew.
        """
        try:
            process = self._running()
            assert process.stdin is not None and process.stdout is not None
            _send(process.stdin, grammar)
            answer = _receive(process.stdout)
        except OSError:
            answer = None
        if answer is None:
            self.close()
            raise CheckFailed
        return answer

    def close(self) -> None:
        """Ends the process; it also ends with this one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__],
                stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
            assert self._process.stdin is not None
            _send(self._process.stdin, self._first)
        return self._process


def _send(stream: IO[bytes], text: str) -> None:
    raw = text.encode("utf-8", "surrogatepass")
    stream.write(len(raw).to_bytes(4, "little") + raw)
    stream.flush()


def _receive(stream: IO[bytes]) -> str | None:
    """The next frame; None at the end."""
    head = stream.read(4)
    raw = stream.read(int.from_bytes(head, "little")) if len(head) == 4 else b""
    return raw.decode("utf-8", "surrogatepass") if len(head) == 4 else None


def _serve() -> None:
    """Answers until the end of its input. A grammar that takes too long ends the process by SIGALRM, wherever it is."""
    from llguidance import LLMatcher, LLTokenizer

    given, requests = sys.stdin.buffer, iter(lambda: _receive(sys.stdin.buffer), None)
    first = _receive(given)
    if first is None:
        return
    facts = json.loads(first)
    tokens = LLTokenizer(facts["tokenizer"], n_vocab=facts["vocab"], eos_token=facts["ends"])
    for text in requests:
        signal.alarm(facts["seconds"])
        matcher = LLMatcher(tokens, text, log_level=0, limits=limits())
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first mask is the dearest one
        _send(sys.stdout.buffer, matcher.get_error())
        signal.alarm(0)


def limits() -> LLParserLimits:
    """A lexer state takes 1 to 2 KB. The other limits are llguidance's own: about 20 ms to read a grammar, 15 ms a token."""
    from llguidance import LLParserLimits

    return LLParserLimits(max_lexer_states=50_000, verbose_errors=False)


if __name__ == "__main__":
    threading.stack_size(_STACK_BYTES)
    worker = threading.Thread(target=_serve)
    worker.start()
    worker.join()
