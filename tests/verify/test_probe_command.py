"""`uncast probe` as a user runs it: filters, tables, JSON, claims, errors in one sentence."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from uncast.attention import ProblemSpec, registry
from uncast.cli.main import main
from uncast.cli.probe_tables import progress
from uncast.verify.probe_claims import claims, ranges
from uncast.verify.probe_grid import Filters

DOCS = Path(__file__).parents[2] / "docs" / "probe.md"
ONE = ("--backend", "torch_cpu", "--layout", "fp8_e4m3", "--dtype", "float32", "--mode", "decode", "--heads", "3")
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="describes a machine without a GPU")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("UNCAST_CACHE_DIR", str(tmp_path))
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str, str]:
    code = main(["probe", *options])
    out = capsys.readouterr()
    return code, out.out, out.err


def matrix() -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["backend"], row["kv_layout"]): row for row in claims(Filters())}


@no_gpu
def test_json_has_the_filtered_rows_and_the_described_fields(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--backend", "torch_cpu", "--backend", "native", "--backend", "pool_cast:torch_cpu"]
    options += [
        "--layout",
        "fp8_e4m3",
        "--layout",
        "bf16",
        "--heads",
        "3",
        "--heads",
        "7",
        "--page-size",
        "8",
        "--page-size",
        "16",
    ]
    code, out, err = run(capsys, *options, "--dtype", "bfloat16", "--mode", "extend", "--json")
    assert code == 0 and err == ""
    report = json.loads(out)
    combinations = {(row["backend"], row["kv_layout"], row["num_heads"], row["page_size"]) for row in report["rows"]}
    able = [("torch_cpu", "fp8_e4m3"), ("torch_cpu", "bf16"), ("pool_cast:torch_cpu", "fp8_e4m3")]
    assert combinations == {(*pair, heads, page) for pair in able for heads in (3, 7) for page in (8, 16)}
    assert report["counts"] == {"verified": 12, "failed": 0, "skipped": 0} and report["cached_rows"] == 0
    assert all(
        0 < row["tensor_error"] <= row["row_error"] < 1e-2 and len(row["variants"]) == 8 for row in report["rows"]
    )
    refused = {(entry["backend"], *entry["layouts"]): entry for entry in report["refused"]}
    assert refused["native", "fp8_e4m3", "bf16"]["reason"] == "the native kernels run on cuda, not on cpu"
    assert refused["pool_cast:torch_cpu", "bf16"]["keys"] == 4
    described = DOCS.read_text()
    fields = {
        *report,
        *report["rows"][0],
        *report["refused"][0],
        *report["would_probe_on_a_gpu"][0],
        *claims(Filters())[0],
    }
    for name in fields:
        assert f"`{name}`" in described, f"docs/probe.md does not describe {name}"


@no_gpu
def test_the_text_says_what_ran_what_is_refused_and_what_a_gpu_would_add(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *ONE, "--backend", "native")
    assert code == 0 and err == ""
    assert "2 verified, 0 failed, 0 skipped\n" in out
    assert "refused: native for fp8_e4m3: the native kernels run on cuda, not on cpu\n" in out
    assert "fp8_e5m2" not in out  # another layout was asked for
    assert "There is no GPU here. On one, the probe would also run:\n" in out
    for backend, layouts in (
        ("native", "fp8_ds_mla, fp8_e4m3, bf16"),
        ("flashinfer_fa3", "fp8_e4m3, bf16"),
        ("flashmla", "bf16"),
        ("flashinfer_xqa", "bf16"),
    ):
        assert f"  {backend}: {layouts} (" in out
    assert "2 verified, 0 failed, 0 skipped; 2 of them from " in run(capsys, *ONE)[1]


@no_gpu
def test_layouts_that_no_backend_reads_are_among_the_refusals(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "--backend", "native", "--quick", "--json")
    (entry,) = (entry for entry in json.loads(out)["refused"] if entry["backend"] == "all")
    assert entry["layouts"] == ["fp8_e5m2"] and "no kernel reads e5m2 rows" in entry["reason"]


def test_a_failing_row_is_shown_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    from tests.verify.broken import PATHS

    try:
        code, out, _ = run(
            capsys, "--register", f"zeros={PATHS['zeros']}", *ONE, "--backend", "zeros", "--page-size", "64"
        )
    finally:
        registry._BACKENDS.pop("zeros")
    flat = " ".join(out.replace("│", " ").split())
    assert code == 0 and "1 verified, 1 failed, 0 skipped" in flat
    assert "zeros fp8_e4m3 float32 3 64 decode failed zeros gives zeros only, and the oracle does not" in flat


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--backend", "fa4"], "unknown attention backend 'fa4': use one of flashinfer_cutlass, "),
        (["--layout", "fp8_e5m2"], "KV cache layout 'fp8_e5m2' is refused: no kernel reads e5m2 rows"),
        (["--layout", "fp4"], "unknown KV cache layout 'fp4': use one of auto, "),
        (["--backend", "torch_cpu", "--page-size", "48"], "page_size is 48: allowed are powers of two from 1 to 128"),
        (["--heads", "129"], "'129' is not a number from 1 to 128"),
        (["--heads", "x"], "'x' is not a number from 1 to 128"),
        (["--dtype", "float64"], "invalid choice: 'float64'"),
        (["--jobs", "0"], "'0' is not a number from 1 to 16"),
        (["--timeout", "0"], "'0' is not a number of seconds above 0"),
        (["--timeout", "nan"], "'nan' is not a number of seconds above 0"),
        (["--register", "mine"], "'mine' is not NAME=MODULE:CLASS"),
        (["--register", "a:b=m:C"], "a backend name has no colon: 'a:b'"),
        (["--register", "auto=m:C"], "'auto' is a name of uncast's own: choose another"),
        (
            ["--register", "torch_cpu=tests.verify.broken:Zeros"],
            "'torch_cpu' is a name of uncast's own: choose another",
        ),
        (["--register", "ghost=.m:C"], "the attention backend 'ghost' cannot be imported: TypeError: "),
        (
            ["--register", "ghost=tests.verify.raises_on_import:C"],
            "'ghost' cannot be imported: SystemExit: not for you",
        ),
        (["--heads", "²"], "'²' is not a number from 1 to 128"),
        (["--jobs", "²"], "'²' is not a number from 1 to 16"),
        (["--claims", "--layout", "fp4"], "unknown KV cache layout 'fp4': use one of auto, "),
        (["--claims", "--heads", "3"], "--claims runs nothing and covers all shapes: leave out --heads"),
        (["--claims", "--page-size", "3"], "--claims runs nothing and covers all shapes: leave out --page-size"),
        (["--claims", "--quick"], "--claims runs nothing and covers all shapes: leave out --quick"),
    ],
)
def test_bad_input_is_one_sentence(options: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["probe", *options])
    except SystemExit as stop:
        code = int(str(stop.code))
    finally:
        registry._BACKENDS.pop("ghost", None)
    captured = capsys.readouterr()
    assert code == 2 and captured.out == ""
    assert sentence in captured.err and captured.err.strip().splitlines()[-1].startswith("uncast")


def test_auto_is_the_layout_that_it_stands_for(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(
        capsys, "--backend", "torch_cpu", "--layout", "auto", "--layout", "fp8_ds_mla", *ONE[4:], "--quick", "--json"
    )
    assert [row["kv_layout"] for row in json.loads(out)["rows"]] == ["fp8_ds_mla"]
    _, out, _ = run(capsys, "--claims", "--layout", "auto", "--layout", "fp8_e5m2", "--backend", "native", "--json")
    assert [(row["kv_layout"], row["status"]) for row in json.loads(out)["claims"]] == [
        ("fp8_ds_mla", "claimed"),
        ("fp8_e5m2", "refused"),
    ]


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("no_such_module:Ghost", "the attention backend 'ghost' cannot be imported: No module named 'no_such_module'"),
        (
            "uncast.version:Ghost",
            "the attention backend 'ghost' cannot be imported: module 'uncast.version' has no attr",
        ),
        ("uncast.version:__version__", "'ghost' is registered as uncast.version:__version__, which is not a class of"),
    ],
)
def test_a_registered_backend_that_does_not_exist_is_refused(
    path: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code, out, err = run(capsys, "--register", f"ghost={path}", "--backend", "ghost", "--quick", "--json")
    finally:
        registry._BACKENDS.pop("ghost")
    assert (code, out) == (2, "") and err.startswith(f"uncast: --register ghost={path}: {sentence}")
    assert err.count("\n") == 1


def test_a_cache_that_cannot_be_written_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "file").write_text("")
    monkeypatch.setenv("UNCAST_CACHE_DIR", str(folder / "file"))
    code, out, err = run(capsys, *ONE, "--quick")
    assert code == 0 and "1 verified" in out
    assert err.startswith("uncast: results are not kept: ") and err.count("\n") == 1


def test_progress_is_for_terminals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    row = {"backend": "native", "kv_layout": "bf16"}
    plain, terminal = io.StringIO(), Terminal()
    with progress(plain) as on_row:
        assert on_row is None
    with progress(terminal) as on_row:
        assert on_row is not None
        on_row(row, 1, 7)
    assert plain.getvalue() == "" and "native bf16" in terminal.getvalue() and "1/7" in terminal.getvalue()


def test_the_documented_matrix_of_the_peers() -> None:
    """Facts of flashinfer 0.7.2 and sgl-flash-mla 1.0.0: a change here is a change of their contracts."""
    rows = matrix()
    for kernel in ("flashinfer_fa2", "flashinfer_fa3"):
        fp8 = rows[kernel, "fp8_e4m3"]
        assert fp8["gpus"] == {"sm_90": ["bfloat16"]} and fp8["head_dims"] == ["512/64"] and not fp8["batch_invariant"]
        assert fp8["heads"] == "1-128" and fp8["heads_causal_extend"] == "1, 2, 4, 8, 16, 32, 64, 128"
        assert rows[kernel, "fp8_ds_mla"]["status"] == "refused" and fp8["package"] == "flashinfer-python"
    assert set(rows["flashinfer_fa2", "bf16"]["gpus"]) == {f"sm_{n}" for n in (80, 86, 89, 90, 100, 103, 120, 121)}
    assert set(rows["flashinfer_fa3", "bf16"]["gpus"]) == {"sm_90"}
    assert rows["flashmla", "fp8_e4m3"]["reason"] == "flashmla reads a bf16 cache, not fp8_e4m3"
    lossy = rows["flashmla_lossy_q", "fp8_e4m3"]
    assert (
        lossy["lossy_q"] and lossy["uniform_q_len"] and lossy["page_sizes"] == [64] and set(lossy["gpus"]) == {"sm_90"}
    )
    native = rows["native", "fp8_ds_mla"]
    assert (
        native["heads"] == native["heads_causal_extend"] == "1-128"
        and native["cuda_graph"]
        and native["batch_invariant"]
    )
    blackwell = rows["flashinfer_trtllm_gen", "bf16"]
    assert (
        set(blackwell["gpus"]) == {"sm_100", "sm_103"}
        and blackwell["page_sizes"] == [32, 64]
        and blackwell["extend"] is False
    )
    assert blackwell["heads_causal_extend"] == blackwell["heads"] == "1, 2, 4, 8, 16, 32, 64, 128"
    for name, chips in (("flashinfer_xqa", {"sm_120", "sm_121"}), ("flashinfer_cutlass", {"sm_100", "sm_103"})):
        row = rows[name, "bf16"]
        assert set(row["gpus"]) == chips and row["heads"] == "128" and row["lse_bases"] == [] and not row["causal"]
        assert rows[name, "fp8_e4m3"]["reason"] == (
            f"{name} takes bfloat16 queries over a bf16 cache, not bfloat16 queries over fp8_e4m3"
        )
    promises = {key: (row["large_output_error"], row["any_output_error"]) for key, row in rows.items()}
    for key in (("native", "fp8_ds_mla"), ("native", "bf16"), ("pool_cast:torch_cpu", "fp8_e4m3")):
        assert promises[key] == promises["gather_cast:native", "fp8_e4m3"] == (0.0025, 0.0025)
    assert promises["flashmla", "bf16"] == promises["gather_cast:flashmla", "fp8_e4m3"] == (0.0025, 0.0042)
    assert (
        promises["flashinfer_fa3", "fp8_e4m3"] == promises["pool_cast:flashinfer_fa2", "fp8_ds_mla"] == (0.003, 0.0046)
    )
    assert promises["flashmla_lossy_q", "fp8_e4m3"] == (0.05, 0.05) and promises["native", "fp32"] == (None, None)
    assert rows["gather_cast:flashmla", "fp8_ds_mla"]["reads"] == "a bf16 copy"
    assert rows["all", "fp8_e5m2"]["reason"].startswith("KV cache layout 'fp8_e5m2' is refused")
    assert all(row["reason"] if row["status"] == "refused" else row["gpus"] for row in rows.values())


def test_claims_run_nothing_and_tell_what_is_installed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("uncast.cli.probe.run_probe", None)
    code, out, _ = run(capsys, "--claims", "--json", "--backend", "native", "--layout", "fp8_e4m3")
    (row,) = json.loads(out)["claims"]
    assert code == 0 and row["package"] == "triton" and row["installed"] not in ("", "not installed")
    code, out, _ = run(capsys, "--claims")
    assert code == 0 and max(map(len, out.splitlines())) < 170
    assert (
        "\nflashmla (sgl-flash-mla: " in out
        and "\n  bf16: sm_90 with bf16 queries\n      heads 1-128; pages 64; " in out
    )
    assert out.count("reads values rounded to bf16\n") == 2  # flashinfer_fa2 and _fa3, over fp8_e4m3 only
    assert "\n  refused: fp8_e5m2 (KV cache layout 'fp8_e5m2' is refused: no kernel reads e5m2 rows" in out
    assert (
        "\ngather_cast:NAME and pool_cast:NAME: FP8 layouts, as a BF16 copy, wherever NAME claims bf16\nerror: " in out
    )
    assert "a large one is of 281 (query row, head) or more (docs/probe.md)\n" in out
    out = run(
        capsys, "--claims", *(f"--backend={name}" for name in ("native", "torch_cpu", "flashmla", "flashinfer_fa3"))
    )[1]
    assert (
        out.count("      error up to 2.5e-03\n") == 7
        and out.count("      error up to 2.5e-03 of a large output, 4.2e-03 of any\n") == 1
    )
    assert out.count("      error up to 3.0e-03 of a large output, 4.6e-03 of any\n") == 2
    assert "large" not in run(capsys, "--claims", "--backend", "native", "--layout", "fp8_e4m3")[1]


def test_no_claim_of_the_matrix_is_taken_back_by_the_backend() -> None:
    """Every chip and dtype in the matrix is one that the backend's capability accepts, and no other is."""
    ask = registry.create("native")
    row = matrix()["native", "fp8_e4m3"]
    for arch in (70, 75, 80, 86, 89, 90, 100, 103, 120, 121):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            spec = ProblemSpec(num_heads=16, kv_layout="fp8_e4m3", q_data_type=dtype, arch=arch)
            listed = str(dtype).removeprefix("torch.") in row["gpus"].get(f"sm_{arch}", [])
            assert ask.capability(spec).ok is listed, (arch, dtype)


def test_ranges() -> None:
    assert ranges([]) == "" and ranges([5]) == "5" and ranges([1, 2]) == "1, 2"
    assert ranges([1, 2, 3, 7, 9, 10, 11, 12]) == "1-3, 7, 9-12"
