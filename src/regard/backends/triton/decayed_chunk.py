"""What the kernels of the linear recurrence do with a chunk of tokens: features, decays, and products that decay.

a_t = g_1 + ... + g_t from the start of the chunk. No exponent is above 0, and none is the difference of two rounded
sums. One decay for all features is summed in float64. Those of each feature are only added up between two tokens, by a
product with ones and zeros, and a pair of tokens decays by way of a token between them: j < t have

    e^{g_{j+1} + ... + g_{m-1}} e^{g_m + ... + g_t}

where m starts the later half of the smallest aligned block of 2, 4, 8, ... tokens that has both. So all pairs whose
block has one size are one product on tensor cores, with a mask: the blocks of Yang et al. 2024 (arXiv 2312.06635,
section 4.3), at every size.

An input is a tuple (pointer, strides of batch, head and row), and the rows of one head (pointer, stride).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .score_tile import product, rounded

SMALLEST_DECAY = tl.constexpr(-1000.0)
"""e to this is 0; lower decays, -inf among them, are computed as this."""
EXACT = tl.constexpr("tf32x3")
"""The precision, of float32, of products that add decays up or solve a system."""
TINY = tl.constexpr(1.1754943508222875e-38)
"""A total below this divides nothing."""


@triton.jit
def at_head(INPUT, batch, head):
    """The rows of one head of an input; None of None."""
    if INPUT is None:
        return None
    else:
        return INPUT[0] + batch * INPUT[1] + head * INPUT[2], INPUT[3]


@triton.jit
def load_block(ROWS, first, count, column, WIDTH: tl.constexpr, OTHER, R: tl.constexpr, BW: tl.constexpr):
    """Rows first, first + 1, … of `count` rows of WIDTH numbers, from a column on, as (R, BW); beyond them, OTHER."""
    row, number = first + tl.arange(0, R), column + tl.arange(0, BW)
    at = ROWS[0] + tl.cast(row, tl.int64)[:, None] * ROWS[1] + number[None, :]
    if WIDTH % BW == 0:
        return tl.load(at, mask=(row < count)[:, None], other=OTHER)
    else:
        return tl.load(at, mask=(row < count)[:, None] & (number < WIDTH)[None, :], other=OTHER)


@triton.jit
def store_block(ROWS, x, first, count, column, WIDTH: tl.constexpr, R: tl.constexpr, BW: tl.constexpr):
    """Write x, (R, BW), where `load_block` reads."""
    row, number = first + tl.arange(0, R), column + tl.arange(0, BW)
    at = ROWS[0] + tl.cast(row, tl.int64)[:, None] * ROWS[1] + number[None, :]
    mask = (row < count)[:, None] & (number < WIDTH)[None, :]
    tl.store(at, rounded(x, ROWS[0].dtype.element_ty), mask=mask)


@triton.jit
def load_each(ROWS, first, count, C: tl.constexpr):
    """A number for each token of a chunk, (C,); 0 beyond the end."""
    token = first + tl.arange(0, C)
    return tl.load(ROWS[0] + tl.cast(token, tl.int64) * ROWS[1], mask=token < count, other=0.0)


@triton.jit
def load_shares(ROW_TOTAL, first, count, C: tl.constexpr):
    """1 / total of each row of a chunk, (C,); 0 of a total that divides nothing."""
    total = load_each((ROW_TOTAL, 1), first, count, C)
    divides = tl.abs(total) >= TINY
    return tl.where(divides, 1.0 / tl.where(divides, total, 1.0), 0.0)


@triton.jit
def load_features(
    ROWS, first, count, column, D: tl.constexpr, ELU: tl.constexpr, T: tl.constexpr, C: tl.constexpr, BD: tl.constexpr
):
    """φ of queries or keys of a chunk, (C, BD), float32, rounded to T; 0 beyond the ends."""
    if ELU:
        raw = load_block(ROWS, first, count, column, D, -float("inf"), C, BD).to(tl.float32)
        return rounded(tl.where(raw > 0, raw + 1.0, tl.exp(tl.minimum(raw, 0.0))), T).to(tl.float32)
    else:
        return load_block(ROWS, first, count, column, D, 0.0, C, BD).to(tl.float32)


@triton.jit
def times_slopes(grad, features, ELU: tl.constexpr):
    """The gradient of queries or keys from that of their features: that of elu + 1 is 1, or the feature below 1."""
    if ELU:
        return grad * tl.minimum(features, 1.0)
    else:
        return grad


@triton.jit
def load_sums(DECAY, first, count, C: tl.constexpr):
    """a_t of one decay for all features, (C,), float64."""
    return tl.cumsum(tl.maximum(load_each(DECAY, first, count, C), SMALLEST_DECAY).to(tl.float64), 0)


@triton.jit
def load_feature_decays(
    DECAY, first, count, column, D: tl.constexpr, PER_FEATURE: tl.constexpr, C: tl.constexpr, BD: tl.constexpr
):
    """g of each feature, (C, BD); None where features have none of their own."""
    if PER_FEATURE:
        return tl.maximum(load_block(DECAY, first, count, column, D, 0.0, C, BD), SMALLEST_DECAY)
    else:
        return None


@triton.jit
def summed(keep, x):
    """Rows that are sums of those rows of x, (C, BD), for which keep, (C, C), is true: float32 as three bfloat16."""
    ones = keep.to(tl.float32).to(tl.bfloat16)
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
    return product(ones, high, product(ones, middle, product(ones, low, None, EXACT), EXACT), EXACT)


@triton.jit
def chunk_factors(
    DECAY, first, count, column, D: tl.constexpr, PER_FEATURE: tl.constexpr, C: tl.constexpr, BD: tl.constexpr
):
    """e^{a_t} and e^{a_C - a_j}, each (C, BD), and e^{a_C}, (BD,)."""
    ones = tl.full((C, BD), 1.0, tl.float32)
    if DECAY is None:
        return ones, ones, tl.full((BD,), 1.0, tl.float32)
    elif PER_FEATURE:
        decays = load_feature_decays(DECAY, first, count, column, D, PER_FEATURE, C, BD)
        row, token = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
        return tl.exp(summed(token <= row, decays)), tl.exp(summed(token > row, decays)), tl.exp(tl.sum(decays, 0))
    else:
        sums = load_sums(DECAY, first, count, C)
        last = tl.sum(tl.where(tl.arange(0, C) == C - 1, sums, 0.0), 0)
        start, end = tl.exp(sums.to(tl.float32)), tl.exp((last - sums).to(tl.float32))
        factor = tl.full((BD,), 1.0, tl.float32) * tl.exp(last.to(tl.float32))
        return ones * start[:, None], ones * end[:, None], factor


@triton.jit
def pair_factors(DECAY, first, count, PER_FEATURE: tl.constexpr, C: tl.constexpr):
    """e^{a_t - a_j} for j <= t and 0 for j > t, (C, C); 1 in its place where features have a decay each, or none."""
    row, token = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    if DECAY is None or PER_FEATURE:
        return tl.where(token <= row, 1.0, 0.0)
    else:
        sums = load_sums(DECAY, first, count, C)
        high = sums.to(tl.float32)
        low = (sums - high.to(tl.float64)).to(tl.float32)
        exponents = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
        return tl.exp(tl.where(token <= row, exponents, -float("inf")))


@triton.jit
def middle_factors(decays, level, C: tl.constexpr):
    """The factors by which tokens decay to the middle of their block of 2^(level + 1), (C, BD).

    A token t of the later half has e^{g_m + ... + g_t}, one of the earlier half e^{g_{t+1} + ... + g_{m-1}}.
    """
    row, token = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    later = ((row >> level) & 1) == 1
    return tl.exp(summed(((row >> level) == (token >> level)) & (later == (token <= row)), decays))


@triton.jit
def in_block(x, level, C: tl.constexpr):
    """x, (C, C), for the pairs j < t whose smallest common block has 2^(level + 1) tokens, else 0."""
    row, token = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    return tl.where((row > token) & (((row ^ token) >> level) == 1), x, 0.0)


@triton.jit
def diagonal(x, C: tl.constexpr):
    """x, (C, C), where j = t, else 0."""
    row, token = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    return tl.where(row == token, x, 0.0)


@triton.jit
def add_products(
    acc, rows, keys, decays, T: tl.constexpr, PRECISION: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr
):
    """acc + Σ_d rows_td keys_jd for j <= t, times e^{a_td - a_jd} where features have decays; for j > t anything.

    Shapes: acc (C, C); rows, keys and decays (C, BD), float32.
    """
    if decays is None:
        return product(rounded(rows, T), tl.trans(rounded(keys, T)), acc, PRECISION)
    else:
        for level in range(LEVELS):
            factors = middle_factors(decays, level, C)
            left, right = rounded(rows * factors, T), rounded(keys * factors, T)
            acc += in_block(product(left, tl.trans(right), None, PRECISION), level, C)
        return acc + diagonal(tl.broadcast_to(tl.sum(rows * keys, 1)[:, None], acc.shape), C)


@triton.jit
def row_gradients(
    weights, keys, decays, T: tl.constexpr, PRECISION: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr
):
    """Σ_j weights_tj keys_j, times e^{a_t - a_j} where features have decays, and then for j < t: (C, BD)."""
    if decays is None:
        return product(weights, rounded(keys, T), None, PRECISION)
    else:
        grad = tl.zeros(keys.shape, tl.float32)
        for level in range(LEVELS):
            factors = middle_factors(decays, level, C)
            grad += factors * product(in_block(weights, level, C), rounded(keys * factors, T), None, PRECISION)
        return grad


@triton.jit
def key_gradients(
    weights, rows, decays, T: tl.constexpr, PRECISION: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr
):
    """Σ_t weights_tj rows_t, times e^{a_t - a_j} where features have decays, and then for t > j: (C, BD)."""
    if decays is None:
        return product(tl.trans(weights), rounded(rows, T), None, PRECISION)
    else:
        grad = tl.zeros(rows.shape, tl.float32)
        for level in range(LEVELS):
            factors = middle_factors(decays, level, C)
            part = tl.trans(in_block(weights, level, C))
            grad += factors * product(part, rounded(rows * factors, T), None, PRECISION)
        return grad


@triton.jit
def inverse_of_unit_lower(system, C: tl.constexpr, LEVELS: tl.constexpr):
    """(I + L)⁻¹, where L is system, (C, C), for j < t: the inverses of blocks of two halves, from single tokens on.

    That of [[A, 0], [B, D]] has A⁻¹ and D⁻¹ in its diagonal, and -D⁻¹ B A⁻¹ below.
    """
    inverse = diagonal(tl.full((C, C), 1.0, tl.float32), C) - in_block(system, 0, C)
    for level in range(1, LEVELS):
        right = product(in_block(system, level, C), inverse, None, EXACT)
        inverse -= product(inverse, right, None, EXACT)
    return inverse
