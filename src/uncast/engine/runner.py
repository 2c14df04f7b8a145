"""The model runner: sequences over a paged pool, one forward step for any mix of prefill chunks and decodes."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch
from torch.profiler import record_function

from uncast.engine.batch import Batch
from uncast.engine.decode_steps import DecodeSteps, graph_refusal
from uncast.engine.drafted import DraftedRequest, Report, Verified
from uncast.engine.drafted_step import DraftedStep
from uncast.engine.labels import step_label
from uncast.engine.passes import PassRunner
from uncast.engine.runner_pool import RunnerError
from uncast.engine.sampler import Draw
from uncast.engine.sequence import MTPState, Rows, Sequence
from uncast.engine.static_step import BUCKETS, KNOWN, Chosen, Staged, StaticStep, StepParts, StepRequest
from uncast.engine.step_bytes import DraftPasses, StepBytes, lengths_of_passes, step_bytes

__all__ = ["MTPState", "ModelRunner", "Rows", "RunnerError", "Sequence", "StepBytes"]


class ModelRunner(PassRunner):
    """Sequences over the pool, eagerly or in static buffers; see `PassRunner` for the arguments and what else there is.

    Attributes:
        decode_steps: steps in static buffers, after `capture`; None before it.
    """

    decode_steps: DecodeSteps | None = None
    _chunks: Seq[tuple[int, int]] = ()
    _verified: tuple[DraftedStep, list[int]] | None = None
    _tell: Callable[[Staged], None] | None = None

    def ensure_pages(self, sequence: Sequence, num_tokens: int) -> None:
        """Allocates pages so that `sequence` can hold `num_tokens` rows.

        Raises:
            OutOfPages: the pool is full; the sequence is unchanged.
        """
        missing = self.pool.pages_for(num_tokens) - len(sequence.pages)
        if missing > 0:
            sequence.pages.extend(self.pool.allocate(missing))

    def free(self, sequence: Sequence) -> None:
        """Gives the sequence's pages back."""
        pages, sequence.pages, sequence.cached = sequence.pages, [], 0
        self.pool.release(pages)

    def capture(
        self, max_requests: int, *, drafts: Seq[int] = (), graphs: bool | None = None, buckets: Seq[int] = BUCKETS
    ) -> str | None:
        """Prepares decode steps of up to `max_requests` requests, and those that verify these numbers of drafts, in static
        buffers: on a GPU as CUDA graphs (unless `graphs` is false), see `static_step`. Later steps that fit them use them.

        Returns:
            None, or a sentence that says why every step stays eager.
        """
        reason = self.capture_refusal()
        if reason is not None:
            return reason
        device, topk = self.model.device, self._max_topk
        longest = min(self.pool.num_pages * self.page_size, self.model.config.max_position_embeddings)
        parts = StepParts(
            self._decoder, self.pool, self.counters, self.attention.requested, self.deterministic, self.drafts, topk,
            self.pool.pages_for(longest), self._planning, self.alone,
        )  # fmt: skip
        on = device.type == "cuda" if graphs is None else graphs and device.type == "cuda"
        self.decode_steps = DecodeSteps(parts, max_requests, drafts, graphs=on, buckets=buckets)
        return None

    def capture_refusal(self) -> str | None:
        """Why `capture` would do nothing, in one sentence; None if it can."""
        return graph_refusal(self._decoder, self.attention.requested, self._planning.spec(1, self._max_topk))

    def release_steps(self) -> None:
        """Gives up what `capture` made; steps are eager then."""
        if self.decode_steps is not None:
            self.decode_steps.release()
        self.decode_steps = None

    def launch(self, sequences: Seq[Sequence], sources: Seq[int], draws: Seq[tuple[int, Draw]] = ()) -> Chosen:
        """Starts a decode step of the next row of each sequence, in `decode_steps.decode`; nothing waits for the device.

        Args:
            sources: by sequence, the row of the launch before this one that chose the token to run, or `KNOWN`: its last.
            draws: (row, how it samples); other rows take their likeliest token.

        Returns:
            What the step chose, in the order of `sequences`; `cached` counts the rows already.
        """
        assert self.decode_steps is not None
        requests = [
            StepRequest(s.pages, s.cached + 1, s.tokens[s.cached] if source == KNOWN else 0, source)
            for s, source in zip(sequences, sources, strict=True)
        ]
        step = self.decode_steps.decode
        rows = self._run_static(step, requests, [(sequence, 1) for sequence in sequences], draws)
        return step.chosen(rows)

    def launch_drafted(self, drafts: int, requests: Seq[DraftedRequest], draws: Seq[tuple[int, Draw]] = ()) -> Report:
        """Starts a step that verifies so many drafts of each request and makes the next ones; nothing waits for the device.

        Args:
            draws: (row, how it samples); other rows take their likeliest token.
        """
        assert self.decode_steps is not None
        step = self.decode_steps.verify[drafts]
        with record_function(step_label([(request.start + step.q_len, step.q_len) for request in requests])):
            step.verify(requests, draws)
            return step.draft(len(requests))

    def drafted_bytes(
        self, drafts: int, starts: Seq[int], accepted: Seq[int], before: DraftPasses | None = None
    ) -> StepBytes:
        """Cache bytes of a step from `launch_drafted` whose requests began at these rows, with so many drafts accepted;
        `before` are further passes of the MTP layer that count."""
        assert self.decode_steps is not None
        step = self.decode_steps.verify[drafts]
        verify, passes = step.counted(starts, accepted)
        if before is not None:
            passes.add(before)
        chunks = [(start + step.q_len, step.q_len) for start in starts]
        return step_bytes(self.model.config, self.pool, [verify], chunks, passes)

    @property
    def verified(self) -> int:
        """Sequences of the last `step` if it verified drafts in static buffers, so that `draft_verified` can follow; else 0."""
        return 0 if self._verified is None else len(self._verified[1])

    def draft_verified(self, chosen: Seq[Seq[int]]) -> list[Verified]:
        """Makes the next drafts after a step that verified some, and writes its rows of the MTP layer; waits for them.

        Args:
            chosen: of each sequence the token chosen at each of its rows; beyond the last one kept they mean nothing, but none
                may be the draft at its place where the one before was.
        """
        assert self._verified is not None
        (step, starts), self._verified = self._verified, None
        found = step.draft(len(starts), chosen).read()
        self._draft_passes.add(step.counted(starts, [of.accepted for of in found])[1])
        return found

    def step(self, chunks: Seq[tuple[Sequence, int]], *, every_token: bool = False) -> torch.Tensor:
        """Runs the next `count` uncached tokens of each sequence, its drafts included; pages must be there.

        Returns:
            float32 [rows, vocab]: logits after each chunk's last token, of a sequence with drafts after its last token and each
            draft; with `every_token`, after each token of all chunks in order. After `capture` they, and `hidden`, may be in
            buffers that the next step overwrites.
        """
        self._verified, static = None, None if every_token else self.decode_steps
        drafted = None if static is None else static.find_drafted(chunks)
        if drafted is not None:
            return self._verify(*drafted, [sequence for sequence, _ in chunks])
        found = None if static is None else static.find(chunks)
        if found is not None:
            count = self._run_static(found[0], found[1], chunks)
            if found[0].hidden is not None:
                self.hidden = list(torch.split(found[0].hidden[:count], [count for _, count in chunks]))
            return found[0].logits[:count]
        rows = []
        for sequence, count in chunks:
            start, end = sequence.cached, sequence.cached + count
            rows.append(Rows(sequence, start, end, start if every_token else end - 1 - len(sequence.drafts)))
        batches = self.batches(rows)
        self._plans = []
        with record_function(step_label([(row.end, row.end - row.start) for row in rows])):
            results = [self._forward(batch, self.pool) for batch in batches]
        for sequence, count in chunks:
            sequence.cached += count
        self._chunks = [(sequence.cached, count) for sequence, count in chunks]
        if self.drafts:
            hidden = torch.cat([result[1] for result in results])[: sum(count for _, count in chunks)]
            self.hidden = list(torch.split(hidden, [count for _, count in chunks]))
        return results[0][0] if len(results) == 1 else torch.cat([result[0] for result in results])

    def _verify(self, step: DraftedStep, requests: Seq[DraftedRequest], sequences: Seq[Sequence]) -> torch.Tensor:
        """Runs a step that verifies drafts, up to its logits."""
        rows, starts = len(requests) * step.q_len, [request.start for request in requests]
        with record_function(step_label([(start + step.q_len, step.q_len) for start in starts])):
            step.verify(requests)
        for sequence in sequences:
            sequence.cached += step.q_len
        self._verified = step, starts
        self._plans = [step.counted(starts)[0]]
        self._chunks = [(sequence.cached, step.q_len) for sequence in sequences]
        self.hidden = list(torch.split(step.hidden[:rows], step.q_len))
        return step.logits[:rows]

    def _run_static(
        self,
        step: StaticStep,
        requests: Seq[StepRequest],
        chunks: Seq[tuple[Sequence, int]],
        draws: Seq[tuple[int, Draw]] = (),
    ) -> int:
        """Runs a static step; how many rows it has."""
        with record_function(step_label([(sequence.cached + count, count) for sequence, count in chunks])):
            rows = step.run(requests, draws, self._tell)
        for sequence, count in chunks:
            sequence.cached += count
        self._plans, self._chunks = step.used, [(sequence.cached, count) for sequence, count in chunks]
        return rows

    def last_step_bytes(self) -> StepBytes:
        """Cache bytes of the last step.

        Raises:
            RunnerError: no step was run.
        """
        if not self._plans:
            raise RunnerError("no step was run yet")
        return step_bytes(self.model.config, self.pool, self._plans, self._chunks, self._draft_passes)

    def draft_chain(self, batch: Batch, hidden: torch.Tensor, slots: Seq[Seq[int]]) -> torch.Tensor:
        """As the passes' own, in static buffers if they fit."""
        static = None if self.decode_steps is None else self.decode_steps.draft
        size = None if static is None else static.size_for(len(batch.ids))
        if static is not None and size is not None:
            self._draft_passes.plans += [
                static.counted(size, kv_lens) for kv_lens in lengths_of_passes(batch.kv_lens, slots)
            ]
            return static.run(size, batch, hidden, slots).cpu()
        return super().draft_chain(batch, hidden, slots)
