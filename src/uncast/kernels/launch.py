"""What every attention kernel's launch needs: one call's tensors in the form kernels take, and scratch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from uncast.kernels.schedule import SCHED_COLUMNS, SplitPlan
from uncast.latent.codec import Scale

LSE_MODES = {"2": 1, "e": 2}


@dataclass(frozen=True)
class Scratch:
    """partial_o fp32 or fp16 [partial_blocks, block_rows, 512], partial_lse and (or None) partial_scale fp32
    [partial_blocks, block_rows], one behind the other, sched int32 [1 + groups, 8]; see `schedule` and `combine`."""

    partial_o: torch.Tensor
    partial_lse: torch.Tensor
    partial_scale: torch.Tensor | None
    sched: torch.Tensor

    @classmethod
    def allocate(
        cls, plan: SplitPlan, device: torch.device, dtype: torch.dtype = torch.float32, *, scaled: bool = False
    ) -> Scratch:
        blocks = max(1, plan.partial_blocks)
        rows = torch.ones(1 + scaled, blocks, plan.block_rows, dtype=torch.float32, device=device)
        return cls(
            torch.empty(blocks, plan.block_rows, 512, dtype=dtype, device=device),
            rows[0],
            rows[1] if scaled else None,
            torch.zeros(1 + plan.num_groups, SCHED_COLUMNS, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True)
class Call:
    """One layer's tensors: q_nope, q_pe and out are 16-byte aligned with strides that are multiples of 8 elements.

    A scale given as a device tensor is read by the kernel through its pointer (bit 0 of `scale_flags`: ckv, bit 1: kpe), so
    no value ever comes back to the host. `lse_mode`: 0 none, 1 base 2, 2 base e.
    """

    q_nope: torch.Tensor
    q_pe: torch.Tensor
    cache: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor | None
    lse_mode: int
    ckv_scale: float
    kpe_scale: float
    ckv_scale_ptr: torch.Tensor
    kpe_scale_ptr: torch.Tensor
    scale_flags: int


def make_call(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    cache: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    lse_base: str,
    ckv_scale: Scale,
    kpe_scale: Scale,
    dummy: torch.Tensor,
) -> Call:
    """Normalises one `Backend.run`. `dummy`: any fp32 tensor on the device, the target of pointers that are not read.

    Queries whose addresses or strides are not multiples of 16 bytes are copied (they are small; the cache never is).
    """
    ckv, ckv_ptr = _scale(ckv_scale, dummy)
    kpe, kpe_ptr = _scale(kpe_scale, dummy)
    flags = int(ckv_ptr is not dummy) | int(kpe_ptr is not dummy) << 1
    mode = 0 if lse is None else LSE_MODES[lse_base]
    return Call(aligned(q_nope), aligned(q_pe), cache, out, lse, mode, ckv, kpe, ckv_ptr, kpe_ptr, flags)


def is_aligned(x: torch.Tensor) -> bool:
    """Whether x [tokens, heads, channels] can be read 16 bytes at a time."""
    return x.data_ptr() % 16 == 0 and x.stride(2) == 1 and x.stride(0) % 8 == 0 and x.stride(1) % 8 == 0


def aligned(x: torch.Tensor) -> torch.Tensor:
    return x if is_aligned(x) else x.clone(memory_format=torch.contiguous_format)


def _scale(scale: Scale, dummy: torch.Tensor) -> tuple[float, torch.Tensor]:
    if isinstance(scale, torch.Tensor):
        if scale.device == dummy.device:
            return 1.0, scale
        scale = float(scale)
    return (1.0 if scale is None else scale), dummy


def resident_ctas(compiled: object, device: torch.device) -> int:
    """CTAs of a compiled kernel that the device runs at once, from its shared memory, registers and warps."""
    properties = torch.cuda.get_device_properties(device)
    compiled._init_handles()
    shared = compiled.metadata.shared + 1024
    threads = 32 * compiled.metadata.num_warps
    registers = -(-compiled.n_regs // 8) * 8 * threads
    per_sm = min(
        properties.shared_memory_per_multiprocessor // shared,
        properties.regs_per_multiprocessor // registers,
        properties.max_threads_per_multi_processor // threads,
    )
    return properties.multi_processor_count * max(1, per_sm)
