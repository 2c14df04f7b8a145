"""A GGUF file's inventory against that of the Hugging Face folder that it was made from."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf")

from gguf import GGMLQuantizationType as Kind

from tests.checkpoints.gguf_files import write_gguf
from tests.fixtures import build_hf
from uncast.checkpoints.gguf_file import GgufFile
from uncast.checkpoints.inventory import Module, gguf_modules, gguf_place, modules, read_headers
from uncast.cli.main import main


def parameters(found: list[Module]) -> Counter[tuple[int | None, str]]:
    total: Counter[tuple[int | None, str]] = Counter()
    for module in found:
        total[module.layer, "norms" if module.part == "attention" and "norm" in module.name else module.part] += (
            module.parameters
        )
    return total


@pytest.mark.parametrize("family", ["glm_moe_dsa_52", "deepseek_v2_lite"])
def test_parts_have_the_parameters_of_the_folder(family: str, tmp_path: Path) -> None:
    build_hf(family, tmp_path / "hf", num_hidden_layers=3)
    write_gguf(tmp_path / "hf", tmp_path / "model.gguf", [Kind.Q8_0, Kind.Q4_0, Kind.F16])
    found = gguf_modules(GgufFile(tmp_path / "model.gguf").tensors, 3)
    assert parameters(found) == parameters(modules(read_headers(tmp_path / "hf"), 3))
    assert {"Q8_0", "Q4_0", "F16", "F32"} >= {module.format for module in found} > {"F32"}


def test_inspect_of_a_gguf_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build_hf("glm_moe_dsa_52", tmp_path / "hf", num_hidden_layers=2)
    path = tmp_path / "model.gguf"
    write_gguf(tmp_path / "hf", path, [Kind.Q8_0])

    def facts(of: Path) -> dict[str, Any]:
        assert main(["inspect", str(of), "--json", "--context", "100", "--memory", "1"]) == 0
        read: dict[str, Any] = json.loads(capsys.readouterr().out)
        return read

    gguf, folder = facts(path), facts(tmp_path / "hf")
    assert gguf["architecture"]["indexer"] == folder["architecture"]["indexer"]
    assert gguf["weights"]["parameters"] == folder["weights"]["parameters"]
    assert gguf["weights"]["bytes"] < folder["weights"]["bytes"] / 2 and gguf["weights"]["stored"]
    assert [c["bytes_per_token"] for c in gguf["cache"]] == [c["bytes_per_token"] for c in folder["cache"]]
    assert gguf["notes"][0].startswith("uncast multiplies GGUF blocks out when it loads them: 0.0 GB in BF16")


def test_a_damaged_gguf_file_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + b"\xff" * 60)
    assert main(["inspect", str(tmp_path / "model.gguf")]) == 1
    captured = capsys.readouterr()
    assert "is not a whole GGUF file" in captured.err and captured.err.count("\n") == 1


def test_places_of_llama_cpps_names() -> None:
    for name, expected in {
        "token_embd": (None, "embedding"),
        "output": (None, "LM head"),
        "blk.7.attn_k_b": (7, "attention"),
        "blk.7.indexer.attn_k": (7, "indexer"),
        "blk.7.ffn_gate_inp": (7, "router"),
        "blk.7.exp_probs_b": (7, "router"),
        "blk.7.ffn_up_exps": (7, "experts"),
        "blk.7.ffn_up_shexp": (7, "shared experts"),
        "blk.7.ffn_up": (7, "dense MLP"),
        "blk.7.ffn_norm": (7, "norms"),
        "blk.9.attn_q_b": (9, "MTP"),
        "blk.8.nextn.eh_proj": (8, "MTP"),
    }.items():
        assert gguf_place(name, 9) == expected
