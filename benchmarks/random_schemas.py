"""Answers of tiny-glm to random JSON schemas, each checked with jsonschema.

    python benchmarks/random_schemas.py --count 500

Exit code 1 if a complete answer is not valid. Answers that reach the length limit are incomplete and not counted; schemas are
drawn until `--count` answers are complete.
"""

from __future__ import annotations

import argparse
import json
import random
import sys

import jsonschema
import torch
from tests.schemas import random_schema

from uncast.checkpoints.bundled import model_folder
from uncast.checkpoints.load import load_model
from uncast.engine.core import Engine, EngineConfig
from uncast.engine.grammar import GrammarCompiler, json_grammar
from uncast.engine.request import Request
from uncast.engine.runner import ModelRunner
from uncast.engine.sampler import SamplingParams
from uncast.engine.tokenizer import Tokenizer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=300)
    args = parser.parse_args()
    torch.set_num_threads(1)
    folder = model_folder("tiny-glm")
    tokenizer, model = Tokenizer(folder), load_model(folder)
    compiler = GrammarCompiler(tokenizer, model.config.vocab_size, model.config.stop_token_ids)
    engine = Engine(ModelRunner(model, num_pages=256), tokenizer, EngineConfig(max_running=32, max_step_tokens=512))
    rng, drawn, complete, cut, wrong = random.Random(args.seed), 0, 0, 0, 0
    schemas, texts = {}, {}
    prompt = tokenizer.encode("It was a dark night. ")
    while complete < args.count:
        while len(schemas) < 32 and complete + len(schemas) < args.count:
            name, drawn = f"s{drawn}", drawn + 1
            schemas[name], texts[name] = random_schema(rng), ""
            params = SamplingParams(temperature=float(drawn % 2), seed=drawn)
            grammar = compiler.compile(json_grammar(schemas[name]))
            engine.add(Request(prompt, params, args.max_tokens, grammar=grammar, request_id=name))
        for output in engine.step():
            texts[output.request_id] += output.text
            if not output.finished:
                continue
            schema, text = schemas.pop(output.request_id), texts.pop(output.request_id)
            if output.finish_reason != "stop":
                cut += 1
                continue
            complete += 1
            try:
                jsonschema.validate(json.loads(text), schema)
            except (ValueError, jsonschema.ValidationError) as error:
                wrong += 1
                print(f"wrong: {json.dumps(schema)}\n  {text!r}\n  {error!s:.200}")
    print(
        f"{drawn} schemas, {complete} complete answers of which {wrong} are not valid, {cut} cut at {args.max_tokens} tokens"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
