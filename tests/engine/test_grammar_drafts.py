"""Grammar and drafts together: a draft that the grammar rules out is not taken, and no text changes."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import pytest

pytest.importorskip("llguidance")
from tests.engine.workload import make_engine, run_all, tokens_of
from tests.schemas import random_schema
from uncast.engine import grammar as grammars
from uncast.engine.grammar import GrammarCompiler, GrammarSource
from uncast.engine.request import Request, RequestOutput
from uncast.engine.sampler import SamplingParams
from uncast.engine.stats import EngineStats
from uncast.engine.tokenizer import Tokenizer
from uncast.models.decoder import MLADecoder

PATTERN = r"(the|and|of|a|in|to| |,){8,14}\."
LETTER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "to": {"type": "string", "minLength": 3, "maxLength": 12},
        "text": {"type": "string", "minLength": 12, "maxLength": 30},
        "pages": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["to", "text", "pages"],
    "additionalProperties": False,
}


def requests_of(
    glm: MLADecoder, words: Tokenizer, sources: list[GrammarSource | None], max_tokens: int
) -> list[Request]:
    """Half greedy, half sampled with a seed."""
    compiler = GrammarCompiler(words, glm.config.vocab_size, glm.config.stop_token_ids)
    return [
        Request(
            words.encode("The captain wrote a letter to his mother, and it said: "),
            SamplingParams(float(index % 2), seed=index),
            max_tokens,
            grammar=None if source is None else compiler.compile(source),
            request_id=f"g{index}",
        )
        for index, source in enumerate(sources)
    ]


def answers(
    glm: MLADecoder, words: Tokenizer, requests: list[Request], drafts: int
) -> tuple[dict[str, list[RequestOutput]], EngineStats]:
    """Deterministic mode: otherwise rounding may choose other tokens in another batch."""
    engine = make_engine(glm, words, pages=200, deterministic=True, speculate=drafts)
    return run_all(engine, requests), engine.stats()


def seen(outputs: list[RequestOutput]) -> tuple[list[int], str, str | None]:
    return tokens_of(outputs), "".join(output.text for output in outputs), outputs[-1].finish_reason


def test_texts_are_valid_and_those_without_drafts(glm: MLADecoder, words: Tokenizer) -> None:
    """A schema and an expression, greedy and sampled, beside plain text; drafts are accepted, and some are refused."""
    letter, pattern = grammars.json_grammar(LETTER), grammars.regex_grammar(PATTERN)
    requests = requests_of(glm, words, [letter, letter, pattern, pattern, None], 90)
    (with_drafts, stats), (without, none) = answers(glm, words, requests, 3), answers(glm, words, requests, 0)
    assert none.draft_tokens_total == 0 < stats.draft_tokens_accepted_total < stats.draft_tokens_total
    for request in requests:
        assert seen(with_drafts[request.request_id]) == seen(without[request.request_id])
    texts = [seen(with_drafts[request.request_id]) for request in requests]
    for _, text, reason in texts[:2]:
        assert reason == "stop"
        jsonschema.validate(json.loads(text), LETTER)
    for _, text, reason in texts[2:4]:
        assert reason == "stop" and re.fullmatch(PATTERN, text), text


def test_random_schemas(glm: MLADecoder, words: Tokenizer) -> None:
    rng = random.Random(11)
    schemas = [random_schema(rng) for _ in range(8)]
    requests = requests_of(glm, words, [grammars.json_grammar(schema) for schema in schemas], 60)
    (with_drafts, stats), (without, _) = answers(glm, words, requests, 1), answers(glm, words, requests, 0)
    assert stats.draft_tokens_accepted_total > 0
    complete = 0
    for request, schema in zip(requests, schemas, strict=True):
        got = seen(with_drafts[request.request_id])
        assert got == seen(without[request.request_id])
        if got[2] == "stop":
            complete += 1
            jsonschema.validate(json.loads(got[1]), schema)
    assert complete >= 3, "the others reached the length limit"
