"""One tiny model per worker, with a short and a long context; no outcome depends on a machine's speed or its proxies."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.live import LiveServer, live_server, make_engine, with_context
from tests.tiny_model import build_model_folder
from uncast.engine.tokenizer import Tokenizer
from uncast.server import body, run

VOCAB = 282
os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1"


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times after which a server gives a client up are out of reach, even where everything stands still for seconds."""
    monkeypatch.setattr(body, "_DISCARD_SECONDS", 600.0)
    monkeypatch.setattr(run, "_CLOSE_S", 600)


@pytest.fixture(autouse=True)
def _same_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hypothesis also draws constants that it finds in our modules, those that happen to be imported by now; not here."""
    from hypothesis.internal.conjecture import providers

    private = ("_local_constants", "_get_local_constants", "CONSTANTS_CACHE")
    if all(hasattr(providers, name) for name in private):  # another release may do it in another way
        nothing = type(providers._local_constants)()
        monkeypatch.setattr(providers, "_get_local_constants", lambda: nothing)
        providers.CONSTANTS_CACHE.cache.clear()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Context of 96 tokens: every request ends within a second."""
    folder = tmp_path_factory.mktemp("server") / "tiny"
    build_model_folder(folder, max_position_embeddings=96, vocab_size=VOCAB)
    assert Tokenizer(folder).vocab_size == VOCAB, "every token id should have a text"
    return folder


@pytest.fixture(scope="session")
def long_folder(folder: Path) -> Path:
    """Context of 4096 tokens: a request can run for many seconds."""
    return with_context(folder, folder.parent / "long", 4096)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    """Deterministic: choices of one request run in steps together or not, as they happen to arrive."""
    with live_server(folder, make_engine(folder, deterministic=True)) as live:
        yield live
        live.wait_idle()
