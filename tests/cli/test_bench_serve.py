"""`uncast bench serve` against our own server and against servers that break: output, files, exit codes."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httpx")
pytest.importorskip("uvicorn")
from tests.bench.serve_fakes import Connection, fake_server, text
from tests.server.live import MODEL, LiveServer, live_server
from tests.tiny_model import build_model_folder
from uncast.cli.main import main

VOCAB = "282"


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = build_model_folder(
        tmp_path_factory.mktemp("bench") / "tiny", max_position_embeddings=256, vocab_size=int(VOCAB)
    )
    with live_server(folder) as server:
        yield server
        server.wait_idle()


def bench(*arguments: object) -> int:
    return main(["bench", "serve", *map(str, arguments)])


def test_our_own_server_in_a_closed_loop(live: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = live.stats()
    table, picture = tmp_path / "serve.csv", tmp_path / "serve.png"
    options = ["--vocab-size", VOCAB, "--input-len", 20, "--output-len", 6, "--num-prompts", 5, "--ignore-eos"]
    drawn = ["--plot", picture] if find_spec("matplotlib") else []
    code = bench("--url", f"{live.url}/v1", "--concurrency", 1, 3, *options, "--warmup", 1, "--csv", table, *drawn)
    out = capsys.readouterr().out
    assert code == 0 and f"{MODEL} on uncast" in out and "concurrency 3: 5 of 5 requests complete" in out
    assert "tokens: 30 new after 100 of prompt, counted by usage" in out and "closed loop" in out
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["load"] for row in rows] == ["concurrency 1", "concurrency 3"]
    for row in rows:
        assert (row["complete"], row["output_tokens"], row["prompt_tokens"]) == ("5", "30", "100")
        assert row["cached_tokens"] == "0", "prompts of another load and of the warm-up are others"
        assert 0 < float(row["ttft_p50_ms"]) <= float(row["ttft_p99_ms"]) <= float(row["e2e_p99_ms"])
        assert float(row["itl_p50_ms"]) >= 0 and float(row["output_tokens_per_s"]) > 0
    assert not drawn or picture.read_bytes().startswith(b"\x89PNG")
    after = live.wait_idle()
    assert after.requests_total - before.requests_total == 2 * (5 + 1)


def test_a_chat_in_an_open_loop_as_json(live: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--endpoint", "chat", "--num-prompts", 4, "--input-len", 60, "--output-len", 4, "--json"]
    assert bench("--url", live.url, "--request-rate", 50, "inf", *options) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["server"] == "uncast" and [one["load"] for one in found["loads"]] == ["rate 50/s", "all at once"]
    for one in found["loads"]:
        assert one["complete"] == 4 and 45 * 4 < one["prompt_tokens"] < 75 * 4, "about 60 tokens each"
        assert one["ttft_ms"]["p50"] > 0 and one["failures"] == {}


def test_a_file_of_prompts_whole_answers_and_more_fields(
    live: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('"the latent"\n{"prompt": "the cache"}\n')
    options = ["--no-stream", "--output-len", 3, "--extra-body", '{"top_k": 5, "seed": 1}', "--num-prompts", 3]
    assert bench("--url", live.url, "--prompts", path, *options) == 0
    assert "3 of 3 requests complete" in capsys.readouterr().out
    assert bench("--url", live.url, "--prompts", path, "--extra-body", '{"nonsense": 1}') == 1
    assert "nonsense" in capsys.readouterr().err, "the server's own words come through"


def test_a_server_that_dies_is_a_row_and_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server(good) as server:

        async def handler(c: Connection) -> None:
            if len(server.requests) > 6:
                server.refuse()
                c.close()
            else:
                await good(c)

        server.handler = handler
        table = tmp_path / "dead.csv"
        code = bench("--url", server.url, "--num-prompts", 80, "--concurrency", 2, "--warmup", 2, "--csv", table)
    captured = capsys.readouterr()
    assert code == 1 and "failed: " in captured.out and "not sent: " in captured.out and captured.err == ""
    with table.open() as file:
        (row,) = csv.DictReader(file)
    assert row["complete"] == "4" and "connection" in row["failures"] and int(row["not_sent"]) > 50


async def good(c: Connection) -> None:
    await c.begin()
    await c.events(text("a", "stop"), "[DONE]")
    await c.end()


async def forbidden(c: Connection) -> None:
    await c.whole({"error": {"message": "a key is needed"}}, 401)


def test_the_key_is_sent_and_a_refusal_is_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNCAST_API_KEY", "from-the-environment")
    with fake_server(forbidden) as server:
        assert bench("--url", server.url) == 1
        assert capsys.readouterr().err == (f"uncast: {server.url} answers no request: HTTP 401: a key is needed\n")
        assert {body["headers"]["authorization"] for body in server.requests} == {"Bearer from-the-environment"}
        assert bench("--url", server.url, "--api-key", "given") == 1
        assert server.requests[-1]["headers"]["authorization"] == "Bearer given"
    assert bench("--url", "http://127.0.0.1:1") == 1
    assert "does not answer" in capsys.readouterr().err


def test_a_server_that_does_not_list_its_models(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server(good) as server:
        server.lists_models = False
        assert bench("--url", server.url) == 1
        assert "/v1/models answered 404" in capsys.readouterr().err
        assert bench("--url", server.url, "--model", "mine", "--num-prompts", 2) == 0
        assert server.requests[-1]["model"] == "mine" and "mine on an unknown server" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--url", "localhost:8000"], "an address such as"),
        (["--url", "http://127.0.0.1:99999"], "an address such as"),
        (["--url", "http://127.0.0.1:-1"], "an address such as"),
        (["--url", "http://xn--a"], "an address such as"),
        (["--api-key", "key "], "api_key"),
        (["--concurrency", "0"], "concurrency is 0"),
        (["--request-rate", "-1"], "request_rate is -1"),
        (["--request-rate", "nan"], "request_rate is nan"),
        (["--num-prompts", "0"], "num_prompts is 0"),
        (["--input-len", "0"], "input_len is 0"),
        (["--output-len", "0"], "output_len is 0"),
        (["--warmup", "-1"], "warmup is -1"),
        (["--timeout", "0"], "timeout is 0"),
        (["--temperature", "nan"], "temperature is nan"),
        (["--api-key", "kéy"], "api_key"),
        (["--prompts", "/nowhere.txt"], "cannot read"),
        (["--prompts", "/nowhere.txt", "--input-len", "5"], "not both"),
        (["--endpoint", "chat", "--vocab-size", "5"], "vocab_size"),
        (["--extra-body", "{"], "a JSON object"),
        (["--extra-body", '{"a": NaN}'], "a JSON object"),
        (["--extra-body", '{"n": 2}'], "has n"),
        (["--csv", "/nowhere/x.csv"], "cannot write"),
        (["--csv", "same.out", "--plot", "./same.out"], "give two files"),
        (["--extra-body", '{"a": 1e999}'], "extra_body cannot be sent"),
        (["--extra-body", '{"a": "\\ud800"}'], "extra_body cannot be sent"),
    ],
)
def test_wrong_options_are_one_sentence(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever the server is: the address comes last unless it is what is wrong."""
    with fake_server(good) as server:
        code = bench(*options, *([] if "--url" in options else ["--url", server.url]))
        assert not server.requests
    err = capsys.readouterr().err
    assert code == 2 and words in err and err.count("\n") == 1 and err.startswith("uncast: ")


def test_without_torch_and_without_httpx(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The load needs httpx alone: no import of torch is paid for, nor needed."""
    code = "import sys; sys.modules['torch'] = None\nfrom uncast.cli.main import main\nsys.exit(main(sys.argv[1:]))"
    with fake_server(good) as server:
        command = [sys.executable, "-c", code, "bench", "serve", "--url", server.url, "--num-prompts", "2"]
        done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "2 of 2 requests complete" in done.stdout, done.stderr
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert bench("--url", "http://127.0.0.1:1") == 1
    assert capsys.readouterr().err == "uncast: bench serve needs httpx: pip install 'uncast[bench]'\n"


def test_prompts_that_utf8_cannot_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('"good"\n"\\ud800"\n')
    with fake_server(good) as server:
        assert bench("--url", server.url, "--prompts", path) == 2 and not server.requests
    assert "line 2 holds half of a surrogate pair" in capsys.readouterr().err


@pytest.mark.parametrize("ending", ["interrupt", "refusal"])
def test_loads_that_are_over_are_kept(
    ending: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt or a dead server in the second load: the first one's row, picture and figures are there."""
    from uncast.bench import serve
    from uncast.bench.serve import ServerError

    whole, calls = serve.measure, []

    def measure(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt if ending == "interrupt" else ServerError("it is gone")
        return whole(*args, **options)

    monkeypatch.setattr(serve, "measure", measure)
    table, picture = tmp_path / "serve.csv", tmp_path / "serve.png"
    drawn = ["--plot", picture] if find_spec("matplotlib") else []
    with fake_server(good) as server:
        options = ["--model", r"a$\\frac$", "--num-prompts", 2, "--concurrency", 1, 2, "--csv", table, *drawn, "--json"]
        assert bench("--url", server.url, *options) == (130 if ending == "interrupt" else 1)
    facts = json.loads(capsys.readouterr().out)
    assert [load["load"] for load in facts["loads"]] == ["concurrency 1"]
    with table.open() as file:
        assert [row["complete"] for row in csv.DictReader(file)] == ["2"]
    assert not drawn or picture.read_bytes().startswith(b"\x89PNG")
