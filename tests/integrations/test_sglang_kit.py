"""SGLang's conformance kit with our name; a failure means that SGLang would compute something else through us."""

from __future__ import annotations

import pytest
import torch

from tests.integrations import sglang_kit

pytest.importorskip("sglang", reason="SGLang is not installed here", exc_type=ImportError)
pytest.importorskip(
    "sglang.test.kits.attention_unittest.attention_methods.mla_attention",
    reason="SGLang's kit does not import here",
    exc_type=ImportError,
)


def test_kit() -> None:
    results = sglang_kit.run_all("cuda" if torch.cuda.is_available() else "cpu")
    failed = {name: outcome for name, outcome in results.items() if outcome.startswith("FAILED")}
    assert not failed, failed
    assert len(results) >= 55 and "passed" in results.values()
