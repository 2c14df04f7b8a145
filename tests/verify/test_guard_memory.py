"""The guard on memory that is shared, viewed as bool, sparse or opaque, and on operations that take no data."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from uncast.latent.layouts import row_layout
from uncast.latent.pool import PagedPool
from uncast.verify.guard import CastError, guard

LIMIT = 64 * 656
"""One page of the caches below."""


def make_cache() -> torch.Tensor:
    return torch.randint(1, 100, (8, 64, 656), dtype=torch.uint8)


def make_floats() -> torch.Tensor:
    return torch.randn(8 * 64, 576)


def bool_view_clone(cache: torch.Tensor) -> object:
    return cache.view(torch.bool).clone().view(torch.uint8).bfloat16()


def bool_view_copy(cache: torch.Tensor) -> object:
    return torch.empty_like(cache).view(torch.bool).copy_(cache.view(torch.bool))


def bool_view_cat(cache: torch.Tensor) -> object:
    return torch.cat(list(cache.view(torch.bool)))


def bool_view_logic(cache: torch.Tensor) -> object:
    return (cache.view(torch.bool) & True).view(torch.uint8).half()


def bool_view_in_small_parts(cache: torch.Tensor) -> object:
    parts = [page.view(torch.bool)[:32].clone() for page in cache]
    return torch.stack([part.view(torch.uint8).half() for part in parts])


def dlpack_clone(cache: torch.Tensor) -> object:
    return torch.from_dlpack(cache).clone()


def dlpack_of_a_part(cache: torch.Tensor) -> object:
    return torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(cache[3:])).float()


def numpy_and_back(cache: torch.Tensor) -> object:
    return torch.from_numpy(cache.numpy()[2:]).half()


def dlpack_of_a_copy(cache: torch.Tensor) -> object:
    """A scratch below the limit, joined through another name of its memory."""
    scratch = torch.empty(2, 32, 656, dtype=torch.uint8)
    torch.from_dlpack(scratch[1:]).copy_(cache[:1, :32])
    scratch[0] = cache[1, :32]
    return torch.from_dlpack(scratch).half()


@pytest.mark.parametrize("inference", [False, True], ids=["plain", "inference_mode"])
@pytest.mark.parametrize(
    "copy",
    [
        bool_view_clone, bool_view_copy, bool_view_cat, bool_view_logic, bool_view_in_small_parts, dlpack_clone,
        dlpack_of_a_part, numpy_and_back, dlpack_of_a_copy,
    ],
    ids=lambda copy: copy.__name__,
)  # fmt: skip
def test_a_copy_through_another_view_of_the_memory_is_caught(
    copy: Callable[[torch.Tensor], object], inference: bool
) -> None:
    cache = make_cache()
    with torch.inference_mode(inference), guard(watch=[cache], limit_bytes=LIMIT), pytest.raises(CastError) as caught:
        copy(cache)
    assert caught.value.filename == __file__


@pytest.mark.parametrize(
    "copy",
    [
        lambda floats: floats.to_sparse(),
        lambda floats: floats.to_sparse_csr(),
        lambda floats: floats.to_mkldnn(),
    ],
    ids=["coo", "csr", "mkldnn"],
)
def test_a_copy_into_another_layout_is_caught(copy: Callable[[torch.Tensor], object]) -> None:
    floats = make_floats()
    with guard(watch=[floats], limit_bytes=LIMIT), pytest.raises(CastError):
        copy(floats)


@pytest.mark.parametrize("inference", [False, True], ids=["plain", "inference_mode"])
def test_what_takes_no_data_passes(inference: bool) -> None:
    cache, floats = make_cache(), make_floats()
    with torch.inference_mode(inference), guard(watch=[cache, floats], limit_bytes=LIMIT):
        for like in (torch.empty_like, torch.zeros_like, torch.ones_like, torch.rand_like, torch.randn_like):
            assert like(floats).shape == floats.shape
        torch.full_like(cache, 3).float()
        torch.randint_like(floats, 5).mul_(2)
        for new in (floats.new_zeros, floats.new_empty, floats.new_ones):
            new(8 * 64, 576).double()
        floats.new_full((8 * 64, 576), 2.0).double()
        torch.cat([floats[:8].clone().exponential_()] * 8)
        assert not floats.isnan().any() and (floats == floats).all()
        assert cache.to(torch.bool).logical_not().sum() == 0


def test_sparse_arguments_are_followed() -> None:
    floats = make_floats()
    mixing = torch.eye(8 * 64)
    coo, csr, opaque = mixing.to_sparse(), mixing.to_sparse_csr(), torch.ones(4, 4).to_mkldnn()
    with guard(watch=floats, limit_bytes=LIMIT):
        assert torch.sparse.mm(coo, torch.ones(8 * 64, 3)).shape == (8 * 64, 3)
        assert (coo @ floats).shape == (csr @ floats).shape == floats.shape, "a product is no copy"
        assert (opaque + opaque).to_dense().sum() == 32
        small = floats[:8].to_sparse()
        assert small.values().numel() == 8 * 576
        with pytest.raises(CastError):
            torch.cat([small.to_dense()] * 8)
    with guard(watch=[coo], limit_bytes=64), pytest.raises(CastError):
        coo.to(torch.float64)


def test_a_single_pool_or_tensor_is_watched() -> None:
    pool = PagedPool(row_layout("fp8_ds_mla"), num_layers=2, num_pages=8)
    for watch, tensor in ((pool, pool.storage), (pool.storage, pool.storage), (iter([pool]), pool.storage)):
        with guard(watch=watch, limit_bytes=LIMIT), pytest.raises(CastError):
            tensor.float()


def test_memory_of_other_tensors_and_of_none_is_no_pool() -> None:
    cache = make_cache()
    other = torch.from_numpy(np.ones((8, 64, 656), dtype=np.uint8))
    with guard(watch=[cache], limit_bytes=LIMIT):
        other.float().mul_(2)
        torch.empty(8, 64, 656, device="meta").float()
        torch.empty(0).float()
        cache.copy_(other)
        torch.from_dlpack(cache)[:4].copy_(other[:4])


def test_checks_that_build_a_temporary_are_caught_and_pass_page_by_page() -> None:
    floats = make_floats().view(64, 8, 576)
    with guard(watch=[floats], limit_bytes=LIMIT):
        assert all(page.isfinite().all() and page.quantile(0.5).isfinite() for page in floats)
        with pytest.raises(CastError):
            floats.isfinite()
        with pytest.raises(CastError):
            floats.quantile(0.5)
