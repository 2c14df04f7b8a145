"""k_scale on SGLang's MLA pool: the same scale for writes, for reads by kernels and for reads by un-absorbed prefill.

SGLang's own writer casts to FP8 without a scale, which its readers then apply; the writer here divides by it, saturates and
counts. It takes the place of the pool's methods, so that every path of a model writes the same bytes: absorbed attention,
un-absorbed prefill, draft steps. The pool's storage, and whatever copies it as bytes, is untouched.
"""

from __future__ import annotations

from typing import Any

import torch

from uncast.attention import registry
from uncast.integrations._common import WriteCounters
from uncast.latent.codec import Scale

FP8_LAYOUT = "fp8_e4m3"
_OWNER = "_uncast_writer"


def layer_scale(layer: Any, device: torch.device) -> Scale:
    """`layer.k_scale` where it lies on the cache's device (so that captured graphs follow a reload), else its host value;
    None for none."""
    scale = getattr(layer, "k_scale", None)
    if (
        isinstance(scale, torch.Tensor)
        and scale.device == device
        and scale.dtype == torch.float32
        and scale.numel() == 1
    ):
        return scale.detach()
    host = getattr(layer, "k_scale_float", None)
    if host is not None:
        return float(host)
    return None if scale is None else float(scale)


def absorbed_layers(model: Any, head_dim: int) -> dict[int, Any]:
    """Layer id -> the attention over the latent (SGLang's `attn_mqa`), which holds the checkpoint's scale.

    A model has a second attention object per layer, for un-absorbed prefill, whose scale stays at 1.
    """
    if model is None:
        return {}
    found: dict[int, Any] = {}
    for module in model.modules():
        if getattr(module, "head_dim", None) == head_dim and hasattr(module, "layer_id") and hasattr(module, "k_scale"):
            found[module.layer_id] = module
    return found


class PoolWriter:
    """Writes FP8 rows into an `MLATokenToKVPool` in place of the pool's own methods.

    Args:
        pool: SGLang's pool; rows `[size + page_size, 1, head_dim_ckv + head_dim_kpe]` a layer.
        rank: latent channels.
        backend: uncast's backend whose writer is used.
        layers: see `absorbed_layers`.
    """

    def __init__(self, pool: Any, rank: int, page_size: int, backend: str, layers: dict[int, Any]) -> None:
        self.pool, self.rank, self.page_size, self.layers = pool, rank, page_size, layers
        self.device = torch.device(pool.get_key_buffer(pool.start_layer).device)
        self.counters = WriteCounters(self.device)
        self._backend = registry.create(backend)
        self._get = pool.get_mla_kv_buffer

    def scale(self, layer: Any) -> Scale:
        """The scale of a layer's rows, whichever of its attention objects asks."""
        return layer_scale(self.layers.get(layer.layer_id, layer), self.device)

    def set_mla_kv_buffer(
        self,
        layer: Any,
        loc_info: Any,
        cache_k_nope: torch.Tensor,
        cache_k_rope: torch.Tensor,
        layer_id_override: int | None = None,
    ) -> None:
        """The pool's method: rows [n, 1, rank] and [n, 1, rope] into the slots of `loc_info` (a KVWriteLoc or int64 [n])."""
        self.pool._check_physical_write_loc(loc_info, "set_mla_kv_buffer (uncast)")
        slots = getattr(loc_info, "loc", loc_info)
        index = (layer.layer_id if layer_id_override is None else layer_id_override) - self.pool.start_layer
        rows = self.pool.kv_buffer[index]
        whole = rows.shape[0] // self.page_size * self.page_size
        cache = rows[:whole].view(torch.uint8).view(-1, self.page_size, rows.shape[-1])
        scale = self.scale(layer)
        self._backend.write(
            cache_k_nope.reshape(-1, cache_k_nope.shape[-1]), cache_k_rope.reshape(-1, cache_k_rope.shape[-1]), cache,
            slots.contiguous(), kv_layout=FP8_LAYOUT, ckv_scale=scale, kpe_scale=scale, counters=self.counters.values,
        )  # fmt: skip

    def set_kv_buffer(
        self,
        layer: Any,
        loc_info: Any,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor | None,
        layer_id_override: int | None = None,
    ) -> None:
        """The pool's method: rows [n, 1, rank + rope]; `cache_v` is their first part and ignored, as in SGLang."""
        nope, rope = cache_k[..., : self.rank], cache_k[..., self.rank :]
        self.set_mla_kv_buffer(layer, loc_info, nope, rope, layer_id_override)

    def get_mla_kv_buffer(
        self, layer: Any, loc: torch.Tensor, dst_dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The pool's method: rows `loc` in `dst_dtype`, with the scale; raw codes where no other dtype is asked for."""
        nope, rope = self._get(layer, loc, dst_dtype)
        scale = self.scale(layer)
        if scale is not None and nope.dtype != self.pool.dtype:
            nope.mul_(scale)
            if rope is not None:
                rope.mul_(scale)
        return nope, rope


def install_writer(pool: Any, rank: int, page_size: int, backend: str, layers: dict[int, Any]) -> PoolWriter:
    """The writer of `pool`, put in place of its methods once however many backends (draft steps) share it."""
    writer = getattr(pool, _OWNER, None)
    if writer is None:
        writer = PoolWriter(pool, rank, page_size, backend, layers)
        for name in ("set_mla_kv_buffer", "set_kv_buffer", "get_mla_kv_buffer"):
            setattr(pool, name, getattr(writer, name))
        setattr(pool, _OWNER, writer)
    assert isinstance(writer, PoolWriter)
    return writer
