"""Profiles of SGLang's attention steps on an H200 (8 layers, FP8 cache of 495,552 rows): its own backend beside ours."""

from __future__ import annotations

from pathlib import Path

from uncast.doctor.diagnose import Options, diagnose

DATA = Path(__file__).parent / "data"


def test_sglangs_flashinfer_backend_casts_the_pool_in_every_layer() -> None:
    report = diagnose(DATA / "sglang_flashinfer.json.gz", Options()).report
    casts = [f for f in report.findings if f.kind == "pool_cast"]
    assert len(casts) == 1 and casts[0].calls_per_step == 8 and report.live_tokens == 8192


def test_ours_in_the_same_objects_moves_no_pool() -> None:
    report = diagnose(DATA / "sglang_uncast.json.gz", Options()).report
    assert not [f for f in report.findings if "cast" in f.kind or "gather" in f.kind]
    assert any("wgmma_decode" in a.kernel for a in report.attention)
