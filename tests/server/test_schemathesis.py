"""schemathesis over the server's own OpenAPI document: what the document allows is answered, what it forbids is refused.

By hand, for longer: `uncast serve & schemathesis run http://127.0.0.1:8000/openapi.json --exclude-checks
positive_data_acceptance --max-time 600` (that check calls every limit of the model a fault; the test here knows them).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode

from tests.server.live import LIMIT_S, LiveServer, live_server, make_engine
from tests.tiny_model import build_model_folder
from uncast.server.app import create_app

LIMITS = {
    "chat_template", "context_length_exceeded", "empty_prompt", "invalid_combination", "invalid_grammar",
    "invalid_json", "tools_not_supported", "too_many_choices", "unknown_token",
}  # fmt: skip
"""Codes of limits that JSON Schema does not say: those of the model, and of fields together."""


@pytest.fixture(scope="module")
def api(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    traces = tmp_path_factory.mktemp("traces")
    with live_server(folder, make_engine(folder, max_waiting=512), profile_dir=traces) as live:
        yield live
        live.wait_idle()


def test_the_document_lists_every_route(api: LiveServer) -> None:
    schema = schemathesis.openapi.from_url(f"{api.url}/openapi.json", timeout=LIMIT_S)
    paths = {str(getattr(route, "path", "")).replace(":path", "") for route in create_app(api.state).routes}
    assert paths == set(schema.raw_schema["paths"])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_what_the_document_allows_is_answered(api: LiveServer, path: str) -> None:
    """Refused only at a limit of the model or for fields that exclude each other; then the answer says which."""
    operation = schemathesis.openapi.from_url(f"{api.url}/openapi.json", timeout=LIMIT_S)[path]["POST"]
    seen: Counter[int] = Counter()

    @given(case=operation.as_strategy(generation_mode=GenerationMode.POSITIVE))
    @settings(max_examples=40, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    def try_one(case: schemathesis.Case) -> None:
        response = case.call(timeout=LIMIT_S)
        case.validate_response(
            response, excluded_checks=[schemathesis.checks.CHECKS.get_one("positive_data_acceptance")]
        )
        seen[response.status_code] += 1
        assert response.status_code in (200, 400, 404, 429), response.text
        if response.status_code == 400:
            error = response.json()["error"]
            assert error["code"] in LIMITS, f"the document allows this, the server does not: {error}, {case.body!r}"
        if response.status_code == 404:
            assert case.body["model"] not in (None, "tiny")

    try_one()
    assert seen[200] >= 3, seen


def test_the_command_line_tool_finds_nothing(tmp_path: Path) -> None:
    """All of its checks and phases: no 5xx; statuses, bodies and headers as documented; nothing forbidden taken.

    The number of cases is bounded, not the time, so that every machine tries the same ones: a thousand, for a model of one
    layer and 32 tokens, which answers with two choices at most.
    """
    folder = build_model_folder(tmp_path / "tiny", max_position_embeddings=32, vocab_size=282, num_hidden_layers=1)
    command = [
        str(Path(sys.executable).with_name("schemathesis")), "run", "--seed", "1", "--max-examples", "15",
        "--exclude-checks", "positive_data_acceptance", "--exclude-path-regex", "profile", "--no-color",
        "--request-timeout", str(LIMIT_S), "--suppress-health-check", "all",
    ]  # fmt: skip
    with live_server(folder, make_engine(folder, max_waiting=512), profile_dir=tmp_path) as live:
        live.state.served.max_waiting = 2
        ran = subprocess.run(
            [*command, f"{live.url}/openapi.json"],
            capture_output=True, text=True, cwd=tmp_path, timeout=2 * LIMIT_S, env={**os.environ, "PYTHONHASHSEED": "0"},
        )  # fmt: skip
        live.wait_idle()
    assert ran.returncode == 0, ran.stdout[-5000:] + ran.stderr[-2000:]
    generated = re.search(r"(\d+) generated, (\d+) passed", ran.stdout)
    assert generated and int(generated[1]) == int(generated[2]) > 500, ran.stdout[-3000:]
