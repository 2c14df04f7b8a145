"""That the random sweep runs without a GPU, and fails where a kernel is wrong."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from tests.kernels import sweep
from uncast.kernels import wgmma_launch


def run(capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    with pytest.raises(SystemExit) as end:
        sweep.main(["--emulate", "--cases", "3", "--backend", "native", "--seed", "5"])
    return int(end.value.code or 0), capsys.readouterr().out


def test_emulated_cases_pass(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys)
    assert code == 0 and "3 of 3 cases, 0 failures" in out and "WgmmaPlan" in out and "MmaPlan" in out, out


def test_a_wrong_kernel_is_found(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wgmma_launch, "LOG2E", 1.0)
    code, out = run(capsys)
    assert code == 1 and ", 0 failures" not in out and "case " in out, out
