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
    """Rows first, first + 1, … of a head with `count` rows of D numbers, as a tile (B, BD); 0 beyond both ends.

    Within a tile offsets are int32, which takes fewer registers: `stride` is below 2²⁴.
    """
    row, number = tl.arange(0, B), tl.arange(0, BD)
    at = POINTER + tl.cast(first, tl.int64) * stride + (row[:, None] * stride + number[None, :])
    if D == BD:
        return tl.load(at, mask=(first + row < count)[:, None], other=0.0)
    else:
        return tl.load(at, mask=(first + row < count)[:, None] & (number < D)[None, :], other=0.0)


@triton.jit
def load_split_rows(
    POINTER, first, count, stride, D: tl.constexpr, BD: tl.constexpr, REST: tl.constexpr, B: tl.constexpr
):
    """As `load_rows`, of wide heads as two tiles: (B, BD), and (B, REST) with the rest; None where REST is 0."""
    if REST > 0:
        return (
            load_rows(POINTER, first, count, stride, BD, BD, B),
            load_rows(POINTER + BD, first, count, stride, D - BD, REST, B),
        )
    else:
        return load_rows(POINTER, first, count, stride, D, BD, B), None


@triton.jit
def split_product(a, b, PRECISION: tl.constexpr):
    """a bᵀ of rows as `load_split_rows` gives them, in the dtype of a."""
    whole = product(a[0], tl.trans(b[0].to(a[0].dtype)), None, PRECISION)
    if b[1] is not None:
        whole = product(a[1], tl.trans(b[1].to(a[1].dtype)), whole, PRECISION)
    return whole


@triton.jit
def not_finite(x):
    """Where x is NaN or infinite. Widened, as the interpreter would subtract the bits of bfloat16."""
    wide = x.to(tl.float32)
    return (wide - wide) != 0.0


@triton.jit
def only_finite(x, REPAIR: tl.constexpr):
    """x; in a repair with 0 for what is not finite: no pair that takes part reads it, see `finite_rows`."""
    if REPAIR:
        x = tl.where(not_finite(x), 0.0, x).to(x.dtype)
    return x


@triton.jit
def finite_rows(x):
    """Which rows of a tile (B, BD) have finite numbers alone: (B,).

    Of a pair whose query or key has others, the score is -inf and the weight 0, if its row has a finite output.
    """
    return tl.max(not_finite(x).to(tl.int32), 1) == 0


@triton.jit
def capped(x, cap):
    """cap · tanh(x), and the slope 1 - tanh²(x), exact where it is small; libdevice's tanh cannot be interpreted."""
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    tanh, share = (1.0 - e) / (1.0 + e), 1.0 / (1.0 + e)
    tanh = tl.where(x < 0, -tanh, tanh)
    return tanh * cap, 4.0 * e * share * share


@triton.jit
def sigmoid(x):
    """1 / (1 + 2⁻ˣ)."""
    return 1.0 / (1.0 + tl.exp2(-x))


@triton.jit
def sigmoid_slope(x):
    """w = `sigmoid`, and its slope w · (w · 2⁻ˣ), exact where w is near 1; of x below -126 both are as there."""
    e = tl.exp2(tl.minimum(-x, 126.0))
    weight = 1.0 / (1.0 + e)
    return weight, weight * (weight * e)


@triton.jit
def excess_of(SCORE, h):
    """(α - 1) / log₂ e of a head."""
    if SCORE.powers is not None:
        return tl.load(SCORE.powers + h) / LOG2E
    else:
        return SCORE.excess


@triton.jit
def unscaled(threshold, SCORE, h):
    """A threshold of scores times α - 1 in the units of scores, rounded once."""
    return tl.div_rn(threshold, tl.zeros(threshold.shape, tl.float32) + excess_of(SCORE, h))


@triton.jit
def excess_weights(x, SCORE, h):
    """w = max(y, 0)^(1 / (α - 1)), of scores that are x above a threshold and y in its units; and w^(2 - α). NaN stays.

    By the latter the gradients of scores differ: 1 where sparsemax has weight, √w of entmax-1.5.
    """
    above = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) * excess_of(SCORE, h)
    if SCORE.powers is not None:
        power = tl.load(SCORE.powers + h)
        some = above > 0.0
        digits = tl.log2(tl.where(some, above, 1.0)) / power
        return tl.where(some, tl.exp2(digits), above), tl.where(some, tl.exp2(digits * (1.0 - power)), above)
    elif SCORE.squared is not None:
        return above * above, above
    else:
        return above, tl.where(x > 0.0, 1.0, 0.0)


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


@triton.jit
def head_rows(ROWS, b, h):
    """Where the first row of a head of `StridedRows` is; b and h are int64."""
    return ROWS.pointer + b * ROWS.batch + h * ROWS.head


@triton.jit
def row_numbers(ROWS, b, h, m, count, other: tl.constexpr):
    """The numbers of rows m of a head, of `StridedRows` without a last axis; `other` beyond the last of `count`."""
    return tl.load(head_rows(ROWS, b, h) + tl.cast(m, tl.int64) * ROWS.row, mask=m < count, other=other)


@triton.jit
def mask_set(MASK, b, h):
    """The number of the set of tiles of a batch and head, int64."""
    return b * MASK.set_batch + h * MASK.set_head


@triton.jit
def tile_range(MASK, s, line, lines, length, B: tl.constexpr):
    """(first, full, cut, last) of a line of tiles, see `MaskArgument`; without a mask all tiles of B of `length`."""
    if MASK.ranges is not None:
        at = MASK.ranges + (s * lines + line) * 4
        return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    else:
        return 0, 0, length // B, tl.cdiv(length, B)


@triton.jit
def full_tile(MASK, i):
    """The number of the tile that is entry i of a line."""
    if MASK.tiles is not None:
        return tl.load(MASK.tiles + i)
    else:
        return i


@triton.jit
def cut_tile(MASK, i, first, full, cut):
    """The number of the i-th tile of a line of which some pairs exist: those before the full ones, then those after."""
    at = first + i
    return full_tile(MASK, tl.where(at < full, at, at + (cut - full)))


@triton.jit
def row_spans(MASK, s, m, M):
    """The first key of rows m, and the one after the last; nothing of use where rows are no spans."""
    if MASK.spans is not None:
        at = MASK.spans + (s * M + m) * 2
        return tl.load(at, mask=m < M, other=0), tl.load(at + 1, mask=m < M, other=0)
    else:
        return m, m


@triton.jit
def kept(MASK, s, m, n, n0, begin, end, M, N, BN: tl.constexpr):
    """Which pairs of a tile exist; n0 is its first column and begin, end are `row_spans`."""
    if MASK.spans is not None:
        return (n >= begin) & (n < end)
    elif MASK.numbers is not None:
        across = tl.cdiv(N, 64)
        line = MASK.numbers + (s * tl.cdiv(M, 64) + m // 64) * across
        word = tl.zeros(m.shape, tl.int32)
        for i in tl.static_range((BN + 31) // 32):
            half = n0 // 32 + i
            number = tl.load(line + half // 2, mask=(m < M) & (half < 2 * across), other=0)
            here = tl.load(MASK.bits + (tl.cast(number, tl.int64) * 64 + m % 64) * 2 + half % 2)
            word = tl.where(n - n0 >= 32 * i, here, word)
        return (((word >> (n & 31)) & 1) != 0) & (n < N)
    else:
        return n < N


@triton.jit
def pairs_at(POINTER, STRIDES, b, h, m, n):
    """Where the numbers of pairs are in a tensor (B or 1, H or 1, M or 1, N or 1); b and h are int64."""
    if STRIDES[0] is not None:
        POINTER += b * STRIDES[0]
    if STRIDES[1] is not None:
        POINTER += h * STRIDES[1]
    if STRIDES[2] is not None:
        POINTER += tl.cast(m, tl.int64) * STRIDES[2]
    if STRIDES[3] is not None:
        POINTER += tl.cast(n, tl.int64) * STRIDES[3]
    return POINTER


@triton.jit
def scores(raw, LESS, SCORE, BIAS, b, h, m, n, keep, M, N, CUT: tl.constexpr):
    """Products become scores, with softcap, bias and mask, less a number of each row; and the slope of the softcap.

    LESS: None, or the numbers. Beside large scores it matters how they are subtracted: of products alone in one
    instruction, which rounds once. CUT: some pairs do not exist. A product that is infinite gives NaN under a softcap
    or a sigmoid, which would make it finite. The line of a bias is padded by a tile at both ends: no test for each
    pair.
    """
    slope = 1.0
    if SCORE.cap is not None:
        x = raw * SCORE.factor
        unbounded = x - x
        x, slope = capped(x, SCORE.cap)  # pyright: ignore[reportGeneralTypeIssues]
        x += unbounded
    elif LESS is not None and BIAS.line is None and BIAS.pairs is None:
        x = tl.fma(raw, SCORE.factor, -LESS)
    else:
        x = raw * SCORE.factor
    if SCORE.sigmoid is not None and SCORE.cap is None:
        x += raw - raw
    if BIAS.line is not None:
        x += tl.load(BIAS.line + h * BIAS.line_head + (n - m))
    if BIAS.pairs is not None:
        at = pairs_at(BIAS.pairs, BIAS.pairs_strides, b, h, m, n) + tl.zeros(raw.shape, tl.int32)  # if all have one
        x += tl.load(at, mask=(m < M) & (n < N), other=0.0).to(tl.float32) * LOG2E
    if LESS is not None and (SCORE.cap is not None or BIAS.line is not None or BIAS.pairs is not None):
        x -= LESS
    if CUT:
        x = tl.where(keep, x, -INF)
    return x, slope


@triton.jit
def weighted(acc, p, v, keep, PRECISION: tl.constexpr, CUT: tl.constexpr, REPAIR: tl.constexpr):
    """acc + p v; in a repair NaN and infinity in v reach the rows that attend to them, and no others."""
    if CUT and REPAIR:
        bad = not_finite(v)
        met = product(keep.to(tl.float16), bad.to(tl.float16), None, PRECISION)
        acc += tl.where(met > 0.0, float("nan"), 0.0)  # a choice between acc and NaN does not compile for sm_100
        v = tl.where(bad, 0.0, v)
    return product(p.to(v.dtype), v, acc, PRECISION)


@triton.jit
def row_hashes(DROPOUT, b, h, heads, m, M):
    """The hashes of rows m; nothing of use without dropout."""
    if DROPOUT.rows is not None:
        return tl.load(DROPOUT.rows + (b * heads + h) * M + m, mask=m < M, other=0)
    else:
        return m


@triton.jit
def column_hashes(DROPOUT, b, n, N):
    """The hashes of columns n; nothing of use without dropout."""
    if DROPOUT.rows is not None:
        return tl.load(DROPOUT.columns + b * DROPOUT.columns_batch + n, mask=n < N, other=0)
    else:
        return n


@triton.jit
def note_not_finite(FLAG, x):
    """Store 1 where `FLAG` points if x has a number that is not finite; the compiler for sm_100 cannot reduce x."""
    tl.store(FLAG + tl.zeros(x.shape, tl.int32), 1, mask=not_finite(x))
