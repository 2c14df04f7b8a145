"""Steps that verify drafts on a real GPU: replays are the calls, and nothing waits."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from tests.engine.test_decode_step_gpu import no_sync
from uncast.checkpoints.bundled import BUNDLED
from uncast.checkpoints.load import load_model
from uncast.engine.drafted import DraftedRequest
from uncast.engine.runner import ModelRunner, Sequence
from uncast.engine.sampler import Draw
from uncast.models.decoder import MLADecoder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore::uncast.attention.ClaimedCapabilityWarning"),
]


@pytest.fixture(scope="module")
def glm() -> MLADecoder:
    return load_model(BUNDLED["tiny-glm"], dtype=torch.bfloat16, device="cuda", mtp=True)


def prompts(runner: ModelRunner) -> list[Sequence]:
    sequences = [Sequence([7 + 31 * index + place for place in range(5 + 20 * index)]) for index in range(3)]
    for sequence in sequences:
        runner.ensure_pages(sequence, len(sequence.tokens) + 80)
        runner.step([(sequence, len(sequence.tokens) - 1)])
    return sequences


@pytest.mark.parametrize("deterministic", [False, True])
def test_replays_are_the_calls_and_nobody_waits(glm: MLADecoder, deterministic: bool) -> None:
    """Ten steps, each begun by what the one before left on the device: tokens, accepted drafts, next drafts and cache of graphs
    equal those of the same kernels launched one by one, bit for bit."""
    sides = []
    for graphs in (True, False):
        runner = ModelRunner(glm, num_pages=40, drafts=True, deterministic=deterministic)
        assert runner.capture(4, drafts=[2], graphs=graphs) is None
        sequences = prompts(runner)
        known = [DraftedRequest(s.pages, [s.tokens[-1], 5, 6], s.cached, 2) for s in sequences]
        left = [DraftedRequest(s.pages, [], 0, 2, row) for row, s in enumerate(sequences)]
        draws = [(row, Draw(0.7, 9, 0.9, 0.0, 0.3)) for row in (1, 4)]
        runner.launch_drafted(2, known, draws).read()  # loads what it samples with
        with no_sync() if graphs else nullcontext():
            reports = [runner.launch_drafted(2, known, draws), *(runner.launch_drafted(2, left) for _ in range(10))]
        sides.append(([report.read() for report in reports], runner.pool.storage.clone()))
    assert sides[0][0] == sides[1][0] and torch.equal(sides[0][1], sides[1][1])
    found = [verified for report in sides[0][0] for verified in report]
    assert all(all(verified.finite) for verified in found) and any(verified.accepted for verified in found)
