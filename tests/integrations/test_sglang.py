"""The SGLang backend's paths on stand-ins, against float64 on the stored rows. A failure here is a wrong answer in a server."""

from __future__ import annotations

import logging
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.integrations.sglang_fakes import DEVICE, RANK, ROPE, Layer, Mode, Server, batch, oracle
from uncast.attention.oracle import relative_errors
from uncast.integrations import _common
from uncast.integrations._common import EngineRefusal
from uncast.integrations.sglang.attention import MLAForward, MultiStepDraft
from uncast.integrations.sglang.gates import add_draft_backends, make_handler
from uncast.integrations.sglang.ragged import ragged_attention

PAGES = (1, 64)
SCALE = 0.25
DTYPES = (torch.float8_e4m3fn, torch.bfloat16)


@pytest.fixture(autouse=True)
def quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def make(server: Server, **kwargs: Any) -> MLAForward:
    return MLAForward(server.runner, num_heads=server.heads, **kwargs)


def layer_of(server: Server, scaled: bool = True) -> Layer:
    layer = Layer(tp_q_head_num=server.heads)
    if scaled and server.dtype == torch.float8_e4m3fn:
        layer.k_scale, layer.k_scale_float = torch.tensor(SCALE, device=DEVICE), SCALE
    return layer


def rows_of(count: int, spread: float = 1.0) -> torch.Tensor:
    return (torch.randn(count, 1, RANK + ROPE, device=DEVICE) * spread).bfloat16()


def fill(server: Server, backend: MLAForward, layer: Layer, prefix: list[int], rows: list[int]) -> None:
    """Prefixes through the pool's door, as un-absorbed prefill writes them."""
    for row, length in zip(rows, prefix, strict=True):
        new = rows_of(length)
        backend.token_to_kv_pool.set_mla_kv_buffer(
            layer, server.slots(row, 0, length), new[..., :RANK], new[..., RANK:]
        )


def run(
    backend: MLAForward, layer: Layer, fb: Any, q: torch.Tensor, k: torch.Tensor, *, split: bool = True
) -> torch.Tensor:
    call = backend.forward_decode if fb.forward_mode.is_decode_or_idle() else backend.forward_extend
    if split:
        out = call(
            q[..., :RANK].transpose(0, 1).contiguous().transpose(0, 1), k[..., :RANK], k[..., :RANK], layer, fb,
            q_rope=q[..., RANK:], k_rope=k[..., RANK:],
        )  # fmt: skip
    else:
        out = call(q.flatten(1), k, k[..., :RANK], layer, fb)
    assert isinstance(out, torch.Tensor)
    return out.view(q.shape[0], -1, RANK)


def check(out: torch.Tensor, expected: torch.Tensor) -> None:
    row_error, tensor_error = relative_errors(out, expected)
    assert row_error <= 1e-2 and tensor_error <= 2.5e-3, (row_error, tensor_error)


CASES = {
    "decode": (Mode.DECODE, [0, 5, 63, 130], [1, 1, 1, 1]),
    "extend": (Mode.EXTEND, [0, 5, 64, 130], [70, 1, 9, 33]),
    "verify": (Mode.TARGET_VERIFY, [3, 63, 64, 200], [4, 4, 4, 4]),
    "draft_extend": (Mode.DRAFT_EXTEND_V2, [3, 63, 64, 200], [4, 4, 4, 4]),
}


@pytest.mark.parametrize("page_size", PAGES)
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp8", "bf16"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("split", [True, False], ids=["split", "joined"])
def test_every_mode_matches_float64_on_what_is_stored(
    page_size: int, dtype: torch.dtype, name: str, split: bool
) -> None:
    mode, prefix, extend = CASES[name]
    server = Server(page_size, dtype, drafts=4)
    backend, layer, rows = make(server), layer_of(server), [4, 1, 5, 2]
    fill(server, backend, layer, prefix, rows)
    fb = batch(server, mode, prefix, extend, rows=rows)
    q = torch.randn(sum(extend), server.heads, RANK + ROPE, device=DEVICE).bfloat16()
    backend.init_forward_metadata(fb)
    out = run(backend, layer, fb, q, rows_of(sum(extend)), split=split)
    totals = [p + e for p, e in zip(prefix, extend, strict=True)]
    check(out, oracle(server, q, layer, totals, extend, rows, SCALE if dtype == torch.float8_e4m3fn else 1.0))


@pytest.mark.parametrize("page_size", PAGES)
@pytest.mark.parametrize("host", ["lengths", "none", "stale", "absent"])
def test_replays_in_the_same_buffers_follow_new_lengths_and_pages(page_size: int, host: str) -> None:
    """SGLang 0.5.23's runners hand out what the host knows of lengths, nothing, what it knew before, or no such field."""
    server = Server(page_size)
    backend, layer = make(server), layer_of(server)
    backend.init_cuda_graph_state(4, 4)
    kept = None
    for prefix, rows in (([1, 1, 1], [0, 0, 0]), ([7, 200, 63], [1, 2, 3]), ([320, 8, 64], [3, 5, 1])):
        fill(server, backend, layer, prefix, rows)
        fb = batch(server, Mode.DECODE, prefix, [1, 1, 1], rows=rows, host=host == "lengths")
        if host == "stale":
            fb.seq_lens_cpu = torch.ones(3, dtype=torch.int64)
        elif host == "absent":
            del fb.seq_lens_cpu
        backend.init_forward_metadata_out_graph(fb, in_capture=kept is None)
        metadata = backend.forward_metadata
        assert metadata is not None
        pointers = [t.data_ptr() for t in (metadata.qo_indptr, metadata.block_table, metadata.kv_len)]
        assert kept in (None, pointers), "a captured graph would read freed buffers"
        kept = pointers
        q = torch.randn(3, server.heads, RANK + ROPE, device=DEVICE).bfloat16()
        out = run(backend, layer, fb, q, rows_of(3))
        check(out[-1:], oracle(server, q[-1:], layer, [prefix[-1] + 1], [1], [rows[-1]], SCALE))
        if len(set(rows)) == 3:
            check(out, oracle(server, q, layer, [p + 1 for p in prefix], [1, 1, 1], rows, SCALE))
    assert len(backend.builder._graphs) == 1


@pytest.mark.parametrize("page_size", PAGES)
def test_each_draft_step_sees_the_drafts_before_it(page_size: int) -> None:
    server = Server(page_size, drafts=4, algorithm="EAGLE", topk=1)
    draft = MultiStepDraft([make(server, draft_step=i) for i in range(3)], 1, 4)
    layer, rows, prefix = layer_of(server), [2, 4], [63, 100]
    fill(server, draft.attn_backends[0], layer, prefix, rows)
    draft.init_cuda_graph_state(2, 2)
    fb = batch(server, Mode.DECODE, [p - 1 for p in prefix], [1, 1], rows=rows)
    for prepare in (draft.init_forward_metadata, draft.init_forward_metadata_out_graph):
        prepare(fb)
        for step, backend in enumerate(draft.attn_backends):
            fb.out_cache_loc = torch.cat(
                [server.slots(r, p + step, p + step + 1) for r, p in zip(rows, prefix, strict=True)]
            )
            q = torch.randn(2, server.heads, RANK + ROPE, device=DEVICE).bfloat16()
            out = run(backend, layer, fb, q, rows_of(2))
            check(out, oracle(server, q, layer, [p + step + 1 for p in prefix], [1, 1], rows, SCALE))


def test_scale_is_honoured_by_every_door_of_the_pool() -> None:
    server = Server(64)
    backend, layer = make(server), layer_of(server)
    unabsorbed = Layer(layer_id=layer.layer_id, head_dim=192, v_head_dim=128, tp_k_head_num=4)
    server.runner.model = SimpleNamespace(modules=lambda: [layer, unabsorbed])
    del server.pool._uncast_writer
    for name in ("set_mla_kv_buffer", "set_kv_buffer", "get_mla_kv_buffer"):
        delattr(server.pool, name)
    backend = make(server)
    new = rows_of(3)
    slots = server.slots(1, 0, 3)
    writes = (
        lambda: server.pool.set_mla_kv_buffer(unabsorbed, slots, new[..., :RANK], new[..., RANK:]),
        lambda: server.pool.set_mla_kv_buffer(layer, slots, new[..., :RANK], new[..., RANK:]),
        lambda: server.pool.set_kv_buffer(layer, slots, new, new[..., :RANK]),
    )
    expected = (new.float() / SCALE).to(torch.float8_e4m3fn).view(torch.uint8)
    for write in writes:
        server.pool.kv_buffer[layer.layer_id].zero_()
        write()
        assert torch.equal(server.pool.kv_buffer[layer.layer_id][slots], expected)
    for asked in (layer, unabsorbed):
        nope, rope = server.pool.get_mla_kv_buffer(asked, slots, torch.bfloat16)
        values = (expected.view(torch.float8_e4m3fn).float() * SCALE).bfloat16()
        assert torch.equal(torch.cat([nope, rope], -1), values)
    codes, _ = server.pool.get_mla_kv_buffer(layer, slots)
    assert torch.equal(codes.view(torch.uint8), expected[..., :RANK]), "raw codes have no scale in them"
    assert backend.writer is not None and make(server).writer is backend.writer, "one writer a pool"


def test_writes_saturate_and_are_counted_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    server = Server(64)
    backend, layer = make(server), layer_of(server)
    assert backend.writer is not None
    backend.writer.counters.every = 1
    new = rows_of(2)
    new[0, 0, 0], new[1, 0, -1], new[1, 0, 1] = 1e4, -1e4, float("nan")
    slots = server.slots(1, 0, 2)
    server.pool.set_mla_kv_buffer(layer, slots, new[..., :RANK], new[..., RANK:])
    stored = server.pool.get_key_buffer(layer.layer_id).view(torch.uint8)[slots].view(torch.float8_e4m3fn).float()
    assert (stored[0, 0, 0], stored[1, 0, -1]) == (448.0, -448.0)
    with caplog.at_level(logging.WARNING, "uncast.integrations"):
        for _ in range(3):
            backend.init_forward_metadata(batch(server, Mode.DECODE, [1], [1]))
            if DEVICE == "cuda":
                torch.cuda.synchronize()
    assert "2 saturated" in caplog.text and "1 NaN" in caplog.text


def test_rows_that_pad_a_batch_are_zero_and_idle_ranks_plan_nothing() -> None:
    server = Server(64)
    backend, layer = make(server), layer_of(server)
    fill(server, backend, layer, [9], [1])
    fb = batch(server, Mode.DECODE, [9], [1])
    backend.init_forward_metadata(fb)
    q = torch.randn(3, server.heads, RANK + ROPE, device=DEVICE).bfloat16()
    out = backend.forward_decode(q, None, None, layer, fb).view(3, -1, RANK)
    assert not out[1:].any() and bool(out[0].any())
    backend.init_forward_metadata(batch(server, Mode.IDLE, [], []))
    assert backend.forward_decode(q[:0], None, None, layer, fb).shape == (0, server.heads * RANK)


def test_prefill_in_chunks_is_the_attention_over_everything() -> None:
    server, heads, qk, width = Server(64), 4, 192, 128
    backend = make(server)
    layer = Layer(heads, head_dim=qk, v_head_dim=width, tp_k_head_num=heads, scaling=0.07)
    prefix, extend = [0, 37, 90], [20, 3, 50]
    totals = [p + e for p, e in zip(prefix, extend, strict=True)]
    fb = batch(server, Mode.EXTEND, prefix, extend)
    backend.init_forward_metadata(fb)
    q = torch.randn(sum(extend), heads, qk, device=DEVICE).bfloat16()
    keys = [torch.randn(t, heads, qk, device=DEVICE).bfloat16() for t in totals]
    values = [torch.randn(t, heads, width, device=DEVICE).bfloat16() for t in totals]

    def attend(parts: list[tuple[int, int]], chunk: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = (torch.cat([x[a:b] for x, (a, b) in zip(xs, parts, strict=True)]) for xs in (keys, values))
        fb.attn_attend_prefix_cache, fb.prefix_chunk_idx, fb.mha_return_lse = chunk is not None, chunk, True
        out = backend.forward_extend(q, k, v, layer, fb, save_kv_cache=False)
        assert isinstance(out, tuple)
        return out

    states = [attend([(p, t) for p, t in zip(prefix, totals, strict=True)], None)]
    chunks = [[(0, min(p, 50)) for p in prefix], [(min(p, 50), p) for p in prefix]]
    lens = torch.tensor([[b - a for a, b in c] for c in chunks], dtype=torch.int32, device=DEVICE)
    fb.prefix_chunk_cu_seq_lens = torch.nn.functional.pad(lens.cumsum(1), (1, 0)).int()
    fb.prefix_chunk_max_seq_lens = lens.amax(1).tolist()
    states += [attend(c, i) for i, c in enumerate(chunks)]
    lse = torch.stack([torch.where(s[1].isfinite(), s[1], -torch.inf) for s in states])
    weights = torch.softmax(lse.double(), 0)[..., None]
    merged = sum(w * torch.nan_to_num(s[0].double()) for w, s in zip(weights, states, strict=True))
    first = 0
    for p, e, k, v in zip(prefix, extend, keys, values, strict=True):
        scores = torch.einsum("qhd,khd->hqk", q[first : first + e].double(), k.double()) * layer.scaling
        scores = scores.masked_fill(torch.ones(e, p + e, dtype=torch.bool, device=DEVICE).triu(1 + p), -torch.inf)
        expected = torch.einsum("hqk,khd->qhd", torch.softmax(scores, -1), v.double())
        check(torch.as_tensor(merged)[first : first + e], expected)
        first += e


@pytest.mark.parametrize(("qk", "width"), [(192, 128), (256, 256), (96, 128)])
def test_dense_attention_takes_either_width(qk: int, width: int) -> None:
    starts = torch.tensor([0, 5, 12], dtype=torch.int32, device=DEVICE)
    q, k = (torch.randn(12, 2, qk, device=DEVICE).bfloat16() for _ in range(2))
    v = torch.randn(12, 2, width, device=DEVICE).bfloat16()
    out, lse = ragged_attention(q, k, v, starts, starts, max_q_len=7, max_k_len=7, causal=True, sm_scale=0.1)
    assert out.shape == (12, 2, width) and lse.shape == (12, 2)
    assert torch.equal(out[0], v[0]) and torch.equal(out[5], v[5]), "a first token attends to itself alone"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": torch.float16}, "--kv-cache-dtype fp8_e4m3"),
        ({"dtype": torch.float8_e5m2}, "float8_e5m2"),
        ({"algorithm": "NGRAM"}, "--speculative-algorithm NGRAM"),
        ({"algorithm": "EAGLE", "topk": 4}, "--speculative-eagle-topk is 4"),
    ],
)
def test_what_cannot_be_served_is_refused_at_start_in_one_sentence(change: dict[str, Any], words: str) -> None:
    with pytest.raises(EngineRefusal, match=words):
        make(Server(64, **change))


def test_a_scale_and_another_reader_of_the_pool_do_not_go_together() -> None:
    server = Server(64)
    layer = layer_of(server)
    server.runner.model = SimpleNamespace(modules=lambda: [layer])
    with pytest.raises(EngineRefusal, match=r"k_scale \(layer 1\) and fa3 would read"):
        make(server, others={"fa3"})
    layer.k_scale, layer.k_scale_float = torch.tensor(1.0), 1.0
    assert make(server, others={"fa3"}).writer is not None
    layer.k_scale, layer.k_scale_float = torch.tensor(SCALE), SCALE
    assert make(server, others=set()).writer is not None


def test_sparse_pools_and_unknown_arguments_are_refused() -> None:
    server = Server(64)
    server.pool.use_dsa = True
    with pytest.raises(EngineRefusal, match="--attention-backend dsa"):
        make(server)
    server.pool.use_dsa = False
    backend, layer = make(server), layer_of(server)
    fb = batch(server, Mode.DECODE, [1], [1])
    backend.init_forward_metadata(fb)
    q = torch.randn(1, server.heads, RANK + ROPE, device=DEVICE).bfloat16()
    with pytest.raises(EngineRefusal, match="topk_indices"):
        backend.forward_decode(q, None, None, layer, fb, topk_indices=torch.zeros(1))
    layer.logit_cap = 30.0
    with pytest.raises(EngineRefusal, match="caps no logits"):
        backend.forward_decode(q, None, None, layer, fb)


def test_a_fallback_warns_once_and_cannot_be_captured(caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    monkeypatch.setattr(_common, "_warned", set())
    spec = make(Server(64)).shape
    names = ("native", "torch_cpu") if DEVICE == "cpu" else ("torch_cpu", "native")
    problem = _common.ProblemSpec(num_heads=4, page_size=64, kv_layout=spec.kv_layout, device=DEVICE, arch=90)
    with caplog.at_level(logging.WARNING, "uncast.integrations"):
        assert _common.serving_backend(problem, names) == _common.serving_backend(problem, names) == names[1]
    assert caplog.text.count("attention runs on") == 1
    with pytest.raises(EngineRefusal, match="cannot serve this model"):
        _common.serving_backend(problem, names[:1])
    backend = make(Server(64))
    backend.shape = backend.shape.__class__(**{**backend.shape.__dict__, "backend": "gather_cast:flashinfer_fa2"})
    with pytest.raises(EngineRefusal, match="--disable-cuda-graph"):
        backend.init_cuda_graph_state(1, 1)


def test_long_prefill_goes_unabsorbed_and_captured_or_short_prefixes_do_not() -> None:
    exec_ = SimpleNamespace(deterministic=SimpleNamespace(enable_deterministic_inference=False))
    module = SimpleNamespace(
        AttnForwardMethod=SimpleNamespace(MLA="mla", MHA_CHUNKED_KV="chunked"), get_exec=lambda: exec_,
        is_in_tc_piecewise_cuda_graph=lambda: module.captured, is_in_breakable_cuda_graph=lambda: False,
        is_cp_active=lambda fb: False, captured=False,
    )  # fmt: skip
    attn = SimpleNamespace(chunked_prefix_cache_threshold=100, disable_chunked_prefix_cache=False)
    server = Server(64)
    handle = make_handler(module, dense=True)

    def asked(mode: Mode, prefix: list[int]) -> str:
        return str(handle(attn, batch(server, mode, prefix, [1] * len(prefix))))

    assert asked(Mode.EXTEND, [0, 0]) == "chunked" and asked(Mode.EXTEND, [60, 60]) == "chunked"
    assert asked(Mode.EXTEND, [60]) == "mla" and asked(Mode.DECODE, [0]) == "mla"
    assert asked(Mode.TARGET_VERIFY, [200]) == "mla"
    attn.disable_chunked_prefix_cache = True
    assert asked(Mode.EXTEND, [200]) == "mla"
    attn.disable_chunked_prefix_cache = False
    assert make_handler(module, dense=True, prefix=False)(attn, batch(server, Mode.EXTEND, [200], [1])) == "mla"
    assert make_handler(module, dense=False)(attn, batch(server, Mode.EXTEND, [0], [4])) == "mla"
    module.captured = True
    assert asked(Mode.EXTEND, [0]) == "mla"


def test_draft_backends_are_added_to_the_factory_of_the_right_kind(monkeypatch: Any) -> None:
    made: list[tuple[Any, ...]] = []
    fake = SimpleNamespace(
        UncastAttentionBackend=lambda runner: made.append(("extend", runner)) or "one",
        UncastMultiStepDraft=lambda *args: made.append(("steps", *args)) or "many",
    )
    monkeypatch.setitem(__import__("sys").modules, "uncast.integrations.sglang.backend", fake)
    factory = SimpleNamespace(draft_model_runner="runner", topk=1, speculative_num_steps=3)

    def original(
        self: Any, name: str, backend_map: dict[str, Any], template: str, stamps_children: bool = False
    ) -> Any:
        assert set(backend_map) == {"fa3", "uncast"} and self is factory
        return backend_map["uncast"]()

    given = {"fa3": lambda: None}
    assert add_draft_backends(original, factory, "decode", given, "no", stamps_children=True) == ("uncast", "many")
    assert add_draft_backends(original, factory, "prefill", given, "no") == ("uncast", "one")
    assert made == [("steps", "runner", 1, 3), ("extend", "runner")] and set(given) == {"fa3"}
