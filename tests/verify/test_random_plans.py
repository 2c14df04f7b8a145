"""500 random plans: each runs within tolerance or is refused in one sentence; there is no third outcome.

A failure is a hole in a backend's capability, or in the checks of `plan`.
"""

from __future__ import annotations

import math
import random
import warnings
from collections import Counter
from typing import Any

import pytest
import torch

from uncast.attention import ClaimedCapabilityWarning, MLAPagedAttention, ProblemError, ProblemSpec, Refused, registry
from uncast.attention.oracle import relative_errors
from uncast.attention.registry import UnknownBackend
from uncast.latent.layouts import LayoutError
from uncast.verify.probe import MAX_LSE_ERROR, ProbeCase, ProbeInputs, Rounding, allowed_errors, make_case, run_case

PLANS = 500
REFUSALS = (ProblemError, Refused, UnknownBackend, LayoutError)
INT64, GARBAGE = torch.int64, 2**31 - 1
WRONG: list[dict[str, Any]] = [
    {"num_heads": 0}, {"num_heads": 129}, {"num_heads": 8.0}, {"page_size": 3}, {"page_size": 256}, {"page_size": 0},
    {"kv_layout": "fp8_e5m2"}, {"kv_layout": "fp4"}, {"kv_layout": None}, {"q_data_type": torch.float8_e4m3fn},
    {"q_data_type": torch.float64}, {"q_data_type": "bf16"}, {"sm_scale": 0.0}, {"sm_scale": math.nan}, {"sm_scale": None},
    {"lse_base": 2}, {"lse_base": "10"}, {"head_dim_ckv": 0}, {"head_dim_kpe": -64}, {"head_dim_ckv": "512"}, {"max_q_len": 0},
    {"max_kv_len": -1}, {"max_kv_len": 0}, {"total_q": -3}, {"total_q": 10_000}, {"num_pages": 0}, {"num_pages": "many"},
    {"seq_lens": None}, {"block_tables": None}, {"kv_indptr": torch.zeros(2, dtype=torch.int32)}, {"head_dim_kpe": None},
]  # fmt: skip
BROKEN_METADATA = ["dtype", "length", "negative", "too long", "page", "one dimension", "decreasing", "no tensor"]


def random_problem(rng: random.Random, device: str) -> tuple[ProblemSpec, ProbeCase]:
    gpu = device == "cuda"  # where no backend takes fp32: a few of each, so that enough plans run
    layout = rng.choice(["fp8_ds_mla", "fp8_e4m3", "bf16"] * (4 if gpu else 1) + ["fp32"])
    dims = (512, 64) if layout == "fp8_ds_mla" or gpu or rng.random() < 0.5 else rng.choice([(128, 32), (256, 64)])
    spec = ProblemSpec(
        num_heads=rng.choice([1, 2, 3, 5, 8, 12, 16, 20] if rng.random() < 0.93 else [37, 64, 128]),
        head_dim_ckv=dims[0],
        head_dim_kpe=dims[1],
        page_size=rng.choice([1, 2, 4, 8, 16, 32, 64, 128]),
        kv_layout=layout,
        q_data_type=rng.choice([torch.bfloat16, torch.float16] * (4 if gpu else 1) + [torch.float32]),
        causal=rng.random() < 0.7,
        sm_scale=rng.choice([576**-0.5, 0.01, 0.2]),
        device=device,
        lse_base=rng.choice(["2", "e"]),
        batch_invariant=rng.random() < 0.3,
    )
    kv_lens = [rng.choice([0, 1, 2, 63, 64, 65, rng.randrange(150)]) for _ in range(rng.randrange(1, 5))]
    q_lens = [rng.choice([0, 1, 1, 1, 2, 5]) for _ in kv_lens]
    return spec, make_case(spec, kv_lens, q_lens, seed=rng.randrange(1000))


def break_metadata(how: str, arguments: dict[str, Any]) -> None:
    """Makes one of the metadata tensors impossible."""
    if how == "dtype":
        arguments["seq_lens"] = arguments["seq_lens"].to(INT64)
    elif how == "length":
        arguments["qo_indptr"] = arguments["qo_indptr"][:-1]
    elif how == "negative":
        arguments["seq_lens"] = -1 - arguments["seq_lens"]
    elif how == "too long":
        arguments["seq_lens"] = arguments["seq_lens"] + 100_000
    elif how == "page":
        arguments["block_tables"] = arguments["block_tables"].fill_(GARBAGE)
        arguments["seq_lens"] = arguments["seq_lens"].fill_(1)
    elif how == "one dimension":
        arguments["block_tables"] = arguments["block_tables"].flatten()
    elif how == "decreasing":
        arguments["qo_indptr"] = arguments["qo_indptr"].flip(0) + 1
    else:
        arguments["block_tables"] = arguments["block_tables"].tolist()


def random_plan(rng: random.Random, device: str, backends: list[str]) -> str:
    """Plans at random; "verified" against the oracle, or the type of the refusal."""
    spec, case = random_problem(rng, device)
    arguments: dict[str, Any] = {
        "qo_indptr": case.qo_indptr.clone(), "block_tables": case.block_tables.clone(), "seq_lens": case.seq_lens.clone(),
        "num_heads": spec.num_heads, "head_dim_ckv": spec.head_dim_ckv, "head_dim_kpe": spec.head_dim_kpe,
        "page_size": spec.page_size, "causal": spec.causal, "sm_scale": spec.sm_scale, "q_data_type": spec.q_data_type,
        "kv_layout": spec.kv_layout, "lse_base": spec.lse_base, "batch_invariant": spec.batch_invariant,
        "num_pages": case.cache.shape[0], "validate": True,
    }  # fmt: skip
    kind = rng.random()
    wrong: object = None
    if kind < 0.2:
        wrong = rng.choice(WRONG)
        arguments |= wrong  # type: ignore[operator]
    elif kind < 0.35:
        wrong = rng.choice(BROKEN_METADATA)
        break_metadata(wrong, arguments)
    backend = rng.choice(backends)
    try:
        attention = MLAPagedAttention(backend)
        plan = attention.plan(**arguments)
        out, lse = run_case(attention, case)
    except REFUSALS as refusal:
        sentence = str(refusal)
        assert len(sentence) > 15 and "\n" not in sentence, (backend, wrong, sentence)
        return type(refusal).__name__
    expected, expected_lse = ProbeInputs((), case).reference(plan.problem, Rounding.of(plan))
    row_error, tensor_error = relative_errors(out, expected)
    live = expected_lse.isfinite()
    row, whole = allowed_errors(registry.create(plan.backend), plan.problem, expected)
    assert row_error <= row and tensor_error <= whole, (plan.backend, wrong, spec, row_error, tensor_error, whole)
    assert bool((lse[~live] == -math.inf).all())
    assert not bool(live.any()) or float((lse.double() - expected_lse)[live].abs().max()) <= MAX_LSE_ERROR
    return "verified"


def check_plans(device: str, backends: list[str], seed: int) -> Counter[str]:
    rng = random.Random(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ClaimedCapabilityWarning)
        return Counter(random_plan(rng, device, backends) for _ in range(PLANS))


def test_500_random_plans_run_or_refuse() -> None:
    backends = [
        "auto",
        "torch_cpu",
        "gather_cast:torch_cpu",
        "pool_cast:torch_cpu",
        "native",
        "flashinfer_fa3",
        "flashmla",
        "nope",
    ]
    outcomes = check_plans("cpu", backends, seed=5)
    assert outcomes["verified"] >= 100 and all(outcomes[error.__name__] > 0 for error in REFUSALS), outcomes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_500_random_plans_run_or_refuse_on_a_gpu() -> None:
    peers = ["flashinfer_fa2", "flashinfer_fa3", "flashmla", "flashinfer_xqa"]  # refused where they are not installed
    wrapped = ["gather_cast:native", "pool_cast:native", "gather_cast:flashmla", "gather_cast:flashinfer_fa3"]
    outcomes = check_plans("cuda", ["auto", "auto", "native", "native", "torch_cpu", *peers, *wrapped], seed=6)
    assert outcomes["verified"] >= 80 and outcomes["Refused"] > 0, outcomes
