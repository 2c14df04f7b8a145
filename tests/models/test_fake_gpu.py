"""Every family's steps on the pretended GPU: no tensor on another device, no host sync in a decode step, and few launches.

A failure means that the engine would stop on a GPU, that a CUDA graph could not capture a step, or that a step got slower.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("transformers")

from tests.fake_cuda import FakeGpu, fake_cuda
from tests.models.fake_gpu import batch_of, config_of, meta_model, pool_of
from uncast.attention import ClaimedCapabilityWarning
from uncast.models.config import ModelConfig
from uncast.models.decoder import MLADecoder
from uncast.models.parallel import Parallel

FAMILIES = (
    "glm4_moe_lite", "deepseek_v2", "deepseek_v2_lite", "deepseek_v3", "kimi_k2", "glm_moe_dsa", "glm_moe_dsa_52",
    "deepseek_v32",
)  # fmt: skip
LAYOUTS = ("bf16", "fp8_e4m3", "fp8_ds_mla")
STEPS = ([(1, 100)], [(1, 20)] * 40, [(1, 90), (50, 70), (1, 1)])
"""(q_len, kv_len) of requests: one token, more tokens than the kernels of few take, a mixed step."""
LAYER = 15
"""Launches of a layer with a mixture, one token, split attention."""


@pytest.fixture(autouse=True)
def _silent() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ClaimedCapabilityWarning)
        yield


def small(family: str) -> ModelConfig:
    return config_of(family, num_hidden_layers=4 if family == "glm_moe_dsa_52" else 2)


def check_steps(gpu: FakeGpu, model: MLADecoder, layout: str) -> None:
    pool = pool_of(model.config, layout)
    for sparse in (False, True) if model.config.indexer is not None else (False,):
        for lens in STEPS:
            batch = batch_of(model, pool, lens, sparse=sparse)
            if all(q_len == 1 for q_len, _ in lens):
                with gpu.no_sync():
                    logits = model.forward(batch)
            else:
                logits = model.forward(batch)
            assert logits.is_cuda and logits.shape == (len(lens), model.config.vocab_size)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_step_of_every_family(family: str) -> None:
    model = meta_model(small(family))
    with fake_cuda(90) as gpu:
        for layout in LAYOUTS if family == "deepseek_v32" else ("fp8_ds_mla",):
            check_steps(gpu, gpu.move(model), layout)


@pytest.mark.parametrize("packed", ["nvfp4", "fp8"])
@pytest.mark.parametrize("family", ["glm4_moe_lite", "deepseek_v32"])
def test_packed_weights(family: str, packed: str) -> None:
    model = meta_model(small(family), packed)
    with fake_cuda(90) as gpu:
        check_steps(gpu, gpu.move(model), "fp8_ds_mla")


@pytest.mark.parametrize("arch", [80, 100])
def test_other_chips(arch: int) -> None:
    model = meta_model(small("deepseek_v32"), "nvfp4")
    with fake_cuda(arch) as gpu:
        check_steps(gpu, gpu.move(model), "fp8_ds_mla")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_long_chunks_go_unabsorbed(layout: str) -> None:
    model = meta_model(config_of("glm_flash", num_hidden_layers=2), prefill="unabsorbed")
    with fake_cuda(90) as gpu:
        model = gpu.move(model)
        model.forward(batch_of(model, pool_of(model.config, layout), [(1, 90), (300, 1500), (64, 64), (1, 1)]))
        assert gpu.names().count("merge_states_kernel") >= 2 * len(model.layers)


def test_the_mtp_layer_drafts() -> None:
    model = meta_model(small("deepseek_v3"), mtp=True)
    with fake_cuda(90) as gpu:
        model = gpu.move(model)
        batch = batch_of(model, pool_of(model.config, "fp8_ds_mla", more=1), [(1, 9), (1, 20)])
        with gpu.no_sync():
            _, hidden = model.forward_hidden(batch, every=True)
            logits, hidden = model.draft(batch, hidden, every=True)
            logits.argmax(-1)
        assert hidden.shape == (2, model.config.hidden_size)
        assert not any("pad" in name for name in gpu.names())  # its products see whole tiles without a copy, too


@pytest.mark.parametrize("packed", ["", "nvfp4", "fp8"])
def test_ranks_share_a_model(packed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Parallel, "_collective", lambda self, run: None)
    model = meta_model(small("deepseek_v3"), packed, parallel=Parallel(1, 2))
    with fake_cuda(90) as gpu:
        check_steps(gpu, gpu.move(model), "fp8_ds_mla")


def test_launches_of_a_decode_step() -> None:
    """GLM-4.7-Flash, one token: `LAYER` a layer, so that a step is bound by the weights' bytes and not by launches."""
    config = config_of("glm_flash")
    model = meta_model(config)
    with fake_cuda(90) as gpu:
        model = gpu.move(model)
        batch = batch_of(model, pool_of(config, "fp8_ds_mla"), [(1, 1000)])
        counts = []
        for layers in (model.layers, model.layers[:-1]):
            shorter = MLADecoder(
                replace(config, num_layers=len(layers)), model.embed, layers, model.final_norm, model.lm_head
            )
            gpu.launches.clear()
            with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
                shorter.forward(batch)
            graph.replay()
            counts.append(len(gpu.launches))
        assert counts[0] - counts[1] <= LAYER, gpu.names()


def test_both_down_projections_are_views_of_one_matrix() -> None:
    for packed in ("", "nvfp4", "fp8"):
        attention = meta_model(small("deepseek_v3"), packed).layers[1].attention
        assert attention.qkv_a is not None and attention.q_a is not None
        assert attention.qkv_a.shape[0] == attention.q_a.shape[0] + attention.kv_a.shape[0]
    assert meta_model(small("deepseek_v2_lite")).layers[1].attention.qkv_a is None


@pytest.mark.parametrize(
    ("packed", "layout"), [("", "fp8_ds_mla"), ("", "bf16"), ("fp8", "fp8_e4m3"), ("nvfp4", "fp8_ds_mla")]
)
def test_products_of_few_rows_are_the_same_whatever_their_number(packed: str, layout: str) -> None:
    """A library takes its code, and with it a row's last bits, by the shapes that it sees: those of 1 to 16 rows are the same,
    and no row is copied for that. Our kernels' compile-time arguments, tiles and splits among them, are the same, too."""
    model = meta_model(config_of("glm_flash"), packed)
    with fake_cuda(90) as gpu:
        model = gpu.move(model)
        pool, seen = pool_of(model.config, layout), set()
        for rows in range(1, 17):
            batch = batch_of(model, pool, [(1, 100)] * rows, alone_rows=1)
            gpu.launches.clear()
            model.forward(batch)
            products = [launch.arguments["shapes"] for launch in gpu.launches if launch.name in ("linear", "bmm", "mm")]
            ours = [
                (launch.name, *((name, value) for name, value in sorted(launch.arguments.items()) if name.isupper()))
                for launch in gpu.launches
                if launch.kind == "triton"
            ]
            assert not any("pad" in name for name in gpu.names())
            # SPREAD is room that a combine occupies; what it computes does not depend on it
            ours = [
                [part for part in kernel if part[0] not in ("BATCH", "SPREAD")]
                for kernel in ours
                if kernel[0] != "sort_kernel"
            ]
            seen.add(repr((products, ours, len(gpu.launches))))
        assert len(seen) == 1
        assert all(16 in shapes[0] for shapes in products)
