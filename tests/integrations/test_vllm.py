"""The backend UNCAST computes what vLLM asks for, on the CPU against the float64 oracle.

Each test runs on stand-ins for vLLM's modules and, where they import, on vLLM's own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.integrations.vllm_scene import (
    PAGE,
    RANK,
    ROPE,
    Scene,
    close,
    close_lse,
    impl_arguments,
    load,
    make_scene,
)
from uncast.integrations import _common
from uncast.integrations._common import EngineRefusal
from uncast.integrations.vllm import serving, step
from uncast.latent.codec import NAN, SATURATED, encode_rows
from uncast.latent.layouts import row_layout

MakeScene = Callable[..., Scene]
pytestmark = pytest.mark.filterwarnings("ignore::uncast.attention.ClaimedCapabilityWarning")


@pytest.fixture(params=["stand-in", "vllm"])
def module(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load(request.param, monkeypatch)


@pytest.fixture
def scene(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> MakeScene:
    return lambda **how: make_scene(module, monkeypatch, **how)


@pytest.mark.parametrize(
    ("kv_cache_dtype", "k_scale"), [("fp8", 1.0), ("fp8_e4m3", 0.037), ("auto", 3.0), ("bfloat16", 3.0)]
)
def test_decode(scene: MakeScene, kv_cache_dtype: str, k_scale: float) -> None:
    """k_scale counts for FP8 rows only, in scores and output."""
    s = scene(kv_cache_dtype=kv_cache_dtype, k_scale=k_scale)
    s.fill([1, 64, 65, 200], width=4)
    s.check([1, 1, 1, 1])


def test_verify_of_one_length(scene: MakeScene) -> None:
    s = scene(drafts=2)
    s.fill([3, 70, 130], width=3)
    metadata = s.batch([3, 3, 3])
    assert metadata.num_decodes == 3 and metadata.decode.step.uniform_query_len == 3
    s.check([3, 3, 3])


def test_verify_of_several_lengths_is_decoded(scene: MakeScene) -> None:
    """Requests with fewer drafts do not fall back to prefill."""
    s = scene(drafts=2)
    s.fill([3, 70, 130, 5], width=3)
    metadata = s.batch([3, 1, 2, 1])
    assert metadata.num_decodes == 4 and metadata.decode.step.uniform_query_len is None
    s.check([3, 1, 2, 1])


def test_decodes_beside_prefills(scene: MakeScene) -> None:
    """Of a mixed batch only the leading decodes come here; a prefill's length does not make them ragged."""
    s = scene(drafts=2)
    s.fill([66, 7, 100], width=2)
    q_lens = [1, 1, 40]
    starts = torch.tensor([0, 1, 2], dtype=torch.int32)
    step = s.module.DecodeStep(s.table[:2], torch.tensor([66, 7], dtype=torch.int32), starts, 2, 3, 100)
    assert step.uniform_query_len == 1
    q = s.queries(2)
    out, _ = s.forward(q, type("Metadata", (), {"decode": type("Decode", (), {"step": step})}))
    s.table = s.table[:2]
    close(out, s.oracle(q, q_lens[:2], [66, 7])[0])


def test_queries_in_one_tensor(scene: MakeScene) -> None:
    """Under decode context parallelism vLLM concatenates them and gathers the heads of all ranks."""
    s = scene()
    s.fill([90, 12], width=2)
    q = s.queries(2, heads=8)
    out, _ = s.forward(torch.cat(q, dim=-1), s.batch([1, 1]))
    close(out, s.oracle(q, [1, 1])[0])


def test_lse_merges_shards(scene: MakeScene) -> None:
    """Two ranks' outputs over halves of the rows, merged by base-e LSE, are the attention over all rows."""
    s = scene()
    assert s.impl.lse_base_on_e and s.impl.can_return_lse_for_decode
    s.impl.need_to_return_lse_for_decode = True
    s.fill([128, 64], width=2)
    q = s.queries(2)
    expected, expected_lse = s.oracle(q, [1, 1])
    table, parts = s.table, []
    for rank in range(2):
        s.table, s.kv_lens = table[:, rank : rank + 1].contiguous(), ([64, 64], [64, 0])[rank]
        out, lse = s.forward(q, s.batch([1, 1]))
        assert lse is not None
        parts.append((out.double(), lse.double()))
    total = torch.logsumexp(torch.stack([lse for _, lse in parts]), 0)
    merged = sum(out * (lse - total).exp()[..., None] for out, lse in parts)
    close(torch.as_tensor(merged), expected)
    close_lse(total.float(), expected_lse)


def test_dcp_uses_local_lengths(scene: MakeScene) -> None:
    s = scene()
    s.builder.dcp_world_size = 2
    s.impl.need_to_return_lse_for_decode = True
    s.fill([100, 20], width=2)
    local = torch.tensor([50, 0], dtype=torch.int32)
    q = s.queries(2)
    out, lse = s.forward(q, s.batch([1, 1], dcp_local_seq_lens=local))
    expected, expected_lse = s.oracle(q, [1, 1], [50, 0])
    close(out, expected)
    close_lse(lse, expected_lse)


@pytest.mark.parametrize("query_len", [1, 2])
def test_padding_requests_of_a_graph_are_zero(scene: MakeScene, query_len: int) -> None:
    """A graph for 4 requests replays 2: the others have no query rows and no rows in the cache, and their outputs are 0."""
    s = scene(drafts=query_len - 1)
    s.fill([100, 33, 0, 0], width=3)
    s.table[2:] = 0
    metadata = s.batch([query_len, query_len, 0, 0], capture=True, rows=4 * query_len)
    assert metadata.num_decodes == 4 and metadata.num_decode_tokens == 4 * query_len
    q = s.queries(4 * query_len)
    out, _ = s.forward(q, metadata)
    assert not out[2 * query_len :].any()
    close(out, s.oracle(q, [query_len] * 4)[0])


@pytest.mark.parametrize("query_len", [1, 2])
def test_replays_read_refilled_metadata(scene: MakeScene, query_len: int) -> None:
    """vLLM refills lengths and block table in place; the plan of the first call serves the later ones."""
    s = scene(drafts=query_len - 1)
    s.fill([10, 180], width=4)
    metadata = s.batch([query_len] * 2, capture=True)
    q = s.queries(2 * query_len)
    close(s.forward(q, metadata)[0], s.oracle(q, [query_len] * 2)[0])
    lengths, table = metadata.decode.seq_lens, s.table
    for kv_lens in ([250, 11], [64, 0]):
        s.fill(kv_lens, width=4)
        table.copy_(s.table)
        lengths.copy_(torch.tensor(kv_lens))
        q = s.queries(2 * query_len)
        close(s.forward(q, metadata)[0], s.oracle(q, [query_len] * 2)[0])
    assert len(metadata.decode.step._plans) == 1


def test_layers_share_a_plan(scene: MakeScene) -> None:
    """A second plan is made only for layers of another shape (a draft model's head count)."""
    s = scene()
    s.fill([90, 12], width=2)
    metadata = s.batch([1, 1])
    for heads in (4, 4, 2):
        q = s.queries(2, heads)
        close(s.forward(q, metadata)[0], s.oracle(q, [1, 1])[0])
    assert len(metadata.decode.step._plans) == 2


def test_a_captured_plan_is_used_in_its_graph_only(scene: MakeScene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its constants exist only while the graph replays, and a warm-up's scratch only until its metadata goes."""
    s = scene()
    s.fill([90, 12], width=2)
    metadata = s.batch([1, 1])
    plans = []
    for capturing in (False, True, False, True):
        monkeypatch.setattr(step, "is_capturing", lambda device, answer=capturing: answer)
        q = s.queries(2)
        close(s.forward(q, metadata)[0], s.oracle(q, [1, 1])[0])
        plans.append(set(metadata.decode.step._plans.values()))
    assert [len(p) for p in plans] == [1, 2, 2, 2]


def test_draft_steps_lengthen_requests_in_place(scene: MakeScene) -> None:
    """vLLM need not build metadata between draft steps: a request may grow past the length it was planned for."""
    s = scene()
    assert s.builder.supports_draft_decode_metadata_update
    s.fill([140, 70], width=3)
    s.kv_lens = [126, 60]
    metadata = s.batch([1, 1])
    for grown in range(5):
        s.kv_lens = [126 + grown, 60 + grown]
        metadata.decode.seq_lens.copy_(torch.tensor(s.kv_lens))
        s.builder.update_draft_decode_metadata(metadata)
        q = s.queries(2)
        close(s.forward(q, metadata)[0], s.oracle(q, [1, 1])[0])


def test_scale_is_read_at_each_call(scene: MakeScene) -> None:
    """The layer's tensor counts, not a value remembered from an earlier call."""
    s = scene(k_scale=0.05)
    s.fill([90], width=2)
    metadata, q = s.batch([1]), s.queries(1)
    for value in (0.05, 0.02):
        s.layer._k_scale.fill_(value)
        close(s.forward(q, metadata)[0], s.oracle(q, [1])[0])


def test_batch_invariance_is_asked_for(scene: MakeScene, monkeypatch: pytest.MonkeyPatch) -> None:
    """With VLLM_BATCH_INVARIANT a request's bits must not depend on the batch: the plan is made so."""
    s = scene()
    monkeypatch.setattr(s.module.envs, "VLLM_BATCH_INVARIANT", True)
    s.fill([90, 12], width=2)
    metadata = s.batch([1, 1])
    s.forward(s.queries(2), metadata)
    (attention,) = metadata.decode.step._plans.values()
    assert attention.last_plan is not None and attention.last_plan.problem.spec.batch_invariant
    assert s.module.UncastMLABackend.supports_batch_invariance() and _combination(s.module) is None


def test_queries_stay_bf16(scene: MakeScene) -> None:
    """vLLM quantises queries for an FP8 cache unless the implementation says no."""
    assert scene(kv_cache_dtype="fp8").impl.supports_quant_query_input is False


@pytest.mark.parametrize("skip_scale", [False, True])
def test_written_bytes(scene: MakeScene, skip_scale: bool) -> None:
    """The bytes are the layout's; graph padding past `slot_mapping` and negative slots are not written."""
    s = scene(k_scale=0.03)
    ckv, kpe = s.random(6, RANK, size=2.0), s.random(6, ROPE, size=2.0)
    ckv[0, :3] = torch.tensor([1000.0, -1000.0, torch.nan])
    slots = torch.tensor([70, 5, -1, 130])
    before = s.cache.clone()
    s.write(ckv, kpe, slots, skip_scale)
    scale = None if skip_scale else s.layer._k_scale
    rows = encode_rows(ckv, kpe, row_layout("fp8_e4m3"), ckv_scale=scale, kpe_scale=scale)
    before.view(-1, RANK + ROPE)[[70, 5, 130]] = rows[[0, 1, 3]]
    assert torch.equal(s.cache, before)
    assert s.cache[1, 6, :2].tolist() == [0x7E, 0xFE] and int(s.cache[1, 6, 2]) & 0x7F == 0x7F  # 448, -448, NaN
    counts = s.module.write_counters(s.device).values
    assert counts[SATURATED] == 2 and counts[NAN] == 1


def test_saturated_writes_are_logged(scene: MakeScene, caplog: pytest.LogCaptureFixture) -> None:
    s = scene(k_scale=1e-4)
    s.module.write_counters(s.device).every = 2
    s.fill([5], width=1)
    with caplog.at_level(logging.WARNING, "uncast.integrations"):
        s.batch([1])
        assert not caplog.records
        s.batch([1])
    assert "saturated" in caplog.text and "k_scale" in caplog.text


def test_no_cache_while_memory_is_profiled(scene: MakeScene) -> None:
    s = scene()
    s.cache = torch.empty(0, dtype=torch.uint8)
    s.write(s.random(2, RANK), s.random(2, ROPE), torch.tensor([0, 1]))


def test_interleaved_cache_is_refused(scene: MakeScene) -> None:
    s = scene()
    s.cache = torch.zeros(4, 2, PAGE, RANK + ROPE, dtype=torch.uint8)[:, 0]
    with pytest.raises(EngineRefusal, match="VLLM_KV_CACHE_LAYOUT=LBNHC"):
        s.write(s.random(1, RANK), s.random(1, ROPE), torch.tensor([0]))


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"sliding_window": 128}, "sliding window"),
        ({"logits_soft_cap": 30.0}, "soft cap"),
        ({"attn_type": "encoder"}, "decoder attention"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "--kv-cache-dtype"),
    ],
)
def test_layers_that_are_refused(scene: MakeScene, other: dict[str, Any], said: str) -> None:
    with pytest.raises(EngineRefusal, match=said) as refused:
        type(scene().impl)(**impl_arguments(**other))
    assert "\n" not in str(refused.value)


def _combination(module: ModuleType, **other: Any) -> str | None:
    values = {
        "head_size": 576, "dtype": torch.bfloat16, "kv_cache_dtype": "fp8", "block_size": None, "use_mla": True,
        "has_sink": False, "use_sparse": False, "use_mm_prefix": False,
        "device_capability": type("Capability", (), {"major": 9, "minor": 0}),
    }  # fmt: skip
    return module.UncastMLABackend.supports_combination(**values | other)


def _chip(major: int, minor: int) -> type:
    return type("Capability", (), {"major": major, "minor": minor})


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"use_mla": False}, "MLA models only"),
        ({"use_sparse": True}, "sparse"),
        ({"dtype": torch.float16}, "--dtype bfloat16"),
        ({"head_size": 320}, "512 + 64"),
        ({"block_size": 96}, "multiple of 64"),
        ({"kv_cache_dtype": "fp8_ds_mla"}, "--kv-cache-dtype"),
        ({"device_capability": _chip(7, 5)}, "compute capability 8.0 or newer"),
    ],
)
def test_configurations_that_are_refused(module: ModuleType, other: dict[str, Any], said: str) -> None:
    reason = _combination(module, **other)
    assert reason is not None and said in reason and "\n" not in reason


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "bfloat16", "fp8", "fp8_e4m3", None])
@pytest.mark.parametrize("chip", [(8, 0), (9, 0), (10, 0), (12, 0)])
def test_configurations_that_are_served(module: ModuleType, kv_cache_dtype: str | None, chip: tuple[int, int]) -> None:
    other = {"kv_cache_dtype": kv_cache_dtype, "block_size": 128, "device_capability": _chip(*chip)}
    assert _combination(module, **other) is None


def test_full_graphs_where_the_native_kernels_run(scene: MakeScene, monkeypatch: pytest.MonkeyPatch) -> None:
    s = scene()
    monkeypatch.setattr(s.module, "device_arch", lambda: 90)
    support = s.builder.get_cudagraph_support(s.builder.vllm_config, None)
    assert support.name == "UNIFORM_BATCH"


def test_no_full_graphs_where_a_copy_serves(
    scene: MakeScene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """gather_cast asks for lengths on the host; vLLM is told, and the user once."""
    s = scene()
    monkeypatch.setattr(_common, "_warned", set())
    serving._serving.cache_clear()
    monkeypatch.setattr(s.module, "device_arch", lambda: 90)
    monkeypatch.setenv("UNCAST_VLLM_BACKEND", "gather_cast:native")
    with caplog.at_level(logging.WARNING, "uncast.integrations"):
        for _ in range(2):
            assert s.builder.get_cudagraph_support(s.builder.vllm_config, None).name == "NEVER"
    assert [r.getMessage().count("gather_cast:native") for r in caplog.records] == [1, 1]
    assert "without full CUDA graphs" in caplog.text and "UNCAST_VLLM_BACKEND" in caplog.text


def test_a_backend_that_does_not_exist_is_refused(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNCAST_VLLM_BACKEND", "nativ")
    assert "unknown attention backend 'nativ'" in str(_combination(module))
