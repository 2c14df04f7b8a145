"""Real traces of other projects (vLLM, SGLang, Hugging Face, training). They lie beside the repository, not in it."""

from __future__ import annotations

import collections
from pathlib import Path

import pytest

from uncast.doctor.diagnose import Diagnosis, Options, diagnose
from uncast.doctor.link import link
from uncast.doctor.reader import read_trace

SHARED = Path(__file__).parents[3] / "shared" / "traces"
pytestmark = pytest.mark.skipif(not SHARED.is_dir(), reason=f"no real traces at {SHARED}")


def run(name: str, options: Options | None = None) -> Diagnosis:
    return diagnose(SHARED / f"{name}.json.gz", options)


def test_vllm_table_cast() -> None:
    r = run("vllm_decode_graph").report
    assert r.layers == 24 and r.judged == "decode" and r.live_tokens == 55_086
    assert r.graphs is not None and (r.graphs.joined, r.graphs.replayed) == (421, 421)
    f = next(f for f in r.findings if f.kind == "table_cast")
    assert (f.calls_per_step, f.shape, f.dtype_from, f.dtype_to) == (23, [131_072, 64], "fp32", "bf16")
    assert f.bytes_per_call is not None and f.bytes_needed_per_step is not None
    assert f.bytes_per_call == 131_072 * 64 * 6 and round(f.bytes_per_call / 1e6, 1) == 50.3
    assert f.us_per_step == pytest.approx(292.4, abs=0.1) and round(100 * f.share_of_step, 1) == 2.7
    assert f.bytes_needed_per_step / 23 == 32 * 64 * 6 and f.confidence == "joined"
    assert f.source is not None and f.source.startswith("vllm/model_executor/models/gpt_oss.py")
    assert r.gpu_busy_us == pytest.approx(10_718, abs=1)


def test_sglang_strided_copies() -> None:
    r = run("sglang_decode_graph").report
    assert r.layers == 36 and r.live_tokens == 32_785
    assert r.graphs is not None and (r.graphs.joined, r.graphs.replayed) == (544, 544)
    (f,) = r.findings
    assert (f.kind, f.calls_per_step, f.layers_relation) == ("strided_copy", 72, "2 x 36 layers")
    assert f.us_per_step == pytest.approx(346.7, abs=0.1) and f.confidence == "joined"
    assert f.source == "sglang/srt/models/utils.py(394): _reshape_for_qk_norm"
    assert 0.03 < f.share_of_step < 0.036


@pytest.mark.parametrize("name", ["vllm_decode_graph", "sglang_decode_graph"])
def test_amd_graphs_without_capture_say_so(name: str, tmp_path: Path) -> None:
    alone = tmp_path / "t.json.gz"
    alone.write_bytes((SHARED / f"{name}.json.gz").read_bytes())
    r = diagnose(alone).report
    assert any("neither shapes nor grids" in note for note in r.notes)
    assert all(f.confidence in ("inferred", "unknown") and f.source is None for f in r.findings)


def test_no_operator_is_mislinked_in_legacy_files() -> None:
    """Every launched kernel nests in an operator, and each kernel name meets operators that can launch it."""
    trace = read_trace(SHARED / "rtx2080_legacy_ids.json.gz")
    links = link(trace)
    meets: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for kernel in range(len(trace.kernels)):
        op = links.op_of_kernel(kernel)
        assert op >= 0
        launch = links.launch[kernel]
        assert trace.ops.lane[op] == trace.launches.lane[launch]
        assert trace.ops.ts[op] <= trace.launches.ts[launch] <= trace.ops.end(op)
        meets[trace.names[trace.kernels.name[kernel]]][trace.names[trace.ops.name[op]]] += 1
    fits = {
        "max_pool_forward": ("aten::max_pool2d_with_indices",), "batch_norm_bw": ("aten::cudnn_batch_norm_backward",),
        "bn_bw": ("aten::cudnn_batch_norm_backward",), "bn_fw": ("aten::cudnn_batch_norm",),
        "softmax_warp_forward": ("aten::_log_softmax",), "softmax_warp_backward": ("aten::_log_softmax_backward_data",),
        "nll_loss_forward": ("aten::nll_loss_forward",), "nll_loss_backward": ("aten::nll_loss_backward",),
        "direct_copy_kernel": ("aten::copy_",), "dgrad": ("aten::cudnn_convolution_backward", "aten::convolution_backward"),
        "wgrad": ("aten::cudnn_convolution_backward", "aten::convolution_backward"),
        "Memcpy": ("aten::copy_", "aten::_local_scalar_dense", "aten::eq", "aten::item"),
    }  # fmt: skip
    checked = 0
    for name, ops in meets.items():
        for word, allowed in fits.items():
            if word in name:
                checked += sum(ops.values())
                assert set(ops) <= set(allowed), (name, ops)
    assert checked > 1000


def test_training_with_graphs_and_legacy_ids() -> None:
    r = run("a100_train_cuda_graphs").report
    assert r.steps == 5 and r.steps_found_by == "ProfilerStep" and r.graphs is not None and r.graphs.joined == 0
    assert r.judged == "training" and [p.phase for p in r.phases] == ["training"]
    assert not any(f.kind in ("pool_cast", "table_cast") for f in r.findings)


def test_hugging_face_prefill() -> None:
    r = run("h100_hf_qwen_eager").report
    assert r.layers == 24 and r.judged == "prefill"
    kinds = {f.kind: f for f in r.findings}
    assert kinds["strided_copy"].calls_per_step == 96 and kinds["cast_round_trip"].calls_per_step == 98
    assert "modeling_qwen2.py" in (kinds["cast_round_trip"].source or "")


def test_gpu_events_only() -> None:
    r = run("mi210_gpu_only").report
    assert r.findings == [] and any("boundaries are a guess" in note for note in r.notes)


def test_a_capture_pass_is_recognised() -> None:
    r = run("vllm_decode_graph.capture").report
    assert any("capture pass of a graph" in note for note in r.notes)
