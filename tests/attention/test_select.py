"""Which backend `auto` takes, asked for chips that are not here. A failure means a slower or no backend for
someone."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.backends import flashinfer_double
from uncast.attention import Backend, Capability, MLAPagedAttention, Problem, ProblemSpec, Refused, registry, verified
from uncast.attention.select import Selector
from uncast.attention.verified import mark_verified
from uncast.backends.torch_cpu import TorchCpuBackend

BLACKWELL = ProblemSpec(num_heads=16, kv_layout="bf16", arch=100)


@pytest.fixture(autouse=True)
def nothing_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verified, "_verified", set())
    monkeypatch.setattr(verified, "_times", {})
    monkeypatch.setattr(verified, "_loaded", {"cpu", "cuda"})


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in flashinfer_double.modules().items():
        monkeypatch.setitem(sys.modules, name, module)


def auto(spec: ProblemSpec, **kw: Any) -> str:
    return MLAPagedAttention(**kw).resolve(spec)


def probed(backend: str, spec: ProblemSpec, microseconds: float | None = None) -> None:
    mark_verified(backend, spec)
    if microseconds is not None:
        verified._times[backend, verified.combination(spec)] = microseconds


@pytest.mark.usefixtures("flashinfer")
def test_trtllm_gen_is_preferred_on_sm_100_where_its_contract_fits() -> None:
    for fits in ({}, {"arch": 103}, {"page_size": 32}, {"max_q_len": 4}, {"num_heads": 128}, {"return_lse": True}):
        assert auto(replace(BLACKWELL, **fits)) == "flashinfer_trtllm_gen", fits
    for not_its in (
        {"arch": 90}, {"arch": 120}, {"kv_layout": "fp8_e4m3"}, {"kv_layout": "fp8_ds_mla"}, {"num_heads": 20},
        {"page_size": 16}, {"q_data_type": torch.float16}, {"batch_invariant": True}, {"max_q_len": 4, "causal": False},
    ):  # fmt: skip
        assert auto(replace(BLACKWELL, **not_its)) == "native", not_its
    assert auto(BLACKWELL, cuda_graph=True) == "native"
    probed("native", BLACKWELL)
    assert auto(BLACKWELL) == "native"  # verified before claimed
    probed("flashinfer_trtllm_gen", BLACKWELL)
    assert auto(BLACKWELL) == "flashinfer_trtllm_gen"


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is not None, reason="FlashInfer is installed")
def test_without_the_library_native_is_taken() -> None:
    assert auto(BLACKWELL) == "native"


@pytest.mark.usefixtures("flashinfer")
def test_a_verified_peer_is_taken_when_it_is_faster_and_never_imported_before(monkeypatch: pytest.MonkeyPatch) -> None:
    hopper = replace(BLACKWELL, arch=90)
    made: list[str] = []
    create = registry.create
    monkeypatch.setattr(registry, "create", lambda name: made.append(name) or create(name))
    probed("native", hopper, 80.0)
    probed("flashinfer_fa3", hopper, 70.0)
    assert auto(hopper) == "native"  # fa3 misses the default accuracy over split contexts: by name only
    monkeypatch.setattr(
        registry, "AUTO_ORDER", {"cuda": ("native", "flashinfer_fa3", "flashinfer_fa2", "flashmla"), "cpu": ()}
    )
    assert auto(hopper) == "flashinfer_fa3" and set(made) == {"native", "flashinfer_fa3"}
    probed("flashinfer_fa3", hopper, 90.0)
    assert auto(hopper) == "native"
    probed("flashinfer_fa2", hopper)  # no time: then the documented order
    probed("native", hopper, 100.0)
    assert auto(hopper) == "native"
    assert auto(replace(hopper, num_heads=8)) == "native" and "flashmla" not in made


class RoundsP(TorchCpuBackend):
    """Reads an FP8 cache as it is stored and rounds probabilities to BF16."""

    name = "rounds_p"
    bf16_probabilities = ("fp8_e4m3",)


@pytest.mark.parametrize("said", [("fp8_e4m3",), "fp8_e4m3"])
def test_over_fp8_only_what_keeps_the_default_accuracy_is_taken(said: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a backend that names one layout without a tuple around it, as the probe understands it."""
    monkeypatch.setattr(RoundsP, "bf16_probabilities", said)
    monkeypatch.setitem(registry._BACKENDS, "rounds_p", f"{__name__}:RoundsP")
    monkeypatch.setattr(registry, "AUTO_ORDER", {"cpu": ("rounds_p", "torch_cpu"), "cuda": ()})
    here = ProblemSpec(num_heads=4, kv_layout="fp8_e4m3", q_data_type=torch.float32, device="cpu")
    probed("rounds_p", here, 1.0)
    assert auto(here) == "torch_cpu" and auto(replace(here, kv_layout="bf16")) == "rounds_p"
    assert MLAPagedAttention("rounds_p").resolve(here) == "rounds_p"
    monkeypatch.setattr(registry, "AUTO_ORDER", {"cpu": ("rounds_p",), "cuda": ()})
    with pytest.raises(
        Refused, match=r"rounds_p rounds to BF16 on the way from an FP8 cache to its output: ask for it by"
    ):
        auto(here)


def test_what_casts_or_rounds_is_never_taken() -> None:
    for names in registry.AUTO_ORDER.values():
        for name in names:
            made = registry.backend_class(name)
            assert not made.lossy and made.copy_layout is None and ":" not in name


@pytest.mark.parametrize(
    ("name", "spec", "sentence"),
    [
        (
            "torch_cpu", BLACKWELL,
            r"^torch_cpu cannot run this: .*; use native$",
        ),
        (
            "native", replace(BLACKWELL, q_data_type=torch.float32),
            r"^native cannot run this: .* not float32; no other backend here can either$",
        ),
    ],
)  # fmt: skip
def test_a_backend_asked_for_is_refused_with_those_that_can(name: str, spec: ProblemSpec, sentence: str) -> None:
    with pytest.raises(Refused, match=sentence):
        MLAPagedAttention(name).resolve(spec)


@pytest.mark.usefixtures("flashinfer")
def test_a_16_bit_backend_is_offered_behind_a_gather() -> None:
    with pytest.raises(
        Refused, match=r"^flashinfer_fa2 cannot run this: it reads .* not fp8_ds_mla; use native or gather_"
    ) as it:
        MLAPagedAttention("flashinfer_fa2").resolve(replace(BLACKWELL, arch=90, kv_layout="fp8_ds_mla"))
    assert str(it.value).endswith("gather_cast:flashinfer_fa2")
    with pytest.raises(
        Refused, match=r"^flashinfer_fa2 cannot run this: its run\(\) cannot be captured .*; use native$"
    ):
        MLAPagedAttention("flashinfer_fa2", cuda_graph=True).resolve(replace(BLACKWELL, arch=90))


class Fickle(TorchCpuBackend):
    """Claims everything and takes it back for batches of more than one request."""

    name = "fickle"

    def plan(self, problem: Problem) -> None:
        if problem.batch_size > 1:
            raise Refused("fickle runs single requests")
        super().plan(problem)


class Never(Backend):
    name = "never"

    def capability(self, spec: ProblemSpec) -> Capability:
        return Capability.refused("never runs anything")

    def plan(self, problem: Problem) -> None:
        raise AssertionError

    def run(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError


@pytest.fixture
def fickle(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for made in (Fickle, Never):
        registry.register(made.name, f"{__name__}:{made.__name__}")
    monkeypatch.setattr(registry, "AUTO_ORDER", {"cpu": ("never", "fickle", "torch_cpu"), "cuda": ("never", "gone")})
    yield
    for made in (Fickle, Never):
        registry._BACKENDS.pop(made.name)


def plan(attention: MLAPagedAttention, requests: int) -> str:
    int32 = {"dtype": torch.int32}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return attention.plan(
            torch.arange(requests + 1, **int32), block_tables=torch.zeros((requests, 1), **int32),
            seq_lens=torch.ones(requests, **int32), num_heads=2, sm_scale=0.1, q_data_type=torch.float32,
        ).backend  # type: ignore[arg-type]  # fmt: skip


@pytest.mark.usefixtures("fickle")
def test_auto_passes_over_a_claim_that_is_taken_back_and_comes_back_to_it() -> None:
    attention = MLAPagedAttention()
    assert [plan(attention, n) for n in (1, 2, 1)] == ["fickle", "torch_cpu", "fickle"]
    with pytest.raises(Refused, match="fickle runs single requests"):
        plan(MLAPagedAttention("fickle"), 2)


@pytest.mark.usefixtures("fickle")
def test_no_backend_is_one_sentence_with_every_reason() -> None:
    with pytest.raises(
        Refused, match=r"no backend can run this on cuda \(never runs anything; unknown attention backend .gone"
    ):
        next(Selector("auto", False).able(BLACKWELL))
