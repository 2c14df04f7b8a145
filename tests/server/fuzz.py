"""Sends bodies that are valid, nearly valid, or rubbish, from several clients at once, some of which leave.

    python -m tests.server.fuzz --url http://127.0.0.1:8000 --bodies 10000 --seed 0

Every answer must be a success or an error in OpenAI's format with a status below 500 (503 too with --draining), within the
time limit. The same seed sends the same bodies. Exit code 0, or 1 and the bodies at fault.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import httpx

PATHS = ("/v1/completions", "/v1/chat/completions")
_PATIENCE_S = 0.05
STRANGE: list[Any] = [
    None, True, False, 0, -1, 1, 2, 0.5, -0.5, 1e-320, 1e308, -1e308, 2**31, 2**53 + 1, 2**63, -(2**63) - 1, 10**40, 10**400,
    "", "0", "a", "\x00", "\u202e", "\ufffe", "é" * 50, "🙂" * 30, "x" * 5000, "NaN", "null", [], [[]], [[[]]], {}, {"a": {}},
    [None], ["", ""], ["a"] * 200, list(range(300)), {"": ""}, {"1": 1}, {"-1": 1}, {"99999999999": 1}, [1, "a", None, {}],
]  # fmt: skip
FIELDS = [
    "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p",
    "repetition_penalty", "ignore_eos", "presence_penalty", "frequency_penalty", "logit_bias", "n", "stop", "seed", "stream",
    "stream_options", "user", "metadata", "store", "logprobs", "top_logprobs", "echo", "response_format", "tools", "best_of",
    "__proto__", "constructor", "a.b", "suffix", "functions",
]  # fmt: skip


@dataclass
class Attempt:
    """One request: `raw` is the body on the wire; `leave_s`: seconds until the client leaves, None to stay."""

    path: str
    raw: bytes
    content_type: str = "application/json"
    leave_s: float | None = None


@dataclass
class Report:
    """What came back.

    Attributes:
        statuses: answers by status; 0 counts clients that left.
        last: by seed, the status that ended the attempt.
        faults: sentences about attempts that broke a rule.
        slowest_s: of one answer.
    """

    statuses: Counter[int] = field(default_factory=Counter)
    last: dict[int, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    slowest_s: float = 0.0


def good_body(rng: random.Random, path: str) -> dict[str, Any]:
    """A valid body of a random subset of fields; some exceed the context."""
    choices: dict[str, Callable[[], Any]] = {
        "temperature": lambda: rng.choice([0, 0.7, 1, 2]),
        "top_p": lambda: rng.choice([1e-9, 0.5, 1]),
        "top_k": lambda: rng.choice([-1, 0, 1, 5, 10**6]),
        "min_p": lambda: rng.choice([0, 0.1, 1]),
        "repetition_penalty": lambda: rng.choice([0.01, 1, 1.1, 10]),
        "presence_penalty": lambda: rng.choice([-2, 0, 2]),
        "frequency_penalty": lambda: rng.choice([-2, 0, 2]),
        "logit_bias": lambda: {
            str(rng.randint(0, 281)): rng.choice([-100, 0.5, 100]) for _ in range(rng.randint(0, 5))
        },
        "n": lambda: rng.choice([1, 1, 1, 2, 3]),
        "stop": lambda: rng.choice(["a", ["a", "the"], [], "\n", "🙂"]),
        "seed": lambda: rng.choice([0, 7, -1, 2**63 - 1, -(2**63)]),
        "stream": lambda: rng.random() < 0.5,
        "user": lambda: "u",
        "ignore_eos": lambda: rng.random() < 0.5,
        "logprobs": lambda: rng.randint(0, 5) if path == PATHS[0] else True,
    }
    body: dict[str, Any] = {name: choices[name]() for name in rng.sample(sorted(choices), rng.randint(0, 6))}
    if rng.random() < 0.9:
        body["max_tokens"] = rng.randint(1, 12)
    words = " ".join(rng.choice(["the", "latent", "cache", "é", "🙂", "\x00", "is"]) for _ in range(rng.randint(1, 20)))
    if path == PATHS[0]:
        ids = [rng.randint(0, 281) for _ in range(rng.randint(1, 60))]
        body["prompt"] = rng.choice([words, [words, "a"], ids, [ids[:5], ids[-5:]]])
        if "logprobs" not in body:
            body["echo"] = rng.random() < 0.3
    else:
        roles = ["user", "assistant", "system", "developer"]
        body["messages"] = [
            {"role": rng.choice(roles), "content": words[: rng.randint(1, 30)]} for _ in range(rng.randint(1, 3))
        ]
    if body.get("stream") and rng.random() < 0.5:
        body["stream_options"] = {"include_usage": True}
    return body


def spoil(rng: random.Random, body: Any, depth: int = 0) -> Any:
    """The body with one value, somewhere in it, replaced, added or taken away."""
    if isinstance(body, dict) and body and (depth == 0 or rng.random() < 0.6):
        body = dict(body)
        name = rng.choice([*body, *FIELDS]) if depth == 0 else rng.choice([*body, "x"])
        if rng.random() < 0.1:
            body.pop(name, None)
        elif name in body and rng.random() < 0.5:
            body[name] = spoil(rng, body[name], depth + 1)
        else:
            body[name] = rng.choice(STRANGE)
        return body
    if isinstance(body, list) and body and rng.random() < 0.7:
        position = rng.randrange(len(body))
        return [*body[:position], spoil(rng, body[position], depth + 1), *body[position + 1 :]]
    return rng.choice(STRANGE)


def damage(rng: random.Random, raw: bytes) -> bytes:
    """Bytes that are hardly JSON any more."""
    position = rng.randrange(len(raw) + 1)
    kind = rng.randrange(9)
    if kind == 0:
        return raw[:position]
    if kind == 1:
        return raw[:position] + bytes(rng.randrange(256) for _ in range(rng.randint(1, 8))) + raw[position:]
    if kind == 2:
        return raw.replace(b":", rng.choice([b": NaN,", b": Infinity,", b":1e999,", b":-", b"::"]), 1)
    if kind == 3:
        return raw.replace(b'"', b'"\\ud800', rng.randint(1, 3))
    if kind == 4:
        return rng.choice([b"[", b'{"a":', b"[[],"]) * rng.choice([10, 150, 300, 20_000])
    if kind == 5:
        return bytes(rng.randrange(256) for _ in range(rng.randint(0, 200)))
    if kind == 6:
        return raw.decode().encode(rng.choice(["utf-16", "utf-32", "utf-8-sig"]))
    if kind == 7:
        return b'{"prompt": ' + b"9" * rng.choice([20, 400, 5000, 50_000]) + b"}"
    return b'{"prompt": "' + b"a " * rng.choice([1000, 100_000]) + b'"}'


def attempt(seed: int) -> Attempt:
    """The attempt of a seed: 4 in 10 valid, 4 spoiled, 2 damaged; 1 in 10 clients leaves."""
    rng = random.Random(seed)
    path = rng.choice(PATHS)
    body: Any = good_body(rng, path)
    kind = rng.random()
    for _ in range(rng.randint(1, 3) if 0.4 <= kind < 0.8 else 0):
        body = spoil(rng, body)
    raw = json.dumps(body, ensure_ascii=rng.random() < 0.5).encode()
    if kind >= 0.8:
        raw = damage(rng, raw)
    content_type = (
        "application/json" if rng.random() < 0.97 else rng.choice(["text/plain", "", "application/json; charset=x"])
    )
    return Attempt(path, raw, content_type, rng.uniform(0, 0.05) if rng.random() < 0.1 else None)


async def run(
    url: str,
    seeds: Iterable[int],
    *,
    clients: int = 8,
    limit_s: float = 60,
    draining: bool = False,
    everyone_leaves: bool = False,
    patient: bool = False,
    report: Report | None = None,
) -> Report:
    """Sends the attempts of all seeds and checks the answers.

    Args:
        limit_s: for one answer.
        draining: 503 is an answer, too.
        everyone_leaves: within 50 ms, instead of one client in ten.
        patient: an attempt that gets 429 is sent again until it does not.
        report: filled as answers come; a new one unless given.
    """
    report, left = Report() if report is None else report, iter(seeds)
    limits = httpx.Limits(max_connections=clients)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=limit_s, verify=False) as client:

        async def worker() -> None:
            for seed in left:
                what = attempt(seed)
                if everyone_leaves and what.leave_s is None:
                    what.leave_s = 0.0005 * (seed % 100)
                began = time.monotonic()
                status, fault = await _send(client, what, draining)
                while status == 429 and patient and fault is None:
                    report.statuses[status] += 1
                    await asyncio.sleep(_PATIENCE_S)
                    began = time.monotonic()
                    status, fault = await _send(client, what, draining)
                if status is not None:
                    report.statuses[status] += 1
                    report.last[seed] = status
                report.slowest_s = max(report.slowest_s, time.monotonic() - began)
                if fault:
                    report.faults.append(f"seed {seed}: {fault}")

        await asyncio.gather(*(worker() for _ in range(clients)))
    return report


async def _send(client: httpx.AsyncClient, what: Attempt, draining: bool) -> tuple[int | None, str | None]:
    """The answer's status, 0 if the client left, None without an answer; and what is wrong with it."""
    headers = {"Content-Type": what.content_type} if what.content_type else {}
    request = client.post(what.path, content=what.raw, headers=headers)
    try:
        response = await (request if what.leave_s is None else asyncio.wait_for(request, what.leave_s))
    except TimeoutError:
        return 0, None
    except httpx.TimeoutException:
        return None, f"no answer in time to {what.raw[:200]!r}"
    except httpx.HTTPError as error:
        return None, f"{type(error).__name__}: {error} to {what.raw[:200]!r}"
    return response.status_code, check(response, draining)


def check(response: httpx.Response, draining: bool) -> str | None:
    """What is wrong with an answer, None if nothing."""
    if response.status_code >= 500 and not (draining and response.status_code == 503):
        return f"status {response.status_code}: {response.text[:300]}"
    if "Traceback" in response.text:
        return f"a traceback: {response.text[:300]}"
    if response.headers.get("content-type") == "text/event-stream; charset=utf-8":
        events = [line for line in response.text.split("\n\n") if line]
        if events[-1] != "data: [DONE]":
            return f"a stream without an end: {events[-1][:300]}"
        answers = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
        return (
            None if all("choices" in answer for answer in answers) else f"an error in a stream: {response.text[-300:]}"
        )
    answer = response.json()
    if response.status_code == 200:
        return None if answer["choices"] else f"no choices: {response.text[:300]}"
    error = answer["error"]
    if set(error) != {"message", "type", "param", "code"} or not error["message"] or "\n" in error["message"]:
        return f"not an error in OpenAI's format: {response.text[:300]}"
    return None


def main() -> int:
    """Runs the command; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--bodies", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="the first body's seed")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--draining", action="store_true", help="503 is an answer, too")
    args = parser.parse_args()
    began = time.monotonic()
    seeds = range(args.seed, args.seed + args.bodies)
    report = asyncio.run(run(args.url, seeds, clients=args.clients, draining=args.draining))
    counts = ", ".join(f"{status or 'left'}: {count}" for status, count in sorted(report.statuses.items()))
    print(f"{args.bodies} bodies in {time.monotonic() - began:.0f} s, slowest {report.slowest_s:.2f} s; {counts}")
    for fault in report.faults[:50]:
        print(fault)
    print(f"{len(report.faults)} faults")
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
