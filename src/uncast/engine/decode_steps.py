"""Which steps of a runner run in static buffers: those in which every request has its next token, or a draft's verification."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from uncast.attention import MLAPagedAttention, ProblemSpec, Refused
from uncast.engine.drafted import DraftedRequest
from uncast.engine.drafted_step import DraftedStep
from uncast.engine.sequence import Sequence
from uncast.engine.static_draft import StaticDraft
from uncast.engine.static_step import BUCKETS, StaticStep, StepParts, StepRequest
from uncast.models.decoder import MLADecoder
from uncast.models.layers import ExpertStack, MoE
from uncast.models.parallel import ShardedMoE


def graph_refusal(decoder: MLADecoder, requested: str, spec: ProblemSpec) -> str | None:
    """Why no decode step of this model can be captured on its GPU (or run without the host looking at it), in one sentence;
    None if it can."""
    if decoder.device.type == "cpu":
        return None
    x = torch.empty((1, decoder.config.hidden_size), dtype=decoder.dtype, device=decoder.device)
    for layer in decoder.layers:
        experts = layer.mlp.experts if isinstance(layer.mlp, MoE | ShardedMoE) else None
        if experts is not None and not (isinstance(experts, ExpertStack) and experts.is_grouped(x)):
            return (
                f"decode steps are not captured: experts of {decoder.dtype} and these widths are called one by one by the "
                "host; use bfloat16 and packed widths that are multiples of 128"
            )
    try:
        MLAPagedAttention(requested, cuda_graph=True).resolve(spec)
    except Refused as refused:
        return f"decode steps are not captured: {refused}"
    return None


class DecodeSteps:
    """Static steps of one runner.

    Attributes:
        decode: one token of each request.
        verify: by number of drafts, the same for every request. In deterministic mode `decode`, whose every row is a request,
            serves other steps with drafts.
        draft: passes of the MTP layer after the first draft of a request that comes from a step that is not static.
    """

    def __init__(
        self, parts: StepParts, max_requests: int, drafts: Seq[int] = (), *, graphs: bool, buckets: Seq[int] = BUCKETS
    ) -> None:
        self._deterministic = parts.deterministic
        self.draft = StaticDraft(parts, max_requests, buckets) if max(drafts, default=0) > 1 else None
        self.verify = {
            count: DraftedStep(parts, max_requests, count, buckets) for count in sorted(set(drafts)) if count
        }
        if parts.deterministic:
            max_requests *= 1 + max(drafts, default=0)
        self.decode = StaticStep(parts, max_requests, buckets)
        for step in self._all():
            step.prepare(graphs)

    def release(self) -> None:
        """Gives the graphs up; no step may follow."""
        for step in self._all():
            step.release()

    def _all(self) -> list[StaticStep | DraftedStep | StaticDraft]:
        return [self.decode, *self.verify.values(), *([] if self.draft is None else [self.draft])]

    def find(self, chunks: Seq[tuple[Sequence, int]]) -> tuple[StaticStep, list[StepRequest]] | None:
        """The static step that these chunks fit, and its requests; None if they have to be run eagerly. Logits of all its
        rows are wanted."""
        if any(count != 1 + len(sequence.drafts) for sequence, count in chunks):
            return None
        step, rows = self.decode, sum(count for _, count in chunks)
        if not self._deterministic and rows != len(chunks):
            return None
        if rows > step.max_requests or any(s.cached + count > step.longest for s, count in chunks):
            return None
        return step, [
            StepRequest(sequence.pages, last, sequence.token(last - 1))
            for sequence, count in chunks
            for last in range(sequence.cached + 1, sequence.cached + count + 1)
        ]

    def find_drafted(self, chunks: Seq[tuple[Sequence, int]]) -> tuple[DraftedStep, list[DraftedRequest]] | None:
        """The same of steps that verify drafts."""
        drafts = len(chunks[0][0].drafts) if chunks else 0
        step = self.verify.get(drafts)
        if step is None or any(len(sequence.drafts) != drafts or count != 1 + drafts for sequence, count in chunks):
            return None
        if len(chunks) > step.max_requests or any(s.cached + count > step.longest for s, count in chunks):
            return None
        return step, [DraftedRequest(s.pages, [s.tokens[s.cached], *s.drafts], s.cached, drafts) for s, _ in chunks]
