"""Steps, phases and layers are found by every rung of the ladder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.doctor.synthetic import BF16, Tracer, decode, decode_graph, layer, layer_kernels
from uncast.doctor.diagnose import Options, diagnose
from uncast.doctor.labels import parse_label
from uncast.doctor.report import Report


def report(tmp_path: Path, t: Tracer) -> Report:
    return diagnose(t.write(tmp_path / "t.json")).report


@pytest.mark.parametrize(
    ("name", "phase", "batch", "live", "new"),
    [
        ("execute_32_context_0(sq0sk0sqsq0sqsk0)_generation_32(sq32sk55086sqsq32sqsk55086)", "decode", 32, 55086, 32),
        ("execute_context_1(888_788544)_generation_0(0)", "prefill", 1, None, None),
        ("execute_9_context_1(sq8sk8sqsq64sqsk64)_generation_8(sq8sk100sqsq8sqsk100)", "mixed", 9, 108, 16),
        ("step[DECODE bs=32]", "decode", 32, None, 32),
        ("step[DECODE bs=1 g_sk=4096]", "decode", 1, 4096, 1),
        ("step[EXTEND bs=2 toks=512]", "prefill", 2, None, 512),
        ("step[TARGET_VERIFY bs=4]", "verify", 4, None, None),
        ("ProfilerStep#134", "unknown", None, None, None),
    ],
)
def test_labels(name: str, phase: str, batch: int | None, live: int | None, new: int | None) -> None:
    label = parse_label(name)
    assert label is not None
    assert (label.phase, label.batch, label.live_tokens, label.new_tokens) == (phase, batch, live, new)


@pytest.mark.parametrize("name", ["execute_model", "step", "## Call CompiledFxGraph x ##", "step[", "ProfilerStep#"])
def test_other_annotations_are_no_steps(name: str) -> None:
    assert parse_label(name) is None


@pytest.mark.parametrize(
    ("label", "how"),
    [
        ("step[DECODE bs=1 g_sk=4096]", "labels of SGLang"),
        ("execute_1_context_0(sq0sk0sqsq0sqsk0)_generation_1(sq1sk4096sqsq1sqsk4096)", "labels of vLLM"),
        ("ProfilerStep#7", "ProfilerStep"),
    ],
)
def test_marked_steps(tmp_path: Path, label: str, how: str) -> None:
    r = report(tmp_path, decode(layers=12, steps=4, label=label))
    assert (r.steps, r.steps_found_by, r.judged, r.layers) == (4, how, "decode", 12)
    assert r.live_tokens == (None if "Profiler" in label else 4096)


def test_frames_of_the_servers_loop(tmp_path: Path) -> None:
    t = Tracer()
    for _ in range(5):
        with t.frame("sglang/srt/managers/scheduler.py(1900): run_batch"):
            for _ in range(8):
                layer(t)
        t.sync()
    r = report(tmp_path, t)
    assert (r.steps, r.steps_found_by, r.layers) == (5, "Python frames of the server's loop", 8)


def test_graph_launches_full_and_piecewise(tmp_path: Path) -> None:
    full = decode_graph(layers=9, steps=4, label="no step")
    r = report(tmp_path, full)
    assert (r.steps, r.steps_found_by, r.judged, r.layers) == (4, "graph launches", "decode", 9)
    t = Tracer(stacks=False)
    for _ in range(4):
        for _ in range(9):
            t.replay(layer_kernels(0)[:1])
            t.launch("mma_decode_kernel", 15.0)
        t.replay([*layer_kernels(0)[2:], ("argmax", 3.0, 1)])
    r = report(tmp_path, t)
    assert (r.steps, r.layers) == (4, 9)


def test_the_period_of_a_trace_without_cpu_events(tmp_path: Path) -> None:
    t = decode(layers=10, steps=6)
    gpu = [e for e in t.events if e["cat"] == "kernel"]
    out = Tracer()
    for position, event in enumerate(gpu):
        out.events.append(event)
        if position % 30 == 29:
            out.events.append(event | {"name": "sample_tokens", "ts": event["ts"] + event["dur"] + 0.1, "dur": 0.2})
    r = report(tmp_path, out)
    assert r.steps_found_by == "the period of the kernel sequence" and r.steps == 5 and r.layers == 10
    assert any("boundaries are a guess" in note for note in r.notes)


def test_prefill_and_decode_are_told_apart(tmp_path: Path) -> None:
    t = decode(layers=6, steps=4)
    with t.step("step[EXTEND bs=1 toks=512]"):
        for _ in range(6):
            t.op("aten::mm", [[512, 6144], [6144, 6144]], ["c10::BFloat16"] * 2, "nvjet_prefill", 900.0)
    r = report(tmp_path, t)
    assert r.judged == "decode" and r.steps == 4
    phases = {p.phase: p for p in r.phases}
    assert phases["prefill"].steps == 1 and phases["prefill"].step_us > phases["decode"].step_us
    for phase in ("prefill", "decode"):
        assert diagnose(tmp_path / "t.json", Options(phase=phase)).report.judged == phase


def test_unlabelled_prefill_is_told_by_its_rows(tmp_path: Path) -> None:
    t = Tracer()
    with t.step("ProfilerStep#1"):
        for _ in range(6):
            t.op("aten::mm", [[2048, 64], [64, 64]], ["c10::BFloat16"] * 2, "nvjet_prefill", 900.0)
    assert report(tmp_path, t).judged == "prefill"


def test_a_cut_step_is_dropped(tmp_path: Path) -> None:
    t = decode(layers=10, steps=5)
    missing = [e for e in t.events if e["cat"] == "kernel"][:15]
    t.events = [e for e in t.events if e not in missing]
    r = report(tmp_path, t)
    assert (r.steps, r.steps_dropped, r.layers) == (4, 1, 10)


def test_kernels_belong_to_the_step_that_launched_them(tmp_path: Path) -> None:
    """The GPU lags: most kernels run after their step's label has ended."""
    t = decode(layers=10, steps=5, cast_us=500.0)
    for event in t.events:
        if event["cat"] == "kernel":
            event["ts"] += 3000.0
    r = report(tmp_path, t)
    assert r.steps == 5 and all(p.kernels_per_step == 40 for p in r.phases)


@pytest.mark.parametrize("trace", ["optimizer", "backward"])
@pytest.mark.parametrize("rows", [1, 4096])
def test_training_is_told_by_its_backward_pass_or_optimizer(tmp_path: Path, trace: str, rows: int) -> None:
    """Of two kinds of steps in one trace only those that train are called so."""
    t = Tracer()
    for number in range(6):
        with t.step(f"ProfilerStep#{number}"):
            for _ in range(8):
                t.op("aten::mm", [[rows, 6144], [6144, 6144]], [BF16, BF16], "nvjet", 90.0)
            if number >= 3 and trace == "optimizer":
                with t.step("Optimizer.step#AdamW.step"):
                    t.op("aten::_foreach_add_", [[6144, 6144]], [BF16], "multi_tensor_apply_kernel", 50.0)
            if number >= 3 and trace == "backward":
                name = "autograd::engine::evaluate_function: MmBackward0"
                with t.span("cpu_op", name):
                    t.op("aten::mm", [[6144, rows], [rows, 6144]], [BF16, BF16], "nvjet", 180.0)
        t.sync()
    r = report(tmp_path, t)
    assert {p.phase: p.steps for p in r.phases} == {"decode" if rows == 1 else "prefill": 3, "training": 3}
    assert r.judged == ("decode" if rows == 1 else "training")
