"""The backend UNCAST on a GPU: eager and in full CUDA graphs, as vLLM captures and replays them."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from tests.integrations.vllm_scene import RANK, ROPE, close, close_lse, load, make_scene

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore::uncast.attention.ClaimedCapabilityWarning"),
]


@pytest.fixture(params=["stand-in", "vllm"])
def module(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load(request.param, monkeypatch)


@pytest.mark.parametrize(("kv_cache_dtype", "k_scale"), [("fp8", 1.0), ("fp8", 0.037), ("auto", 3.0)])
@pytest.mark.parametrize("heads", [20, 128])
def test_decode(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, kv_cache_dtype: str, k_scale: float, heads: int
) -> None:
    s = make_scene(module, monkeypatch, heads=heads, kv_cache_dtype=kv_cache_dtype, k_scale=k_scale, device="cuda")
    s.impl.need_to_return_lse_for_decode = True
    s.fill([1, 64, 65, 500], width=9)
    s.check([1, 1, 1, 1])


@pytest.mark.parametrize("q_lens", [[3, 3, 3, 3], [3, 1, 2, 1]])
def test_verify(module: ModuleType, monkeypatch: pytest.MonkeyPatch, q_lens: list[int]) -> None:
    s = make_scene(module, monkeypatch, heads=16, drafts=2, device="cuda")
    s.fill([3, 64, 130, 200], width=4)
    s.check(q_lens)


@pytest.mark.parametrize("query_len", [1, 2])
@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "auto"])
def test_graph(module: ModuleType, monkeypatch: pytest.MonkeyPatch, kv_cache_dtype: str, query_len: int) -> None:
    """A step of two layers, write and attention, captured for four requests: replays read refilled buffers, and batches of
    fewer requests leave zeros in the rows of the others. Each replay has the bits of an eager call."""
    s = make_scene(module, monkeypatch, heads=20, kv_cache_dtype=kv_cache_dtype, drafts=query_len - 1, device="cuda")
    s.impl.need_to_return_lse_for_decode = True
    rows = 4 * query_len
    s.fill([query_len] * 4, width=5)
    metadata = s.batch([query_len] * 4, capture=True)
    table, lengths = s.table, metadata.decode.seq_lens
    q = s.queries(rows)
    ckv, kpe, slots = s.random(rows, RANK), s.random(rows, ROPE), torch.full((rows,), -1, device="cuda")

    def step() -> tuple[torch.Tensor, torch.Tensor | None]:
        s.write(ckv, kpe, slots)
        s.forward(q, metadata)
        return s.forward(q, metadata)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = step()
    for kv_lens in ([320, 1 + query_len, 64, 65], [77, 200, 0, 0]):
        s.fill(kv_lens, width=5)
        live = sum(n > 0 for n in kv_lens) * query_len
        table.copy_(s.table)
        lengths.copy_(torch.tensor(kv_lens, dtype=torch.int32))
        last = torch.tensor(kv_lens).repeat_interleave(query_len) - query_len + torch.arange(query_len).repeat(4)
        request = torch.arange(4).repeat_interleave(query_len)
        page = table.cpu()[request, last.clamp_min(0) // 64].long()
        slots.copy_(torch.where(last >= 0, page * 64 + last % 64, -1))
        for tensor, fresh in zip(
            (*q, ckv, kpe), (*s.queries(rows), s.random(rows, RANK), s.random(rows, ROPE)), strict=True
        ):
            tensor.copy_(fresh)
        out.fill_(torch.nan)
        graph.replay()
        expected, expected_lse = s.oracle(q, [query_len] * 4)
        close(out, expected)
        close_lse(lse, expected_lse)
        assert not out[live:].any()
        again, lse_again = s.forward(q, s.batch([query_len] * 4, capture=True))
        assert torch.equal(out, again) and torch.equal(lse, lse_again)
