"""Every kind of waste is found with its numbers, and a clean step has none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.doctor.synthetic import (
    ALL_REDUCE,
    BF16,
    CAST,
    FP8,
    FP32,
    NORM,
    POOL,
    STRIDED,
    TO_BF16,
    TO_FLOAT,
    Tracer,
    decode,
    layer,
)  # fmt: skip
from uncast.doctor.diagnose import Options, diagnose
from uncast.doctor.report import Finding, Report
from uncast.doctor.rules import per_token, relation

POOL_BYTES = 495_552 * 576 * 3


def report(tmp_path: Path, t: Tracer, **options: object) -> Report:
    return diagnose(t.write(tmp_path / "t.json.gz"), Options(**options)).report  # type: ignore[arg-type]


def only(r: Report, kind: str) -> Finding:
    assert [f.kind for f in r.findings] == [kind]
    return r.findings[0]


def test_a_clean_step_has_no_findings(tmp_path: Path) -> None:
    r = report(tmp_path, decode())
    assert r.findings == [] and r.predicted_step_us is None and r.notes == [] and r.layers == 78


def test_the_founding_case(tmp_path: Path) -> None:
    r = report(tmp_path, decode(cast_us=828.0))
    f = only(r, "pool_cast")
    assert f.calls_per_step == 78 and f.layers_relation == "once in each of 78 layers"
    assert (f.dtype_from, f.dtype_to, f.shape) == ("fp8_e4m3", "bf16", POOL)
    assert f.bytes_per_call == POOL_BYTES == 856_313_856 and f.bytes_per_step == 78 * POOL_BYTES
    assert (
        f.bytes_needed_per_step == 78 * 4096 * 576 * 3 and f.needed_source == "4,096 live tokens, from the step labels"
    )
    assert f.us_per_step == pytest.approx(78 * 828) and f.share_of_step == pytest.approx(78 * 828 / r.step_us)
    assert f.source == "engine/attention/fa3.py(410): get_bf16_cache" and f.confidence == "measured"
    clean = report(tmp_path, decode()).step_us
    assert f.predicted_step_us.low == pytest.approx(clean, rel=0.01)
    assert f.predicted_step_us.low <= f.predicted_step_us.high <= 1.1 * clean
    assert any("35291" in link for link in f.links)


def test_issue_35291(tmp_path: Path) -> None:
    """sglang issue 35291: 61 casts of 225.79 us of 131,072 tokens in 31.52 ms; they measured 17.68 ms without."""
    t = Tracer()
    rest = (31_520.0 - 61 * (225.79 + 1.5) + 0.5) / 61 / 3
    with (
        t.step("step[DECODE bs=1 g_sk=1440]"),
        t.frame("sglang/srt/layers/attention/flashinfer_mla_backend.py(300): decode"),
    ):
        for _ in range(61):
            t.launch("gemm_in", rest)
            t.op("aten::copy_", [[131_072, 1, 576]] * 2, [BF16, FP8], CAST, 225.79, 131_072 * 576 // 512)
            t.launch("gemm_out", 2 * rest)
    f = only(report(tmp_path, t), "pool_cast")
    assert round(report(tmp_path, t).step_us / 1e3, 2) == 31.52
    assert round(f.us_per_step / 1e3, 2) == 13.77 and round(100 * f.share_of_step, 1) == 43.7
    assert round(f.predicted_step_us.low / 1e3, 2) == 17.75
    assert abs(f.predicted_step_us.low - 17_680) < 0.005 * 17_680
    assert f.bytes_needed_per_step is not None and f.bytes_per_step is not None
    assert round(1 - f.bytes_needed_per_step / f.bytes_per_step, 3) == 0.989


def test_live_tokens_given_or_unknown(tmp_path: Path) -> None:
    t = decode(cast_us=800.0, label="ProfilerStep#3", layers=12)
    f = only(report(tmp_path, t), "pool_cast")
    assert f.bytes_needed_per_step is None and "1,728 bytes a call for every live token" in f.needed_source
    f = only(report(tmp_path, t, live_tokens=1000), "pool_cast")
    assert f.bytes_needed_per_step == 12 * 1000 * 576 * 3 and f.needed_source == "1,000 live tokens, --live-tokens"


@pytest.mark.parametrize("live", [61_944, 61_945, 123_888, 400_000, 495_552])
def test_the_pool_cast_is_found_whatever_the_fill(tmp_path: Path, live: int) -> None:
    """A kernel that reads the cache as it is stored needs no cast, however many rows are in use."""
    r = report(tmp_path, decode(cast_us=828.0, label=f"step[DECODE bs=8 g_sk={live}]", layers=12))
    f = only(r, "pool_cast")
    assert f.calls_per_step == 12 and f.shape == POOL and f.us_per_step == pytest.approx(12 * 828)
    assert f.bytes_needed_per_step == 12 * live * 576 * 3
    assert ("none with a kernel that reads the cache" in f.needed_source) == (8 * live > POOL[0])
    assert f.predicted_step_us.low == pytest.approx(report(tmp_path, decode(layers=12)).step_us, rel=0.05)
    assert f.predicted_step_us.low < f.predicted_step_us.high <= r.step_us
    assert not any("do not fit" in note for note in r.notes)


def test_more_live_tokens_than_rows_are_flagged(tmp_path: Path) -> None:
    r = report(tmp_path, decode(cast_us=828.0, layers=12), live_tokens=600_000)
    f = only(r, "pool_cast")
    assert f.bytes_needed_per_step == f.bytes_per_step == 12 * POOL_BYTES
    assert "all 495,552 rows: 600,000 live tokens, --live-tokens, are more than it has" in f.needed_source
    assert any("600,000 live tokens (--live-tokens) do not fit into the pool's 495,552 rows" in n for n in r.notes)


def test_the_steps_own_fp8_activations_are_no_pool(tmp_path: Path) -> None:
    def activation(t: Tracer) -> None:
        t.op("aten::copy_", [[16_384, 6144]] * 2, [BF16, FP8], CAST, 200.0)

    for label in ("step[EXTEND bs=1 toks=16384 g_sk=16384]", "step[EXTEND bs=4 toks=16384 c_sk=9000]"):
        assert "pool_cast" not in {f.kind for f in report(tmp_path, extra_in_clean(activation, label=label)).findings}


def test_a_cast_of_few_gathered_rows_is_no_pool(tmp_path: Path) -> None:
    def gathered(t: Tracer) -> None:
        t.op("aten::copy_", [[4096, 1, 576]] * 2, [BF16, FP8], CAST, 6.0)

    assert report(tmp_path, extra_in_clean(gathered)).findings == []


def extra_in_clean(extra: Callable[[Tracer], None], **kwargs: object) -> Tracer:
    return decode(layers=20, extra=extra, **kwargs)  # type: ignore[arg-type]


def test_table_cast(tmp_path: Path) -> None:
    def table(t: Tracer) -> None:
        t.op("aten::copy_", [[131_072, 64]] * 2, [BF16, FP32], TO_BF16, 12.7)

    f = only(report(tmp_path, extra_in_clean(table)), "table_cast")
    assert f.bytes_per_call == 131_072 * 64 * 6 and f.bytes_needed_per_step == 20 * 64 * 6
    assert f.needed_source == "1 tokens in the step" and any("42833" in link for link in f.links)


def test_activations_and_weights_are_no_tables(tmp_path: Path) -> None:
    def weight(t: Tracer) -> None:
        t.op("aten::copy_", [[36864, 6144]] * 2, [BF16, FP32], TO_BF16, 300.0)

    assert only(report(tmp_path, extra_in_clean(weight)), "weight_cast").bytes_needed_per_step == 0
    t = Tracer()
    with t.step("step[EXTEND bs=1 toks=2048]"):
        for _ in range(8):
            t.op("aten::mm", [[2048, 6144], [6144, 1024]], [BF16, BF16], "nvjet", 300.0)
            t.op("aten::copy_", [[2048, 6144]] * 2, [BF16, FP32], TO_BF16, 100.0)
    assert report(tmp_path, t).findings == []


def test_fp8_weights_are_no_pool(tmp_path: Path) -> None:
    t = Tracer()
    with t.step("step[DECODE bs=1 g_sk=64]"):
        for _ in range(8):
            t.op("aten::copy_", [[36864, 6144]] * 2, [BF16, FP8], CAST, 300.0)
            t.op("aten::mm", [[1, 6144], [6144, 36864]], [BF16, BF16], "nvjet", 300.0)
    assert only(report(tmp_path, t), "weight_cast").dtype_from == "fp8_e4m3"


def test_round_trip(tmp_path: Path) -> None:
    def norm(t: Tracer) -> None:
        t.op("aten::copy_", [[1, 6144]] * 2, [FP32, BF16], TO_FLOAT, 3.0)
        t.launch(NORM, 4.0)
        t.op("aten::copy_", [[1, 6144]] * 2, [BF16, FP32], TO_BF16, 3.5)

    f = only(report(tmp_path, extra_in_clean(norm)), "cast_round_trip")
    assert f.calls_per_step == 40 and f.us_per_step == pytest.approx(20 * 6.5)
    assert (f.dtype_from, f.dtype_to) == ("bf16", "fp32")


def test_strided_copies_of_one_function_are_one_finding(tmp_path: Path) -> None:
    def reshape(t: Tracer) -> None:
        with t.frame("sglang/srt/models/utils.py(394): _reshape_for_qk_norm"):
            for n in (4096, 1024):
                t.op("aten::copy_", [[32, n], [32, n], []], [BF16, BF16, "Scalar"], STRIDED, 4.0,
                     strides=[[n, 1], [6144, 1], []])  # fmt: skip

    f = only(report(tmp_path, extra_in_clean(reshape)), "strided_copy")
    assert f.calls_per_step == 40 and f.layers_relation == "2 x 20 layers" and f.shape == [32, 4096]
    assert (
        f.bytes_per_step == 20 * 32 * (4096 + 1024) * 4 and f.source is not None and "_reshape_for_qk_norm" in f.source
    )
    assert "1 other shape" in f.evidence


def test_expanded_sources_count_their_memory_once(tmp_path: Path) -> None:
    def expand(t: Tracer) -> None:
        t.op("aten::copy_", [[64, 4096], [64, 4096]], [BF16, BF16], STRIDED, 5.0, strides=[[4096, 1], [0, 1]])

    f = only(report(tmp_path, extra_in_clean(expand)), "strided_copy")
    assert f.bytes_per_call == 64 * 4096 * 2 + 4096 * 2


def test_copies_around_a_collective(tmp_path: Path) -> None:
    def all_reduce(t: Tracer) -> None:
        t.memcpy("DtoD", 1 << 20, 4.0)
        t.launch(ALL_REDUCE, 20.0)
        t.memcpy("DtoD", 1 << 20, 4.0)

    f = only(report(tmp_path, extra_in_clean(all_reduce)), "collective_copy")
    assert f.calls_per_step == 40 and f.bytes_per_step == 40 * 2 * (1 << 20)


def test_padding_copies(tmp_path: Path) -> None:
    def pad(t: Tracer) -> None:
        with t.span(
            "cpu_op", "aten::constant_pad_nd", {"Input Dims": [[32, 2880], [], []], "Input type": [BF16, "", ""]}
        ):
            t.op("aten::copy_", [[32, 2880]] * 2, [BF16, BF16], STRIDED, 5.0, strides=[[3072, 1], [2880, 1]])

    assert only(report(tmp_path, extra_in_clean(pad)), "padding_copy").calls_per_step == 20


def test_device_copies_per_layer(tmp_path: Path) -> None:
    def clone(t: Tracer) -> None:
        with t.frame("engine/cache.py(9): save"):
            t.memcpy("DtoD", 4 << 20, 5.0)

    f = only(report(tmp_path, extra_in_clean(clone)), "device_copy")
    assert f.bytes_per_call == 2 * (4 << 20) and f.source == "engine/cache.py(9): save" and f.confidence == "measured"


def test_a_few_copies_a_step_are_no_finding(tmp_path: Path) -> None:
    t = Tracer()
    for _ in range(3):
        with t.step("step[DECODE bs=1 g_sk=4096]"):
            for n in range(20):
                layer(t)
                if n < 3:
                    t.memcpy("DtoD", 4 << 20, 20.0)
        t.sync()
    assert report(tmp_path, t).findings == []


def test_host_syncs(tmp_path: Path) -> None:
    def item(t: Tracer) -> None:
        with t.frame("engine/lengths.py(3): max_len"):
            t.sync()
            t.cpu += 40.0

    r = report(tmp_path, extra_in_clean(item))
    f = only(r, "host_sync")
    assert f.calls_per_step == pytest.approx(20, abs=1) and f.source == "engine/lengths.py(3): max_len"
    assert f.predicted_step_us.low == pytest.approx(r.step_us - f.us_per_step)


def test_the_wait_for_the_token_is_no_finding(tmp_path: Path) -> None:
    assert all(f.kind != "host_sync" for f in report(tmp_path, decode(layers=20)).findings)


def test_launch_bound(tmp_path: Path) -> None:
    t = Tracer(stacks=False)
    for _ in range(3):
        with t.step("step[DECODE bs=1 g_sk=100]"):
            for _ in range(200):
                t.op("aten::add", [[1, 64]] * 2, [BF16, BF16], "tiny", 2.0)
        t.sync()
    r = report(tmp_path, t)
    f = only(r, "launch_bound")
    assert f.calls_per_step == 200 and f.share_of_step > 0.5
    assert f.predicted_step_us.low < f.predicted_step_us.high == r.step_us


def test_overlapped_time_is_not_promised_back(tmp_path: Path) -> None:
    """A cast that runs beside other work on another stream frees only what nothing else covers."""
    t = decode(layers=10, steps=2, cast_us=400.0)
    for event in [e for e in t.events if e["cat"] == "kernel" and e["name"] == CAST]:
        args = event["args"] | {"stream": 9, "correlation": event["args"]["correlation"]}
        t.events.append(event | {"name": "other_work", "tid": 9, "dur": 300.0, "args": args})
    f = only(report(tmp_path, t), "pool_cast")
    assert f.us_per_step == pytest.approx(4000) and f.exposed_us_per_step == pytest.approx(1000, rel=0.01)


def test_the_roofline_of_attention(tmp_path: Path) -> None:
    t = Tracer()
    dims = [[4, 32, 128], [4, 8, 128], [4, 8, 128]]
    for _ in range(2):
        with t.step("step[DECODE bs=4 g_sk=40000]"):
            for _ in range(8):
                t.op("vllm::unified_attention", dims, [BF16] * 3, "flash_fwd_splitkv_kernel", 100.0)
                t.op("aten::mm", [[4, 4096], [4096, 4096]], [BF16, BF16], "nvjet", 20.0)
        t.sync()
    line = report(tmp_path, t).attention[0]
    assert line.bytes_needed_per_step == 8 * 40_000 * 2 * 8 * 128 * 2
    assert line.floor_us_per_step is not None and line.times_floor is not None
    assert line.floor_us_per_step == pytest.approx(line.bytes_needed_per_step / 4.8e6)
    assert line.times_floor == pytest.approx(800 / line.floor_us_per_step)
    assert report(tmp_path, t, peak_gb_per_s=2400.0).attention[0].times_floor == pytest.approx(line.times_floor / 2)


@pytest.mark.parametrize(
    ("calls", "layers", "words"),
    [(78, 78, "once in each of 78 layers"), (72, 36, "2 x 36 layers"), (23, 24, "24 layers - 1"), (73, 36, "2 x 36 layers + 1"),
     (5, 40, ""), (3.5, 24, ""), (7, None, "")],
)  # fmt: skip
def test_relations(calls: float, layers: int | None, words: str) -> None:
    assert relation(calls, layers) == words


@pytest.mark.parametrize(
    ("shape", "tokens"),
    [((10, 576), (10, 576)), ((10, 1, 576), (10, 576)), ((10, 64, 576), (640, 576)), ((10, 8, 128), (10, 1024)),
     ((10, 64, 8, 128), (640, 1024)), ((99,), (0, 0))],
)  # fmt: skip
def test_tokens_of_a_cache(shape: tuple[int, ...], tokens: tuple[int, int]) -> None:
    assert per_token(shape) == tokens
