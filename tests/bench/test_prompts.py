"""Prompt files: forms, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.rescaled import SOURCE

from uncast.bench.prompts import read_prompts
from uncast.engine.tokenizer import TemplateError, Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(SOURCE)


def test_lines_of_text(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "p.txt"
    path.write_bytes(b'First.\r\n\n  \n"second" {"a": 1}\n')
    assert read_prompts(path, tokenizer) == [tokenizer.encode("First."), tokenizer.encode('"second" {"a": 1}')]


def test_json_lines(tmp_path: Path, tokenizer: Tokenizer) -> None:
    question, answer = {"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I."}
    rows = ["one", {"prompt": "two"}, {"text": "three"}, {"messages": [question]}, {"messages": [question, answer]}]
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    assert read_prompts(path, tokenizer) == [
        tokenizer.encode("one"),
        tokenizer.encode("two"),
        tokenizer.encode("three"),
        tokenizer.chat([question]),
        tokenizer.chat([question, answer], add_generation_prompt=False),
    ]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "holds no prompt"),
        ('"a"\n{', "line 2 is not JSON"),
        ("7", "line 1: a string or an object"),
        ('{"messages": []}', "line 1: a string or an object"),
        ('{"messages": [{"role": 1}]}', "line 1: a string or an object"),
        ('{"prompt": null}', "line 1: a string or an object"),
    ],
)
def test_other_content_is_refused(tmp_path: Path, tokenizer: Tokenizer, content: str, sentence: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=sentence):
        read_prompts(path, tokenizer)


def test_unreadable_files_are_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="cannot read"):
        read_prompts(tmp_path / "none.txt", tokenizer)
    (tmp_path / "latin.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="is not UTF-8"):
        read_prompts(tmp_path / "latin.txt", tokenizer)
    (tmp_path / "role.jsonl").write_text('{"messages": [{"content": "x"}]}')
    with pytest.raises(TemplateError):
        read_prompts(tmp_path / "role.jsonl", tokenizer)
