"""Grammars: what comes out follows them, whatever happens to a request; what cannot be compiled is one sentence."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import pytest
import torch

from tests.engine.workload import make_engine, random_requests, run_all, tokens_of
from tests.schemas import random_schema
from tests.tiny_model import build_model_folder
from uncast.checkpoints.load import load_model
from uncast.engine import grammar as grammars
from uncast.engine.grammar import Grammar, GrammarCompiler, GrammarError, GrammarSource, Marks
from uncast.engine.request import Request, RequestOutput
from uncast.engine.sampler import SamplingParams
from uncast.engine.tokenizer import Tokenizer
from uncast.models.decoder import MLADecoder

pytest.importorskip("llguidance")
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> MLADecoder:
    """Its end token is "!": that of the other tests has the quotation mark as its text."""
    return load_model(build_model_folder(tmp_path_factory.mktemp("grammar"), eos_token_id=0))


@pytest.fixture(scope="module")
def compiler(model: MLADecoder, tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, model.config.vocab_size, model.config.stop_token_ids)


def request(grammar: Grammar | None, index: int = 0, temperature: float = 1.0, **options: Any) -> Request:
    params = SamplingParams(temperature, seed=index, **options.pop("params", {}))
    return Request(
        [1 + index, 2, 3], params, options.pop("max_tokens", 300), grammar=grammar, request_id=f"g{index}", **options
    )


def text_of(outputs: list[RequestOutput]) -> str:
    return "".join(output.text for output in outputs)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("source", "pattern"),
    [
        (grammars.regex_grammar(r"\d{3}-[a-f]{2,5}/x"), r"[0-9]{3}-[a-f]{2,5}/x"),
        (grammars.choice_grammar(["yes", "no", 'a "quoted"\nline', "🙂"]), r'yes|no|a "quoted"\nline|🙂'),
        (
            grammars.lark_grammar('start: "<" word ("," word){2} ">"\nword: /[a-z]{1,4}/'),
            r"<[a-z]{1,4}(,[a-z]{1,4}){2}>",
        ),
    ],
)
def test_texts_follow_their_grammar(
    model: MLADecoder, tokenizer: Tokenizer, compiler: GrammarCompiler, source: GrammarSource, pattern: str,
    temperature: float,
) -> None:  # fmt: skip
    engine = make_engine(model, tokenizer, pages=300)
    wanted = [request(compiler.compile(source), index, temperature) for index in range(4)]
    for outputs in run_all(engine, wanted).values():
        assert outputs[-1].finish_reason == "stop" and re.fullmatch(pattern, text_of(outputs)), outputs


def test_random_schemas_are_followed(model: MLADecoder, tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    """Batches of 8; an answer that was cut by its length is not JSON, every other is valid."""
    engine, rng, complete = make_engine(model, tokenizer, pages=400), random.Random(0), 0
    for batch in range(3):
        schemas = [random_schema(rng) for _ in range(8)]
        wanted = [request(compiler.compile(grammars.json_grammar(s)), 8 * batch + i) for i, s in enumerate(schemas)]
        outputs = run_all(engine, wanted)
        for schema, one in zip(schemas, wanted, strict=True):
            got = outputs[one.request_id]
            assert got[-1].finish_reason in ("stop", "length")
            if got[-1].finish_reason == "stop":
                complete += 1
                jsonschema.validate(json.loads(text_of(got)), schema)
    assert complete >= 18


def test_one_of_where_the_alternatives_exclude_each_other(
    model: MLADecoder, tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    """By their types, or by what one property must be; with `discriminator`, as pydantic's unions have it, by reference, too.
    Each answer fits exactly one."""

    def kind(name: str, value: dict[str, Any]) -> dict[str, Any]:
        fields = {"kind": {"const": name}, "value": value}
        return {"type": "object", "properties": fields, "required": ["kind", "value"], "additionalProperties": False}

    named = {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "discriminator": {"propertyName": "kind"}}
    schema = {
        "oneOf": [
            {"type": "array", "items": named, "minItems": 1, "maxItems": 1},
            kind("c", {"type": "null"}),
            {"type": "null"},
        ],
        "$defs": {"a": kind("a", {"type": "integer", "minimum": 0, "maximum": 9}), "b": kind("b", {"type": "boolean"})},
    }
    grammar = compiler.compile(grammars.json_grammar(schema))
    outputs = run_all(make_engine(model, tokenizer, pages=300), [request(grammar, index) for index in range(12)])
    answers = [json.loads(text_of(got)) for got in outputs.values() if got[-1].finish_reason == "stop"]
    for answer in answers:
        jsonschema.validate(answer, schema)
    assert len(answers) >= 10 and {type(answer) for answer in answers} >= {list, dict}


def test_preemption_prefixes_and_neighbours_change_no_text(
    model: MLADecoder, tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    """Requests with and without a grammar in a pool that is too small for them, each as alone; deterministic mode."""
    grammar = compiler.compile(grammars.json_grammar(PERSON))
    wanted = [request(grammar, index, float(index % 2), max_tokens=60) for index in range(6)]
    others = random_requests(random.Random(5), 6, longest=20)
    engine = make_engine(model, tokenizer, pages=11, deterministic=True)
    outputs = run_all(engine, [one for pair in zip(wanted, others, strict=True) for one in pair], rng=random.Random(1))
    assert engine.stats().preemptions_total > 0
    for one in wanted:
        alone = run_all(make_engine(model, tokenizer, pages=40, deterministic=True), [one])[one.request_id]
        assert tokens_of(outputs[one.request_id]) == tokens_of(alone)


def test_stop_strings_lengths_and_logprobs(model: MLADecoder, tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(grammars.json_grammar(PERSON))
    engine = make_engine(model, tokenizer, pages=100)
    outputs = run_all(
        engine,
        [
            request(grammar, 0, stop=['"age"']),
            request(grammar, 1, max_tokens=5),
            request(grammar, 2, params={"logprobs": 2}),
        ],
    )
    assert outputs["g0"][-1].matched_stop == '"age"' and "age" not in text_of(outputs["g0"])
    assert outputs["g1"][-1].finish_reason == "length"
    entries = [entry for output in outputs["g2"] for entry in output.logprobs]
    assert len(entries) == outputs["g2"][-1].completion_tokens
    # Of the model's own distribution: a token that the grammar rules out may be the likeliest.
    assert any(entry.top[0][0] != entry.token_id for entry in entries)


def test_a_bias_against_everything_that_fits_still_follows_the_grammar(
    model: MLADecoder, tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    bias = dict.fromkeys(range(200), -100.0)
    grammar = compiler.compile(grammars.choice_grammar(["yes"]))
    (outputs,) = run_all(
        make_engine(model, tokenizer, pages=40), [request(grammar, 0, 0.0, params={"logit_bias": bias})]
    ).values()
    assert text_of(outputs) == "yes"


def test_an_answer_after_its_reasoning(model: MLADecoder, tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    source = grammars.after(grammars.choice_grammar(["yes"]), "the", Marks(tokenizer))
    grammar = compiler.compile(source)
    state = grammar.begin()
    for token in tokenizer.encode("so th the\nyes"):
        state.apply(torch.zeros(model.config.vocab_size))
        assert not state.complete
        state.accept(token)
    assert state.complete


def test_end_tokens_are_allowed_only_where_the_grammar_can_end(model: MLADecoder, compiler: GrammarCompiler) -> None:
    end = min(model.config.stop_token_ids)
    state = compiler.compile(grammars.regex_grammar("a+")).begin()
    logits = torch.zeros(model.config.vocab_size)
    assert state.apply(logits)[end] == -torch.inf
    state.accept(int(state.apply(logits).argmax()))
    assert state.apply(logits)[end] == 0 and not state.complete


DEEP: dict[str, Any] = {}
for _ in range(100_000):
    DEEP = {"items": DEEP}


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (grammars.json_grammar({"type": "strin"}), "strin"),
        (grammars.json_grammar({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (grammars.json_grammar({"oneOf": [{"type": "number"}, {"type": "integer"}]}), "use anyOf"),
        (
            grammars.json_grammar({"items": {"oneOf": [{"enum": [1]}, {"enum": [2]}]}}),
            "by a property that each requires",
        ),
        (
            grammars.json_grammar(
                {"oneOf": [{"$ref": "#/$defs/a"}, {"type": "null"}], "$defs": {"a": {"type": "string"}}}
            ),
            "named as discriminator",
        ),
        (grammars.json_grammar({"$ref": "http://example.com/schema"}), "example.com"),
        (grammars.json_grammar({"$ref": "#/nowhere"}), "nowhere"),
        (grammars.json_grammar({"type": "object", "properties": {"a": False}, "required": ["a"]}), "nsatisfiable"),
        (grammars.json_grammar(DEEP), "deep"),
        (grammars.json_grammar({"properties": {f"k{i}": {} for i in range(30_000)}}), "characters"),
        (
            grammars.lark_grammar("start: r0\n" + "".join(f"r{i}:r{i + 1}\n" for i in range(9000)) + 'r9000:"a"'),
            "complex",
        ),
        (grammars.regex_grammar("(?=a)b"), "regex"),
        (grammars.regex_grammar("(a"), "regex"),
        (grammars.lark_grammar("start: nothing"), "nothing"),
        (grammars.lark_grammar("no start"), "."),
        (grammars.lark_grammar("start: " + "(" * 50_000), "nested"),
        (grammars.regex_grammar("["), "unclosed character class"),
    ],
)
def test_what_cannot_be_compiled_is_one_sentence(compiler: GrammarCompiler, source: GrammarSource, words: str) -> None:
    with pytest.raises(GrammarError, match=words) as caught:
        compiler.compile(source)
    assert "\n" not in str(caught.value) and len(str(caught.value)) <= 310


def test_a_grammar_that_becomes_too_complex_ends_its_request_and_no_other(
    model: MLADecoder, tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    """After the first letter the parser would have to follow more rules at once than it may."""
    many = " | ".join(f'"y" "{index}"' for index in range(3000))
    bad = compiler.compile(grammars.lark_grammar(f'start: "x" many\nmany: {many}'))
    outputs = run_all(make_engine(model, tokenizer, pages=200), [request(bad, 0), request(None, 1, max_tokens=20)])
    assert outputs["g0"][-1].finish_reason == "error" and outputs["g0"][-1].grammar_failed
    assert "grammar" in (outputs["g0"][-1].error or "") and outputs["g1"][-1].finish_reason == "length"


def test_compiled_grammars_are_remembered(compiler: GrammarCompiler) -> None:
    assert compiler.compile(grammars.json_grammar(PERSON)) is compiler.compile(grammars.json_grammar(dict(PERSON)))


def test_a_model_without_an_end_token_has_no_grammars(tokenizer: Tokenizer) -> None:
    with pytest.raises(GrammarError, match="no end token"):
        GrammarCompiler(tokenizer, 512, ()).compile(grammars.json_grammar({}))


def test_without_the_extra_the_sentence_says_what_to_install(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(GrammarError, match=r"pip install 'uncast\[grammar\]'"):
        compiler.compile(grammars.json_grammar({}))
