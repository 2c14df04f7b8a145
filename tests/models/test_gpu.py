"""A model on a GPU against the same model on a CPU: every family, cache layout and weight format, prefill to single tokens.

Measured per token: |logits - reference| / |reference|; the reference is float32 on the CPU over the same stored weights and a
float32 cache. The bound is what a CPU in BF16 with the same cache layout has, times `SLACK`, of the median and of the
ninth decile: an expert that is chosen the other way round changes one token, a fault of a kernel changes all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from tests.checkpoints.packed_files import to_compressed_tensors, to_fp8_blocks, to_modelopt
from tests.fixtures import build_hf
from tests.models.helpers import Chunk, ragged_step
from uncast.checkpoints.load import load_config, load_model
from uncast.latent.index_keys import index_layout, matching_layout
from uncast.latent.layouts import row_layout
from uncast.latent.pool import PagedPool
from uncast.models.decoder import MLADecoder

SLACK, SPARSE_SLACK, FLOOR = 1.3, 2.0, 4e-3
"""Sparse attention: tokens near the edge of the choice go either way with the last bit of a score."""
FAMILIES = ("glm4_moe_lite", "deepseek_v2_lite", "deepseek_v3", "glm_moe_dsa_52", "deepseek_v32")
LAYOUTS = ("bf16", "fp8_e4m3", "fp8_ds_mla")
FORMATS: dict[str, Callable[[Path], object]] = {
    "fp8": to_fp8_blocks,
    "modelopt": lambda folder: to_modelopt(folder, ["*self_attn*", "lm_head"]),
    "compressed-tensors": lambda folder: to_compressed_tensors(folder, ["re:.*self_attn.*", "lm_head"]),
}
needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore::uncast.attention.ClaimedCapabilityWarning"),
]


def build(folder: Path, family: str) -> Path:
    build_hf(family, folder, num_hidden_layers=4 if family == "glm_moe_dsa_52" else 2, sharpen=3.0)
    return folder


def logits(model: MLADecoder, layout: str, backend: str) -> torch.Tensor:
    """float32 on the host, of every token: two prompts together, then one token beside more of the other, then one each."""
    config, generator = model.config, torch.Generator().manual_seed(1)
    rows, indexer = row_layout(layout, config.kv_lora_rank, config.qk_rope_head_dim), config.indexer
    keys = None
    if indexer is not None:
        keys = index_layout("fp32", indexer.head_dim) if layout == "fp32" else matching_layout(rows, indexer.head_dim)
    pool = PagedPool(
        rows, num_layers=config.num_layers, num_pages=6, page_size=64, device=model.device, index_layout=keys,
        num_index_layers=0 if indexer is None else len(indexer.full_layers),
    )  # fmt: skip
    pool.storage.fill_(0xFF)  # NaN, and what the last owner of a page may have left
    pages, starts, made = (pool.allocate(3), pool.allocate(3)), [0, 0], []
    for counts in ((37, 90), (1, 20), (1, 1), (1, 1)):
        ids = [torch.randint(config.vocab_size, (count,), generator=generator) for count in counts]
        chunks = [Chunk(pages[i], ids[i], starts[i]) for i in range(2)]
        made += ragged_step(model, pool, chunks, backend=backend)
        starts = [start + count for start, count in zip(starts, counts, strict=True)]
    return torch.cat(made).float().cpu()


def deciles(got: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """Median and ninth decile of the tokens' relative errors."""
    errors = ((got - expected).norm(dim=-1) / expected.norm(dim=-1)).sort().values
    return float(errors[len(errors) // 2]), float(errors[len(errors) * 9 // 10])


def check(folder: Path, layout: str, device: str) -> None:
    reference = logits(load_model(folder), "fp32", "torch_cpu")
    on_cpu = deciles(logits(load_model(folder, dtype=torch.bfloat16), layout, "torch_cpu"), reference)
    backend = "native" if device == "cuda" else "torch_cpu"
    got = logits(load_model(folder, dtype=torch.bfloat16, device=device), layout, backend)
    assert bool(got.isfinite().all())
    slack = SPARSE_SLACK if load_config(folder).indexer is not None else SLACK
    for mine, theirs in zip(deciles(got, reference), on_cpu, strict=True):
        assert mine <= slack * theirs + FLOOR, (deciles(got, reference), on_cpu)


def test_the_comparison_itself_on_a_cpu(tmp_path: Path) -> None:
    """A CPU passes its own bound, and logits of another model miss it."""
    folder = build(tmp_path, "glm4_moe_lite")
    check(folder, "fp8_ds_mla", "cpu")
    model = load_model(folder, dtype=torch.bfloat16)
    expected = logits(load_model(folder), "fp32", "torch_cpu")
    right = deciles(logits(model, "fp8_ds_mla", "torch_cpu"), expected)
    for layer in model.layers:
        layer.attention.kv_a_norm *= 1.1
    assert deciles(logits(model, "fp8_ds_mla", "torch_cpu"), expected)[0] > SLACK * right[0] + FLOOR


@pytest.mark.parametrize("family", [pytest.param(family, marks=needs_gpu) for family in FAMILIES])
def test_layouts_on_the_gpu(family: str, tmp_path: Path) -> None:
    folder = build(tmp_path, family)
    for layout in LAYOUTS:
        check(folder, layout, "cuda")


@pytest.mark.parametrize("form", [pytest.param(form, marks=needs_gpu) for form in FORMATS])
@pytest.mark.parametrize("family", ["glm4_moe_lite", "deepseek_v32"])
def test_weight_formats_on_the_gpu(family: str, form: str, tmp_path: Path) -> None:
    folder = build(tmp_path, family)
    FORMATS[form](folder)
    check(folder, "fp8_ds_mla", "cuda")


@pytest.mark.parametrize("_gpu", [pytest.param(None, marks=needs_gpu)])
def test_a_gguf_file_on_the_gpu(_gpu: None, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from tests.checkpoints.gguf_files import MIXED, write_gguf

    write_gguf(build(tmp_path / "hf", "deepseek_v3"), tmp_path / "model.gguf", MIXED)
    check(tmp_path / "model.gguf", "fp8_e4m3", "cuda")
