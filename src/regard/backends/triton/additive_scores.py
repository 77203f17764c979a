"""Tiles of additive scores, weight · tanh(query + key), and of their gradients by query, key and weight.

tanh(x + y) = 1 - 2 / (1 + e^2x e^2y): the exponentials are computed once for each token. Two features share a
reciprocal: w/d + w'/d' is (w d' + w' d) / (d d'). A tile is computed in one of three ways, by the largest numbers of
its tokens. Where they are small, 1 - 2 / (1 + e^2z) would lose digits: there it is u / (u + 2) with u = e^2z - 1, which
is e + f + e f for e = e^2x - 1 and f = e^2y - 1. Where e^2x might leave the range of float32, the sum is made first.

Features are rows in memory, so that neighbouring tokens are read at once.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .score_tile import INF, INTERPRETED, LOG2E, head_rows, not_finite

STRIP = tl.constexpr(64)
"""Tokens with a bound of their own: no tile has more rows or columns."""
LARGEST = tl.constexpr(20.0)
"""The largest |x| + |y| whose exponentials are multiplied: two features make e^80. tanh is 1 from there on."""
LARGEST_WEIGHT = tl.constexpr(2.0**10)
"""The largest weight beside such a product: together they stay below 2^127."""
SMALL = tl.constexpr(1.0)
"""The largest |x| of a strip whose numbers are e^2x - 1: from it, e^2x is known to 2^-22. Those of others are e^2x."""
LN2_HIGH, LN2_LOW = tl.constexpr(0.693145751953125), tl.constexpr(1.4286068203094172e-06)


class PreparedTokens(NamedTuple):
    """Queries or keys of all batches and heads, features first, for `pair_scores`.

    numbers: (B · heads, 2, padded features, length) float32, e^2x or e^2x - 1 (see SMALL), and x, which is NaN where it
    was infinite, and 0 of what is padded. bounds: (B · heads, length / STRIP), the largest |x|, infinite where one is
    NaN. length: a multiple of STRIP.
    """

    numbers: Tensor
    bounds: Tensor
    length: int


class FeatureWeights(NamedTuple):
    """The weights of features, (H or 1, A) float32: their memory, the step from head to head, A, and A padded."""

    pointer: Tensor
    head: int
    features: int
    padded: int


@triton.jit
def reciprocal(x):
    """1 / x to the last bit but one, by one instruction, which the interpreter has not."""
    if INTERPRETED:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def settled(x):
    """x, computed once: the compiler would compute what leads to it again, in the layout of each use.

    It does not look beyond a `while`, of which it sees later that there is nothing left.
    """
    step = 0
    while step < 1:
        x = x - step
        step += 1
    return x


@triton.jit
def _exponentials(z, less):
    """e^z, or e^z - 1 where `less` is true, both exact to some 2^-22 of themselves."""
    whole = tl.floor(z * LOG2E + 0.5)
    rest = (z - whole * LN2_HIGH) - whole * LN2_LOW
    power = tl.exp2(rest * LOG2E) * tl.exp2(whole)
    series = 1.0 + z * (1.0 / 8)
    for n in tl.static_range(7, 1, -1):  # pyright: ignore[reportGeneralTypeIssues]
        series = 1.0 + z * (1.0 / n) * series
    return tl.where(less, tl.where(tl.abs(z) < 0.5, z * series, power - 1.0), power)


@triton.jit
def _prepare_strip(
    ROWS, TOKENS, WEIGHT, b, h, head, strip, L, A: tl.constexpr, AP: tl.constexpr, AT_ONCE: tl.constexpr
):
    """The numbers and the bound of a strip of tokens of a head; WEIGHT: None, or weights that are bounded too."""
    row, largest = strip * STRIP + tl.arange(0, STRIP), 0.0
    first = TOKENS.numbers + head * 2 * AP * TOKENS.length + row[:, None]
    plane = tl.cast(TOKENS.length, tl.int64) * AP
    for start in range(0, AP, AT_ONCE):
        a = start + tl.arange(0, AT_ONCE)
        at = head_rows(ROWS, b, h) + row.to(tl.int64)[:, None] * ROWS.row + a[None, :]
        x = tl.load(at, mask=(row < L)[:, None] & (a < A)[None, :], other=0.0).to(tl.float32)
        x = tl.where(not_finite(x), float("nan"), x)
        size = tl.where(x == x, tl.abs(x), INF)
        largest = tl.maximum(largest, tl.max(tl.max(size, 1), 0))
        tl.store(first + plane + a.to(tl.int64)[None, :] * TOKENS.length, x, mask=(a < AP)[None, :])
    tl.debug_barrier()  # what was stored is read by other threads
    for start in range(0, AP, AT_ONCE):
        a = start + tl.arange(0, AT_ONCE)
        at, exists = first + a.to(tl.int64)[None, :] * TOKENS.length, (a < AP)[None, :]
        x = tl.load(at + plane, mask=exists, other=0.0)
        tl.store(at, _exponentials(2.0 * x, largest <= SMALL), mask=exists)
    if WEIGHT is not None:
        for start in range(0, AP, AT_ONCE):
            a = start + tl.arange(0, AT_ONCE)
            weight = tl.load(WEIGHT.pointer + h * WEIGHT.head + a, mask=a < A, other=0.0)
            usual = tl.abs(weight) <= LARGEST_WEIGHT
            largest = tl.maximum(largest, tl.max(tl.where(usual, 0.0, INF), 0))
    tl.store(TOKENS.bounds + head * (TOKENS.length // STRIP) + strip, largest)


@triton.jit
def prepare_tokens(
    Q,
    K,
    QUERIES,
    KEYS,
    WEIGHT,
    M,
    N,
    heads,
    key_heads,
    query_programs,
    A: tl.constexpr,
    AP: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Write `PreparedTokens` of queries and of keys: the first `query_programs` are strips of queries."""
    program = tl.program_id(0)
    if program < query_programs:
        strips = QUERIES.length // STRIP
        head = (program // strips).to(tl.int64)
        b, h = head // heads, head % heads
        _prepare_strip(Q, QUERIES, WEIGHT, b, h, head, program % strips, M, A, AP, AT_ONCE)
    else:
        program -= query_programs
        strips = KEYS.length // STRIP
        head = (program // strips).to(tl.int64)
        b, h = head // key_heads, head % key_heads
        _prepare_strip(K, KEYS, None, b, h, head, program % strips, N, A, AP, AT_ONCE)


@triton.jit
def _bound(TOKENS, head, first):
    """The largest |x| of a strip of tokens."""
    return tl.load(TOKENS.bounds + head * (TOKENS.length // STRIP) + first // STRIP)


@triton.jit
def _exponential_of_sum(z):
    """e^2z, where the tanh is not 1 anyway; NaN of NaN."""
    z = tl.where(z > LARGEST, LARGEST, tl.where(z < -LARGEST, -LARGEST, z))
    return tl.exp2(z * (2.0 * LOG2E))


@triton.jit
def _weight(weights, a, WEIGHT):
    """The weight of feature a; 0 of one that is padded."""
    return tl.load(weights + a, mask=a < WEIGHT.features, other=0.0)


@triton.jit
def pair_scores(LEFT, RIGHT, WEIGHT, left_head, right_head, h, left, right, BL: tl.constexpr, BR: tl.constexpr):
    """Σ_a weight_a tanh(x_ia + y_ja) of a tile, (BL, BR), of tokens from `left` and `right` on; LEFT or RIGHT are keys.

    left_head, right_head: numbers of B · heads, int64. h: the query head.
    """
    one = LEFT.numbers + left_head * 2 * WEIGHT.padded * LEFT.length + left
    other = RIGHT.numbers + right_head * 2 * WEIGHT.padded * RIGHT.length + right
    i, j = tl.arange(0, BL), tl.arange(0, BR)
    weights = WEIGHT.pointer + h * WEIGHT.head
    total, a = tl.zeros([BL, BR], tl.float32), 0
    bound, other_bound = _bound(LEFT, left_head, left), _bound(RIGHT, right_head, right)
    if tl.maximum(bound, other_bound) <= SMALL:
        while a < WEIGHT.padded:
            e, f = tl.load(one + i)[:, None], tl.load(other + j)[None, :]
            next_e, next_f = tl.load(one + LEFT.length + i)[:, None], tl.load(other + RIGHT.length + j)[None, :]
            w, next_w = _weight(weights, a, WEIGHT), _weight(weights, a + 1, WEIGHT)
            u, next_u = e * (1.0 + f) + f, next_e * (1.0 + next_f) + next_f
            d, next_d = u + 2.0, next_u + 2.0
            total += ((w * u) * next_d + (next_w * next_u) * d) * reciprocal(d * next_d)
            one += 2 * LEFT.length
            other += 2 * RIGHT.length
            a += 2
    elif bound + other_bound <= LARGEST:
        less, other_less = (bound <= SMALL).to(tl.float32), (other_bound <= SMALL).to(tl.float32)
        while a < WEIGHT.padded:
            e, f = (tl.load(one + i) + less)[:, None], (tl.load(other + j) + other_less)[None, :]
            next_e = (tl.load(one + LEFT.length + i) + less)[:, None]
            next_f = (tl.load(other + RIGHT.length + j) + other_less)[None, :]
            w, next_w = _weight(weights, a, WEIGHT), _weight(weights, a + 1, WEIGHT)
            d, next_d = e * f + 1.0, next_e * next_f + 1.0
            total += (w + next_w) - 2.0 * ((w * next_d + next_w * d) * reciprocal(d * next_d))
            one += 2 * LEFT.length
            other += 2 * RIGHT.length
            a += 2
    else:
        one += tl.cast(LEFT.length, tl.int64) * WEIGHT.padded
        other += tl.cast(RIGHT.length, tl.int64) * WEIGHT.padded
        while a < WEIGHT.features:
            power = _exponential_of_sum(tl.load(one + i)[:, None] + tl.load(other + j)[None, :])
            total += tl.load(weights + a) * (1.0 - 2.0 * reciprocal(1.0 + power))
            one += LEFT.length
            other += RIGHT.length
            a += 1
    return settled(total)


@triton.jit
def add_token_gradients(
    gradient,
    LEFT,
    RIGHT,
    WEIGHT,
    GRADIENT,
    TANH_SUMS,
    left_head,
    right_head,
    b,
    h,
    own,
    left,
    right,
    L,
    factor,
    BL: tl.constexpr,
    BR: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Add the gradient of the tokens on the left of a tile, Σ_j g_ij weight_a (1 - tanh²) · factor, to memory.

    gradient: g (BL, BR), by the scores. GRADIENT: `StridedRows`, of head `own` of batch b. TANH_SUMS: None, or memory
    (B · heads, L, A) to add Σ_j g_ij tanh · factor to. Both belong to this program alone.

    Features are in the middle of three axes and pairs are summed over the first, in registers of one thread each.
    """
    gradient, number = settled(gradient), tl.arange(0, AT_ONCE)
    i, j = left + tl.arange(0, BL), right + tl.arange(0, BR)
    g = tl.trans(gradient)[:, None, :]
    one = LEFT.numbers + left_head * 2 * WEIGHT.padded * LEFT.length + i[None, :]
    other = RIGHT.numbers + right_head * 2 * WEIGHT.padded * RIGHT.length + j[None, :]
    bound, other_bound = _bound(LEFT, left_head, left), _bound(RIGHT, right_head, right)
    near, small = bound + other_bound <= LARGEST, tl.maximum(bound, other_bound) <= SMALL
    less, other_less = (bound <= SMALL).to(tl.float32), (other_bound <= SMALL).to(tl.float32)
    whole = tl.sum(gradient, 1)[None, :]
    if not near:
        one += tl.cast(LEFT.length, tl.int64) * WEIGHT.padded
        other += tl.cast(RIGHT.length, tl.int64) * WEIGHT.padded
    for start in range(0, WEIGHT.padded, AT_ONCE):
        a = start + number
        x = tl.load(one + a.to(tl.int64)[:, None] * LEFT.length)[None, :, :]
        y = tl.trans(tl.load(other + a.to(tl.int64)[:, None] * RIGHT.length))[:, :, None]
        weight = tl.load(WEIGHT.pointer + h * WEIGHT.head + a, mask=a < WEIGHT.features, other=0.0)
        exists = (a < WEIGHT.features)[:, None] & (i < L)[None, :]
        if near:
            power = (x + less) * (y + other_less)
            share = reciprocal(1.0 + power)
            part = g * share
            slopes = tl.sum(part * (power * share), 0)
            if TANH_SUMS is not None:
                if small:  # noqa: SIM108  # no branch of registers
                    tanhs = tl.sum(part * (x * (1.0 + y) + y), 0)
                else:
                    tanhs = whole - 2.0 * tl.sum(part, 0)
        else:
            power = _exponential_of_sum(x + y)
            share = reciprocal(1.0 + power)
            slopes = tl.sum(tl.where(g == 0.0, 0.0, g * (power * share * share)), 0)
            if TANH_SUMS is not None:
                tanhs = tl.sum(tl.where(g == 0.0, 0.0, g * (1.0 - 2.0 * share)), 0)
        at = head_rows(GRADIENT, b, own) + i.to(tl.int64)[None, :] * GRADIENT.row + a[:, None]
        tl.store(at, tl.load(at, mask=exists) + slopes * (4.0 * factor * weight)[:, None], mask=exists)
        if TANH_SUMS is not None:
            into = TANH_SUMS + (left_head * L + i.to(tl.int64))[None, :] * WEIGHT.features + a[:, None]
            tl.store(into, tl.load(into, mask=exists) + tanhs * factor, mask=exists)
    tl.debug_barrier()  # the next tile reads what was stored
