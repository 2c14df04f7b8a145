"""Verified rows between processes: for the same machine and versions only, and never in the way when they cannot be kept."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from tests.verify.registered import registered
from uncast.attention import (
    ClaimedCapabilityWarning,
    MLAPagedAttention,
    ProblemSpec,
    Refused,
    registry,
    verified,
    wrapper,
)
from uncast.attention.verified import cache_path, is_verified, read_rows
from uncast.backends.torch_cpu import TorchCpuBackend
from uncast.verify import probe_kept
from uncast.verify.cases import make_case, plan_case
from uncast.verify.probe_grid import Filters, ProbeKey
from uncast.verify.probe_run import run_probe

FILTERS = Filters(
    backends=("torch_cpu",),
    layouts=("fp8_ds_mla",),
    dtypes=("float32",),
    heads=(4,),
    page_sizes=(64,),
    modes=("decode",),
)
LONG_S = 600.0
"""A limit that only what hangs reaches."""
STRICT = """
import sys, torch
from uncast.attention import MLAPagedAttention, Refused
def one(heads):
    int32 = lambda *values: torch.tensor(values, dtype=torch.int32)
    plan = MLAPagedAttention(strict=True).plan(int32(0, 1), block_tables=int32(0)[None], seq_lens=int32(5), num_heads=heads,
                                               sm_scale=0.1, q_data_type=torch.float32)
    return plan.status
assert one(4) == "verified"
try:
    one(5)
except Refused as refused:
    print(refused)
assert not any(name.startswith("uncast.verify") for name in sys.modules)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("UNCAST_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(verified, "_verified", set())
    monkeypatch.setattr(verified, "_loaded", set())
    monkeypatch.setattr(verified, "_times", {})
    monkeypatch.setattr(wrapper, "_warned", set())
    yield tmp_path


def probe(**kw: Any) -> Any:
    return run_probe(FILTERS, device="cpu", arch=0, seconds=LONG_S, **kw)


def spec(**changes: Any) -> ProblemSpec:
    defaults: dict[str, Any] = {"num_heads": 4, "q_data_type": torch.float32, "device": "cpu", "sm_scale": 0.3}
    return ProblemSpec(**{**defaults, **changes})


def test_strict_works_in_a_later_process_which_does_not_import_the_probe() -> None:
    probe()
    done = subprocess.run([sys.executable, "-c", STRICT], capture_output=True, text=True, timeout=LONG_S)
    assert done.returncode == 0, done.stderr
    assert "torch_cpu for fp8_ds_mla, 5 heads, page size 64 on cpu is claimed but not verified" in done.stdout
    assert "run `uncast probe`, or pass strict=False" in done.stdout


def test_what_is_verified_is_what_ran_and_nothing_else() -> None:
    assert not is_verified("torch_cpu", spec())
    probe()
    same_code: list[dict[str, Any]] = [
        {"sm_scale": 0.01},
        {"lse_base": "e"},
        {"causal": False},
        {"batch_invariant": True},
    ]
    for same in [*same_code, {}, {"kv_layout": "auto"}]:
        assert is_verified("torch_cpu", spec(**same)), same
    for other in (
        {"num_heads": 8}, {"page_size": 32}, {"kv_layout": "bf16"}, {"max_q_len": 2}, {"q_data_type": torch.float16},
        {"kv_layout": "bf16", "head_dim_ckv": 256},
    ):  # fmt: skip
        assert not is_verified("torch_cpu", spec(**other)), other
    assert not is_verified("pool_cast:torch_cpu", spec())


def test_a_row_that_fails_later_is_no_longer_verified() -> None:
    row = probe().rows[0]
    assert is_verified("torch_cpu", spec())
    verified.learn([{**row, "status": "failed", "variants": []}])
    assert not is_verified("torch_cpu", spec())


def test_a_second_probe_runs_nothing_and_fresh_runs_again() -> None:
    first, second, third = probe(), probe(), probe(fresh=True)
    assert (first.cached, second.cached, third.cached) == (0, 1, 0)
    assert second.rows == first.rows and third.rows[0]["status"] == "verified"


@pytest.mark.parametrize("part", ["device", "driver", "torch", "triton", "uncast", "sgl-flash-mla"])
def test_another_version_of_anything_is_another_file(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    probe()
    assert is_verified("torch_cpu", spec())
    here = verified.machine("cpu")
    before = cache_path("cpu")
    monkeypatch.setattr(verified, "machine", lambda device: {**here, part: "another"})
    verified.forget()
    assert cache_path("cpu") != before and not is_verified("torch_cpu", spec())
    before.rename(cache_path("cpu"))  # even under the other's name, the file says what it is of
    verified.forget()
    assert read_rows("cpu") == [] and not is_verified("torch_cpu", spec())


@pytest.mark.parametrize(
    "change",
    [
        {"variants": []}, {"variants": [[True, "2", "yes"]]}, {"variants": [[True, "2", True, 4]]}, {"variants": "abc"},
        {"num_heads": None}, {"num_heads": [4]}, {"arch": [0]}, {"mode": "huh"}, {"mode": ["decode"]}, {"reason": None},
        {"row_error": "abc"}, {"few_rows_error": [1]}, {"run_us": "fast"}, {"status": "failed"}, {"backend": 7},
        *({name: ...} for name in ("num_heads", "head_dim_ckv", "row_error", "many_rows_error", "run_us", "reason", "arch")),
    ],
    ids=str,
)  # fmt: skip
def test_a_row_that_no_probe_wrote_verifies_nothing(change: dict[str, Any]) -> None:
    """`...`: without the field."""
    probe()
    stored = json.loads(cache_path("cpu").read_text(encoding="utf-8"))
    row = {name: value for name, value in (stored["rows"][0] | change).items() if value is not ...}
    cache_path("cpu").write_text(json.dumps({**stored, "rows": [row]}), encoding="utf-8")
    verified.forget()
    assert read_rows("cpu") == [] and not is_verified("torch_cpu", spec())


WRONG_ROWS = '{"machine": MACHINE, "rows": [1, {}, {"variants": [[1]]}, ROW]}'


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", "[" * 200_000, '{"machine": 3, "rows": []}', "\x00\xff", WRONG_ROWS], ids=range(8)
)
def test_a_damaged_file_verifies_nothing_and_is_replaced(text: str) -> None:
    key = ProbeKey("torch_cpu", "fp8_ds_mla", "float33", 4, 64, "decode", "cpu", 0)
    row = key.row("verified", "") | {"variants": [[1, "2", 0]]}
    text = text.replace("MACHINE", json.dumps(verified.machine("cpu"))).replace("ROW", json.dumps(row))
    cache_path("cpu").parent.mkdir(parents=True)
    cache_path("cpu").write_text(text, encoding="utf-8")
    assert read_rows("cpu") == [] and not is_verified("torch_cpu", spec())
    probe()
    assert len(read_rows("cpu")) == 1 and is_verified("torch_cpu", spec())


def test_a_folder_that_cannot_be_written_is_one_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "file").write_text("")
    monkeypatch.setenv("UNCAST_CACHE_DIR", str(folder / "file"))
    report = run_probe(
        Filters(backends=("torch_cpu",), dtypes=("float32",), modes=("decode",), quick=True), device="cpu", arch=0
    )
    assert len(report.rows) == 4 and all(row["status"] == "verified" for row in report.rows)
    assert is_verified("torch_cpu", spec(num_heads=16))  # for this process
    assert report.notes == [f"results are not kept: {cache_path('cpu')} cannot be written (Not a directory)"]


def test_the_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UNCAST_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_path("cpu").parent == Path("/xdg/uncast/probe")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the specification: ignored
    monkeypatch.setenv("HOME", "/home/of/somebody")
    assert cache_path("cpu").parent == Path("/home/of/somebody/.cache/uncast/probe")


class Worse(TorchCpuBackend):
    """Another backend of this machine, for the choice between claimed and verified; a slow one."""

    name = "worse"

    def run(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(0.02)
        super().run(*args, **kwargs)


class Rival(TorchCpuBackend):
    name = "rival"


@pytest.fixture
def two_backends(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "AUTO_ORDER", {"cpu": ("worse", "rival"), "cuda": ()})
    with registered({cls.name: f"{__name__}:{cls.__name__}" for cls in (Worse, Rival)}):
        yield


@pytest.mark.usefixtures("two_backends")
def test_auto_takes_the_first_verified_else_the_first_claimed_with_one_warning() -> None:
    case = make_case(spec(), [5], [1])

    def chosen(**kw: Any) -> tuple[str, str]:
        attention = MLAPagedAttention(**kw)
        plan_case(attention, spec(), case)
        assert attention.last_plan is not None
        return attention.last_plan.backend, attention.last_plan.status

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert chosen() == ("worse", "claimed") and chosen() == ("worse", "claimed")
        verified.mark_verified("rival", spec())
        assert chosen() == ("rival", "verified") and chosen(strict=True) == ("rival", "verified")
        verified.mark_verified("worse", spec())
        assert chosen() == ("worse", "verified")
    assert [str(w.message) for w in caught if w.category is ClaimedCapabilityWarning] == [
        "worse for fp8_ds_mla, 4 heads, page size 64 on cpu is claimed but not verified on this machine"
    ]
    with pytest.raises(Refused, match=r"native cannot run this: .* on cuda, not on cpu; use worse or rival$"):
        chosen(backend="native")


@pytest.mark.usefixtures("two_backends")
def test_auto_takes_the_fastest_of_a_probe_and_the_first_where_a_time_is_missing() -> None:
    filters = Filters(
        backends=("worse", "rival", "torch_cpu"), layouts=("fp8_ds_mla",), dtypes=("float32",), heads=(4,),
        page_sizes=(64,), modes=("decode",),
    )  # fmt: skip
    rows = {row["backend"]: row for row in run_probe(filters, device="cpu", arch=0, seconds=LONG_S).rows}
    assert rows["torch_cpu"]["run_us"] is None  # auto has no choice to make with it
    assert rows["worse"]["run_us"] > 20_000 and rows["rival"]["run_us"] > 0
    fastest = min(("worse", "rival"), key=lambda name: rows[name]["run_us"])
    assert MLAPagedAttention().resolve(spec()) == fastest
    for times, expected in (
        ((2.0, 1.0), "rival"),
        ((1.0, 2.0), "worse"),
        ((2.0, None), "worse"),
        ((None, 1.0), "worse"),
    ):
        verified.forget()
        verified.learn(rows[name] | {"run_us": us} for name, us in zip(("worse", "rival"), times, strict=True))
        assert MLAPagedAttention().resolve(spec()) == expected, times


@pytest.mark.usefixtures("two_backends")
def test_rows_of_backends_from_elsewhere_are_not_kept() -> None:
    report = run_probe(
        Filters(backends=("rival", "pool_cast:rival"), layouts=("fp8_e4m3",), quick=True), device="cpu", arch=0
    )
    assert len(report.rows) == 12 and all(row["status"] == "verified" for row in report.rows)
    assert read_rows("cpu") == []


KEEP = """
import sys
from uncast.verify.probe_grid import ProbeKey
from uncast.verify.probe_kept import keep
for page in (1, 2, 4, 8, 16, 32, 64, 128):
    key = ProbeKey("torch_cpu", "bf16", "float32", int(sys.argv[1]), page, "decode", "cpu", 0)
    assert keep("cpu", [key.row("verified", "", variants=[[True, "2", False]])]) == ""
"""


def test_probes_side_by_side_keep_each_others_rows() -> None:
    both = [subprocess.Popen([sys.executable, "-c", KEEP, str(heads)]) for heads in (1, 2)]
    assert [process.wait(LONG_S) for process in both] == [0, 0]
    assert len(read_rows("cpu")) == 16


def test_a_file_that_cannot_be_locked_is_written_and_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_kept, "LOCK_SECONDS", 0.1)
    rows = [ProbeKey("torch_cpu", "bf16", "float32", heads, 64, "decode", "cpu", 0) for heads in (1, 2)]
    kept = [key.row("verified", "", variants=[[True, "2", False]]) for key in rows]
    path = cache_path("cpu")
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        note = probe_kept.keep("cpu", kept[:1])
    assert note == (
        f"{path} was not locked (another process has held it for 0.1 s): another probe at this time may lose rows"
    )

    def refuses(lock: FileLock) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patch:
        patch.setattr(FileLock, "acquire", refuses)
        assert "was not locked ([Errno 37] No locks available): another" in probe_kept.keep("cpu", kept[1:])
    assert probe_kept.keep("cpu", kept) == "" and len(read_rows("cpu")) == 2
