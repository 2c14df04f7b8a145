"""One multi-step draft of SGLang's conformance kit: eager, eager with the batch padded as a graph pads it, and captured.

    python -m tests.integrations.sglang_draft [PAGE ...]    prints what differs and how close the drafted tokens were to ties

The kit compares drafted token ids of an eager batch of 2 and of a graph captured for 4. Its weights and logits are BF16, so a
product of 4 rows that rounds another way than one of 2 can turn a tie of two tokens. The padded eager draft tells that apart
from a fault of a captured pass: it has the graph's shapes, and none of its buffers.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tests.integrations import sglang_kit

DRAFTS = 3
CAPTURED_BATCH = 4
VOCABULARY = 64


@dataclass
class Draft:
    """What one pass drafted.

    Attributes:
        ids: [requests, DRAFTS], the first given. hidden, logits: per drafting step, [requests, hidden], [requests, VOCABULARY].
    """

    ids: torch.Tensor
    hidden: list[torch.Tensor]
    logits: list[torch.Tensor]


def smallest_margin(draft: Draft) -> float:
    """The smallest distance between the best two logits, in BF16 steps of the best one."""
    steps = []
    for logits in draft.logits:
        best = torch.topk(logits, 2, -1).values
        unit = 2.0 ** (torch.frexp(best[:, 0].abs())[1].float() - 8)  # 8 bits of significand
        steps.append(float(((best[:, 0] - best[:, 1]) / unit).min()))
    return min(steps)


@contextlib.contextmanager
def _recording(worker: Any, requests: int) -> Iterator[list[Any]]:
    kept: list[Any] = []
    inner = worker.model_runner.forward

    def forward(batch: Any, *args: Any, **kwargs: Any) -> Any:
        result = inner(batch, *args, **kwargs)
        kept.append(result.logits_output)
        return result

    worker.model_runner.forward = forward
    try:
        yield kept
    finally:
        worker.model_runner.forward = inner


def _draft(output: Any, kept: list[Any], requests: int) -> Draft:
    ids = next(x for x in reversed(output) if isinstance(x, torch.Tensor) and x.dim() == 2 and x.shape[1] == DRAFTS)
    kept = kept[-(DRAFTS - 1) :]
    return Draft(
        ids[:requests].clone(),
        [one.hidden_states[:requests].clone() for one in kept],
        [one.next_token_logits[:requests].clone() for one in kept],
    )


def _pad(batch: Any, size: int) -> None:
    """Requests as a graph runner fills up a captured batch: of one token, writing to slot 0."""
    more = size - batch.batch_size

    def padded(x: torch.Tensor, value: float) -> torch.Tensor:
        return torch.cat([x, x.new_full((more, *x.shape[1:]), value)])

    batch.batch_size = size
    batch.req_pool_indices, batch.positions = padded(batch.req_pool_indices, 0), padded(batch.positions, 0)
    batch.seq_lens, batch.seq_lens_cpu = padded(batch.seq_lens, 1), padded(batch.seq_lens_cpu, 1)
    batch.out_cache_loc = torch.cat([batch.out_cache_loc, batch.out_cache_loc.new_zeros(DRAFTS * more)])
    spec = batch.spec_info
    spec.topk_p, spec.topk_index = padded(spec.topk_p, 0), padded(spec.topk_index, 0)
    spec.hidden_states = padded(spec.hidden_states, 0)


def run(page: int, way: str, device: str, backend: str = sglang_kit.NAME) -> Draft:
    """Drafts the kit's `draft_chain` case.

    Args:
        way: "eager", "padded" (eager, of `CAPTURED_BATCH` requests) or "captured" (a GPU's graph).
    """
    from sglang.test.kits.attention_unittest.attention_methods import mla_attention as mla
    from sglang.test.kits.attention_unittest.runner_modes import speculative_draft_runner as kit

    if device == "cpu":
        kit._seeded_rng = _cpu_seed
    case = sglang_kit._make("draft_chain", "DECODE", page, (4, 7), backend=backend)
    shape = {**sglang_kit.SHAPE, "dtype": torch.bfloat16, "device": device}
    settings = kit.EagleDraftRunnerSettings(
        topk=1, speculative_num_steps=DRAFTS, speculative_num_draft_tokens=DRAFTS, capture_batch_size=CAPTURED_BATCH,
        hidden_size=shape["hidden_size"], vocab_size=VOCABULARY, max_context_len=shape["max_context_len"],
        dtype=torch.bfloat16, device=device, atol=0.03, rtol=0.03,
    )  # fmt: skip
    adapter = kit.EagleDraftCudaGraphRunnerAdapter(
        build_fixture=mla.build_mla_attention_fixture, make_model_forward=kit._make_mla_model_forward,
        make_draft_inputs=kit._make_mla_draft_inputs, prepare_replay_state=kit._prepare_mla_draft_replay_state,
        make_forward_batch=kit._make_mla_eagle_draft_forward_batch, check_case=kit._check_mla_draft_cache_layout,
    )  # fmt: skip
    fixture, worker, made = kit._build_eagle_draft_fixture(
        sglang_kit._Case(), case, adapter=adapter, build_kwargs=shape, settings=settings
    )
    inputs = adapter.make_draft_inputs(case, settings)
    adapter.prepare_replay_state(fixture, case, inputs, settings)
    batch = adapter.make_forward_batch(case, inputs, settings)
    try:
        with torch.no_grad(), _recording(worker, case.batch_size) as kept:
            if way == "captured":
                fixture.runner.kv_index_translator.bind_own_plan(batch)
                runner = kit._capture_eagle_draft_graph_runner(worker, made, settings)
                adapter.prepare_replay_state(fixture, case, inputs, settings)
                output = runner.execute(batch)
                torch.cuda.synchronize()
            else:
                if way == "padded":
                    _pad(batch, CAPTURED_BATCH)
                fixture.runner.kv_index_translator.bind_own_plan(batch)
                output = kit._run_eagle_draft_eager(worker, batch, settings=settings)
            return _draft(output, kept, case.batch_size)
    finally:
        kit._reset_cuda_graph_test_buffers()


@contextlib.contextmanager
def _cpu_seed(seed: int, *, device: Any) -> Iterator[None]:
    """The kit's own saves a GPU's generator."""
    torch.manual_seed(seed)
    yield


def report(page: int, device: str, backend: str = sglang_kit.NAME) -> str:
    """One line: which ids and hidden states differ between the three ways, and the margins."""
    ways = ("eager", "padded", "captured") if device == "cuda" else ("eager", "padded")
    drafts = {way: run(page, way, device, backend) for way in ways}
    first = drafts["eager"]
    parts = [
        f"{backend} page {page}: smallest margin {smallest_margin(first):.2f} BF16 steps, ids {first.ids.tolist()}"
    ]
    for a, b in (("eager", "padded"), ("padded", "captured"), ("eager", "captured"))[: 3 if device == "cuda" else 1]:
        x, y = drafts[a], drafts[b]
        hidden = max(float((p - q).abs().max()) for p, q in zip(x.hidden, y.hidden, strict=True))
        parts.append(f"{a}/{b}: {int((x.ids != y.ids).sum())} ids differ, hidden states by {hidden:.2e}")
    return "; ".join(parts)


def main() -> None:
    sglang_kit.load_plugin()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for page in [int(x) for x in sys.argv[1:]] or sglang_kit.PAGES:
        for backend in (sglang_kit.NAME, "triton")[: 2 if device == "cuda" else 1]:
            print(report(page, device, backend), flush=True)


if __name__ == "__main__":
    main()
