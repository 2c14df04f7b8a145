"""SGLang's multi-step draft through our backend: a captured pass drafts what an eager pass of the same shapes does.

A failure between padded and captured is a fault of the buffers or the metadata that a graph reads. Eager batches of another
size may round products another way, so their tokens are compared only where the best two are further apart than that.
"""

from __future__ import annotations

import pytest
import torch

from tests.integrations import sglang_draft, sglang_kit

pytest.importorskip("sglang", reason="SGLang is not installed here", exc_type=ImportError)
pytest.importorskip(
    "sglang.test.kits.attention_unittest.runner_modes.speculative_draft_runner",
    reason="SGLang's kit does not import here",
    exc_type=ImportError,
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TIE = 4.0
"""BF16 steps between two logits within which rounding may choose either."""


@pytest.fixture(scope="module", autouse=True)
def _plugin() -> None:
    sglang_kit.load_plugin()


@pytest.mark.parametrize("page", sglang_kit.PAGES)
def test_padding_changes_no_draft(page: int) -> None:
    eager, padded = (sglang_draft.run(page, way, DEVICE) for way in ("eager", "padded"))
    for one, other in zip(eager.hidden, padded.hidden, strict=True):
        torch.testing.assert_close(one, other, atol=0.03, rtol=0.03)
    if sglang_draft.smallest_margin(eager) > TIE:
        assert torch.equal(eager.ids, padded.ids)


@pytest.mark.skipif(DEVICE != "cuda", reason="a graph's capture needs a GPU")
@pytest.mark.parametrize("page", sglang_kit.PAGES)
def test_captured_draft_is_the_padded_one(page: int) -> None:
    padded, captured = (sglang_draft.run(page, way, DEVICE) for way in ("padded", "captured"))
    for one, other in zip(padded.hidden, captured.hidden, strict=True):
        torch.testing.assert_close(one, other, atol=0.01, rtol=0.01)
    assert torch.equal(padded.ids, captured.ids)
