"""A model that cannot answer, and what its files say about answering: clear errors, the engine lives on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.server.live import MODEL, live_server, make_engine, metrics, post

NOT_FINITE = "the model's logits are not finite"


@pytest.mark.parametrize("stream", [False, True])
def test_logits_that_are_not_numbers_are_a_clear_error(
    folder: Path, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(folder)
    step = engine.engine.runner.step
    broken = True

    def spoiled(chunks: Any, **options: Any) -> torch.Tensor:
        logits = step(chunks, **options)
        return logits * float("nan") if broken else logits

    monkeypatch.setattr(engine.engine.runner, "step", spoiled)
    with live_server(folder, engine) as live:
        body = {"model": MODEL, "prompt": "the latent", "max_tokens": 4, "stream": stream}
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "max_tokens": 4, "stream": stream}
        for path, given in (("/v1/completions", body), ("/v1/chat/completions", chat)):
            answer = post(live.url + path, given)
            if stream:
                events = [line[6:] for line in answer.text.split("\n") if line.startswith("data: ")]
                assert events[-1] == "[DONE]"
                error = json.loads(events[-2])["error"]
            else:
                assert answer.status_code == 503
                error = answer.json()["error"]
            assert error["message"].startswith(NOT_FINITE) and error["code"] == "model_failed"
        live.wait_idle()
        assert metrics(live.url)['uncast_requests_finished_total{reason="error"}'] == 2
        broken = False
        assert post(live.url + "/v1/completions", {**body, "stream": False}).status_code == 200
        live.wait_idle()


def test_a_hostile_template_is_a_400_and_the_server_lives_on(folder: Path, tmp_path: Path) -> None:
    import shutil

    own = tmp_path / "own"
    shutil.copytree(folder, own)
    source = "{% if messages|length > 1 %}{{ 'a' * 3000000000 }}{% endif %}{{ 1 / (messages[0].content | length) }}"
    (own / "chat_template.jinja").write_text(source)
    with live_server(own) as live:
        for contents, sentence in ((["a", "b"], "was stopped"), ([""], "ZeroDivisionError")):
            messages = [{"role": "user", "content": content} for content in contents]
            answer = post(live.url + "/v1/chat/completions", {"model": MODEL, "messages": messages})
            assert answer.status_code == 400 and sentence in answer.json()["error"]["message"]
        messages = [{"role": "user", "content": "a"}]
        body = {"model": MODEL, "messages": messages, "max_tokens": 2}
        assert post(live.url + "/v1/chat/completions", body).status_code == 200
        live.wait_idle()
