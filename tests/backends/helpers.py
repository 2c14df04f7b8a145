"""Runs one backend on one poisoned case and compares with the float64 oracle."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import torch

from uncast.attention import AttentionPlan, ClaimedCapabilityWarning, MLAPagedAttention, ProblemSpec, registry
from uncast.attention.oracle import mla_oracle, relative_errors
from uncast.verify.probe import MAX_LSE_ERROR, ProbeCase, allowed_errors, make_case, plan_case, run_case


@dataclass
class Outcome:
    """Output, LSE and plan of a run that matched the oracle."""

    out: torch.Tensor
    lse: torch.Tensor
    plan: AttentionPlan
    case: ProbeCase
    attention: MLAPagedAttention


def planned(backend: str, spec: ProblemSpec, case: ProbeCase) -> tuple[MLAPagedAttention, AttentionPlan]:
    attention = MLAPagedAttention(backend)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ClaimedCapabilityWarning)
        plan_case(attention, spec, case)
    assert attention.last_plan is not None
    return attention, attention.last_plan


def check(backend: str, spec: ProblemSpec, kv_lens: list[int], q_lens: list[int], *, seed: int = 0) -> Outcome:
    """Asserts what the backend promises, per (token, head) and over the tensor, the LSE, and bitwise repeatability."""
    case = make_case(spec, kv_lens, q_lens, seed=seed)
    attention, plan = planned(backend, spec, case)
    out, lse = run_case(attention, case)
    expected, expected_lse = mla_oracle(
        plan.problem, case.q_nope, case.q_pe, case.cache,
        ckv_scale=case.ckv_scale, kpe_scale=case.kpe_scale, indices=case.indices,
    )  # fmt: skip
    row_error, tensor_error = relative_errors(out, expected)
    row, whole = allowed_errors(registry.create(backend), plan.problem, expected)
    assert row_error <= row and tensor_error <= whole, (row_error, tensor_error, whole)
    dead = expected_lse == -math.inf
    assert torch.equal(lse == -math.inf, dead)
    assert not bool(dead.all()) or not out.any()
    if not bool(dead.all()):
        assert float((lse.double() - expected_lse)[~dead].abs().max()) <= MAX_LSE_ERROR
    again, lse_again = run_case(attention, case)
    assert torch.equal(out, again) and torch.equal(lse, lse_again)
    return Outcome(out, lse, plan, case, attention)
