"""README's figures are the recorded ones, and its local links lead somewhere."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest

from uncast.bench.readme import render

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_are_generated_from_the_recorded_results(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    text = page.read_text(encoding="utf-8")
    assert render(text) == text, "run: python -m uncast.bench.readme"


def test_readmes_python_runs_as_written(capsys: pytest.CaptureFixture[str]) -> None:
    """The blocks in order, in one namespace, as a reader would paste them."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    namespace: dict[str, object] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for block in blocks:
            exec(compile(block, "README.md", "exec"), namespace)
    out = capsys.readouterr().out
    assert "torch_cpu 98400 98400 0" in out and "bytes of the KV pool in another buffer" in out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_local_links_exist(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target
