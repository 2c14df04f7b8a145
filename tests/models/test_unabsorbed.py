"""Un-absorbed prefill: the same results, chosen by cost and by nothing but the chunk itself, from rows as they are stored."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import uncast
from tests.fixtures import build_hf
from tests.live_memory import LiveMemory
from tests.models import test_config as configs
from tests.models.helpers import Chunk, ragged_step, relative
from uncast.attention import MLAPagedAttention
from uncast.attention.crossover import ExtendChunk, may_prefer_unabsorbed, operations, prefers_unabsorbed
from uncast.checkpoints.load import load_model
from uncast.latent.layouts import row_layout
from uncast.latent.pool import PagedPool
from uncast.latent.reader import BLOCK_ROWS, RowReader
from uncast.models.config import ModelConfig
from uncast.models.decoder import MLADecoder
from uncast.models.unabsorbed import attend_unabsorbed, goes_unabsorbed, head_dims, split_prefill

pytestmark = pytest.mark.filterwarnings("ignore::uncast.attention.ClaimedCapabilityWarning")

LAYOUTS = ["fp32", "bf16", "fp8_e4m3", "fp8_ds_mla"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> MLADecoder:
    """With a scale of its own for the latent and for the rope part in each layer."""
    folder = tmp_path_factory.mktemp("glm")
    build_hf("glm4_moe_lite", folder, num_hidden_layers=2, sharpen=3.0)
    model = load_model(folder)
    for index, layer in enumerate(model.layers):
        layer.attention.ckv_scale, layer.attention.kpe_scale = 0.013 + 0.01 * index, 0.021
    return model


def with_mode(model: MLADecoder, mode: str) -> MLADecoder:
    return MLADecoder(model.config, model.embed, model.layers, model.final_norm, model.lm_head, prefill=mode)


def text(count: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 512, (count,), generator=torch.Generator().manual_seed(seed))


def run(model: MLADecoder, layout: str, page_size: int) -> torch.Tensor:
    """Three steps: a prompt of more than one block, a chunk that goes on with it among decodes, a ragged batch."""
    lengths = {0: BLOCK_ROWS + 150, 1: 40, 2: 9, 3: 3}
    pages_of = {r: -(-n // page_size) for r, n in lengths.items()}
    pool = PagedPool(row_layout(layout), num_layers=2, num_pages=sum(pages_of.values()) + 2, page_size=page_size)
    pool.storage.fill_(0xFF)  # NaN in every layout: what is not written must not be read
    order = torch.randperm(pool.num_pages, generator=torch.Generator().manual_seed(3)).tolist()
    pages = {r: [order.pop() for _ in range(n)] for r, n in pages_of.items()}
    done, logits = dict.fromkeys(lengths, 0), []
    for counts in ({0: BLOCK_ROWS + 60, 1: 1}, {1: 1, 0: 70, 2: 1}, {3: 2, 0: 20, 1: 38, 2: 8}, {3: 1}):
        chunks = [Chunk(pages[r], text(lengths[r], r)[done[r] : done[r] + n], done[r]) for r, n in counts.items()]
        logits += ragged_step(model, pool, chunks)
        for request, count in counts.items():
            done[request] += count
    assert done == lengths
    return torch.cat(logits)


@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_modes_agree_to_rounding(layout: str, page_size: int, model: MLADecoder) -> None:
    """In float32 storage to rounding; rounded storage turns a last bit into a step of the format now and then."""
    absorbed = run(with_mode(model, "absorbed"), layout, page_size)
    assert bool(absorbed.isfinite().all())
    for mode in ("unabsorbed", "auto"):
        got = run(with_mode(model, mode), layout, page_size)
        assert relative(got, absorbed) <= (1e-5 if layout == "fp32" else 2e-2)
        assert not torch.equal(got, absorbed), "the mode was not used"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("q_len", "kv_len"), [(2, 2), (70, 70), (3, 600), (513, 513), (700, 1500)])
def test_one_layer_agrees_on_the_same_rows(layout: str, q_len: int, kv_len: int, model: MLADecoder) -> None:
    case = Case(model, layout, q_len, kv_len)
    assert relative(case.unabsorbed(), case.absorbed()) <= 1e-5


class Case:
    """Random rows of one request, and its last queries, in one layer."""

    def __init__(self, model: MLADecoder, layout: str, q_len: int, kv_len: int, page_size: int = 64) -> None:
        self.config, self.weights = model.config, model.layers[0].attention
        self.layout, self.page_size, self.kv_len = row_layout(layout), page_size, kv_len
        generator = torch.Generator().manual_seed(q_len)
        pool = PagedPool(self.layout, num_layers=1, num_pages=-(-kv_len // page_size) + 1, page_size=page_size)
        pool.storage.fill_(0xFF)
        self.pages = torch.arange(pool.num_pages - 1, 0, -1, dtype=torch.int32)
        self.cache = pool.layer(0)
        self.scales: dict[str, Any] = {"ckv_scale": None, "kpe_scale": None}
        if self.layout.has_external_scales:
            self.scales = {"ckv_scale": 0.011, "kpe_scale": torch.tensor(0.02)}
        heads = self.config.num_heads
        self.q_nope = torch.randn(q_len, heads, self.config.qk_nope_head_dim, generator=generator)
        self.q_pe = torch.randn(q_len, heads, self.config.qk_rope_head_dim, generator=generator)
        self.attention = MLAPagedAttention("torch_cpu")
        self.plan = self.attention.plan(
            torch.tensor([0, q_len], dtype=torch.int32),
            block_tables=self.pages[None],
            seq_lens=torch.tensor([kv_len], dtype=torch.int32),
            num_heads=heads,
            page_size=page_size,
            sm_scale=self.config.sm_scale,
            q_data_type=torch.float32,
            kv_layout=layout,
        )
        self.attention.write(
            torch.randn(kv_len, 512, generator=generator),
            torch.randn(kv_len, 64, generator=generator),
            self.cache,
            pool.slots(self.pages.tolist(), 0, kv_len),
            **self.scales,
        )

    def absorbed(self) -> torch.Tensor:
        query = torch.einsum("qhd,hdr->qhr", self.q_nope, self.weights.w_uk)
        latent = self.attention.run(query, self.q_pe, self.cache, **self.scales)
        assert isinstance(latent, torch.Tensor)
        return torch.einsum("qhr,hvr->qhv", latent, self.weights.w_uv)

    def unabsorbed(self) -> torch.Tensor:
        chunk = ExtendChunk(0, len(self.q_nope), self.kv_len, self.pages)
        reader = RowReader(self.layout, self.page_size)
        return attend_unabsorbed(
            self.q_nope, self.q_pe, self.cache, chunk, reader, self.weights.w_uk, self.weights.w_uv,
            sm_scale=self.config.sm_scale, **self.scales,
        )  # fmt: skip


def test_scratch_is_bounded_and_the_guard_stays_silent(model: MLADecoder) -> None:
    """Of 6,000 rows one block exists, and its keys and values; twice the rows take not a byte more but their page list."""
    peaks = []
    for kv_len in (6000, 12000):
        case = Case(model, "fp8_ds_mla", 8, kv_len)
        with LiveMemory() as memory, uncast.guard(watch=[case.cache]):
            case.unabsorbed()
        peaks.append(memory.peak)
    block = BLOCK_ROWS * 4 * (192 + 256) * 4
    assert block < peaks[0] < 3 * block and abs(peaks[1] - peaks[0]) < 8192


def plan(
    config: ModelConfig, lens: list[tuple[int, int]], backend: str = "torch_cpu", **extra: Any
) -> MLAPagedAttention:
    ends = torch.tensor([0, *torch.tensor([q for q, _ in lens]).cumsum(0).tolist()], dtype=torch.int32)
    attention = MLAPagedAttention(backend)
    attention.plan(
        ends,
        block_tables=torch.arange(len(lens) * 64, dtype=torch.int32).view(len(lens), 64),
        seq_lens=torch.tensor([kv for _, kv in lens], dtype=torch.int32),
        num_heads=config.num_heads,
        sm_scale=config.sm_scale,
        q_data_type=torch.float32,
        kv_layout="fp8_ds_mla",
        **extra,
    )
    return attention


GLM, LITE = ModelConfig.from_hf(configs.GLM_FLASH), ModelConfig.from_hf(configs.V2_LITE)


def test_the_cost_of_a_chunk() -> None:
    """By hand: V2-Lite, 2 queries at the end of 3 rows see 2 + 3 = 5 rows."""
    assert operations(head_dims(LITE), 2, 3) == (16 * (5 * 1088 + 2 * 512 * 256), 16 * (5 * 320 + 3 * 512 * 256))


@pytest.mark.parametrize(
    ("config", "q_len", "kv_len", "chosen"),
    [
        (GLM, 256, 256, True),
        (GLM, 128, 128, False),
        (GLM, 256, 512, False),
        (GLM, 512, 1024, True),
        (LITE, 256, 4096, True),
        (LITE, 64, 64, True),
        (LITE, 64, 256, False),
        (LITE, 8, 4096, False),
        (LITE, 1, 1, False),
    ],
)
def test_auto_goes_where_it_is_cheaper(config: ModelConfig, q_len: int, kv_len: int, chosen: bool) -> None:
    assert goes_unabsorbed(config, "auto", q_len, kv_len) is chosen
    assert not goes_unabsorbed(config, "absorbed", q_len, kv_len)
    assert goes_unabsorbed(config, "unabsorbed", q_len, kv_len) is (q_len > 1)
    assert not goes_unabsorbed(config, "unabsorbed", kv_len + 1, kv_len), (
        "queries that see nothing stay with the backend"
    )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_bounds_that_say_no_hide_no_chunk(device: str) -> None:
    """What saves a GPU the look at its lengths: no chunk within bounds that were refused is preferred."""
    for dims in (head_dims(GLM), head_dims(LITE)):
        for max_q_len in (2, 64, 300, 500, 2000):
            for max_kv_len in (64, 1000, 40000):
                if may_prefer_unabsorbed(dims, max_q_len, max_kv_len, device):
                    continue
                for q_len in range(2, max_q_len + 1, 7):
                    for kv_len in (q_len, (q_len + max_kv_len) // 2, max_kv_len):
                        assert kv_len < q_len or not prefers_unabsorbed(dims, q_len, kv_len, device)


def test_a_gpu_goes_unabsorbed_for_long_chunks_only() -> None:
    """4,096 queries on 32k rows of GLM are 13 ms of products less; 256 are more products; 64 with no prefix are launches."""
    glm = replace(head_dims(GLM), num_heads=64)
    assert prefers_unabsorbed(glm, 4096, 36864, "cuda")
    assert not prefers_unabsorbed(glm, 256, 33024, "cuda")
    assert not prefers_unabsorbed(head_dims(LITE), 64, 64, "cuda") and prefers_unabsorbed(
        head_dims(LITE), 64, 64, "cpu"
    )


def test_the_choice_for_a_chunk_does_not_depend_on_its_batch() -> None:
    lens = [(1, 900), (256, 256), (64, 256), (512, 1024), (8, 8)]
    together = split_prefill(LITE, "auto", plan(LITE, lens))
    assert together is not None and together.rest is not None
    assert [(c.last - c.first, c.kv_len) for c in together.chunks] == [(256, 256), (512, 1024)]
    assert together.rows.tolist() == [0, *range(257, 321), *range(833, 841)]
    for q_len, kv_len in lens:
        alone = split_prefill(LITE, "auto", plan(LITE, [(q_len, kv_len)]))
        assert (alone is not None) is ((q_len, kv_len) in [(256, 256), (512, 1024)])
        assert alone is None or alone.rest is None


def test_the_bits_of_a_chunk_do_not_depend_on_its_place(model: MLADecoder) -> None:
    case = Case(model, "fp8_ds_mla", 90, 700)
    alone = case.unabsorbed()
    case.q_nope, case.q_pe = (torch.cat([torch.randn_like(q), q])[90:] for q in (case.q_nope, case.q_pe))
    assert torch.equal(case.unabsorbed(), alone)


def test_other_backends_and_deterministic_plans_keep_every_chunk() -> None:
    lens = [(256, 256)]
    assert split_prefill(LITE, "auto", plan(LITE, lens)) is not None
    for backend in ("pool_cast:torch_cpu", "gather_cast:torch_cpu"):
        assert split_prefill(LITE, "unabsorbed", plan(LITE, lens, backend, num_pages=64)) is None
    assert split_prefill(LITE, "unabsorbed", plan(LITE, lens, batch_invariant=True)) is None
    assert split_prefill(LITE, "unabsorbed", plan(LITE, lens, causal=False)) is None
    assert split_prefill(LITE, "absorbed", plan(LITE, lens)) is None


def test_an_unknown_mode_is_refused(model: MLADecoder) -> None:
    with pytest.raises(ValueError, match="prefill is 'fast': allowed are auto, absorbed, unabsorbed"):
        with_mode(model, "fast")


def test_bf16_weights_are_used_in_float32(tmp_path: Path, model: MLADecoder) -> None:
    case = Case(model, "fp8_ds_mla", 40, 60)
    exact = case.unabsorbed()
    narrow = {name: getattr(case.weights, name).bfloat16() for name in ("w_uk", "w_uv")}
    case.weights = replace(case.weights, **{name: value.float() for name, value in narrow.items()})
    expected = case.unabsorbed()
    case.weights = replace(case.weights, **narrow)
    assert torch.equal(case.unabsorbed(), expected)
    assert relative(expected, exact) < 1e-2 and not math.isnan(float(exact.sum()))
