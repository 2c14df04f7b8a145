"""Up to 16 rows on a real GPU, in the default mode: decode and verification have the same logits and cache rows, bit for bit.

A failure means that a product, kernel or plan of a pass depends on the number of its rows: drafts could change a greedy text.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("transformers")

from tests.models.fake_gpu import MetaSource, config_of, model_of
from uncast.checkpoints.bundled import BUNDLED
from uncast.checkpoints.load import load_model
from uncast.engine.runner import ModelRunner, Sequence
from uncast.latent.codec import encode_rows
from uncast.models.decoder import MLADecoder
from uncast.quant.packed import Fp8Blocks, Nvfp4, Packed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore::uncast.attention.ClaimedCapabilityWarning"),
]
CONTEXTS = (1, 61, 130, 700, 8440, 20000)
"""Rows before the first that is compared; tiles and splits change within what follows some of them."""


class RandomSource(MetaSource):
    """Weights on the GPU, of a size that keeps activations near 1."""

    def fill(self, name: str, out: torch.Tensor) -> torch.Tensor:
        return out.fill_(1.0) if out.dim() == 1 else out.normal_(0.0, out.shape[-1] ** -0.5)

    def packed(self, name: str, shape: tuple[int, ...]) -> Packed | None:
        (rows, columns), size = shape, shape[1] ** -0.5

        def full(value: float, dtype: torch.dtype, *sizes: int) -> torch.Tensor:
            return torch.full(sizes, value, dtype=dtype, device="cuda")

        if self.kind == "fp8":
            codes = torch.randint(0, 127, shape, dtype=torch.uint8, device="cuda")
            codes |= torch.randint(0, 2, shape, dtype=torch.uint8, device="cuda") << 7
            return Fp8Blocks(codes, full(size / 100, torch.float32, -(-rows // 128), -(-columns // 128)))
        if self.kind == "nvfp4" and "self_attn" not in name:
            codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, device="cuda")
            ones = full(0x38, torch.uint8, rows, columns // 16)
            return Nvfp4(codes, ones, full(size / 3, torch.float32, rows))
        return None


@pytest.fixture(scope="module", params=["tiny-glm", "flash", "flash-fp8", "flash-nvfp4", "v3"])
def model(request: pytest.FixtureRequest) -> MLADecoder:
    """The bundled model; GLM-4.7-Flash's shapes, three layers, dense and packed; a small DeepSeek-V3 with groups of experts."""
    torch.manual_seed(3)
    if request.param == "tiny-glm":
        return load_model(BUNDLED["tiny-glm"], dtype=torch.bfloat16, device="cuda", mtp=True)
    config = config_of("deepseek_v3" if request.param == "v3" else "glm_flash")
    return model_of(config, RandomSource(request.param.removeprefix("flash").removeprefix("-")), "cuda", mtp=True)


@pytest.fixture(autouse=True)
def _without_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which compile kernels that no step here takes."""
    monkeypatch.setattr(ModelRunner, "_warm_up", lambda self: "native")


@dataclass
class Side:
    """A runner whose pool holds the same rows as every other's."""

    runner: ModelRunner
    width: int

    @classmethod
    def of(cls, model: MLADecoder, layout: str, requests: int, drafts: int) -> Side:
        width = max(CONTEXTS) // 64 + 2
        pages = requests * width
        runner = ModelRunner(model, kv_layout=layout, num_pages=pages, page_size=64, drafts=drafts > 0)
        assert runner.alone
        pool, generator = runner.pool, torch.Generator("cuda").manual_seed(5)
        for layer in pool.storage:
            ckv, kpe = (
                torch.randn(pages * 64, width, generator=generator, device="cuda", dtype=torch.bfloat16)
                for width in (pool.layout.kv_lora_rank, pool.layout.qk_rope_head_dim)
            )
            layer.view(torch.uint8).view(pages * 64, -1).copy_(encode_rows(ckv, kpe, pool.layout))
        return cls(runner, width)

    def sequences(self, contexts: list[int], tokens: list[int]) -> list[Sequence]:
        """Of these cached rows, about to run tokens[0]."""
        found = []
        for index, rows in enumerate(contexts):
            pages = range(index * self.width, (index + 1) * self.width)
            found.append(Sequence([index + 1] * rows + [tokens[0] + index], list(pages), rows))
        return found

    def decoded(self, contexts: list[int], tokens: list[int], *, together: bool = True) -> torch.Tensor:
        """Logits [requests, tokens, vocab] of one token after the other, of all requests in a step or of each by itself."""
        sequences, rows = self.sequences(contexts, tokens), []
        for place in range(len(tokens)):
            if place:
                for index, sequence in enumerate(sequences):
                    sequence.tokens.append(tokens[place] + index)
            steps = [sequences] if together else [[sequence] for sequence in sequences]
            rows.append(torch.cat([self.runner.step([(s, 1) for s in step]).clone() for step in steps]))
        return torch.stack(rows, dim=1)

    def verified(self, contexts: list[int], tokens: list[int], *, static: bool) -> torch.Tensor:
        """The same of one step that verifies tokens[1:]."""
        sequences = self.sequences(contexts, tokens)
        for index, sequence in enumerate(sequences):
            sequence.drafts = [token + index for token in tokens[1:]]
        logits = self.runner.step([(sequence, len(tokens)) for sequence in sequences]).clone()
        assert (self.runner.verified > 0) == static
        return logits.view(len(contexts), len(tokens), -1)

    def rows(self) -> torch.Tensor:
        return self.runner.pool.storage[: self.runner.model.config.num_layers].view(torch.uint8)


def layouts_of(model: MLADecoder) -> list[str]:
    """All of them for the smallest model; the others' attention is the same."""
    return ["fp8_ds_mla", "fp8_e4m3", "bf16"] if model.config.hidden_size < 512 else ["fp8_ds_mla"]


@pytest.mark.parametrize("drafts", [1, 2, 3, 8])
def test_one_request_verified_is_one_request_decoded(model: MLADecoder, drafts: int) -> None:
    """At every context: graphs of both, and eager steps of both."""
    tokens = [(11 + 97 * place) % (model.config.vocab_size - 16) for place in range(1 + drafts)]
    for layout in layouts_of(model):
        plain, drafting, eager = (Side.of(model, layout, 1, count) for count in (0, drafts, drafts))
        assert plain.runner.capture(1) is None and drafting.runner.capture(1, drafts=[drafts]) is None
        for context in (rows for rows in CONTEXTS if rows + 20 < model.config.max_position_embeddings):
            expected = plain.decoded([context], tokens)
            assert bool(expected.isfinite().all()) and bool((expected[0, 0] != expected[0, 1]).any())
            assert torch.equal(eager.decoded([context], tokens), expected), (layout, context)
            for side, static in ((drafting, True), (eager, False)):
                found = side.verified([context], tokens, static=static)
                wrong = (found != expected).any(-1).nonzero().tolist()
                assert not wrong, (layout, context, static, wrong)
                assert torch.equal(side.rows(), plain.rows()), (layout, context, static)


@pytest.mark.parametrize(("requests", "drafts"), [(2, 7), (4, 3), (5, 2), (8, 1), (16, 0)])
def test_several_requests_are_each_alone(model: MLADecoder, requests: int, drafts: int) -> None:
    """16 rows and fewer, whose tiles fit one wave: a verification of all, and their decode, have the logits of each alone."""
    tokens, contexts = (
        [(11 + 97 * place) % (model.config.vocab_size - 16) for place in range(1 + drafts)],
        [40 + 61 * index for index in range(requests)],
    )
    layout = "fp8_ds_mla"
    plain, drafting, eager = (Side.of(model, layout, requests, count) for count in (0, drafts, drafts))
    assert plain.runner.capture(requests, buckets=(1, requests)) is None
    alone = plain.decoded(contexts, tokens, together=False)
    wrong = (plain.decoded(contexts, tokens) != alone).any(-1).nonzero().tolist()
    assert not wrong
    if drafts:
        assert drafting.runner.capture(requests, drafts=[drafts], buckets=(requests,)) is None
        for side, static in ((drafting, True), (eager, False)):
            wrong = (side.verified(contexts, tokens, static=static) != alone).any(-1).nonzero().tolist()
            assert not wrong, static
            assert torch.equal(side.rows(), plain.rows()), static
