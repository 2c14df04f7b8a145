"""`uncast generate --json-schema` and `--grammar`: the text follows them, and what cannot be is one sentence."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

pytest.importorskip("llguidance")
from tests.tiny_model import build_model_folder
from uncast.cli.main import main

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
THINKING = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}<think>{% endif %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its chat template begins every answer with reasoning, which ends with </think>."""
    folder = build_model_folder(
        tmp_path_factory.mktemp("tiny"), eos_token_id=0, vocab_size=282, max_position_embeddings=1024
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": THINKING + "{# </think> #}"}))
    return folder


@pytest.fixture
def schema(tmp_path: Path) -> str:
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(SCHEMA))
    return str(path)


def generate(folder: Path, *options: str) -> int:
    sampled = ["--temperature", "1", "--max-tokens", "300"]
    return main(["generate", "the latent", "--model", str(folder), *sampled, *options])


def test_a_schema_is_followed(folder: Path, schema: str, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in ("1", "2"):
        assert generate(folder, "--json-schema", schema, "--json", "--seed", seed) == 0
        facts = json.loads(capsys.readouterr().out)
        assert facts["finish_reason"] == "stop"
        jsonschema.validate(json.loads(facts["text"]), SCHEMA)


def test_a_lark_grammar_is_followed(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "g.lark"
    path.write_text('start: "<" word ("," word){2} ">"\nword: /[a-z]{1,4}/\n')
    assert generate(folder, "--grammar", str(path)) == 0
    captured = capsys.readouterr()
    assert re.match(r"<[a-z]{1,4}(,[a-z]{1,4}){2}>\n", captured.out) and captured.err == ""


def test_what_is_cut_is_said_to_be_incomplete(folder: Path, schema: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(folder, "--json-schema", schema, "--json", "--max-tokens", "3") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["finish_reason"] == "length"
    assert captured.err == "uncast: note: the text was cut at --max-tokens: it is not complete by its grammar\n"


def test_in_a_chat_it_holds_after_the_reasoning(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model does not reason: a schema of one text, and no end of the reasoning within three tokens."""
    path = tmp_path / "one.json"
    path.write_text('{"const": 7}')
    assert generate(folder, "--json-schema", str(path), "--json") == 0
    assert json.loads(capsys.readouterr().out)["text"].strip() == "7"
    assert generate(folder, "--json-schema", str(path), "--json", "--chat", "--max-tokens", "3") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["finish_reason"] == "length" and facts["tokens"] == 3, "anything may come before </think>"


@pytest.mark.parametrize(
    ("option", "content", "sentence"),
    [
        ("--json-schema", '{"type": "array", "uniqueItems": true}', "cannot be compiled: Unimplemented keys"),
        ("--json-schema", '{"oneOf": [{"enum": [1]}, {"enum": [2]}]}', "use anyOf"),
        ("--json-schema", "{", "is not JSON"),
        ("--json-schema", "[]", "holds JSON of type list, not an object"),
        ("--json-schema", None, "cannot read"),
        ("--grammar", "start: nothing", "cannot be compiled"),
        ("--grammar", None, "cannot read"),
    ],
)
def test_what_cannot_be_compiled_is_one_sentence(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, content: str | None, sentence: str
) -> None:
    path = tmp_path / "given"
    if content is not None:
        path.write_text(content)
    assert generate(folder, option, str(path)) == 2
    err = capsys.readouterr().err
    assert sentence in err and str(path) in err and err.startswith("uncast: ") and err.count("\n") == 1


def test_without_the_extra_and_with_both_options(
    folder: Path, schema: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match="2"):
        generate(folder, "--json-schema", schema, "--grammar", schema)
    assert "not allowed with" in capsys.readouterr().err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert generate(folder, "--json-schema", schema) == 1
    assert capsys.readouterr().err == ("uncast: structured output needs llguidance: pip install 'uncast[grammar]'\n")
