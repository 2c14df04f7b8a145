"""The HTML page holds the report, needs no other file, and works in a browser."""

from __future__ import annotations

import html.parser
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.doctor.synthetic import decode
from uncast.doctor.diagnose import diagnose
from uncast.doctor.page import render, write_page

DATA = Path(__file__).parent / "data"
BROWSER = next((b for b in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if b), None)
LONG_S = 600
"""For what ends by itself; reached only if it does not."""


def dump(folder: Path, url: str) -> subprocess.CompletedProcess[str]:
    """The document after its scripts have run, and what they wrote to the console."""
    assert BROWSER is not None
    command = [
        BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr", "--virtual-time-budget=3000", "--dump-dom", url,
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=LONG_S)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skips where there is none that shows a page of one word."""
    if BROWSER is None:
        pytest.skip("no Chromium on this machine")
    folder = tmp_path_factory.mktemp("browser")
    (folder / "page.html").write_text("<p>word</p>")
    done = dump(folder, (folder / "page.html").as_uri())
    if "word" not in done.stdout:
        pytest.skip(f"{BROWSER} does not run on this machine: {done.stderr.strip()[-200:]}")


def test_the_page_holds_the_report_and_the_step() -> None:
    page = render(diagnose(DATA / "founding_eager.json.gz"))
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    data = json.loads(found[1])
    assert data["report"]["findings"][0]["kind"] == "pool_cast"
    events = data["timeline"]["events"]
    assert len(events) == 624 and sum(e[5] for e in events) == 78
    assert all(0 <= e[0] <= e[0] + e[1] <= data["timeline"]["end"] + 1e-3 for e in events)


def test_the_page_loads_nothing_else() -> None:
    page = render(diagnose(DATA / "founding_eager.json.gz"))
    assert not re.search(r"""(?:src|href)\s*=\s*["']|@import|url\(|fetch\(""", page.replace("href: link", ""))
    html.parser.HTMLParser().feed(page)


def test_names_cannot_break_out_of_the_page(tmp_path: Path) -> None:
    t = decode(layers=4)
    for event in t.events:
        if event["name"] == "mma_decode_kernel":
            event["name"] = "</script><script>document.title='broken'</script>&<!--"
    page = render(diagnose(t.write(tmp_path / "</script>.json".replace("/", "_"))))
    assert page.count("</script>") == 2 and "<!--" not in page.split("</head>")[1]


@pytest.mark.usefixtures("browser")
@pytest.mark.parametrize("name", ["founding_eager", "founding_clean_graph"])
def test_in_a_headless_browser(tmp_path: Path, name: str) -> None:
    page = tmp_path / "page.html"
    diagnosis = diagnose(DATA / f"{name}.json.gz")
    write_page(diagnosis, page)
    done = dump(tmp_path, page.as_uri())
    assert 'data-ready="yes"' in done.stdout, done.stderr[-2000:]
    assert "Uncaught" not in done.stderr
    kernels = len(diagnosis.scene.analysed[0].kernels)
    assert f'data-drawn="{kernels}"' in done.stdout
    if diagnosis.report.findings:
        assert "66.8 GB" in done.stdout and "get_bf16_cache" in done.stdout
    else:
        assert "Nothing found" in done.stdout
