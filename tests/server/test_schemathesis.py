"""schemathesis over the server's own OpenAPI document: what the document allows is answered, what it forbids is refused.

By hand, for longer: `uncast serve & schemathesis run http://127.0.0.1:8000/openapi.json --exclude-checks
positive_data_acceptance --max-time 600` (that check calls every limit of the model a fault; the test here knows them).
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode

from tests.server.live import LiveServer, live_server, make_engine
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
    schema = schemathesis.openapi.from_url(f"{api.url}/openapi.json")
    paths = {str(getattr(route, "path", "")).replace(":path", "") for route in create_app(api.state).routes}
    assert paths == set(schema.raw_schema["paths"])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_what_the_document_allows_is_answered(api: LiveServer, path: str) -> None:
    """Refused only at a limit of the model or for fields that exclude each other; then the answer says which."""
    operation = schemathesis.openapi.from_url(f"{api.url}/openapi.json")[path]["POST"]
    seen: Counter[int] = Counter()

    @given(case=operation.as_strategy(generation_mode=GenerationMode.POSITIVE))
    @settings(max_examples=40, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    def try_one(case: schemathesis.Case) -> None:
        response = case.call()
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


def test_the_command_line_tool_finds_nothing(api: LiveServer, tmp_path: Path) -> None:
    """All of its checks and phases, for 12 s: no 5xx; statuses, bodies and headers as documented; nothing forbidden taken."""
    command = [
        str(Path(sys.executable).with_name("schemathesis")), "run", f"{api.url}/openapi.json", "--max-time", "12",
        "--seed", "1",
        "--exclude-checks", "positive_data_acceptance", "--exclude-path-regex", "profile", "--request-timeout", "60",
        "--max-examples", "15", "--no-color",
    ]  # fmt: skip
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert ran.returncode == 0, ran.stdout[-5000:] + ran.stderr[-2000:]
