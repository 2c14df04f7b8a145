"""SGLang's own conformance kit for MLA backends, as its tests of `flashinfer` and `flashmla` call it, with our name.

Runs wherever `sglang` imports: `run_all("cpu")` covers what needs no CUDA graph, `run_all("cuda")` everything.
"""

from __future__ import annotations

import unittest
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

NAME = "uncast"
SHAPE = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "hidden_size": 1024, "max_context_len": 256}
FP8 = {"fp8_kv_cache": True, "atol": 0.2, "rtol": 0.2}
"""SGLang's tolerance for an FP8 cache: its reference is not quantised."""
PAGES = (1, 16, 64)
LAYOUTS = (("interleaved_pages", 16), ("interleaved_pages", 64), ("non_monotonic_extend", 1))
"""`non_monotonic_extend` scatters the tokens of one page, which only pages of one token can hold; SGLang lists it as a known
failure of its own paged backends."""


class _Case(unittest.TestCase):
    """The kit asks a test case for assertions and for skips."""


def load_plugin() -> None:
    """Registers the plug-in as SGLang's `load_plugins` does."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    from uncast.integrations.sglang import register

    register()
    HookRegistry.apply_hooks()


def _make(
    name: str,
    mode: str,
    page: int,
    prefix: tuple[int, ...],
    extend: tuple[int, ...] = (),
    heads: int = 4,
    backend: str = NAME,
) -> Any:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.test.kits.attention_unittest.attention_methods.mla_attention import MLAAttentionCase

    return MLAAttentionCase(
        name=f"{name}_page{page}", backend=backend, forward_mode=ForwardMode[mode], num_heads=heads, page_size=page,
        prefix_lens=prefix, extend_lens=extend,
    )  # fmt: skip


def _plain_cases() -> Iterator[Any]:
    from sglang.test.kits.attention_unittest.attention_methods.mla_attention import make_mla_cases

    yield from make_mla_cases(NAME)
    yield _make("extend_input_page_edges", "EXTEND", 64, (0, 0, 0), (63, 64, 65))
    yield _make("extend_prefix_exact_page", "EXTEND", 64, (64,), (2,))
    yield _make("extend_total_exact_page", "EXTEND", 64, (32,), (32,))
    yield _make("extend_cross_page", "EXTEND", 64, (63,), (2,))
    yield _make("extend_ragged", "EXTEND", 64, (0, 32, 64), (63, 32, 1))
    yield _make("decode_page_boundary", "DECODE", 64, (61, 62, 63))
    yield _make("decode_one", "DECODE", 64, (31,))
    yield _make("decode_page_1", "DECODE", 1, (14, 15, 16))
    yield _make("decode_128_heads", "DECODE", 64, (61, 130, 5), heads=128)
    yield _make("extend_20_heads", "EXTEND", 64, (0, 32, 64), (63, 32, 1), heads=20)


def kit_tests(device: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """(name, test) of every case that `device` can run; a test raises on failure, `unittest.SkipTest` on a skip."""
    from sglang.test.kits.attention_unittest.attention_methods.mla_attention import run_mla_attention_case
    from sglang.test.kits.attention_unittest.runner_modes import (
        cuda_graph_decode_runner as decode,
    )
    from sglang.test.kits.attention_unittest.runner_modes import (
        speculative_draft_extend_runner as draft_extend,
    )
    from sglang.test.kits.attention_unittest.runner_modes import (
        speculative_draft_runner as draft,
    )
    from sglang.test.kits.attention_unittest.runner_modes import (
        speculative_target_verify_runner as verify,
    )
    from sglang.test.kits.attention_unittest.runner_modes import (
        split_op_runner as split,
    )

    common: dict[str, Any] = {**SHAPE, "dtype": torch.bfloat16, "device": device}
    for case in _plain_cases():
        yield f"bf16 {case.name}", partial(run_mla_attention_case, _Case(), case, **common)
        yield f"fp8 {case.name}", partial(run_mla_attention_case, _Case(), case, **common, **FP8)
    for layout, page in LAYOUTS:
        extend = _make(f"extend_{layout}", "EXTEND", page, (page,), (2,))
        yield f"bf16 {extend.name}", partial(run_mla_attention_case, _Case(), extend, loc_layout=layout, **common)
        yield f"fp8 {extend.name}", partial(run_mla_attention_case, _Case(), extend, loc_layout=layout, **common, **FP8)
    for page in (16, 64):
        step = _make("decode_interleaved_pages", "DECODE", page, (page - 2, page - 1, page))
        yield (
            f"fp8 {step.name}",
            partial(run_mla_attention_case, _Case(), step, loc_layout="interleaved_pages", **common, **FP8),
        )
    for page in PAGES:
        step = _make("graph_decode", "DECODE", page, (14, 15, 16))
        yield f"graph {step.name}", partial(decode.run_mla_cuda_graph_decode_case, _Case(), step, **common)
        chain = _make("verify_chain", "TARGET_VERIFY", page, (4, 7), (3, 3))
        yield f"verify {chain.name}", partial(verify.run_mla_eagle_verify_case, _Case(), chain, topk=1, **common)
        yield (
            f"graph {chain.name}",
            partial(verify.run_mla_eagle_verify_cuda_graph_case, _Case(), chain, topk=1, **common),
        )
        window = _make("draft_extend", "DRAFT_EXTEND_V2", page, (5, 8), (3, 3))
        yield (
            f"graph {window.name}",
            partial(draft_extend.run_mla_draft_extend_v2_cuda_graph_case, _Case(), window, **common),
        )
    if device != "cuda":
        return
    for page in PAGES:
        ragged = _make("split_op", "EXTEND", page, (0, 8, 16), (15, 8, 1))
        for breakable in (False, True):
            yield (
                f"{'breakable' if breakable else 'piecewise'} {ragged.name}",
                partial(
                    split.run_mla_split_op_extend_case,
                    _Case(),
                    ragged,
                    breakable=breakable,
                    static_num_tokens=32,
                    **common,
                ),
            )
        chain = _make("draft_chain", "DECODE", page, (4, 7))
        yield (
            f"graph runner {chain.name}",
            partial(
                draft.run_mla_eagle_draft_cuda_graph_runner_case, _Case(), chain, topk=1, speculative_num_draft_tokens=3,
                **common,
            ),
        )  # fmt: skip
        window = _make("draft_extend_runner", "DRAFT_EXTEND_V2", page, (5, 8), (3, 3))
        yield (
            f"graph runner {window.name}",
            partial(draft_extend.run_mla_eagle_draft_extend_v2_cuda_graph_runner_case, _Case(), window, **common),
        )


def run_all(device: str) -> dict[str, str]:
    """Name -> "passed", "skipped: ..." or "FAILED: ..." of every case, for a run without pytest."""
    load_plugin()
    results: dict[str, str] = {}
    for name, test in kit_tests(device):
        try:
            test()
            results[name] = "passed"
        except unittest.SkipTest as skip:
            results[name] = f"skipped: {skip}"
        except Exception as error:  # the report names it; the next case still runs
            results[name] = f"FAILED: {type(error).__name__}: {str(error)[:300]}"
    return results
