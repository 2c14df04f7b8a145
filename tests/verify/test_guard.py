"""What the guard catches, what it lets pass, and where it says it happened."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import uncast
from tests.backends.helpers import planned
from uncast.attention import ProblemSpec
from uncast.backends.torch_cpu import BLOCK_ROWS
from uncast.latent.layouts import row_layout
from uncast.latent.pool import PagedPool
from uncast.verify.guard import DEFAULT_LIMIT_BYTES, CastError, allow_swap, guard
from uncast.verify.probe import make_case, run_case

LIMIT = 64 * 656
"""One page of the pool below."""


@pytest.fixture
def pool() -> PagedPool:
    pool = PagedPool(row_layout("fp8_ds_mla"), num_layers=2, num_pages=8)
    pool.storage.random_(0, 100)
    return pool


def by_cast(pool: PagedPool) -> object:
    return pool.layer(0).to(torch.bfloat16)


def by_copy_into_another_buffer(pool: PagedPool) -> object:
    other = torch.empty(4, 64, 656, dtype=torch.uint8)
    return other.copy_(pool.layer(1)[2:6])


def by_out(pool: PagedPool) -> object:
    return torch.index_select(pool.layer(0), 0, torch.arange(5), out=torch.empty(5, 64, 656, dtype=torch.uint8))


def by_elementwise_out(pool: PagedPool) -> object:
    return torch.mul(pool.layer(0)[:3], 2, out=torch.empty(3, 64, 656, dtype=torch.uint8))


def by_gather_and_index(pool: PagedPool) -> object:
    return pool.layer(0)[torch.tensor([0, 3, 5])]


def by_slice_assignment(pool: PagedPool) -> object:
    other = torch.zeros(8, 64, 656)
    other[:, :, 3:300] = pool.layer(0)[:, :, 3:300]
    return other


def by_cat_of_small_casts(pool: PagedPool) -> object:
    small = [pool.layer(0)[page, :32].float() for page in range(8)]
    return torch.cat([part.to(torch.float16) for part in small])


def by_stack(pool: PagedPool) -> object:
    return torch.stack([pool.layer(0)[0], pool.layer(0)[1]])


def by_many_writes_to_one_buffer(pool: PagedPool) -> object:
    other = torch.zeros(8, 64, 656, dtype=torch.uint8)
    for page in range(8):
        other[page, :16] = pool.layer(0)[page, :16]
    return other


def by_index_put(pool: PagedPool) -> object:
    other = torch.zeros(512, 656, dtype=torch.uint8)
    for page in range(8):
        other[torch.arange(16) + 64 * page] = pool.layer(0)[page, :16]
    return other


def by_foreach(pool: PagedPool) -> object:
    other = [torch.empty(64, 656) for _ in range(2)]
    torch._foreach_copy_(other, [pool.layer(0)[0], pool.layer(0)[1]])
    return other


def by_a_reduction_of_nothing(pool: PagedPool) -> object:
    return pool.layer(0)[:2].unsqueeze(-1).sum(-1)


def by_an_operation_nobody_listed(pool: PagedPool) -> object:
    return torch.sort(pool.layer(0)[:2], dim=-1).values


def by_contiguous(pool: PagedPool) -> object:
    return pool.layer(0)[:, :, :512].contiguous()


def by_detour(pool: PagedPool) -> object:
    """Cast, arithmetic and reshape of a scratch that is itself below the limit, into one that is not."""
    scratch = pool.layer(0)[0, :48].to(torch.int16) << 7
    return scratch.view(torch.float16).float().mul(256).double()


CASTS = [
    by_cast, by_copy_into_another_buffer, by_out, by_elementwise_out, by_gather_and_index, by_slice_assignment,
    by_cat_of_small_casts, by_stack, by_many_writes_to_one_buffer, by_index_put, by_foreach, by_a_reduction_of_nothing,
    by_an_operation_nobody_listed, by_contiguous, by_detour,
]  # fmt: skip


@pytest.mark.parametrize("inference", [False, True], ids=["plain", "inference_mode"])
@pytest.mark.parametrize("cast", CASTS, ids=lambda cast: cast.__name__)
def test_a_copy_is_caught_and_named(cast: Callable[[PagedPool], object], inference: bool, pool: PagedPool) -> None:
    with torch.inference_mode(inference), pytest.raises(CastError) as caught, guard(watch=[pool], limit_bytes=LIMIT):
        cast(pool)
    error = caught.value
    first = cast.__code__.co_firstlineno
    last = max(line for *_, line in cast.__code__.co_lines() if line is not None)
    assert error.filename == __file__ and first < error.lineno <= last
    assert error.derived_bytes > LIMIT and error.operation.startswith("aten.")
    assert f"{__file__}:{error.lineno}: {error.operation} left {error.derived_bytes} bytes" in str(error)
    assert f"as {error.dtype}, and {LIMIT} are allowed" in str(error)
    cast(pool)  # the guard is gone afterwards


@pytest.mark.parametrize("inference", [False, True], ids=["plain", "inference_mode"])
def test_what_is_no_copy_passes(inference: bool, pool: PagedPool) -> None:
    """Views, products, sums, a scratch used again and again, and whatever has nothing to do with the pool."""
    keys, big = torch.empty(8, 656), torch.zeros(1000, 656)
    with torch.inference_mode(inference), guard(watch=[pool], limit_bytes=LIMIT):
        assert pool.layer(1).view(-1, 656)[:, :512].view(torch.float8_e4m3fn).shape == (512, 512)
        out = torch.zeros(300, 300)
        for row in range(0, 64, 8):
            keys.copy_(pool.layer(0)[3, row : row + 8])
            scores = torch.randn(100, 656) @ keys.T
            out = out + torch.softmax(scores, -1).mean() + (torch.ones(300, 8) @ keys)[:, :300].expand(300, 300)
            keys.mul_(pool.layer(0)[3, row : row + 8, :1])
        assert (pool.layer(0) > 3).any()
        assert int(pool.layer(0).sum()) > 0
        big.mul_(2).add_(1).to(torch.bfloat16)
        pool.layer(0).copy_(pool.layer(1))
        pool.layer(0).view(-1, 656)[torch.arange(512)] = torch.zeros(512, 656, dtype=torch.uint8)


def test_a_buffer_that_is_overwritten_is_clean_again(pool: PagedPool) -> None:
    buffer = torch.empty(64, 656, dtype=torch.uint8)
    with guard(watch=[pool], limit_bytes=LIMIT):
        buffer.copy_(pool.layer(0)[0])
        buffer.zero_()
        buffer.to(torch.float64)
        torch.mm(torch.ones(64, 64), torch.ones(64, 656), out=torch.empty(64, 656))
        buffer.copy_(pool.layer(0)[0])
        with pytest.raises(CastError):
            buffer.to(torch.float64)


def test_freed_buffers_are_forgotten(pool: PagedPool) -> None:
    with guard(watch=[pool], limit_bytes=LIMIT) as watch:
        for _ in range(100):
            pool.layer(0)[0, :8].float()
        assert not watch._spans


@pytest.mark.parametrize("layout", ["fp8_e4m3", "fp8_ds_mla", "bf16"])
@pytest.mark.parametrize("q_len", [1, 200], ids=["decode", "extend"])
def test_reading_block_by_block_passes_at_any_length(layout: str, q_len: int) -> None:
    spec = ProblemSpec(
        num_heads=2, kv_layout=layout, q_data_type=torch.float32, sm_scale=0.05, max_q_len=q_len, device="cpu"
    )
    case = make_case(spec, [20_000, 70, 3], [q_len, 1, 1])
    attention, _ = planned("torch_cpu", spec, case)
    free = run_case(attention, case)
    with uncast.guard(watch=[case.cache]):
        guarded = run_case(attention, case)
    assert all(torch.equal(a, b) for a, b in zip(free, guarded, strict=True))
    assert BLOCK_ROWS * 576 * 4 < DEFAULT_LIMIT_BYTES < 20_000 * 576


@pytest.mark.parametrize(
    ("backend", "where"),
    [("pool_cast:torch_cpu", "backends/pool_cast.py"), ("gather_cast:torch_cpu", "backends/gather_cast.py")],
)
def test_the_casting_baselines_are_caught_with_file_and_line(backend: str, where: str) -> None:
    spec = ProblemSpec(num_heads=2, kv_layout="fp8_ds_mla", q_data_type=torch.float32, device="cpu")
    case = make_case(spec, [5000], [1])
    attention, _ = planned(backend, spec, case)
    with pytest.raises(uncast.CastError) as caught, uncast.guard(watch=[case.cache]):
        run_case(attention, case)
    source = Path(sys.modules[attention._impl.__class__.__module__].__file__ or "").read_text().splitlines()
    line = int(str(caught.value).split(f"{where}:")[1].split(",")[0].split(":")[0].rstrip(")"))
    assert "cast_rows(" in source[line - 1] or "index_select(" in source[line - 1]


def test_swapping_is_allowed_and_its_copy_is_watched(pool: PagedPool) -> None:
    host = torch.empty(2, 5, 64, 656, dtype=torch.uint8)
    with guard(watch=[pool], limit_bytes=LIMIT):
        with allow_swap():
            for index, page in enumerate((6, 1, 3, 0, 2)):
                host[:, index].copy_(pool.storage[:, page])
            gathered = pool.storage[:, torch.tensor([4, 5, 7])].to("cpu")
        pool.storage[:, 6].copy_(host[:, 0])
        pool.storage[:, 1:4] = gathered
        for copy in (host, gathered):
            with pytest.raises(CastError):
                copy.float()


def test_a_cast_while_swapping_is_no_swap(pool: PagedPool) -> None:
    with guard(watch=[pool], limit_bytes=LIMIT), allow_swap():
        with pytest.raises(CastError):
            pool.layer(0).to(torch.bfloat16)
        with pytest.raises(CastError):
            torch.add(pool.layer(0), 1)
        scratch = pool.layer(0)[0, :32].half()
        with pytest.raises(CastError):
            torch.cat([scratch, scratch])


def test_a_swap_outside_allow_swap_is_caught(pool: PagedPool) -> None:
    with allow_swap():
        pass
    with guard(watch=[pool], limit_bytes=LIMIT), pytest.raises(CastError):
        pool.storage[:, 0:2].clone()


def test_several_pools_and_plain_tensors_are_watched(pool: PagedPool) -> None:
    other = torch.zeros(4, 64, 576)
    with guard(watch=[pool, other], limit_bytes=LIMIT):
        for watched in (pool.storage, other):
            with pytest.raises(CastError):
                watched.clone()


def test_arguments_are_checked() -> None:
    with pytest.raises(TypeError, match=r"watch holds a str: PagedPool and torch.Tensor are watched"):
        guard(watch=["pool"])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"watch holds a NoneType: PagedPool"):
        guard(watch=None)  # type: ignore[arg-type]
    for limit, shown in (
        (-1, "-1"),
        (float("nan"), "nan"),
        (1e6, "1000000.0"),
        ("x", "'x'"),
        (True, "True"),
        (None, "None"),
    ):
        with pytest.raises(ValueError, match=f"limit_bytes is {shown}: a whole number, 0 or more, is needed"):
            guard(watch=[], limit_bytes=limit)  # type: ignore[arg-type]


def test_the_guard_is_exported_and_importing_uncast_needs_no_torch() -> None:
    assert uncast.guard is guard and uncast.CastError is CastError
    with pytest.raises(AttributeError, match="no attribute 'gard'"):
        uncast.gard  # noqa: B018
    code = "import sys; sys.modules['torch'] = None; import uncast; print(uncast.__version__)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
