"""Which steps of a runner run in static buffers: those in which every request has its next token, or a draft's verification."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from uncast.attention import MLAPagedAttention, ProblemSpec, Refused
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
        verify: by number of drafts; in deterministic mode all are `decode`'s, whose every row is a request.
        draft: passes of the MTP layer after the first draft, of which two or more drafts have some.
    """

    def __init__(
        self, parts: StepParts, max_requests: int, drafts: Seq[int] = (), *, graphs: bool, buckets: Seq[int] = BUCKETS
    ) -> None:
        self._deterministic = parts.deterministic
        self.draft = StaticDraft(parts, max_requests, buckets) if max(drafts, default=0) > 1 else None
        if parts.deterministic:
            max_requests *= 1 + max(drafts, default=0)
        self.decode = StaticStep(parts, max_requests, 1, buckets)
        self.verify = {count: StaticStep(parts, max_requests, 1 + count, buckets) for count in sorted(set(drafts))
                       if count and not parts.deterministic}  # fmt: skip
        for step in (self.decode, *self.verify.values()):
            step.prepare(graphs)
        if self.draft is not None:
            self.draft.prepare(graphs)

    def release(self) -> None:
        """Gives the graphs up; no step may follow."""
        for step in (self.decode, *self.verify.values()):
            step.release()
        if self.draft is not None:
            self.draft.release()

    def find(self, chunks: Seq[tuple[Sequence, int]]) -> tuple[StaticStep, list[StepRequest]] | None:
        """The static step that these chunks fit, and its requests; None if they have to be run eagerly. Logits of all its
        rows are wanted."""
        if any(count != 1 + len(sequence.drafts) for sequence, count in chunks):
            return None
        if self._deterministic:
            step, q_lens = self.decode, [1] * sum(count for _, count in chunks)
        elif len({count for _, count in chunks}) == 1:
            drafts = chunks[0][1] - 1
            found = self.verify.get(drafts) if drafts else self.decode
            if found is None:
                return None
            step, q_lens = found, [found.q_len] * len(chunks)
        else:
            return None
        if len(q_lens) > step.max_requests or any(s.cached + count > step.longest for s, count in chunks):
            return None
        return step, [
            StepRequest(sequence.pages, last, [sequence.token(place) for place in range(last - step.q_len, last)])
            for sequence, count in chunks
            for last in range(sequence.cached + step.q_len, sequence.cached + count + 1, step.q_len)
        ]
