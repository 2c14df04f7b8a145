"""One of several processes of tests/engine/test_parallel.py: `parallel_worker.py OUT WHAT FOLDER...`; rank 0 writes to OUT."""

from __future__ import annotations

import datetime
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from uncast.checkpoints.load import load_model
from uncast.engine import crew as crews
from uncast.engine.core import Engine, EngineConfig
from uncast.engine.crew import Crew, join_crew
from uncast.engine.lockstep import follow, make_runner
from uncast.engine.request import Request
from uncast.engine.runner import ModelRunner, Sequence
from uncast.engine.sampler import SamplingParams
from uncast.engine.tokenizer import Tokenizer
from uncast.models.parallel import Parallel, form_group

PATIENT_S = 600.0
"""Of whatever is to happen: longer than a machine stalls, and no test waits for it."""
HANG_S = 2.0
"""After which a rank that hangs, or never comes, is given up. It counts from when both ranks are at that point."""
PROMPTS = [list(range(3, 40)), [7, 1, 5], list(range(60, 90))]


def logits(runner: ModelRunner) -> list[torch.Tensor]:
    """Two prompts in one step, then three decode steps of one of them beside a prefill of a third."""
    first, second, third = (Sequence(list(prompt)) for prompt in PROMPTS)
    for sequence in (first, second, third):
        runner.ensure_pages(sequence, 64)
    found = [runner.step([(first, 37), (second, 3)], every_token=True)]
    for _ in range(3):
        first.tokens.append(int(found[-1][0].argmax()))
        found.append(runner.step([(first, 1), (third, 10)]))
    return found


def texts(runner: ModelRunner, tokenizer: Tokenizer, *, static: bool = False) -> tuple[list[list[int]], int]:
    """Tokens of six requests that do not fit into the pool together, and how often one was swapped out.

    Args:
        static: decode steps in static buffers, launched ahead of what they chose; half of the requests are sampled then.
    """
    if static:
        assert runner.capture(6, buckets=(1, 2, 4)) is None
    engine = Engine(runner, tokenizer, EngineConfig(max_running=6, max_step_tokens=32))
    found: dict[str, list[int]] = {}
    for number in range(6):
        prompt = [(31 * number + 7 * i) % 500 for i in range(20 + number)]
        params = SamplingParams(1.0, seed=number) if static and number % 2 else SamplingParams()
        engine.add(Request(prompt, params, 40, request_id=str(number), ignore_eos=True))
    while engine.has_work:
        for output in engine.step():
            found.setdefault(output.request_id, []).extend(output.token_ids)
    engine.check_integrity()
    assert not static or engine.ahead.launched_early > 5
    return [found[str(number)] for number in range(6)], engine.stats().preemptions_total


def work(what: str, folder: Path, crew: Crew) -> Any:
    """What this process finds out; None on a rank that follows."""
    model = load_model(folder, parallel=crew.parallel)
    runner = make_runner(
        model,
        crew,
        lambda: 12 + crew.parallel.rank,
        kv_layout="fp32",
        page_size=16,
        deterministic="deterministic" in what,
    )
    assert runner.pool.num_pages == 12
    if not crew.leads:
        if what in FAULTS:
            runner.run_batch = FAULTS[what]  # type: ignore[method-assign]
        follow(runner, crew)
        return None
    if what == "hangs":
        dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=HANG_S))
    if "texts" in what:
        found: Any = texts(runner, Tokenizer(folder), static=what.startswith("static"))
    else:
        found = logits(runner)
    if what == "leader dies":
        die()
    return found


def die(_: object = None) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang(_: object) -> None:
    time.sleep(PATIENT_S)


FAULTS = {"dies": die, "hangs": hang}


def absent() -> None:
    """Rank 1 hears where rank 0 is, and never goes there."""
    rank = int(os.environ["RANK"])
    form_group("gloo", rank, 2, PATIENT_S)
    if rank == 0:
        Crew(Parallel(0, 2), torch.device("cpu"), HANG_S)
    else:
        Parallel(1, 2).from_first(torch.zeros(33, dtype=torch.int64))
        time.sleep(PATIENT_S)


def main() -> None:
    out, what, *folders = sys.argv[1:]
    if what == "is absent":
        absent()
    crews._CLOSE_S = PATIENT_S
    if "dies" in what:
        crews._NOTICE_S = PATIENT_S  # however late the news of a death is, it has the last word
    crew = join_crew(PATIENT_S)
    assert crew is not None
    found = []
    for number, folder in enumerate(folders):
        if number:
            crew = Crew(Parallel(crew.parallel.rank, crew.parallel.world), torch.device("cpu"), PATIENT_S)
        found.append(work(what, Path(folder), crew))
        crew.close()
    if crew.leads:
        torch.save(found, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
