"""A model shared by two processes computes what one process does; when one dies or hangs, none is left."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.engine import parallel_worker
from tests.fixtures import build_hf
from tests.tiny_model import build_model_folder
from uncast.checkpoints.bundled import BUNDLED
from uncast.checkpoints.load import load_model
from uncast.engine.crew import join_crew
from uncast.engine.runner import ModelRunner
from uncast.engine.tokenizer import Tokenizer
from uncast.models.parallel import Parallel, ParallelError, check_shares

FAMILIES = ("deepseek_v3", "deepseek_v2_lite", "glm_moe_dsa_52", "minicpm3")
ROOT = Path(__file__).parents[2]


@contextmanager
def started(out: Path, what: str, *folders: Path, world: int = 2) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that meet at a store of this one, as torchrun's do; on a port that nobody can have taken meanwhile."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = []
    try:
        for rank in range(world):
            environment = {
                **os.environ, "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0", "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]),
            }  # fmt: skip
            command = [sys.executable, "-m", "tests.engine.parallel_worker", str(out), what, *map(str, folders)]
            processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True))
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def finish(processes: list[subprocess.Popen[str]]) -> tuple[list[int], list[str]]:
    """Exit codes and what was said, by rank."""
    said = [process.communicate(timeout=parallel_worker.PATIENT_S)[1] for process in processes]
    return [process.returncode for process in processes], said


def together(out: Path, what: str, *folders: Path, world: int = 2) -> list[Any]:
    with started(out, what, *folders, world=world) as processes:
        codes, said = finish(processes)
    assert codes == [0] * world, said
    found: list[Any] = torch.load(out)
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Group-limited sigmoid routing with q_a; softmax routing with two shared experts and without q_a; sparse attention with
    shared indexers; no experts. None of them has an even vocabulary."""
    root = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        build_hf(family, root / family, vocab_size=511)
    return [root / family for family in FAMILIES]


def test_logits_are_those_of_one_process(folders: list[Path], tmp_path: Path) -> None:
    """Random families in float32, and the bundled FP8 model, whose blocks two ranks cannot split everywhere."""
    models = [*folders, BUNDLED["tiny-glm"]]
    for folder, found in zip(models, together(tmp_path / "out", "logits", *models), strict=True):
        alone = parallel_worker.logits(ModelRunner(load_model(folder), kv_layout="fp32", num_pages=12, page_size=16))
        for expected, logits in zip(alone, found, strict=True):
            assert logits.shape == expected.shape
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5 * max(1.0, float(expected.abs().max())))


def test_deterministic_mode_with_uneven_experts(tmp_path: Path) -> None:
    """Three ranks share 7 experts and 480 ids. A rank's start has checked that a row's bits do not depend on its batch."""
    folder = tmp_path / "model"
    build_hf("glm4_moe_lite", folder, n_routed_experts=7, vocab_size=480, num_hidden_layers=2, num_attention_heads=3)
    (found,) = together(tmp_path / "out", "deterministic", folder, world=3)
    runner = ModelRunner(load_model(folder), kv_layout="fp32", num_pages=12, page_size=16, deterministic=True)
    for expected, logits in zip(parallel_worker.logits(runner), found, strict=True):
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5 * max(1.0, float(expected.abs().max())))


def test_greedy_text_is_that_of_one_process_while_requests_are_swapped(tmp_path: Path) -> None:
    folder = build_model_folder(tmp_path / "tiny")
    ((tokens, swapped),) = together(tmp_path / "out", "texts", folder)
    runner = ModelRunner(load_model(folder), kv_layout="fp32", num_pages=12, page_size=16)
    alone, swapped_alone = parallel_worker.texts(runner, Tokenizer(folder))
    assert tokens == alone and swapped == swapped_alone > 0


@pytest.mark.parametrize("what", ["static texts", "static deterministic texts"])
def test_steps_launched_ahead_are_those_of_one_process(tmp_path: Path, what: str) -> None:
    """Greedy and sampled: what rank 0 drew is known on its device alone when the next step starts."""
    folder = build_model_folder(tmp_path / "tiny")
    ((tokens, swapped),) = together(tmp_path / "out", what, folder)
    runner = ModelRunner(
        load_model(folder), kv_layout="fp32", num_pages=12, page_size=16, deterministic="deterministic" in what
    )
    alone, swapped_alone = parallel_worker.texts(runner, Tokenizer(folder), static=True)
    assert tokens == alone and swapped == swapped_alone > 0


@pytest.mark.parametrize(
    ("what", "codes", "sentences"),
    [
        ("dies", [1, -9], ["rank 0 of 2 ends, because rank 1 has ended", ""]),
        ("leader dies", [-9, 1], ["", "rank 1 of 2 ends, because rank 0 has ended"]),
        ("hangs", [1, 1], ["rank 0 of 2: exchange with the other ranks failed", "rank 1 of 2 ends, because rank 0"]),
    ],
)
def test_a_rank_that_dies_or_hangs_ends_the_others(
    tmp_path: Path, what: str, codes: list[int], sentences: list[str]
) -> None:
    with started(tmp_path / "out", what, build_hf_once(tmp_path)) as processes:
        found, said = finish(processes)
    assert found == codes, said
    for sentence, words in zip(sentences, said, strict=True):
        assert sentence in words and "Traceback" not in words
        assert words.count("uncast: ") == (1 if sentence else 0)


def test_rank_0_does_not_wait_for_ever_for_a_rank_that_is_absent(tmp_path: Path) -> None:
    with started(tmp_path / "out", "is absent", build_hf_once(tmp_path)) as (leader, _):
        said = leader.communicate(timeout=parallel_worker.PATIENT_S)[1]
    assert leader.returncode == 1 and "1 of 2 processes have not reached rank 0" in said


def build_hf_once(tmp_path: Path) -> Path:
    build_hf("minicpm3", tmp_path / "model")
    return tmp_path / "model"


def test_a_model_that_cannot_be_shared_is_refused(folders: list[Path]) -> None:
    config = load_model(folders[0]).config
    with pytest.raises(ParallelError, match="3 processes cannot share 4 attention heads evenly: use one of 1, 2, 4"):
        check_shares(config, 3)
    check_shares(config, 4)


def test_one_process_has_no_crew_and_two_machines_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert join_crew() is None
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    with pytest.raises(ParallelError, match="4 processes run on more than one machine"):
        join_crew()


def test_parts_cover_everything_once() -> None:
    for count in (1, 7, 8, 512):
        for world in (1, 2, 3, 8):
            parts = [Parallel(rank, world).range_of(count) for rank in range(world)]
            assert [number for part in parts for number in part] == list(range(count))
            assert max(map(len, parts)) - min(map(len, parts)) <= 1
