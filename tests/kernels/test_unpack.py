"""e4m3 -> fp16, all 256 codes in every byte position: by executing the integer path's PTX in numpy, and on a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch

from uncast.numerics import e4m3

triton = pytest.importorskip("triton")
from triton.experimental import gluon  # noqa: E402
from triton.experimental.gluon import language as gl  # noqa: E402

from uncast.kernels.unpack import INTEGER, INTEGER_FACTOR, is_native, unpack_keys, unpack_values  # noqa: E402

OPERATIONS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "add.u32": lambda a, b: a + b,
    "shl.b32": lambda a, b: a << b,
    "shr.u32": lambda a, b: a >> b,
}


def run_ptx(text: str, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """$0 and $1 after executing straight-line 32-bit PTX on $2 = x (uint32)."""
    registers = {"$2": x}
    for line in text.strip("{}\n").splitlines():
        if line.startswith(".reg"):
            continue
        op, dst, a, b = re.fullmatch(r"(\S+) (\S+), (\S+), (\S+);", line).groups()  # type: ignore[union-attr]
        operand = registers[b] if b in registers else np.uint32(int(b, 0))
        registers[dst] = OPERATIONS[op](registers[a], operand).astype(np.uint32)
    return registers["$0"], registers["$1"]


def four_codes() -> np.ndarray:
    """uint8 [n, 4]: every code in every position, beside varying others."""
    codes = np.arange(256, dtype=np.uint8)
    return np.concatenate([np.stack([np.roll(codes, k * s) for s in range(4)], axis=1) for k in (0, 1, 37, 127, 128)])


def test_integer_path_is_exact_for_every_code_in_every_position() -> None:
    codes = four_codes()
    expected = e4m3.table().numpy()[codes]
    first, second = run_ptx(INTEGER.value, np.ascontiguousarray(codes).view(np.uint32)[:, 0])
    got = [r.view(np.float16).reshape(-1, 2).astype(np.float64) * INTEGER_FACTOR for r in (first, second)]
    np.testing.assert_array_equal(got[0], expected[:, [0, 2]])
    np.testing.assert_array_equal(got[1], expected[:, [1, 3]])
    assert np.isnan(expected).sum() == 2 * codes.size // 256
    signs = np.signbit(got[0]) == ((codes[:, [0, 2]] & 0x80) != 0)
    assert signs[~np.isnan(expected[:, [0, 2]])].all()


def test_the_chips_that_convert_in_hardware() -> None:
    assert [is_native(a) for a in (80, 86, 87, 89, 90, 100, 120)] == [False] * 3 + [True] * 4


@gluon.jit
def unpack_probe(x, out, KEYS: gl.constexpr, NATIVE: gl.constexpr):
    L: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    i = gl.arange(0, 512, L)
    pairs = gl.load(x + i)
    if KEYS:
        a, b = unpack_keys(pairs, NATIVE)
    else:
        a, b = unpack_values(pairs, NATIVE)
    gl.store(out + i, a.to(gl.float32))
    gl.store(out + 512 + i, b.to(gl.float32))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("keys", [True, False])
@pytest.mark.parametrize("native", [True, False])
def test_unpack_on_the_gpu(keys: bool, native: bool) -> None:
    if native and not is_native(sum(a * b for a, b in zip(torch.cuda.get_device_capability(), (10, 1), strict=True))):
        pytest.skip("no e4m3 conversion in hardware")
    codes = torch.from_numpy(four_codes()[:256]).cuda()
    out = torch.full((2, 256, 2), torch.nan, device="cuda")
    unpack_probe[(1,)](codes.view(torch.int16).reshape(-1), out, KEYS=keys, NATIVE=native)
    expected = e4m3.table().float().cuda()[codes.long()]
    order = ([0, 1], [2, 3]) if keys and native else ([0, 2], [1, 3])
    factor = 1.0 if native else INTEGER_FACTOR
    torch.testing.assert_close(out[0] * factor, expected[:, order[0]], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(out[1] * factor, expected[:, order[1]], rtol=0, atol=0, equal_nan=True)
