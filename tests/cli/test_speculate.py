"""`--speculate`: the same text, what came of the drafts, and refusals in a sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tiny_model import build_model_folder
from uncast.checkpoints.bundled import BUNDLED
from uncast.cli.main import main
from uncast.cli.speculate import speculate_of
from uncast.engine.speculation import SpeculationError


def generate(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, object]:
    common = ("generate", "It was a dark night", "--max-tokens", "40", "--temperature", "0.8", "--seed", "4", "--json")
    assert main([*common, *options]) == 0
    facts: dict[str, object] = json.loads(capsys.readouterr().out)
    return facts


def test_the_text_is_the_same_and_the_summary_says_what_came_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    plain, drafted, auto = (
        generate(capsys, "--speculate", how, "--kv-cache-dtype", "fp32") for how in ("off", "2", "auto")
    )
    assert plain["text"] == drafted["text"] == auto["text"]
    assert plain["speculation"] == "off" and plain["drafted_tokens"] == 0
    assert drafted["speculation"] == "2 drafts" and str(auto["speculation"]).startswith("auto")
    count, accepted = drafted["drafted_tokens"], drafted["accepted_draft_tokens"]
    assert isinstance(count, int) and isinstance(accepted, int) and 0 < accepted < count
    assert main(["generate", "The whale", "--max-tokens", "20", "--temperature", "0", "--speculate", "1"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("speculation"))
    assert "1 drafts" in line and "accepted (" in line


@pytest.mark.parametrize(
    ("family", "words"),
    [("glm4_moe_lite", "has no MTP layer to draft with"), ("glm_moe_dsa", "has sparse attention, whose MTP layer")],
)
def test_a_model_that_cannot_draft(family: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = build_model_folder(tmp_path / "model", family)
    capsys.readouterr()
    command = ["generate", "the latent", "--model", str(folder), "--max-tokens", "4"]
    assert main([*command, "--speculate", "2"]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1 and words in error[0] and "use --speculate off" in error[0]
    assert main([*command, "--speculate", "auto"]) == 0
    assert words in capsys.readouterr().out, "auto is off, and the summary says why"


def test_several_processes_do_not_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SpeculationError, match="speculation needs one process"):
        speculate_of("1", BUNDLED["tiny-glm"])
    auto = speculate_of("auto", BUNDLED["tiny-glm"])
    assert auto.count == 0 and auto.reason is not None and "one process" in auto.reason


@pytest.mark.parametrize("text", ["9", "many", "-1"])
def test_a_number_that_cannot_be(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "x", f"--speculate={text}"]) == 2
    assert "allowed are auto, off and 0 to 8 drafts" in capsys.readouterr().err
