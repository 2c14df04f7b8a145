"""GGUF files of every architecture and of mixed block types. A failure means that a published GGUF is read wrongly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("gguf")

import gguf
import numpy as np
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize

from tests.checkpoints.gguf_files import MIXED, gguf_tensors, write_file, write_gguf
from tests.fixtures import FAMILIES, build_hf
from uncast.checkpoints.files import CheckpointError, DamagedCheckpoint
from uncast.checkpoints.gguf_file import GgufFile, companion_folder, gguf_path
from uncast.checkpoints.gguf_source import GgufSource
from uncast.checkpoints.load import load_config, load_model
from uncast.engine.runner import ModelRunner, Sequence

pytestmark = pytest.mark.filterwarnings("ignore::uncast.attention.ClaimedCapabilityWarning")


def logits(path: Path, tokens: int = 40) -> torch.Tensor:
    model = load_model(path)
    runner = ModelRunner(model, kv_layout="fp32", num_pages=1)
    sequence = Sequence([7 * i % model.config.vocab_size for i in range(tokens)])
    runner.ensure_pages(sequence, tokens)
    return runner.step([(sequence, tokens)], every_token=True)


def with_values(folder: Path, target: Path, meant: dict[str, torch.Tensor], file: GgufSource) -> None:
    """The folder with the values that the GGUF's tensors stand for."""
    target.mkdir()
    (target / "config.json").write_text((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    save_file({k: file.get(k, tuple(t.shape), torch.float32) for k, t in tensors.items()}, target / "model.safetensors")
    for name, tensor in gguf_tensors(target).items():
        assert torch.equal(tensor, meant[name]), name


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in ("kimi_k2", "minicpm3")])
def test_every_architecture_gives_the_logits_of_its_values(family: str, tmp_path: Path) -> None:
    """The same model as a Hugging Face folder with the dequantised values: every name, shape and metadata field counts."""
    folder, path = tmp_path / "hf", tmp_path / "model.gguf"
    build_hf(family, folder, num_hidden_layers=2, sharpen=4.0)
    meant = write_gguf(folder, path, MIXED)
    with_values(folder, tmp_path / "dense", meant, GgufSource(path))
    eps = json.loads((folder / "config.json").read_text())["rms_norm_eps"]
    assert load_config(path).rms_norm_eps == pytest.approx(eps, rel=1e-6)
    expected, got = logits(tmp_path / "dense"), logits(path)
    assert float((got - expected).abs().max()) < 1e-5 * float(expected.abs().max()), "metadata is float32"


def test_older_files_have_kv_b_in_one(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    build_hf("deepseek_v3", folder, num_hidden_layers=2)
    for name, joined in (("new.gguf", False), ("old.gguf", True)):
        write_gguf(folder, tmp_path / name, [Kind.F32], joined_kv_b=joined)
    assert torch.equal(logits(tmp_path / "new.gguf"), logits(tmp_path / "old.gguf"))


QUANTISED = [
    kind for kind in Kind
    if kind not in (Kind.F32, Kind.F16, Kind.I8, Kind.I16, Kind.I32, Kind.I64, Kind.F64, Kind.Q8_1, Kind.Q8_K)
]  # fmt: skip


def one_tensor(path: Path, kind: Kind, rows: int, columns: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """A file with blocks of random bytes; returns them."""
    block, size = GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(seed).integers(0, 256, (rows, columns // block * size), dtype=np.uint8)
    writer = gguf.GGUFWriter(path, "deepseek2")
    writer.add_tensor("token_embd.weight", raw, raw_dtype=kind)
    write_file(writer)
    return raw


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
def test_every_block_type_equals_the_packages_own_values(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any bytes, read in pieces."""
    monkeypatch.setattr("uncast.checkpoints.gguf_file.PIECE_BYTES", 700)
    raw, out = one_tensor(tmp_path / "a.gguf", kind, 7, 512), torch.empty(7, 512)
    with np.errstate(all="ignore"):
        try:
            expected = torch.from_numpy(dequantize(raw, kind).copy())
        except NotImplementedError:
            with pytest.raises(DamagedCheckpoint, match=f"is {kind.name}: the gguf package cannot dequantise"):
                GgufFile(tmp_path / "a.gguf").fill("token_embd.weight", out)
            return
        GgufFile(tmp_path / "a.gguf").fill("token_embd.weight", out)
    assert torch.equal(out.isnan(), expected.isnan()), "which NaN it is, is the processor's affair"
    bits, wanted = (x.nan_to_num(0.0, torch.inf, -torch.inf).view(torch.int32) for x in (out, expected))
    assert torch.equal(bits, wanted)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("v3")
    build_hf("deepseek_v3", folder, num_hidden_layers=2)
    return folder


def test_damage_is_one_sentence(saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(saved, path, [Kind.Q8_0])
    whole = path.read_bytes()
    for size in (0, 3, 100, 5000, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(DamagedCheckpoint, match="is not a whole GGUF file"):
            load_model(path)
    with pytest.raises(CheckpointError, match=r"cannot read .*none.gguf: No such file"):
        load_model(tmp_path / "none.gguf")


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ({"general.architecture": "llama"}, "of architecture 'llama': deepseek2, deepseek32, glm-dsa are supported"),
        ({"deepseek2.rope.scaling.type": "linear"}, "rope.scaling.type 'linear': none and yarn are supported"),
        ({"deepseek2.expert_used_count": 99}, "chooses 99 of 8 experts"),
        ({"deepseek2.embedding_length": 512}, r"shape \[512, 256\]: \[512, 512\] is needed"),
        ({"deepseek2.attention.head_count": 8}, r"are for 4 heads of 128 \+ 128 rows|is needed"),
        ({"deepseek2.expert_count": 16}, "16"),
    ],
)
def test_metadata_that_does_not_fit_is_one_sentence(
    saved: Path, tmp_path: Path, overrides: dict[str, Any], sentence: str
) -> None:
    path = tmp_path / "model.gguf"
    architecture = overrides.pop("general.architecture", None)
    write_gguf(saved, path, [Kind.F16], overrides=overrides)
    if architecture is not None:
        path.write_bytes(path.read_bytes().replace(b"deepseek2", b"llama\0\0\0\0", 1))
        sentence = "of architecture 'llama"
    with pytest.raises(CheckpointError, match=sentence):
        load_model(path)


def test_a_missing_field_and_a_missing_tensor_are_named(saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(saved, path, [Kind.F16])
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"deepseek2.attention.kv_lora_rank", b"deepseek2.attention.kv_lora_rink"))
    with pytest.raises(DamagedCheckpoint, match=r"has no metadata field deepseek2.attention.kv_lora_rank"):
        load_model(path)
    path.write_bytes(whole.replace(b"blk.1.attn_v_b.weight", b"blk.1.attn_v_c.weight"))
    with pytest.raises(DamagedCheckpoint, match=r"has neither blk.1.attn_kv_b.weight nor blk.1.attn_v_b.weight"):
        load_model(path)
    path.write_bytes(whole.replace(b"blk.1.ffn_up_exps.weight", b"blk.1.ffn_up_exqs.weight"))
    with pytest.raises(DamagedCheckpoint, match=r"has no tensor blk.1.ffn_up_exps.weight"):
        load_model(path)


def test_a_folder_with_one_model_is_that_model(saved: Path, tmp_path: Path) -> None:
    write_gguf(saved, tmp_path / "model.gguf", [Kind.F16])
    assert gguf_path(tmp_path) == tmp_path / "model.gguf" == gguf_path(tmp_path / "model.gguf")
    assert gguf_path(saved) is None and companion_folder(tmp_path / "model.gguf") == tmp_path == companion_folder(
        tmp_path
    )
    assert torch.equal(logits(tmp_path, 3), logits(tmp_path / "model.gguf", 3))
    (tmp_path / "other.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match="has 2 GGUF models: give one of them"):
        load_config(tmp_path)


def test_split_files_are_one_model(saved: Path, tmp_path: Path) -> None:
    write_gguf(saved, tmp_path / "whole.gguf", [Kind.F16])
    expected = logits(tmp_path / "whole.gguf", 3)
    reader = gguf.GGUFReader(tmp_path / "whole.gguf")
    parts = tmp_path / "parts"
    parts.mkdir()
    for number in (1, 2):
        writer = gguf.GGUFWriter(parts / f"m-{number:05d}-of-00002.gguf", "deepseek2")
        for field in reader.fields.values():
            if number == 1 and field.name.startswith("deepseek2."):
                writer.add_key_value(field.name, field.contents(), field.types[0])
        for tensor in reader.tensors[number - 1 :: 2]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        write_file(writer)
    assert torch.equal(logits(parts, 3), expected)
    (parts / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"cannot read .*m-00002-of-00002.gguf"):
        load_config(parts)


def test_sharing_of_indexers_follows_types_or_the_context(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    kinds = ["full", "full", "full", "shared", "shared", "shared", "full", "shared"]
    build_hf("glm_moe_dsa", folder, num_hidden_layers=8, indexer_types=kinds)
    context = {"glm-dsa.context_length": 1 << 20}
    write_gguf(folder, tmp_path / "typed.gguf", [Kind.F16])
    write_gguf(folder, tmp_path / "glm52.gguf", [Kind.F16], types=False, overrides=context)
    write_gguf(folder, tmp_path / "glm5.gguf", [Kind.F16], types=False, overrides={"glm-dsa.context_length": 202752})
    for name, expected in (("typed", kinds), ("glm52", kinds), ("glm5", ["full"] * 8)):
        found = load_config(tmp_path / f"{name}.gguf").indexer
        assert found is not None and list(found.kinds) == expected, name
