"""Answers of tiny-glm to random JSON schemas, each checked with jsonschema.

    PYTHONPATH=. python benchmarks/random_schemas.py --count 500 --json benchmarks/results/random-schemas.json

The first answer to a schema is greedy for one half of them and sampled for the other. One that reaches `--max-tokens` is
incomplete (a small model goes round in circles, and a number or a recursion may be as long as it likes); it is counted, and the
schema is asked again, sampled with another seed and a `logit_bias` that favours closing brackets to opening ones, up to
`--attempts` times in all. Exit code 1 if a complete answer is wrong, if
a schema cannot be compiled, or if one has no complete answer.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import random
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import jsonschema
import torch
from tests.schemas import random_schema

from uncast.bench.environment import device_name, versions
from uncast.checkpoints.bundled import model_folder
from uncast.checkpoints.load import load_model
from uncast.engine.core import Engine, EngineConfig
from uncast.engine.grammar import GrammarCompiler, GrammarError, json_grammar
from uncast.engine.request import Request
from uncast.engine.runner import ModelRunner
from uncast.engine.sampler import SamplingParams
from uncast.engine.tokenizer import Tokenizer

RUNNING = 32
PROMPT = "It was a dark night. "
OPENING, CLOSING = 10.0, 4.0


def fault_of(text: str, schema: dict[str, Any]) -> str | None:
    """Why a complete answer is wrong."""
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{error!s:.200}"
    return None


def closing(tokenizer: Tokenizer, vocab_size: int) -> dict[int, float]:
    """A bias with which a model ends its objects, lists and recursions."""
    texts = {token: tokenizer.decode([token]) for token in range(vocab_size)}
    opening = {token: -OPENING for token, text in texts.items() if set(text) & set("{[")}
    return opening | {token: CLOSING for token, text in texts.items() if text and set(text) <= set("}]")}


def answer(schemas: list[dict[str, Any]], max_tokens: int, attempts: int) -> dict[str, Any]:
    """Asks for every schema until its answer is complete; the counts."""
    folder = model_folder("tiny-glm")
    tokenizer, model = Tokenizer(folder), load_model(folder)
    compiler = GrammarCompiler(tokenizer, model.config.vocab_size, model.config.stop_token_ids)
    engine = Engine(
        ModelRunner(model, num_pages=512), tokenizer, EngineConfig(max_running=RUNNING, max_step_tokens=512)
    )
    bias = closing(tokenizer, model.config.vocab_size)
    prompt, waiting, texts = (
        tokenizer.encode(PROMPT),
        deque((index, 0) for index in range(len(schemas))),
        dict[str, str](),
    )
    counts = {
        "complete": 0,
        "not_valid": 0,
        "refused": 0,
        "incomplete": 0,
        "first_answers_cut": 0,
        "answers_cut": 0,
        "tokens": 0,
    }
    while waiting or engine.has_work:
        while waiting and len(texts) < RUNNING:
            index, attempt = waiting.popleft()
            try:
                grammar = compiler.compile(json_grammar(schemas[index]))
            except GrammarError as error:
                counts["refused"] += 1
                print(f"refused: {json.dumps(schemas[index])}\n  {error}")
                continue
            params = SamplingParams(float(index % 2), seed=index)
            if attempt:
                params = SamplingParams(1.0, seed=len(schemas) * attempt + index, logit_bias=bias)
            name = f"{index}/{attempt}"
            texts[name] = ""
            engine.add(Request(prompt, params, max_tokens, grammar=grammar, request_id=name))
        for output in engine.step():
            texts[output.request_id] += output.text
            if not output.finished:
                continue
            index, attempt = map(int, output.request_id.split("/"))
            text = texts.pop(output.request_id)
            counts["tokens"] += output.completion_tokens
            if output.finish_reason == "stop":
                counts["complete"] += 1
                if fault := fault_of(text, schemas[index]):
                    counts["not_valid"] += 1
                    print(f"not valid: {json.dumps(schemas[index])}\n  {text!r}\n  {fault}")
                continue
            assert output.finish_reason == "length", output
            counts["answers_cut"] += 1
            counts["first_answers_cut"] += attempt == 0
            if attempt + 1 < attempts:
                waiting.append((index, attempt + 1))
            else:
                counts["incomplete"] += 1
                print(f"incomplete after {attempts} answers: {json.dumps(schemas[index])}\n  {text[-100:]!r}")
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--attempts", type=int, default=6)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the counts to FILE")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rng, began = random.Random(args.seed), time.perf_counter()
    counts = answer([random_schema(rng) for _ in range(args.count)], args.max_tokens, args.attempts)
    facts = {
        "schemas": args.count, **counts, "max_tokens": args.max_tokens, "attempts": args.attempts, "seed": args.seed,
        "model": "tiny-glm", "seconds": round(time.perf_counter() - began, 1), "device": device_name(),
        "versions": versions()
        + "".join(f" {name}={importlib.metadata.version(name)}" for name in ("llguidance", "jsonschema")),
    }  # fmt: skip
    print(json.dumps(facts, indent=2))
    if args.json is not None:
        args.json.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    return 1 if counts["not_valid"] or counts["refused"] or counts["incomplete"] else 0


if __name__ == "__main__":
    sys.exit(main())
