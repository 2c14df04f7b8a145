"""Products with packed weights, unpacked in registers, one launch for all experts: out[n, m] = sum_k w[expert, n, k] x[m, k].

    one program = BLOCK_N rows of one expert's weights (GATED: of gate and of up) x BLOCK_M of the rows that chose it
    w is the left operand, so that few tokens are the narrow side of the matrix instruction and no tile is padded to 64
    w is read as 32-bit words of PLANES columns (NVFP4 8, FP8 4). Field i of the words of a tile is an operand of its own,
    plane i, and x comes in planes too ([rows, PLANES, K / PLANES]): nothing is interleaved, and the two neighbouring words that
    a thread holds of a row are 16 NVFP4 columns, which have one scale
    NVFP4: e2m1 bits moved into bf16's fields read as value * 2^-126; the e4m3 scale is held as scale * 2^119; their bf16
           product is exact (6 significant bits), and 2^7 * global_scale[n] multiplies the sum in fp32
    FP8:   e4m3 bits moved into bf16's fields read as value * 2^-120, times 2^120 exact; a block's fp32 scale multiplies its sum

Rows of x come in the order of `pairs` (sorted by expert); which expert and which rows a program has, it finds from `ends`.
Floor: packed weights of the experts that were chosen, read once: GLM-5 (8 of 256, 6144 x 2048) in NVFP4 170 MB a token, 40 us
at 4.3 TB/s; unpacking takes 2 integer operations a weight, which an H200 does in about the same time. Plain Triton; unpacking
is inline assembly that every chip from sm_80 on has, and arithmetic in Triton's interpreter (ASM = False).
"""

from __future__ import annotations

import triton
import triton.language as tl

NVFP4, FP8 = tl.constexpr(0), tl.constexpr(1)
PLANES = {NVFP4.value: 8, FP8.value: 4}
BLOCK_N, BLOCK_WORDS, NUM_WARPS = 64, 32, 4
"""Rows of a tile; words of a row in one step (256 NVFP4 or 128 FP8 columns; half of it where the columns ask for that)."""
WIDE_CHIPS = (9, 10)
"""Compute capabilities (major) that take 64 rows of x; the others would spill."""


def _nvfp4_asm() -> str:
    """Two words ($8, $9) and their scale ($10, twice) to the bf16 pairs of planes 0..7, each times the scale.

    The 16-bit halves of t hold four fields of the first word and of the second; a field's sign goes to bit 15, its other bits
    to bits 6..8.
    """
    lines = []
    for half, select in enumerate((0x5410, 0x7632)):
        lines.append(f"prmt.b32 t, $8, $9, {select:#x};")
        for i in range(4):
            sign = f"shl.b32 a, t, {12 - 4 * i}; and.b32 a, a, 0x80008000;" if i < 3 else "and.b32 a, t, 0x80008000;"
            shift = 6 - 4 * i
            move = f"{'shl' if shift > 0 else 'shr'}.b32 b, t, {abs(shift)}; and.b32 b, b, 0x01c001c0;"
            lines.append(f"{sign} {move} or.b32 a, a, b; fma.rn.bf16x2 ${4 * half + i}, a, $10, z;")
    return "{ .reg .b32 t, a, b, z; mov.b32 z, 0x80008000; " + " ".join(lines) + " }"


def _fp8_asm() -> str:
    """Two words ($4, $5) to the bf16 pairs of planes 0..3: byte i of both goes to the upper bytes of t's halves."""
    lines = []
    for i in range(4):
        lines.append(f"prmt.b32 t, $4, $5, {(4 + i) << 12 | i << 4:#x}; and.b32 a, t, 0x80008000; shr.b32 t, t, 4;")
        lines.append(f"and.b32 t, t, 0x07f007f0; or.b32 a, a, t; fma.rn.bf16x2 ${i}, a, s, z;")
    return "{ .reg .b32 t, a, z, s; mov.b32 z, 0x80008000; mov.b32 s, 0x7b807b80; " + " ".join(lines) + " }"


NVFP4_ASM, FP8_ASM = tl.constexpr(_nvfp4_asm()), tl.constexpr(_fp8_asm())
SCALE_SHIFT = tl.constexpr(2.0**127)  # fp16 bits of e4m3 read as value * 2^-8; 2^-8 * 2^127 = 2^119
UNSHIFT = tl.constexpr(2.0**7)


@triton.jit
def e2m1_value(code):
    """fp32 value of a nibble (int32)."""
    size = tl.where((code & 6) == 0, 0.5 * (code & 1), (1.0 + 0.5 * (code & 1)) * tl.exp2(((code >> 1) & 3) - 1.0))
    return tl.where((code & 8) != 0, -size, size)


@triton.jit
def e4m3_value(code):
    """fp32 value of a code (int32), through fp16, whose fields hold it times 2^-8."""
    bits = (((code & 0x80) << 8) | ((code & 0x7F) << 7)).to(tl.int16)
    return bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def unpack_nvfp4(words, scales, ASM: tl.constexpr):
    """bf16 planes 0..7 [n, w] of words int32 [n, w] and scale codes [n, w / 2]; times 2^-7 with ASM, fp32 without."""
    n: tl.constexpr = words.shape[0]
    width: tl.constexpr = words.shape[1]
    bits = (scales.to(tl.int16) & 0x7F) << 7
    size = bits.to(tl.float16, bitcast=True).to(tl.float32)
    if ASM:
        scale = (size * SCALE_SHIFT).to(tl.bfloat16)
        spread = tl.broadcast_to(scale[:, :, None], [n, width // 2, 2]).reshape([n, width])
        b = tl.bfloat16
        planes = tl.inline_asm_elementwise(
            NVFP4_ASM,
            "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r",
            [words, spread],
            dtype=(b, b, b, b, b, b, b, b),
            is_pure=True,
            pack=2,
        )
    else:
        s = tl.broadcast_to((size * 256.0)[:, :, None], [n, width // 2, 2]).reshape([n, width])
        planes = (
            e2m1_value(words & 15) * s, e2m1_value((words >> 4) & 15) * s, e2m1_value((words >> 8) & 15) * s,
            e2m1_value((words >> 12) & 15) * s, e2m1_value((words >> 16) & 15) * s, e2m1_value((words >> 20) & 15) * s,
            e2m1_value((words >> 24) & 15) * s, e2m1_value((words >> 28) & 15) * s,
        )  # fmt: skip
    return planes


@triton.jit
def unpack_fp8(words, ASM: tl.constexpr):
    """bf16 planes 0..3 of words int32; fp32 without ASM."""
    if ASM:
        b = tl.bfloat16
        planes = tl.inline_asm_elementwise(
            FP8_ASM, "=r,=r,=r,=r,r,r", [words], dtype=(b, b, b, b), is_pure=True, pack=2
        )
    else:
        planes = (
            e4m3_value(words & 255), e4m3_value((words >> 8) & 255), e4m3_value((words >> 16) & 255),
            e4m3_value((words >> 24) & 255),
        )  # fmt: skip
    return planes


@triton.jit
def product(w, x, acc, ASM: tl.constexpr):
    """acc + w x; the interpreter multiplies bf16 by its bits, so there both are fp32."""
    if ASM:
        acc = tl.dot(w, x, acc)
    else:
        acc += tl.dot(w, x.to(tl.float32))
    return acc


@triton.jit
def step_nvfp4(acc, words, scales, x, ASM: tl.constexpr):
    """acc + one step; x: its planes, a tuple of 8."""
    w = unpack_nvfp4(words, scales, ASM)
    for i in tl.static_range(8):
        acc = product(w[i], x[i], acc, ASM)
    return acc


@triton.jit
def step_fp8(acc, words, scale, x, ASM: tl.constexpr):
    """acc + one step within one block of the weights; x: its planes, a tuple of 4."""
    w = unpack_fp8(words, ASM)
    part = product(w[0], x[0], tl.zeros_like(acc), ASM)
    for i in tl.static_range(1, 4):
        part = product(w[i], x[i], part, ASM)
    return acc + part * scale


@triton.jit
def my_rows(ends, block, EXPERTS: tl.constexpr, EXPERTS_POW2: tl.constexpr, BLOCK_M: tl.constexpr):
    """Expert, first row and end of this program's block of rows; an expert of EXPERTS means there is none."""
    i = tl.arange(0, EXPERTS_POW2)
    stop = tl.load(ends + i, mask=i < EXPERTS, other=0)
    start = tl.load(ends + i - 1, mask=(i > 0) & (i < EXPERTS), other=0)
    blocks = tl.where(i < EXPERTS, (stop - start + BLOCK_M - 1) // BLOCK_M, 0)
    before = tl.cumsum(blocks, 0)
    expert = tl.sum((before <= block).to(tl.int32), 0)
    mine = i == expert
    first = tl.sum(tl.where(mine, start + (block - before + blocks) * BLOCK_M, 0), 0)
    return tl.minimum(expert, EXPERTS), first, tl.sum(tl.where(mine, stop, 0), 0)


@triton.jit(do_not_specialize=["total"])
def packed_matmul_kernel(
    x, words, scales, global_scale, pairs, ends, weights, out, total, N,
    K: tl.constexpr, EXPERTS: tl.constexpr, EXPERTS_POW2: tl.constexpr, FORMAT: tl.constexpr, GATED: tl.constexpr,
    GATHER: tl.constexpr, SCATTER: tl.constexpr, OUT_PLANES: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_W: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Grid: blocks of rows, cdiv(N, BLOCK_N), SPLITS of K.

    x: bf16 [rows, PLANES, K / PLANES]; words: int32 [experts, rows, K / PLANES]; out: [rows, N], fp32 [SPLITS, rows, N] if
    SPLITS > 1. OUT_PLANES: columns of out are in planes, for the next product.
    GATED: words have 2 N rows, gate before up, and out is silu(gate) * up. GATHER: row i of the sorted order is row
    pairs[i] // GATHER of x (0: row i). SCATTER: it goes to row pairs[i] of out, times weights[pairs[i]].
    BLOCK_ROWS, BLOCK_COLUMNS: of an FP8 block.
    """
    if EXPERTS == 1:
        expert = 0
        first = tl.program_id(0) * BLOCK_M
        stop = total
    else:
        expert, first, stop = my_rows(ends, tl.program_id(0), EXPERTS, EXPERTS_POW2, BLOCK_M)
    if expert < EXPERTS:
        rows = first + tl.arange(0, BLOCK_M)
        live = rows < stop
        pair = rows
        if GATHER or SCATTER:
            pair = tl.load(pairs + rows, mask=live, other=0).to(tl.int32)
        source = pair // GATHER if GATHER else rows
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        n_load = tl.minimum(n, N - 1)
        planes: tl.constexpr = 8 if FORMAT == NVFP4 else 4
        width: tl.constexpr = K // planes
        height = 2 * N if GATED else N
        base = (expert.to(tl.int64) if EXPERTS > 1 else tl.program_id(0).to(tl.int64) * 0) * height
        w = tl.arange(0, BLOCK_W)
        begin = tl.program_id(2) * (width // SPLITS)
        x_ptrs = x + source.to(tl.int64)[None, :] * K + (begin + w)[:, None]
        gate_ptrs = words + (base + n_load)[:, None] * width + (begin + w)[None, :]
        up_ptrs = gate_ptrs + N.to(tl.int64) * width
        seen = live[None, :]
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        acc_up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        if FORMAT == NVFP4:
            g = tl.arange(0, BLOCK_W // 2)
            scale_ptrs = scales + (base + n_load)[:, None] * (width // 2) + (begin // 2 + g)[None, :]
            up_scale_ptrs = scale_ptrs + N.to(tl.int64) * (width // 2)
            for w0 in range(0, width // SPLITS, BLOCK_W):
                values = (
                    tl.load(x_ptrs + w0, seen, 0.0), tl.load(x_ptrs + w0 + width, seen, 0.0),
                    tl.load(x_ptrs + w0 + 2 * width, seen, 0.0), tl.load(x_ptrs + w0 + 3 * width, seen, 0.0),
                    tl.load(x_ptrs + w0 + 4 * width, seen, 0.0), tl.load(x_ptrs + w0 + 5 * width, seen, 0.0),
                    tl.load(x_ptrs + w0 + 6 * width, seen, 0.0), tl.load(x_ptrs + w0 + 7 * width, seen, 0.0),
                )  # fmt: skip
                acc = step_nvfp4(acc, tl.load(gate_ptrs + w0), tl.load(scale_ptrs + w0 // 2), values, ASM)
                if GATED:
                    acc_up = step_nvfp4(acc_up, tl.load(up_ptrs + w0), tl.load(up_scale_ptrs + w0 // 2), values, ASM)
            factor: tl.constexpr = UNSHIFT if ASM else 1.0
            acc *= (tl.load(global_scale + base + n_load) * factor)[:, None]
            if GATED:
                acc_up *= (tl.load(global_scale + base + N + n_load) * factor)[:, None]
        else:
            block_columns: tl.constexpr = (K + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
            block_words: tl.constexpr = BLOCK_COLUMNS // 4
            block_rows = (height + BLOCK_ROWS - 1) // BLOCK_ROWS
            tile = tl.program_id(1) * BLOCK_N
            scale_base = scales + (base // height) * block_rows * block_columns
            gate_scales = scale_base + (tile // BLOCK_ROWS) * block_columns
            up_scales = scale_base + ((tile + N) // BLOCK_ROWS) * block_columns
            for w0 in range(0, width // SPLITS, BLOCK_W):
                quads = (
                    tl.load(x_ptrs + w0, seen, 0.0), tl.load(x_ptrs + w0 + width, seen, 0.0),
                    tl.load(x_ptrs + w0 + 2 * width, seen, 0.0), tl.load(x_ptrs + w0 + 3 * width, seen, 0.0),
                )  # fmt: skip
                scale = tl.load(gate_scales + (begin + w0) // block_words)
                acc = step_fp8(acc, tl.load(gate_ptrs + w0), scale, quads, ASM)
                if GATED:
                    up_scale = tl.load(up_scales + (begin + w0) // block_words)
                    acc_up = step_fp8(acc_up, tl.load(up_ptrs + w0), up_scale, quads, ASM)
        if GATED:
            acc = acc / (1.0 + tl.exp(-acc)) * acc_up
        target = pair if SCATTER else rows
        if SCATTER:
            acc *= tl.load(weights + pair, mask=live, other=0.0)[None, :]
        column = (n % OUT_PLANES) * (N // OUT_PLANES) + n // OUT_PLANES
        out_ptrs = out + target.to(tl.int64)[None, :] * N + column[:, None]
        if SPLITS > 1:
            out_ptrs += tl.program_id(2).to(tl.int64) * total * N
        tl.store(out_ptrs, acc.to(out.dtype.element_ty), mask=live[None, :] & (n < N)[:, None])


def block_words(format_: int, columns: int) -> int:
    """Words of one step."""
    return BLOCK_WORDS if columns % (PLANES[format_] * BLOCK_WORDS) == 0 else BLOCK_WORDS // 2


def block_m(rows: int, major: int = 9) -> int:
    """Rows of x of one program where an expert has about `rows`, on a chip of compute capability `major`."""
    return 16 if rows <= 16 else 32 if rows <= 32 or major not in WIDE_CHIPS else 64


def num_stages(rows: int) -> int:
    """Of the pipeline, by the rows of x of one program: what fits into 99 KB with 32 rows, 163 KB with 64."""
    return {16: 4, 32: 3, 64: 2}[rows]


def constexprs(
    format_: int,
    columns: int,
    experts: int,
    rows: int,
    *,
    gated: bool = False,
    gather: int = 0,
    scatter: bool = False,
    out_planes: int = 1,
    block: tuple[int, int] = (128, 128),
    splits: int = 1,
    asm: bool = True,
) -> dict[str, object]:
    """Compile-time arguments of the kernel; `rows`: of x in one program, `block`: of FP8."""
    return {
        "K": columns, "EXPERTS": experts, "EXPERTS_POW2": triton.next_power_of_2(experts), "FORMAT": format_,
        "GATED": gated, "GATHER": gather, "SCATTER": scatter, "OUT_PLANES": out_planes, "BLOCK_ROWS": block[0],
        "BLOCK_COLUMNS": block[1], "SPLITS": splits, "BLOCK_N": BLOCK_N, "BLOCK_M": rows,
        "BLOCK_W": block_words(format_, columns), "ASM": asm,
    }  # fmt: skip
