"""Host side of `up_project`: a layer's weights, a request's factors, keys and values of a block of rows, packed queries.

No function waits for the device; every one may be called with scales as device tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton

from uncast.kernels import up_project as kernels
from uncast.kernels.unpack import INTEGER_FACTOR, is_native
from uncast.latent.codec import Scale
from uncast.latent.layouts import DS_MLA_TILE, RowLayout

LAYOUTS = ("fp8_e4m3", "fp8_ds_mla", "bf16")
CHANNEL_STEP = 64
"""kv_lora_rank has to be a multiple of it."""


@dataclass(frozen=True)
class UpConfig:
    """Tile of the up-projection: BM rows, BN channels, BK latent channels a step."""

    rows: int
    channels: int
    step: int
    num_warps: int
    num_stages: int


def choose_config(layout: str, arch: int) -> UpConfig:
    """The variant for a layout and a compute capability, within its shared memory (99 KB on sm_86, 89 and 120).

    `fp8_ds_mla` takes a group of channels a step, since each has a scale of its own.
    """
    if layout == "fp8_ds_mla":
        return UpConfig(128, 128, DS_MLA_TILE, 8, 2)
    return UpConfig(128, 256 if 90 <= arch < 120 else 128, CHANNEL_STEP, 8, 3)


@dataclass(frozen=True)
class UpWeights:
    """W_UK [heads, nope, rank] and W_UV [heads, v, rank] as the kernel takes them: fp16 with a factor per row, or bf16.

    bounds: int32 [4], see `up_project`.
    """

    w_uk: torch.Tensor
    w_uv: torch.Tensor
    factor_k: torch.Tensor
    factor_v: torch.Tensor
    bounds: torch.Tensor


def prepare_weights(layout: RowLayout, w_uk: torch.Tensor, w_uv: torch.Tensor) -> UpWeights:
    """Bounds of bf16 weights with rows of unit stride and distance `rank`, and for FP8 layouts their fp16 form (a scratch of
    their size)."""
    bounds = torch.zeros(4, dtype=torch.int32, device=w_uk.device)
    done = [_prepare(w, bounds, index, layout.is_fp8) for index, w in enumerate((w_uk, w_uv))]
    return UpWeights(done[0][0], done[1][0], done[0][1], done[1][1], bounds)


def _prepare(w: torch.Tensor, bounds: torch.Tensor, index: int, scale: bool) -> tuple[torch.Tensor, torch.Tensor]:
    heads, channels, rank = w.shape
    if w.stride(2) != 1 or w.stride(1) != rank:
        w = w.contiguous()
    prepared = torch.empty(w.shape, dtype=torch.float16, device=w.device) if scale else w
    factor = torch.empty(heads * channels if scale else 1, dtype=torch.float32, device=w.device)
    block = 8
    kernels.prepare_weights_kernel[(triton.cdiv(heads * channels, block),)](
        w, prepared, factor, bounds, heads * channels, w.stride(0),
        CH=channels, RANK=rank, BOUND=index, SCALE=scale, BLOCK=block, RANK_POW2=triton.next_power_of_2(rank),
        num_warps=4,
    )  # fmt: skip
    return prepared, factor


@dataclass(frozen=True)
class UpRequest:
    """One request's rows in one layer.

    Attributes:
        items: the cache, flat, as uint8 codes or bf16; words: the same bytes as fp32.
        pages: int32, its page numbers in order. factors: fp32 [6], see `up_project`.
        mantissa: m of sm_scale = m 2^e, the scale that attention over packed queries and keys takes.
    """

    layout: RowLayout
    weights: UpWeights
    items: torch.Tensor
    words: torch.Tensor
    pages: torch.Tensor
    page_shift: int
    factors: torch.Tensor
    mantissa: float
    native: bool


def prepare_request(
    layout: RowLayout,
    weights: UpWeights,
    cache: torch.Tensor,
    pages: torch.Tensor,
    kv_len: int,
    *,
    sm_scale: float,
    ckv_scale: Scale,
    kpe_scale: Scale,
    native: bool,
) -> UpRequest:
    """Factors of a request with `kv_len` rows; cache [num_pages, page_size, row_bytes]. native: see `unpack.is_native`."""
    flat = cache.view(torch.uint8).view(-1)
    words, halves = flat.view(torch.float32), flat.view(torch.bfloat16)
    shift, bounds = cache.shape[1].bit_length() - 1, weights.bounds
    if not layout.has_external_scales:
        bounds, block = bounds.clone(), 64 if layout.is_fp8 else 16
        kernels.bound_rows_kernel[(triton.cdiv(kv_len, block),)](
            halves, words, pages, bounds, kv_len, shift,
            LAYOUT=layout.name, RANK=layout.kv_lora_rank, ROPE=layout.qk_rope_head_dim, ROW_WORDS=layout.row_bytes // 4,
            SCALE_WORD=max(layout.scale_offset, 0) // 4, KPE_ITEM=layout.kpe_offset // 2,
            RANK_POW2=triton.next_power_of_2(layout.kv_lora_rank), ROPE_POW2=_pow2(layout.qk_rope_head_dim), BLOCK=block,
            num_warps=4,
        )  # fmt: skip
    factors = torch.empty(6, dtype=torch.float32, device=flat.device)
    mantissa, exponent = math.frexp(sm_scale)
    on_device = [isinstance(s, torch.Tensor) and s.device == flat.device for s in (ckv_scale, kpe_scale)]
    pairs = list(zip((ckv_scale, kpe_scale), on_device, strict=True))
    kernels.factors_kernel[(1,)](
        bounds, factors, *(s if there else factors for s, there in pairs),
        *(1.0 if s is None or there else float(s) for s, there in pairs),
        2.0 ** (exponent - 1), on_device[0] | on_device[1] << 1,
        EXTERNAL=layout.has_external_scales, INTEGER=INTEGER_FACTOR if layout.is_fp8 and not native else 1.0,
        KEY=kernels.KEY_POWER, VALUE=kernels.VALUE_POWER, num_warps=1,
    )  # fmt: skip
    items = flat if layout.is_fp8 else halves
    return UpRequest(layout, weights, items, words, pages, shift, factors, 2 * mantissa, native)


def project(
    request: UpRequest,
    heads: slice,
    start: int,
    count: int,
    keys: torch.Tensor,
    values: torch.Tensor,
    config: UpConfig,
) -> None:
    """Keys and values of `heads` for rows start..start + count, into fp16 [heads, count, width] each (unit last stride).

    Channels behind nope + rope of keys and behind v of values are left alone.
    """
    layout, weights = request.layout, request.weights
    for index, (w, factor, out) in enumerate(
        ((weights.w_uk, weights.factor_k, keys), (weights.w_uv, weights.factor_v, values))
    ):
        part, per_head = w[heads], w.shape[1]
        channels = part.shape[0] * per_head
        grid = (triton.cdiv(count, config.rows) * triton.cdiv(channels, config.channels),)
        kernels.up_project_kernel[grid](
            request.items, request.words, request.pages, part,
            factor[heads.start * per_head :] if layout.is_fp8 else factor, request.factors[index:], out, start, count,
            channels, part.stride(0), out.stride(0), out.stride(1), request.page_shift,
            LAYOUT=layout.name, NATIVE=request.native, RANK=layout.kv_lora_rank, CH=per_head,
            ROW_ITEMS=layout.row_bytes if layout.is_fp8 else layout.row_bytes // 2, ROW_WORDS=layout.row_bytes // 4,
            SCALE_WORD=max(layout.scale_offset, 0) // 4, BM=config.rows, BN=config.channels, BK=config.step, GROUP=8,
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
    place_rope(request, start, count, keys, weights.w_uk.shape[1])


def place_rope(request: UpRequest, start: int, count: int, keys: torch.Tensor, nope: int) -> None:
    """k_pe of the rows into channels nope.. of every head of `keys`."""
    layout, codes = request.layout, request.layout.kpe_dtype == "e4m3"
    items = request.items if codes or not layout.is_fp8 else request.items.view(torch.bfloat16)
    size = 1 if codes else 2
    kernels.place_rope_kernel[(triton.cdiv(count, 32),)](
        items, request.pages, request.factors, keys, start, count, keys.shape[0], keys.stride(0), keys.stride(1),
        request.page_shift,
        CODES=codes, NATIVE=request.native, ROPE=layout.qk_rope_head_dim, ROPE_POW2=_pow2(layout.qk_rope_head_dim),
        ROW_ITEMS=layout.row_bytes // size, KPE_ITEM=layout.kpe_offset // size, NOPE=nope, BM=32, num_warps=4,
    )  # fmt: skip


def pack_queries(request: UpRequest, q_nope: torch.Tensor, q_pe: torch.Tensor, width: int) -> torch.Tensor:
    """Queries [n, heads, nope] and [n, heads, rope] (any strides but a unit last one) -> fp16 [heads, n, width].

    Channels behind nope + rope are zero.
    """
    q_nope, q_pe = (q if q.stride(2) == 1 else q.contiguous() for q in (q_nope, q_pe))
    tokens, heads, nope = q_nope.shape
    rope = q_pe.shape[2]
    make = torch.empty if nope + rope == width else torch.zeros
    packed = make((heads, tokens, width), dtype=torch.float16, device=q_nope.device)
    block = 16
    kernels.pack_queries_kernel[(triton.cdiv(tokens * heads, block),)](
        q_nope, q_pe, request.factors, packed, tokens, heads, *(q.stride(d) for q in (q_nope, q_pe) for d in (0, 1)),
        NOPE=nope, ROPE=rope, WIDTH=width, NOPE_POW2=_pow2(nope), ROPE_POW2=_pow2(rope), BLOCK=block, num_warps=4,
    )  # fmt: skip
    return packed


def native_unpack(device: torch.device) -> bool:
    """Whether the kernels convert e4m3 in hardware on `device` (never in Triton's interpreter)."""
    if device.type != "cuda":
        return False
    major, minor = torch.cuda.get_device_capability(device)
    return is_native(major * 10 + minor)


def _pow2(n: int) -> int:
    return triton.next_power_of_2(max(1, n))
