"""Load: many streams, clients that leave, a pool small enough for preemption; every completed text must be its solo text.

    OMP_NUM_THREADS=1 python benchmarks/load_test.py --minutes 10 --over http --out benchmarks/results/load-tiny-glm.json
    python benchmarks/load_test.py --minutes 2 --mode default --out load-tiny-glm-h200-default.json

Clients draw from a fixed set of requests (prompts that share beginnings, greedy and seeded). Afterwards each request that was
completed runs alone, with the prefix cache off, and its text is compared with every text that clients received for it.
`--over engine` drives `AsyncEngine` in this process; `--over http` starts `uncast serve` and ends it with SIGTERM under load.
A GPU is used where there is one, as `uncast serve` does. `--mode default` is the mode that users run: there rounding depends on
the batch, so that texts that differ are counted, and decide nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from load_targets import EngineTarget, HttpTarget, Left, Parts, Target, load_parts

from uncast.bench.environment import device_name, versions
from uncast.engine.core import Engine, EngineConfig
from uncast.engine.request import Request
from uncast.engine.runner import ModelRunner
from uncast.engine.sampler import SamplingParams

MODES = ("deterministic", "default")
WARM_UP_SHARE = 0.25
"""Memory is compared between the second quarter of the run and its last one."""


@dataclass
class Record:
    """What the clients saw.

    Attributes:
        texts: request number -> texts of completed answers and how often each came.
        first_s, between_s: seconds to the first output, and between outputs.
        rss: (seconds since the start, bytes) of the serving process.
        peak_running, peak_swapped, peak_waiting: largest numbers seen.
    """

    texts: defaultdict[int, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    completed: int = 0
    left: int = 0
    refused: int = 0
    first_s: list[float] = field(default_factory=list)
    between_s: list[float] = field(default_factory=list)
    rss: list[tuple[float, int]] = field(default_factory=list)
    peak_running: int = 0
    peak_swapped: int = 0
    peak_waiting: int = 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0, help="how long clients start requests (default: 1)")
    parser.add_argument("--over", choices=("engine", "http"), default="http", help="default: http")
    parser.add_argument("--model", default="tiny-glm", help="a folder or a bundled name (default: tiny-glm)")
    parser.add_argument("--mode", choices=MODES, default=MODES[0], help="of the engine (default: deterministic)")
    parser.add_argument("--streams", type=int, default=64, help="concurrent clients (default: 64)")
    parser.add_argument("--leave", type=float, default=0.2, help="share of clients that disconnect (default: 0.2)")
    parser.add_argument("--pool-tokens", type=int, default=2048, help="rows of the KV pool (default: 2048)")
    parser.add_argument("--page-size", type=int, default=16, help="rows per page (default: 16)")
    parser.add_argument("--distinct", type=int, default=96, help="different requests (default: 96)")
    parser.add_argument("--seed", type=int, default=0, help="of the requests and the clients (default: 0)")
    parser.add_argument("--note", default="", help="kept in the record, e.g. what else the machine was doing")
    parser.add_argument("--out", type=Path, help="write the record to this JSON file")
    return parser


def make_requests(ids: list[int], count: int, seed: int) -> list[Request]:
    """Prompts of 8 to 120 tokens cut from a text, in families that begin alike; 8 to 64 new tokens."""
    rng = random.Random(seed)
    stems = [rng.randrange(len(ids) - 200) for _ in range(max(1, count // 6))]
    requests = []
    for index in range(count):
        start, length = rng.choice(stems), rng.randint(8, 120)
        prompt = ids[start : start + length]
        prompt[-1] = rng.choice(ids)
        greedy = rng.random() < 0.5
        params = SamplingParams(
            temperature=0.0 if greedy else 0.8, top_p=1.0 if greedy else 0.95, seed=index,
            frequency_penalty=rng.choice([0.0, 0.0, 0.3]),
        )  # fmt: skip
        requests.append(Request(prompt, params, rng.randint(8, 64), ignore_eos=True))
    return requests


async def client(
    target: Target, requests: list[Request], record: Record, rng: random.Random, leave: float, end: float
) -> None:
    """One user: request after request until `end`; some are left in the middle or before the first token."""
    while time.monotonic() < end:
        number = rng.randrange(len(requests))
        leave_after = rng.randint(0, 20) if rng.random() < leave else None
        text, last, began = "", 0.0, time.monotonic()
        try:
            async for piece in target.stream(requests[number], leave_after):
                now = time.monotonic()
                (record.between_s if last else record.first_s).append(now - (last or began))
                text, last = text + piece, now
        except Left:
            record.left += 1
        except target.full as error:
            record.refused += 1
            await asyncio.sleep(min(1.0, getattr(error, "retry_after_s", 1)))
        else:
            record.completed += 1
            record.texts[number][text] += 1


async def watch(target: Target, record: Record) -> None:
    """Samples memory and queue lengths twice a second."""
    began = time.monotonic()
    while True:
        await asyncio.sleep(0.5)
        record.rss.append((time.monotonic() - began, target.rss()))
        stats = await target.stats()
        record.peak_running = max(record.peak_running, int(stats["running"]))
        record.peak_swapped = max(record.peak_swapped, int(stats["swapped"]))
        record.peak_waiting = max(record.peak_waiting, int(stats["waiting"]))


async def drive(target: Target, requests: list[Request], record: Record, args: argparse.Namespace) -> dict[str, float]:
    """Runs the clients and waits until the engine is idle; returns its final counters."""
    end = time.monotonic() + args.minutes * 60
    watcher = asyncio.create_task(watch(target, record))
    clients = (
        client(target, requests, record, random.Random(f"{args.seed}-{k}"), args.leave, end)
        for k in range(args.streams)
    )
    try:
        await asyncio.gather(*clients)
    finally:
        watcher.cancel()
    stats = await target.stats()
    for _ in range(200):
        if stats["running"] == stats["waiting"] == stats["swapped"] == 0:
            break
        await asyncio.sleep(0.05)
        stats = await target.stats()
    return stats


def solo_texts(parts: Parts, requests: list[Request], numbers: list[int], args: argparse.Namespace) -> dict[int, str]:
    """Each request on an engine of its own kind: one place, no prefix cache, room for everything."""
    pages = 32 * 64 // args.page_size
    runner = ModelRunner(
        parts.model, num_pages=pages, page_size=args.page_size, deterministic=args.mode == "deterministic"
    )
    if parts.model.device.type == "cuda":
        runner.capture(1)  # as `uncast serve` does: tokens are chosen on the device, too
    texts = {}
    for number in numbers:
        engine = Engine(runner, parts.tokenizer, EngineConfig(max_running=1, prefix_cache=False))
        engine.add(requests[number])
        texts[number] = ""
        while engine.has_work:
            texts[number] += "".join(output.text for output in engine.step())
    return texts


def quantile(values: list[float], share: float) -> float:
    return round(sorted(values)[min(len(values) - 1, int(share * len(values)))], 4) if values else 0.0


def summarise(
    record: Record, stats: dict[str, float], solo: dict[int, str], seconds: float, args: argparse.Namespace
) -> dict[str, Any]:
    """The record to keep. `wrong_texts` counts completed answers that differ from their solo run; in
    default mode that is rounding."""
    wrong = sum(n for number, texts in record.texts.items() for text, n in texts.items() if text != solo[number])
    times = [t for t, _ in record.rss]
    early = [r for t, r in record.rss if WARM_UP_SHARE <= t / times[-1] < 2 * WARM_UP_SHARE]
    late = [r for t, r in record.rss if t / times[-1] >= 1 - WARM_UP_SHARE]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": device_name(),
        "versions": versions(),
        **{name: getattr(args, name) for name in (
            "model", "over", "mode", "minutes", "streams", "leave", "pool_tokens", "page_size", "distinct", "seed", "note"
        )},
        "completed": record.completed,
        "left": record.left,
        "refused": record.refused,
        "distinct_completed": len(record.texts),
        "wrong_texts": wrong,
        "completion_tokens_per_s": round(stats["completion_tokens_total"] / seconds, 1),
        "first_output_s_p50": quantile(record.first_s, 0.5),
        "first_output_s_p99": quantile(record.first_s, 0.99),
        "between_outputs_s_p50": quantile(record.between_s, 0.5),
        "between_outputs_s_p99": quantile(record.between_s, 0.99),
        "peak_running": record.peak_running,
        "peak_swapped": record.peak_swapped,
        "peak_waiting": record.peak_waiting,
        "preemptions": int(stats["preemptions_total"]),
        "swap_bytes": int(stats["swap_bytes_total"]),
        "prefix_hit_share": round(stats["prefix_hit_tokens_total"] / max(1, stats["prefix_query_tokens_total"]), 3),
        "rss_mib_second_quarter": round(statistics.median(early) / 2**20, 1),
        "rss_mib_last_quarter": round(statistics.median(late) / 2**20, 1),
        "rss_mib_peak": round(max(r for _, r in record.rss) / 2**20, 1),
        "pages_in_use_at_the_end": int(stats["pool_pages"] - stats["pool_pages_free"] - stats["pool_pages_cached"]),
        "requests_at_the_end": int(stats["running"] + stats["waiting"] + stats["swapped"]),
        "rss_mib_by_minute": by_minute(record.rss),
    }  # fmt: skip


def by_minute(rss: list[tuple[float, int]]) -> list[float]:
    minutes = defaultdict(list)
    for seconds, size in rss:
        minutes[int(seconds // 60)].append(size)
    return [round(statistics.median(sizes) / 2**20, 1) for _, sizes in sorted(minutes.items())]


def failures(result: dict[str, Any]) -> list[str]:
    """What the acceptance line forbids, one sentence each."""
    found = []
    if result["wrong_texts"] and result["mode"] == "deterministic":
        found.append(f"{result['wrong_texts']} completed texts differ from their solo run")
    if not result["completed"] or not result["left"]:
        found.append("no request was completed, or no client left")
    if not result["preemptions"]:
        found.append("no request was preempted: make --pool-tokens smaller")
    if result["pages_in_use_at_the_end"] or result["requests_at_the_end"]:
        found.append("the pool is not empty at the end")
    if result["rss_mib_last_quarter"] > result["rss_mib_second_quarter"] * 1.05 + 8:
        found.append("memory grew")
    if result["end"] != "ok":
        found.append(result["end"])
    return found


async def run(args: argparse.Namespace) -> dict[str, Any]:
    parts = load_parts(args.model)
    requests = make_requests(parts.ids, args.distinct, args.seed)
    record = Record()
    target: Target = HttpTarget(args) if args.over == "http" else EngineTarget(parts, args)
    await target.start()
    began = time.monotonic()
    stats = await drive(target, requests, record, args)
    seconds = time.monotonic() - began
    end = await target.finish(requests)
    print(f"{record.completed} completed, {record.left} left; now alone: {len(record.texts)} requests", flush=True)
    solo = solo_texts(parts, requests, sorted(record.texts), args)
    return {**summarise(record, stats, solo, seconds, args), "end": end}


def main() -> int:
    args = build_parser().parse_args()
    result = asyncio.run(run(args))
    for name, value in result.items():
        print(f"{name:26} {value}")
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    found = failures(result)
    print("passed" if not found else "FAILED: " + "; ".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
