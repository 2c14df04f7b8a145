"""The pretended GPU itself. A failure means that tests which use it may see no fault where there is one."""

from __future__ import annotations

import pytest
import torch

from tests.fake_cuda import HostSync, fake_cuda
from uncast.engine import graphs
from uncast.numerics import e2m1

triton = pytest.importorskip("triton")


@triton.jit
def _kernel(x, n, BLOCK: triton.language.constexpr):  # type: ignore[no-untyped-def]
    pass


def test_small_integers_keep_their_values() -> None:
    with fake_cuda() as gpu:
        lengths = torch.tensor([3, 4, 5], dtype=torch.int32, device="cuda")
        assert (lengths.cumsum(0) + 1)[1:].tolist() == [8, 13] and int(lengths.sum()) == 12
        assert (torch.arange(3, device="cuda") * 2).tolist() == [0, 2, 4]
        lengths += gpu.empty(3, dtype=torch.int32)
        with pytest.raises(HostSync):
            lengths.tolist()


def test_what_a_graph_forbids_is_refused() -> None:
    with fake_cuda() as gpu:
        lengths = torch.tensor([3], device="cuda")
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            for forbidden in (
                lambda: lengths.item(), lambda: lengths.tolist(), lambda: lengths.cpu(), lambda: bool(lengths > 2),
                lambda: torch.tensor([1], device="cuda"), lambda: lengths.nonzero(), lambda: lengths[lengths > 2],
                torch.cuda.synchronize,
            ):  # fmt: skip
                with pytest.raises(HostSync):
                    forbidden()
        assert gpu.empty(4)[1:].data_ptr() - gpu.empty(4).data_ptr() != 2


def test_two_devices_in_one_operation_are_an_error() -> None:
    with fake_cuda() as gpu:
        with pytest.raises(RuntimeError):
            gpu.empty(3) + torch.zeros(3, dtype=torch.bfloat16)
        with pytest.raises(AssertionError, match="x is on cpu"):
            _kernel[(1,)](torch.zeros(3), 3, BLOCK=16)
        with pytest.raises(TypeError):
            _kernel[(1,)](gpu.empty(3), 3, block=16)


def test_launches_are_seen_in_order() -> None:
    with fake_cuda() as gpu:
        x = gpu.empty(4, 8)
        gpu.launches.clear()
        y = (x[1:] * 2).transpose(0, 1)
        _kernel[(3,)](y, 3, BLOCK=16, num_warps=2)
        y[0] = 0.0
        assert gpu.names() == ["mul", "_kernel", "fill_"]
        assert x[1:].data_ptr() == x.data_ptr() + 16
        graph = torch.cuda.CUDAGraph()
        gpu.launches.clear()
        with torch.cuda.graph(graph):
            _kernel[(3,)](x, 3, BLOCK=16)
        assert gpu.names() == []
        graph.replay()
        assert gpu.names() == ["_kernel"]


def test_nothing_of_one_pretended_gpu_is_left_for_the_next() -> None:
    packed = torch.zeros(2, 4, dtype=torch.uint8)
    for _ in range(2):
        with fake_cuda() as gpu:
            assert e2m1.decode(gpu.move(packed)).shape == (2, 8)
            assert isinstance(graphs._capture_stream(0), torch.cuda.Stream)
    assert not e2m1.decode(packed).is_cuda and graphs._capture_stream.cache_info().currsize == 0
