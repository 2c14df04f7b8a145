"""Runs a backend on a small poisoned problem of a given spec and compares it with the float64 oracle."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from uncast.attention import (
    AttentionPlan,
    ClaimedCapabilityWarning,
    MLAPagedAttention,
    Problem,
    ProblemSpec,
    registry,
)
from uncast.attention.oracle import mla_oracle, relative_errors
from uncast.attention.verified import mark_verified
from uncast.latent.codec import Scale, decode_rows, encode_rows
from uncast.latent.layouts import row_layout
from uncast.verify.accuracy import MAX_LSE_ERROR, MAX_ROW_ERROR, MAX_TENSOR_ERROR, Accuracy, allowed_errors
from uncast.verify.bands import BandedTensor
from uncast.verify.bf16_contexts import FEW_ROWS, MANY_ROWS, flatten_scores, tune_few_rows
from uncast.verify.cases import ProbeCase, make_case, plan_case, run_case, run_without_lse
from uncast.verify.probe_errors import broken_output, parts_of, wrong_lse

__all__ = [
    "MAX_LSE_ERROR", "MAX_ROW_ERROR", "MAX_TENSOR_ERROR", "ProbeCase", "ProbeInputs", "ProbeResult", "Rounding",
    "allowed_errors", "make_case", "plan_case", "probe_combination", "run_case",
]  # fmt: skip


@dataclass(frozen=True)
class ProbeResult:
    """Outcome of one probe: `verified`, or why not in one sentence."""

    verified: bool
    reason: str
    row_error: float = math.nan
    tensor_error: float = math.nan
    stored_error: float = math.nan
    """`tensor_error` against the values as stored, where that is against rounded ones."""
    few_rows_error: float = math.nan
    """Of the request of a few rows alone; NaN where there is none."""
    many_rows_error: float = math.nan
    """Of the request of many rows alone."""


@dataclass(frozen=True)
class Rounding:
    """What a plan's backend makes of the stored values before it attends to them.

    Attributes:
        layout: that they are rounded to.
        scales: whether the scales are rounded to BF16 before, as in a kernel that multiplies codes with them in BF16.
    """

    layout: str
    scales: bool

    @classmethod
    def of(cls, plan: AttentionPlan) -> Rounding | None:
        """None for a backend that attends to the stored values."""
        layout = plan.rounded_layout
        return None if layout is None else cls(layout, plan.copy_layout is None)


@dataclass
class ProbeInputs:
    """The batch that probes of specs with the same shapes share, and the oracle's answers to it.

    Its last two requests are those of `verify.bf16_contexts`; `tuned`: whether that was possible of the last.
    """

    key: tuple[object, ...]
    case: ProbeCase
    tuned: bool = False
    references: dict[tuple[bool, Rounding | None], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    pristine: ProbeCase = field(init=False)

    def __post_init__(self) -> None:
        self.pristine = self.case.clone()

    @classmethod
    def of(cls, spec: ProblemSpec, uniform_q_len: bool, before: ProbeInputs | None = None) -> ProbeInputs:
        """Inputs for `spec`: those of the probe before where they fit."""
        shapes = replace(spec, causal=True, lse_base="2", batch_invariant=False)
        key = (shapes, uniform_q_len)
        if before is not None and before.key == key:
            return before
        page = spec.page_size
        kv_lens = [0, 1, page, page + 1, 3 * page + 2, 130, MANY_ROWS, FEW_ROWS]
        if spec.max_q_len == 1:
            q_lens = [1] * len(kv_lens)
        elif uniform_q_len:
            q_lens = [min(spec.max_q_len, 4)] * len(kv_lens)
            kv_lens = [max(kv, q_lens[0]) if kv else 0 for kv in kv_lens]
        else:
            most = spec.max_q_len
            q_lens = [1, 1, min(most, page), 2, min(most, 5), most, min(most, 8), 2]
            q_lens = [min(q, max(1, kv)) for q, kv in zip(q_lens, kv_lens, strict=True)]
        case = make_case(spec, kv_lens, q_lens)
        flatten_scores(case, len(kv_lens) - 2)
        tuned = tune_few_rows(spec, case, len(kv_lens) - 1)
        return cls(key, case, tuned)

    def reference(self, problem: Problem, rounding: Rounding | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The oracle's output and LSE (in the problem's base) over the cache, or over its values as `rounding` leaves them."""
        spec = problem.spec
        key = (spec.causal, rounding)
        if key not in self.references:
            problem = replace(problem, spec=replace(spec, lse_base="e"))
            self.references[key] = _reference(problem, self.case, rounding)
        out, lse = self.references[key]
        return out, lse if spec.lse_base == "e" else lse / math.log(2.0)


@dataclass
class _Run:
    """One run between guard bands."""

    out: BandedTensor
    lse: BandedTensor | None

    @classmethod
    def of(cls, attention: MLAPagedAttention, case: ProbeCase, with_lse: bool) -> _Run:
        rows, heads, width = case.q_nope.shape
        device = case.q_nope.device.type
        run = cls(
            BandedTensor((rows, heads, width), case.q_nope.dtype, device),
            BandedTensor((rows, heads), torch.float32, device) if with_lse else None,
        )
        if run.lse is None:
            run_without_lse(attention, case, run.out.tensor)
        else:
            run_case(attention, case, run.out.tensor, run.lse.tensor)
        return run

    def tensors(self) -> list[tuple[str, BandedTensor]]:
        return [("out", self.out), *([("lse", self.lse)] if self.lse is not None else [])]

    def same_bits(self, other: _Run) -> bool:
        pairs = zip(self.tensors(), other.tensors(), strict=True)
        return all(torch.equal(mine.tensor, theirs.tensor) for (_, mine), (_, theirs) in pairs)


def probe_combination(
    backend: str,
    spec: ProblemSpec,
    *,
    inputs: ProbeInputs | None = None,
    thorough: bool = False,
    alone: bool = False,
    on_phase: Callable[[str], None] | None = None,
) -> ProbeResult:
    """Runs `backend` twice on a small batch of `spec`; on success the combination counts as verified in this process.

    A backend that attends to rounded values (`rounded_layout`), in a copy of the cache or on the fly, is measured against
    those: rounding is what it is there to show. What it may err by is `verify.accuracy`'s to say, of the whole batch and also
    of each of the two requests that are there to show what is rounded to BF16, which the norm of the whole would hide.

    Args:
        inputs: those of a probe before, used again where they fit.
        thorough: also run each request alone for `batch_invariant`, and on a GPU capture and replay a backend that
            can be.
        alone: plan it with `Problem.alone_rows`, for a dense spec of one query.
        on_phase: told "plan", "run" and "graph" before each begins.

    Raises whatever the backend raises; a probe of unknown backends belongs in a child process.
    """
    tell = on_phase or (lambda phase: None)
    traits = registry.create(backend)
    inputs = ProbeInputs.of(spec, traits.uniform_q_len, inputs)
    attention, case = MLAPagedAttention(backend), inputs.case
    tell("plan")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ClaimedCapabilityWarning)
        problem = plan_case(attention, spec, case, case.seq_lens.shape[0] if alone else 0)
    tell("run")
    plan = attention.last_plan
    with_lse = traits.capability(replace(problem.spec, return_lse=True)).ok
    first, second = (_Run.of(attention, case, with_lse) for _ in range(2))
    changed = _changed_inputs(inputs)
    expected, expected_lse = inputs.reference(problem, None if plan is None else Rounding.of(plan))
    out, accuracy = first.out.tensor, Accuracy.of(traits, problem.spec.layout.name)
    parts = parts_of(problem, inputs.tuned, out, expected, accuracy)
    whole, few, many = (part.errors for part in parts)
    errors = (*whole, relative_errors(out, inputs.reference(problem, None)[0])[1], few[1], many[1])
    reason = (
        _overrun(first)
        or _overrun(second)
        or changed
        or broken_output(out, expected)
        or next((part.fault for part in parts if part.fault), "")
        or ("" if first.lse is None else wrong_lse(first.lse.tensor, expected_lse, accuracy))
        or ("" if first.same_bits(second) else "gives different bits in two runs on the same input")
    )
    if not reason and thorough and spec.batch_invariant:
        reason = _batch_fault(backend, spec, case, first)
    if not reason and thorough and traits.cuda_graph and spec.device == "cuda":
        tell("graph")
        reason = _graph_fault(attention, case, first)
    if reason:
        return ProbeResult(False, f"{backend} {reason}", *errors)
    mark_verified(backend, replace(problem.spec, max_q_len=spec.max_q_len))
    return ProbeResult(True, "", *errors)


def _overrun(run: _Run) -> str:
    for name, tensor in run.tensors():
        before, after = tensor.changed()
        if before or after:
            return f"writes out of bounds: {before} bytes before `{name}` and {after} after it changed"
    return ""


def _changed_inputs(inputs: ProbeInputs) -> str:
    """What `run` may not write to, restored: the oracle reads it, too, and would follow the change."""
    changed = inputs.case.restore(inputs.pristine)
    if not changed:
        return ""
    if changed == ["cache"]:
        return "writes to the cache in run(): only write() may"
    return f"writes to its inputs in run(): {', '.join(changed)}"


def _batch_fault(backend: str, spec: ProblemSpec, case: ProbeCase, first: _Run) -> str:
    """Compares each live request's bits with those of a batch of it alone."""
    starts = case.qo_indptr.tolist()
    for request in case.seq_lens.nonzero().flatten().tolist():
        rows = slice(starts[request], starts[request + 1])
        alone = replace(
            case,
            block_tables=case.block_tables[request : request + 1].clone(),
            seq_lens=case.seq_lens[request : request + 1].clone(),
            qo_indptr=case.qo_indptr[request : request + 2] - starts[request],
            q_nope=case.q_nope[rows], q_pe=case.q_pe[rows],
            indices=None if case.indices is None else case.indices[rows],
        )  # fmt: skip
        attention = MLAPagedAttention(backend)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ClaimedCapabilityWarning)
            plan_case(attention, spec, alone)
        single = _Run.of(attention, alone, first.lse is not None)
        pairs = zip(single.tensors(), first.tensors(), strict=True)
        if not all(torch.equal(own.tensor, both.tensor[rows]) for (_, own), (_, both) in pairs):
            return "gives a request other bits in a batch than alone, and batch_invariant was asked for"
    return ""


def _graph_fault(attention: MLAPagedAttention, case: ProbeCase, first: _Run) -> str:
    """Captures one run with its fresh outputs, and replays it."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            captured = _Run.of(attention, case, first.lse is not None)
    except RuntimeError as error:
        return f"cannot be captured in a CUDA graph: {str(error).splitlines()[0]}"
    graph.replay()  # fills the bands and outputs anew, then runs
    torch.cuda.synchronize()
    return _overrun(captured) or ("" if captured.same_bits(first) else "gives different bits in a CUDA graph")


def _reference(problem: Problem, case: ProbeCase, rounding: Rounding | None) -> tuple[torch.Tensor, torch.Tensor]:
    cache, scales, spec = case.cache, (case.ckv_scale, case.kpe_scale), problem.spec
    if rounding is not None:
        copy = row_layout(rounding.layout, spec.head_dim_ckv, spec.head_dim_kpe)
        if rounding.scales:
            scales = (_to_bf16(scales[0]), _to_bf16(scales[1]))
        rows = cache.view(-1, spec.layout.row_bytes)
        values = decode_rows(rows, spec.layout, ckv_scale=scales[0], kpe_scale=scales[1])
        cache = encode_rows(*values, copy).view(cache.shape[0], spec.page_size, copy.row_bytes)
        problem, scales = replace(problem, spec=replace(spec, kv_layout=rounding.layout)), (None, None)
    return mla_oracle(
        problem, case.q_nope, case.q_pe, cache, ckv_scale=scales[0], kpe_scale=scales[1], indices=case.indices
    )


def _to_bf16(scale: Scale) -> Scale:
    return None if scale is None else float(torch.as_tensor(scale).to(torch.bfloat16))
