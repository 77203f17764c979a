"""What kernels do with a tile of scores: load rows, multiply, mask, bias, softcap, dropout. One copy, for all of them.

Scores are in units of log₂ e, so that exp2 gives weights. A pointer that is None is a feature that is off: Triton
compiles the kernel without it. Rows m and columns n of a tile are (BM, 1) and (1, BN), or transposed where a kernel
goes down the columns: every function here broadcasts. Pointers are to the first row of a head; row numbers are int32,
offsets int64, so that tensors of more than 2³¹ numbers are read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import jit_runtime

LOG2E, LN2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)
INF = tl.constexpr(float("inf"))
INTERPRETED = tl.constexpr(jit_runtime.INTERPRETED)


@triton.jit
def product(a, b, acc, PRECISION: tl.constexpr):
    """acc + a b, summed in float32; acc may be None. PRECISION, of float32: "ieee" or "tf32".

    The interpreter would multiply the bits of bfloat16 as whole numbers: there both are widened first.
    """
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def rounded(x, T: tl.constexpr):
    """x in the dtype T, rounded to the nearest.

    The interpreter would cut float32 off to bfloat16: there the bits are rounded before.
    """
    if INTERPRETED and (tl.bfloat16 == T and x.dtype == tl.float32):
        bits = x.to(tl.int32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return x.to(T)


@triton.jit
def load_rows(POINTER, first, count, stride, D: tl.constexpr, BD: tl.constexpr, B: tl.constexpr):
    """Rows first, first + 1, … of a head with `count` rows of D numbers, as a tile (B, BD); 0 beyond both ends."""
    row, number = tl.arange(0, B), tl.arange(0, BD)
    at = POINTER + tl.cast(first, tl.int64) * stride + tl.cast(row, tl.int64)[:, None] * stride + number[None, :]
    if D == BD:
        return tl.load(at, mask=(first + row < count)[:, None], other=0.0)
    else:
        return tl.load(at, mask=(first + row < count)[:, None] & (number < D)[None, :], other=0.0)


@triton.jit
def not_finite(x):
    """Where x is NaN or infinite."""
    return (x - x) != 0.0


@triton.jit
def capped(x, cap):
    """cap · tanh(x), and the slope 1 - tanh²(x); libdevice's tanh cannot be interpreted."""
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    tanh = (1.0 - e) / (1.0 + e)
    tanh = tl.where(x < 0, -tanh, tanh)
    return tanh * cap, 1.0 - tanh * tanh


@triton.jit
def hash64(x):
    """splitmix64 with arithmetic shifts, as `core.dropout`."""
    x = x * (-7046029254386353131)
    x = (x ^ (x >> 30)) * (-4658895280553007687)
    x = (x ^ (x >> 27)) * (-7723592293110705685)
    return x ^ (x >> 31)


@triton.jit
def dropped(row_hash, column_hash, threshold):
    """Whether the weight of a pair is dropped, from the int32 hashes of its row and its column: as `core.dropout`."""
    x = row_hash + column_hash
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * (-2073254261)
    return x < threshold
