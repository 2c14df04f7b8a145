"""The tables of whole engines in the docs say what `benchmarks/results/engines-h200.csv` says."""

from __future__ import annotations

import csv
import re
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BOLD, DEFAULT = re.compile(r"\*\*"), re.compile(r" \(the default.*\)")


def recorded(engine: str) -> dict[tuple[str, str, str], dict[str, dict[str, str]]]:
    """{(model, backend, bf16 or fp8): {batch: row}}."""
    found: dict[tuple[str, str, str], dict[str, dict[str, str]]] = {}
    with (ROOT / "benchmarks" / "results" / "engines-h200.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["engine"] == engine:
                backend, _, prefill = row["attention_backend"].partition("/")
                assert prefill in ("", "fa3")
                cache = "bf16" if row["kv_cache_dtype"] == "auto" else "fp8"
                found.setdefault((row["model"].split(" ")[0], backend, cache), {})[row["batch"]] = row
    return found


def table(page: str) -> dict[tuple[str, str, str], list[str]]:
    """{(model, backend, cache): cells after them}."""
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    rows, model = {}, ""
    for line in text[text.index("| model | backend | cache |") :].splitlines()[2:]:
        if not line.startswith("|"):
            break
        name, backend, cache, *cells = (cell.strip() for cell in BOLD.sub("", line).strip("|").split("|"))
        model = name or model
        rows[model, DEFAULT.sub("", backend).strip("`"), cache.lower()] = cells
    return rows


def rounded(value: str, like: str) -> str:
    """`value` with the digits of `like`, a number such as 2.49 or 1.6e-2."""
    digits, _, exponent = like.partition("e")
    scaled = Decimal(value).scaleb(-int(exponent or 0))
    text = str(scaled.quantize(Decimal(digits), ROUND_HALF_UP))
    return f"{text}e{exponent}" if exponent else text


@pytest.mark.parametrize(("engine", "page"), [("sglang", "sglang"), ("vllm", "vllm")])
def test_every_figure_is_recorded(engine: str, page: str) -> None:
    rows, shown = recorded(engine), table(page)
    assert shown.keys() == rows.keys()
    for key, (*times, logits) in shown.items():
        columns = [(c, b) for c in ("ms_per_token", "gpu_ms_per_token") for b in ("1", "32")]
        for cell, (column, batch) in zip(times, columns, strict=True):
            assert cell == rounded(rows[key][batch][column], cell), (key, column, batch)
        if logits != "reference":
            for cell, batch in zip(logits.split(" / "), ("1", "32"), strict=True):
                note = re.search(r"relative difference ([\d.e+-]+)", rows[key][batch]["note"])
                assert note is not None and cell == rounded(note[1], cell), (key, "logits", batch)
        else:
            assert all("reference of the logits" in row["note"] for row in rows[key].values())
