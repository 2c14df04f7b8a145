"""The fused cache writer, of `native` and of backends whose library has none: attention is theirs, a row's bytes are ours."""

from __future__ import annotations

import torch

from uncast.attention.backend import RopeWriter
from uncast.latent.codec import Scale


class FusedWriter(RopeWriter):
    """A backend that writes with `kernels.cache_write` on a GPU and with the reference writer on a CPU."""

    def write(
        self,
        ckv: torch.Tensor,
        kpe: torch.Tensor,
        cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        *,
        kv_layout: str,
        ckv_scale: Scale,
        kpe_scale: Scale,
        counters: torch.Tensor | None,
    ) -> None:
        if not cache.is_cuda:
            super().write(
                ckv, kpe, cache, slot_mapping,
                kv_layout=kv_layout, ckv_scale=ckv_scale, kpe_scale=kpe_scale, counters=counters,
            )  # fmt: skip
            return
        from uncast.kernels.cache_write import write_rows

        with torch.cuda.device(cache.device):
            write_rows(
                ckv, kpe, cache, slot_mapping,
                kv_layout=kv_layout, ckv_scale=ckv_scale, kpe_scale=kpe_scale, counters=counters,
            )  # fmt: skip

    def rope_write(
        self,
        ckv: torch.Tensor,
        kpe: torch.Tensor,
        q_pe: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        *,
        interleaved: bool,
        kv_layout: str,
        ckv_scale: Scale,
        kpe_scale: Scale,
        counters: torch.Tensor | None,
    ) -> None:
        from uncast.kernels.rope_write import rope_write_rows

        with torch.cuda.device(cache.device):
            rope_write_rows(
                ckv, kpe, q_pe, angles, cache, slot_mapping, interleaved=interleaved,
                kv_layout=kv_layout, ckv_scale=ckv_scale, kpe_scale=kpe_scale, counters=counters,
            )  # fmt: skip
