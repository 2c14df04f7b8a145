"""Un-absorbed extend on a GPU: many new tokens over a long prefix, the cache read as it is stored, in a bounded scratch.

    queries packed, fp16
    the last rows, for as many heads at once as fit:         causal
        keys, values = up-projection of the rows             kernels.up_project, straight from the paged rows
        state = a library's flash attention, with LSE        flash_libraries
    for a group of heads:
        for a block of prefix rows: the same, un-masked
        out = merged states                                  kernels.merge_states, fp32, rounded once

Blocks: `SCRATCH_BYTES` bounds keys and values of one block. A group takes as few heads as fill the GPU, so that a block takes
as many rows as it can. The causal block has the last q_len rows, or with a library whose mask is from the bottom right as many
rows as fit, and what is before them is merged. Besides, a call holds packed queries, the fp16 form of W_UK and W_UV, and the
states of the causal block.

On an H200 (4,096 queries on 32,768 rows, 64 heads, GLM's widths, `fp8_e4m3`) one call on a cool chip is 15.6 ms of kernels,
12.9 of them cuDNN at 725 TFLOP/s and 2.5 the up-projection; call after call the chip slows down to 17.4.

Lengths are host integers, known when the step is planned: requests are a loop on the host, which is what long extends can
afford (a few launches a block); short ones stay absorbed (`attention.crossover`). Not for CUDA graphs.

Accuracy: products in fp32, keys, values and P in fp16, one rounding to the queries' dtype at the end.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from uncast.attention.crossover import ExtendChunk
from uncast.attention.problem import ProblemError
from uncast.backends import flash_libraries as libraries
from uncast.kernels import up_launch
from uncast.kernels.merge_states import State, finish, fold
from uncast.kernels.mma_launch import OLDEST_ARCH
from uncast.latent.codec import Scale
from uncast.latent.layouts import RowLayout

SCRATCH_BYTES = 256 * 2**20
"""Keys and values of one block, in bytes."""
MAX_QUERIES = 16384
"""Longer requests go in pieces of so many queries, each with the rows before it as prefix."""
QUERY_TILE = 128
"""Queries of one CTA of a library's kernel, for sizing a group of heads."""


@dataclass(frozen=True)
class Tiling:
    """heads of a group over the un-masked blocks (first row, rows); causal_heads, a multiple, over the causal block of the
    last `causal_rows`."""

    heads: int
    causal_heads: int
    causal_rows: int
    blocks: tuple[tuple[int, int], ...]


def unabsorbed_refusal(
    layout: RowLayout, arch: int, q_dtype: torch.dtype, w_dtype: torch.dtype, nope: int, v: int
) -> str | None:
    """None if a GPU of compute capability `arch` can go un-absorbed, else why not, in one sentence."""
    qk = nope + layout.qk_rope_head_dim
    if arch < OLDEST_ARCH:
        return f"un-absorbed extend needs compute capability 8.0 or newer, and this GPU has {arch / 10}"
    if layout.name not in up_launch.LAYOUTS or layout.kv_lora_rank % up_launch.CHANNEL_STEP:
        return (
            f"un-absorbed extend reads {', '.join(up_launch.LAYOUTS)} with a rank that is a multiple of "
            f"{up_launch.CHANNEL_STEP}, not {layout.name} with {layout.kv_lora_rank}"
        )
    if w_dtype != torch.bfloat16 or q_dtype not in (torch.bfloat16, torch.float16):
        return f"un-absorbed extend takes bfloat16 weights and 16-bit queries, not {w_dtype} and {q_dtype}"
    if all(libraries.refusal(name, arch, qk, v) for name in libraries.LIBRARIES):
        return f"no attention library here takes heads of {qk} and {v} channels"
    return None


def plan_tiling(
    q_len: int,
    kv_len: int,
    heads: int,
    width: int,
    *,
    library: str,
    num_sms: int,
    scratch_bytes: int = SCRATCH_BYTES,
    group: int | None = None,
) -> Tiling:
    """Heads of a group (given, or chosen) and its blocks of rows, so that keys and values of a block fit `scratch_bytes`.

    The last q_len rows are in one block: `MAX_QUERIES` rows of one head always fit 256 MiB.
    """
    row_bytes, prefix = 2 * 2 * width, kv_len - q_len
    max_rows = scratch_bytes // row_bytes
    if group is None:
        longest = kv_len if libraries.is_bottom_right(library) else max(prefix, q_len)
        group = _choose_group(q_len, longest, heads, num_sms, max_rows)
    elif not 1 <= group <= heads or heads % group:
        raise ProblemError(f"a group of {group} heads does not divide {heads} heads")
    granule = libraries.CUDNN_GRANULE
    block = max(granule, max_rows // group // granule * granule)
    if libraries.is_bottom_right(library):
        causal_rows, causal = min(kv_len, max(q_len, block)), group
    else:
        causal_rows = q_len
        causal = max(g for g in _divisors(heads) if g == group or (g % group == 0 and g * q_len <= max_rows))
    blocks, start = [], 0
    while start < kv_len - causal_rows:
        rows = libraries.split_rows(library, q_len, min(block, kv_len - causal_rows - start))
        blocks.append((start, rows))
        start += rows
    return Tiling(group, causal, causal_rows, tuple(blocks))


def _divisors(heads: int) -> list[int]:
    return [g for g in range(1, heads + 1) if heads % g == 0]


def _choose_group(q_len: int, longest: int, heads: int, num_sms: int, max_rows: int) -> int:
    """The fewest heads that fill the GPU, or more where all rows (of all of the group's heads) still fit `max_rows`."""
    divisors = _divisors(heads)
    tiles = -(-q_len // QUERY_TILE)
    group = next((g for g in divisors if _fills(g * tiles, num_sms)), heads)
    group = max(group, *(g for g in divisors if g == 1 or g * longest <= max_rows))
    return max(g for g in divisors if g == 1 or (g <= group and g * q_len <= max_rows))


def _fills(tiles: int, num_sms: int) -> bool:
    """Whether `tiles` CTAs of equal length keep at least 90 % of the multiprocessors busy, in three waves or more: CTAs do not
    start or end together."""
    waves = -(-tiles // num_sms)
    return waves >= 3 and tiles >= 0.9 * waves * num_sms  # 16 heads of 4,096 queries: 512 tiles on 132, 97 %


def unabsorbed_extend(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    cache: torch.Tensor,
    chunks: list[ExtendChunk],
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    *,
    layout: RowLayout,
    sm_scale: float,
    ckv_scale: Scale = None,
    kpe_scale: Scale = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    lse_base: str = "2",
    library: str | None = None,
    scratch_bytes: int = SCRATCH_BYTES,
    heads_per_group: int | None = None,
) -> torch.Tensor:
    """Causal attention of each chunk's queries over its stored rows, values up-projected.

    Args:
        q_nope: [n, heads, nope], not absorbed; q_pe: [n, heads, rope], rotated; bf16 or fp16.
        cache: [num_pages, page_size, row_bytes] bytes, 16-byte aligned; holds this call's rows already.
        w_uk: bf16 [heads, nope, rank]; w_uv: bf16 [heads, v, rank].
        out: [n, heads, v] in the queries' dtype, made if not given; only rows of chunks are written.
        lse: fp32 [n, heads] in `lse_base`, written if given.
        library: a name of `flash_libraries.LIBRARIES`; None takes the fastest.
        heads_per_group: a divisor of heads, for benchmarks; None lets `plan_tiling` choose.

    Returns:
        out.

    Raises:
        ProblemError: shapes, dtypes or lengths that it does not take; see `unabsorbed_refusal`.
    """
    device = cache.device
    arch, num_sms = _device_facts(device)
    nope, v = w_uk.shape[1], w_uv.shape[1]
    reason = unabsorbed_refusal(layout, arch, q_nope.dtype, w_uk.dtype, nope, v)
    if reason is None and library is not None:
        reason = libraries.refusal(library, arch, nope + layout.qk_rope_head_dim, v)
    if reason is not None:
        raise ProblemError(reason)
    _check_shapes(q_nope, q_pe, cache, chunks, w_uk, w_uv, layout)
    library = library or libraries.choose(arch, nope + layout.qk_rope_head_dim, v)
    if out is None:
        out = q_nope.new_empty(q_nope.shape[0], q_nope.shape[1], v)
    weights = up_launch.prepare_weights(layout, w_uk, w_uv)
    job = _Job(layout, weights, cache, library, arch, num_sms, scratch_bytes, heads_per_group, sm_scale, v)
    for chunk in chunks:
        request = up_launch.prepare_request(
            layout, weights, cache, chunk.pages, chunk.kv_len,
            sm_scale=sm_scale, ckv_scale=ckv_scale, kpe_scale=kpe_scale, native=up_launch.native_unpack(device),
        )  # fmt: skip
        for first in range(chunk.first, chunk.last, MAX_QUERIES):
            last = min(first + MAX_QUERIES, chunk.last)
            rows, kv_len = slice(first, last), chunk.kv_len - (chunk.last - last)
            target = None if lse is None else lse[rows].T
            job.extend(request, q_nope[rows], q_pe[rows], kv_len, out[rows].transpose(0, 1), target, lse_base)
    return out


@dataclass(frozen=True)
class _Job:
    """What is the same for every chunk of a call."""

    layout: RowLayout
    weights: up_launch.UpWeights
    cache: torch.Tensor
    library: str
    arch: int
    num_sms: int
    scratch_bytes: int
    heads_per_group: int | None
    sm_scale: float
    v: int

    def extend(
        self,
        request: up_launch.UpRequest,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        kv_len: int,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        lse_base: str,
    ) -> None:
        """One piece: queries [n, heads, ..], the last ones of `kv_len` rows, into out [heads, n, v] and lse [heads, n]."""
        tokens, heads, nope = q_nope.shape
        qk = nope + q_pe.shape[2]
        width = max(qk, self.v)
        tiling = plan_tiling(
            tokens, kv_len, heads, width, library=self.library, num_sms=self.num_sms,
            scratch_bytes=self.scratch_bytes, group=self.heads_per_group,
        )  # fmt: skip
        packed = up_launch.pack_queries(request, q_nope, q_pe, width)
        rows = max(tiling.causal_heads * tiling.causal_rows, *(tiling.heads * rows for _, rows in tiling.blocks), 0)
        make = torch.empty if qk == self.v else torch.zeros
        scratch = make((2, rows * width), dtype=torch.float16, device=self.cache.device)
        for outer in range(0, heads, tiling.causal_heads):
            part = slice(outer, outer + tiling.causal_heads)
            last = self._attend(request, packed, part, (kv_len - tiling.causal_rows, tiling.causal_rows), True, scratch)
            for first in range(outer, outer + tiling.causal_heads, tiling.heads):
                part, inner = (slice(x, x + tiling.heads) for x in (first, first - outer))
                states = [State(last.out[inner], last.lse[inner], last.lse_base)]
                for block in tiling.blocks:
                    if len(states) == 2:
                        states = [fold(states[0], states[1], self.v)]
                    states.append(self._attend(request, packed, part, block, False, scratch))
                finish(states, request.factors, out[part], None if lse is None else lse[part], lse_base)

    def _attend(
        self,
        request: up_launch.UpRequest,
        packed: torch.Tensor,
        heads: slice,
        block: tuple[int, int],
        causal: bool,
        scratch: torch.Tensor,
    ) -> State:
        """The state of some heads over one block (first row, rows)."""
        group, (tokens, width), (start, rows) = heads.stop - heads.start, packed.shape[1:], block
        keys, values = (s[: group * rows * width].view(group, rows, width) for s in scratch)
        up_launch.project(
            request, heads, start, rows, keys, values, up_launch.choose_config(self.layout.name, self.arch)
        )
        library = libraries.library_for_block(self.library, tokens, rows)
        return State(
            *libraries.attend(
                library, packed[heads], keys, values, v_width=self.v, causal=causal, scale=request.mantissa
            )
        )


def _device_facts(device: torch.device) -> tuple[int, int]:
    """Compute capability and multiprocessors; a CPU (Triton's interpreter) counts as the smallest GPU."""
    if device.type != "cuda":
        return OLDEST_ARCH, 1
    properties = torch.cuda.get_device_properties(device)
    return properties.major * 10 + properties.minor, properties.multi_processor_count


def _check_shapes(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    cache: torch.Tensor,
    chunks: list[ExtendChunk],
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    layout: RowLayout,
) -> None:
    heads, nope, rank = w_uk.shape
    if rank != layout.kv_lora_rank or (w_uv.shape[0], w_uv.shape[2]) != (heads, rank):
        raise ProblemError(
            f"w_uk is {list(w_uk.shape)} and w_uv {list(w_uv.shape)}: they must be [heads, nope, {layout.kv_lora_rank}] and "
            f"[heads, v, {layout.kv_lora_rank}]"
        )
    for name, q, width in (("q_nope", q_nope, nope), ("q_pe", q_pe, layout.qk_rope_head_dim)):
        if q.dim() != 3 or tuple(q.shape) != (q_nope.shape[0], heads, width):
            raise ProblemError(f"{name} is {list(q.shape)}: it must be [{q_nope.shape[0]}, {heads}, {width}]")
    page_size = cache.shape[1]
    if cache.dim() != 3 or cache.shape[2] * cache.element_size() != layout.row_bytes or not cache.is_contiguous():
        raise ProblemError(
            f"cache is {cache.dtype} {list(cache.shape)}: {layout.name} needs contiguous [num_pages, page_size, "
            f"{layout.row_bytes} bytes]"
        )
    if cache.data_ptr() % 16:
        raise ProblemError("the cache must start at a 16-byte boundary")
    for chunk in chunks:
        tokens, pages = chunk.last - chunk.first, -(-chunk.kv_len // page_size)
        if not 1 <= tokens <= chunk.kv_len or chunk.first < 0 or chunk.last > q_nope.shape[0]:
            raise ProblemError(
                f"a chunk has queries {chunk.first} to {chunk.last} and {chunk.kv_len} rows: queries must lie within "
                f"{q_nope.shape[0]} and be at most as many as the rows"
            )
        if chunk.pages.shape[0] < pages or chunk.pages.dtype != torch.int32:
            raise ProblemError(
                f"a chunk of {chunk.kv_len} rows has {chunk.pages.shape[0]} pages of {chunk.pages.dtype}: it needs "
                f"{pages} of int32"
            )
