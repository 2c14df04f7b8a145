"""The decode step on a pretended GPU (`tests.fake_cuda`): mixed devices, a stopped capture, a waiting host fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.fake_cuda import FakeGpu, HostSync, fake_cuda
from tests.models.fake_gpu import config_of, meta_model
from uncast.engine.batch import Batch
from uncast.engine.drafted import DraftedRequest
from uncast.engine.runner import ModelRunner, RunnerError, Sequence
from uncast.engine.sampler import Draw
from uncast.engine.static_step import Staged
from uncast.models.parallel import Parallel

pytest.importorskip("triton")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    """Without the probes of a runner, which compare values."""
    monkeypatch.setattr(ModelRunner, "_warm_up", lambda self: "native")
    with fake_cuda() as gpu:
        yield gpu


def make_runner(gpu: FakeGpu, family: str, packed: str = "", **options: object) -> ModelRunner:
    model = gpu.move(meta_model(config_of(family), packed, mtp=bool(options.get("drafts"))))
    return ModelRunner(model, num_pages=80, page_size=64, **options)  # type: ignore[arg-type]


def cached(runner: ModelRunner, count: int, rows: int = 70) -> list[Sequence]:
    """Sequences with `rows` rows that decode."""
    sequences = [Sequence([1] * (rows + 1), cached=rows) for _ in range(count)]
    for sequence in sequences:
        runner.ensure_pages(sequence, rows + 20)
    return sequences


@pytest.mark.parametrize(
    ("family", "packed", "layout", "deterministic"),
    [
        ("glm_flash", "", "fp8_ds_mla", False),
        ("glm_flash", "nvfp4", "fp8_ds_mla", True),
        ("deepseek_v3", "fp8", "fp8_e4m3", False),
        ("deepseek_v2", "", "bf16", True),
        ("glm_moe_dsa", "", "fp8_ds_mla", False),
        ("glm_moe_dsa", "", "fp8_ds_mla", True),
    ],
)
def test_a_launch_makes_nobody_wait(gpu: FakeGpu, family: str, packed: str, layout: str, deterministic: bool) -> None:
    """Capture allows no sync and no copy from or to the host; a launch makes two of these, from and to pinned memory (three
    where pages are new), and the next one is launched before its result is there."""
    runner = make_runner(gpu, family, packed, kv_layout=layout, deterministic=deterministic)
    assert runner.capture(4) is None
    sequences = cached(runner, 3)
    gpu.launches.clear()
    chosen = runner.launch(sequences, [-1] * 3)
    replayed = gpu.names()
    assert replayed.count("rope_write_kernel") >= runner.model.config.num_layers
    assert sum(launch.kind == "copy" for launch in gpu.launches) == 3
    assert chosen._host.device.type == "cpu" and chosen._host.dtype == torch.int64
    gpu.launches.clear()
    runner.launch(sequences[:2], [0, 1], [(0, Draw(1.0, 5, 0.9, 0.0, 0.5))])
    assert sum(launch.kind == "copy" for launch in gpu.launches) == 3  # inputs, draws, result
    size = runner.last_step_bytes()
    per_layer = runner.pool.layout.row_bytes * runner.model.config.num_layers
    if not runner.model.config.indexer:
        assert size.needed == size.read == 2 * 72 * per_layer and size.written == 0


def test_verification_and_draft_chains_are_captured(gpu: FakeGpu) -> None:
    runner = make_runner(gpu, "glm_flash", drafts=True)
    assert runner.capture(4, drafts=[2]) is None
    sequences = cached(runner, 3)
    for sequence in sequences:
        sequence.drafts = [5, 6]
    logits = runner.step([(sequence, 3) for sequence in sequences])
    assert logits.shape == (9, runner.model.config.vocab_size)
    hidden = runner.model.config.hidden_size
    assert [part.shape for part in runner.hidden] == [(3, hidden)] * 3
    batch = Batch()
    for sequence in sequences:
        batch.add(5, sequence.cached, -1)
        batch.close(sequence.pages, sequence.cached + 1)
    gpu.launches.clear()
    slots = [[7, 8, 9], [10, -1, 11]]
    found = runner.draft_chain(batch, gpu.empty(3, hidden), slots)
    assert found.shape == (2, 3) and gpu.names().count("rope_write_kernel") == 2
    assert sum(launch.kind == "copy" for launch in gpu.launches) == 3  # rows, block tables, guesses


@pytest.mark.parametrize(("packed", "deterministic"), [("", False), ("nvfp4", False), ("fp8", True)])
def test_a_ranks_part_is_captured(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, packed: str, deterministic: bool
) -> None:
    """In a graph ranks exchange the ids, two sums a layer, and their parts of the logits."""
    exchanges = list[Parallel]()
    monkeypatch.setattr(Parallel, "_collective", lambda self, run: exchanges.append(self))
    model = gpu.move(meta_model(config_of("glm_flash"), packed, parallel=Parallel(1, 2)))
    runner = ModelRunner(model, num_pages=80, page_size=64, kv_layout="fp8_ds_mla", deterministic=deterministic)
    assert runner.capture(4, buckets=(4,)) is None
    assert len(exchanges) == 3 * (2 * model.config.num_layers + 2)  # twice before the capture
    gpu.launches.clear()
    runner.launch(cached(runner, 3), [-1] * 3)
    assert gpu.names().count("rope_write_kernel") == model.config.num_layers
    assert len(exchanges) == 3 * (2 * model.config.num_layers + 2)
    steps = runner.decode_steps
    runner.release_steps()
    assert runner.decode_steps is None and steps is not None
    with pytest.raises(KeyError):
        steps.decode.replay(Staged([[0] * steps.decode.max_requests] * 5, [], [], 1, 0))


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_launch_with_drafts_makes_nobody_wait(gpu: FakeGpu, deterministic: bool) -> None:
    """Two replays, of the model's layers and of a pass of the MTP layer for each draft; one copy to the device and one back,
    and where the step begins comes from the step before."""
    runner = make_runner(gpu, "glm_flash", drafts=True, deterministic=deterministic)
    assert runner.capture(4, drafts=[3]) is None
    sequences = cached(runner, 3)
    runner.launch_drafted(3, [DraftedRequest(s.pages, [5, 6, 7, 8], s.cached, 3) for s in sequences])
    gpu.launches.clear()
    draws = [(row, Draw(1.0, 5, 0.9, 0.0, 0.5)) for row in range(4)]
    runner.launch_drafted(3, [DraftedRequest(s.pages, [], 0, 3, row) for row, s in enumerate(sequences)])
    assert gpu.names().count("rope_write_kernel") == runner.model.config.num_layers + 3
    assert sum(launch.kind == "copy" for launch in gpu.launches) == 2
    gpu.launches.clear()
    runner.launch_drafted(3, [DraftedRequest(s.pages, [5, 6, 7, 8], s.cached, 3) for s in sequences], draws)
    assert sum(launch.kind == "copy" for launch in gpu.launches) == 3  # the random numbers, too


@pytest.mark.parametrize("layout", ["fp8_ds_mla", "fp8_e4m3", "bf16"])
def test_every_path_of_up_to_16_rows_computes_a_row_with_the_same_code(gpu: FakeGpu, layout: str) -> None:
    """With and without drafts, in static buffers and eagerly, one request and several: products see the same shapes, and our
    kernels have the same compile-time arguments, but for the batches that they can find their work in."""
    seen, merges = dict[str, str](), set[str]()

    def look(name: str, run: Callable[..., object], *given: object) -> None:
        gpu.launches.clear()
        run(*given)
        found = [
            (launch.name, launch.arguments["shapes"] if launch.kind == "aten" else constants(launch.arguments))
            for launch in gpu.launches
            if launch.name in ("linear", "bmm", "mm") or launch.kind == "triton"
        ]
        # there is none where no request is long enough to be split
        merges.update(repr(kernel) for kernel in found if kernel[0] == "combine_kernel")
        seen[name] = repr([kernel for kernel in found if kernel[0] != "combine_kernel"])

    def constants(arguments: dict[str, Any]) -> list[tuple[str, object]]:
        # SPREAD is room that a combine occupies; what it computes does not depend on it
        upper = [(key, value) for key, value in arguments.items() if key.isupper() and key not in ("BATCH", "SPREAD")]
        return sorted(upper) + [(key, arguments[key]) for key in ("target", "invariant") if key in arguments]

    for drafts in (False, True):
        runner = make_runner(gpu, "glm_flash", kv_layout=layout, drafts=drafts)
        for count in (1, 4):
            look(f"eager, {drafts=}, {count}", runner.step, [(s, 1) for s in cached(runner, count)])
        assert runner.capture(16, drafts=[1, 3] if drafts else [], buckets=(1, 4, 8)) is None
        for count in (1, 3, 8, 13):
            look(f"{drafts=}, {count}", runner.launch, cached(runner, count, 20), [-1] * count)
        for count, verified in ((1, 1), (1, 3), (4, 3), (7, 1)) if drafts else ():
            sequences = cached(runner, count, 20)
            for sequence in sequences:
                sequence.drafts = [5] * verified
            look(f"{count} with {verified}", runner.step, [(s, 1 + verified) for s in sequences])
            assert runner.verified == count
        for verified in (2, 8) if drafts else ():
            (sequence,) = cached(runner, 1, 20)
            sequence.drafts = [5] * verified
            look(f"eager with {verified}", runner.step, [(sequence, 1 + verified)])
            assert not runner.verified
    groups = [[name for name in seen if seen[name] == one] for one in dict.fromkeys(seen.values())]
    assert len(groups) == 1 and len(merges) == 1, groups


def test_experts_that_the_host_calls_are_refused(gpu: FakeGpu) -> None:
    """Not captured, and said so; a captured step would have failed with a sync."""
    runner = make_runner(gpu, "glm_flash")
    layer = runner.model.layers[-1]
    layer.mlp.experts = list(layer.mlp.experts)  # type: ignore[union-attr, arg-type]
    reason = runner.capture(4)
    assert reason is not None and "called one by one by the host" in reason and runner.decode_steps is None
    part = gpu.move(meta_model(config_of("glm_flash"), parallel=Parallel(0, 2)))
    part.layers[-1].mlp.experts = list(part.layers[-1].mlp.experts)  # type: ignore[union-attr, arg-type]
    assert ModelRunner(part, num_pages=80).capture_refusal() == reason


def test_a_model_on_another_gpu_than_the_current_one_is_refused(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    with pytest.raises(
        RunnerError, match=r"cuda:0 and the current device is cuda:1: call torch.cuda.set_device\(0\) first"
    ):
        make_runner(gpu, "glm_flash")


def test_this_test_can_fail(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(gpu, "glm_flash")
    honest = type(runner._decoder).forward_hidden

    def looks_at_values(self, batch, *, every=False):  # type: ignore[no-untyped-def]
        logits, hidden = honest(self, batch, every=every)
        logits.max().item()
        return logits, hidden

    monkeypatch.setattr(type(runner._decoder), "forward_hidden", looks_at_values)
    with pytest.raises(HostSync):
        runner.capture(2)
