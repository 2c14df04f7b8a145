"""The captured decode step on a real GPU: what `test_lookahead` shows on a CPU, and what only a graph can get wrong."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.engine.test_lookahead import device_requests, facts
from tests.engine.workload import alone, make_engine, run_all, tokens_of
from tests.tiny_model import build_model_folder
from uncast.checkpoints.bundled import BUNDLED
from uncast.checkpoints.load import load_model
from uncast.engine.request import Request
from uncast.engine.runner import ModelRunner, Sequence
from uncast.engine.sampler import Draw
from uncast.engine.tokenizer import Tokenizer
from uncast.models.decoder import MLADecoder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore::uncast.attention.ClaimedCapabilityWarning"),
]
FAMILIES = ("glm4_moe_lite", "deepseek_v3", "glm_moe_dsa")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[MLADecoder, Tokenizer]]:
    found = {}
    for family in FAMILIES:
        folder: Path = build_model_folder(tmp_path_factory.mktemp(family), family)
        found[family] = load_model(folder, dtype=torch.bfloat16, device="cuda"), Tokenizer(folder)
    return found


@contextmanager
def no_sync() -> Iterator[None]:
    """Torch's operations that make the host wait are errors."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def sequences_of(runner: ModelRunner, count: int) -> list[Sequence]:
    rng = random.Random(1)
    sequences = [Sequence([rng.randrange(512) for _ in range(3 + 29 * index)]) for index in range(count)]
    for sequence in sequences:
        runner.ensure_pages(sequence, len(sequence.tokens) + 40)
        runner.step([(sequence, len(sequence.tokens))])
    return sequences


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", ["fp8_ds_mla", "fp8_e4m3", "bf16"])
def test_a_replay_is_the_call_and_repeats(
    models: dict[str, tuple[MLADecoder, Tokenizer]], family: str, layout: str
) -> None:
    """Logits and cache of replays equal those of the same kernels launched one by one, bit for bit; and of an eager step, which
    may cut its work differently, within the accuracy of BF16."""
    sides = []
    for graphs in (True, True, False, None):
        rng = random.Random(2)
        runner = ModelRunner(models[family][0], kv_layout=layout, num_pages=40)
        if graphs is not None:
            assert runner.capture(6, graphs=graphs) is None
        sequences, found = sequences_of(runner, 6), []
        for _ in range(25):
            chosen = rng.sample(sequences, rng.randint(1, 6))
            for sequence in chosen:
                sequence.tokens.append(rng.randrange(512))
            found.append(runner.step([(sequence, 1) for sequence in chosen]).clone())
        sides.append((torch.cat(found), runner.pool.storage.clone(), runner.counters.tolist()))
    for other in sides[1:3]:
        assert torch.equal(sides[0][0], other[0]) and torch.equal(sides[0][1], other[1]) and sides[0][2] == other[2]
    logits, eager = sides[0][0].double(), sides[3][0].double()
    errors = (logits - eager).norm(dim=-1) / eager.norm(dim=-1)
    assert float(errors.median()) < 2e-2  # a row whose experts or tokens are chosen otherwise, at a tie, may be far off
    assert float((errors > 0.2).double().mean()) < 0.1


@pytest.mark.parametrize("family", FAMILIES)
def test_a_launch_makes_nobody_wait(models: dict[str, tuple[MLADecoder, Tokenizer]], family: str) -> None:
    runner = ModelRunner(models[family][0], num_pages=40)
    assert runner.capture(4) is None
    sequences = sequences_of(runner, 3)
    for sequence in sequences:
        sequence.tokens.append(7)
    runner.launch(sequences, [-1] * 3, [(1, Draw(1.0, 0, 0.9, 0.0, 0.5))]).read()  # loads what it samples with
    with no_sync():
        first = runner.launch(sequences, [0, 1, 2], [(1, Draw(1.0, 0, 0.9, 0.0, 0.5))])
        second = runner.launch(sequences[1:], [1, 2])
    assert len(first.read()[0]) == 3 and len(second.read()[0]) == 2 and all(second.read()[1])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_crowd_equals_solo_runs_bit_for_bit(models: dict[str, tuple[MLADecoder, Tokenizer]], family: str) -> None:
    """Deterministic mode, replays against eager steps: lookahead, aborts, preemption, prefix cache, stop strings."""
    model, tokenizer = models[family]
    rng = random.Random(3)
    requests = device_requests(rng, 14, share=0.9)
    crowd = make_engine(model, tokenizer, pages=14, deterministic=True, static=True)
    outputs = run_all(crowd, requests, rng=rng, abort_share=0.05)
    assert crowd.ahead.launched_early > 5
    single = make_engine(model, tokenizer, pages=14, deterministic=True, prefix_cache=False)
    for request in requests:
        name, got = request.request_id, outputs[request.request_id]
        expected = alone(single, request)
        # an aborted request has fewer rows, perhaps none
        assert all(torch.equal(a, b) for a, b in zip(crowd.logits[name], single.logits[name], strict=False))
        if got[-1].finish_reason != "abort":
            assert facts(got) == facts(expected)


@pytest.mark.parametrize("deterministic", [False, True])
def test_drafts_change_no_greedy_text(deterministic: bool) -> None:
    """Draft chains and their verification as replays; in the default mode one request at a time, of 16 rows at most."""
    model, words = (
        load_model(BUNDLED["tiny-glm"], dtype=torch.bfloat16, device="cuda", mtp=True),
        Tokenizer(BUNDLED["tiny-glm"]),
    )
    text = (BUNDLED["tiny-glm"] / "heldout.txt").read_text(encoding="utf-8")
    prompts = [words.encode(text[start : start + 80]) for start in range(0, 16_000, 2_000)]
    found = []
    for drafts in (0, 1, 3) if deterministic else (0, 1, 8):
        engine = make_engine(
            model, words, pages=200, deterministic=deterministic, speculate=drafts, static=True, max_step_tokens=64,
            prefix_cache=deterministic,
        )  # fmt: skip
        requests = [Request(p, max_tokens=40, ignore_eos=True, request_id=f"{i}") for i, p in enumerate(prompts)]
        crowds = [requests] if deterministic else [[request] for request in requests]
        outputs = {name: said for crowd in crowds for name, said in run_all(engine, crowd).items()}
        found.append([tokens_of(outputs[request.request_id]) for request in requests])
        assert drafts == 0 or engine.stats().draft_tokens_accepted_total > 0.2 * engine.stats().draft_tokens_total
    assert found[1] == found[0] and found[2] == found[0]


def test_memory_stays_as_it_is(models: dict[str, tuple[MLADecoder, Tokenizer]]) -> None:
    model, tokenizer = models["glm4_moe_lite"]
    engine = make_engine(model, tokenizer, pages=60, static=True)
    sizes = []
    for seed in range(4):
        run_all(engine, device_requests(random.Random(seed), 10))
        engine.logits.clear()
        torch.cuda.synchronize()
        sizes.append(torch.cuda.memory_allocated())
    assert sizes[3] <= sizes[1]
