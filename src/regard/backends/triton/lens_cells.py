"""Adding a tile of values to cells of rows and columns, and to bins of distances."""

from __future__ import annotations

import triton
import triton.language as tl

PIECES = tl.constexpr(8)
"""The most cells along a side of a tile that are reduced to one number each, one after another."""


@triton.jit
def reduced(values, AXIS: tl.constexpr, SUMS: tl.constexpr):
    """The sums along an axis, or the maxima."""
    if SUMS:
        return tl.sum(values, AXIS)
    else:
        return tl.max(values, AXIS)


@triton.jit
def combine(at, values, mask, SUMS: tl.constexpr):
    """Add to float64 sums, or raise maxima of numbers of at least 0, which the bits of float32 order as they are."""
    if SUMS:
        tl.atomic_add(at, values.to(tl.float64), mask=mask, sem="relaxed")
    else:
        tl.atomic_max(at, values.to(tl.int32, bitcast=True), mask=mask, sem="relaxed")


@triton.jit
def add_to_cells(INTO, CELLS, values, pair, m, n, line, column, M, N, SUMS: tl.constexpr):
    """Combine a tile of values with the cells that its rows and columns lie in; maxima of numbers of at least 0.

    Few cells get one number each. Of more, those along one side are taken one after another, the side with fewer, and
    each row or column of the other side has a number for its cell; so does each column where cells are far apart.
    """
    at = INTO + pair * CELLS.height * CELLS.width
    rows = tl.load(CELLS.rows + m, mask=m < M, other=-1)[:, None]
    columns = tl.load(CELLS.columns + n, mask=n < N, other=-1)[None, :]
    first_row, last_row = tl.load(CELLS.row_ranges + 2 * line), tl.load(CELLS.row_ranges + 2 * line + 1)
    first, last = tl.load(CELLS.column_ranges + 2 * column), tl.load(CELLS.column_ranges + 2 * column + 1)
    height, width = tl.maximum(last_row - first_row + 1, 0), tl.maximum(last - first + 1, 0)
    if height * width <= PIECES:
        for piece in range(height * width):
            row, cell = first_row + piece // width, first + piece % width
            of_pairs = reduced(tl.where((rows == row) & (columns == cell), values, 0.0), None, SUMS)
            combine(at + tl.cast(row, tl.int64) * CELLS.width + cell, of_pairs, None, SUMS)
    elif (height <= width) & (height <= values.shape[1]):
        for row in range(first_row, last_row + 1):
            of_columns = reduced(tl.where(rows == row, values, 0.0), 0, SUMS)
            cell = tl.load(CELLS.columns + n, mask=n < N, other=-1)
            combine(at + tl.cast(row, tl.int64) * CELLS.width + cell, of_columns, cell >= 0, SUMS)
    else:
        cell = tl.load(CELLS.rows + m, mask=m < M, other=-1)
        start = at + cell.to(tl.int64) * CELLS.width
        if width <= values.shape[1]:
            for place in range(first, last + 1):
                of_rows = reduced(tl.where(columns == place, values, 0.0), 1, SUMS)
                combine(start + place, of_rows, cell >= 0, SUMS)
        else:
            for j in range(values.shape[1]):
                own = tl.arange(0, values.shape[1]) == j
                place = tl.max(tl.where(own, tl.load(CELLS.columns + n, mask=n < N, other=-1), -1), 0)
                of_rows = reduced(tl.where(own[None, :], values, 0.0), 1, SUMS)
                combine(start + place, of_rows, (cell >= 0) & (place >= 0), SUMS)


@triton.jit
def add_to_histogram(HISTOGRAM, weight, apart, pair, line, column, BINS: tl.constexpr):
    """Add the weights of a tile to the bins that its distances, int32, lie in; BINS is a power of two."""
    queries, keys = HISTOGRAM.query_ranges + 2 * line, HISTOGRAM.key_ranges + 2 * column
    first_query, last_query = tl.load(queries), tl.load(queries + 1)
    first_key, last_key = tl.load(keys), tl.load(keys + 1)
    nearest = tl.maximum(tl.maximum(first_query - last_key, first_key - last_query), 0)
    farthest = tl.maximum(last_query - first_key, last_key - first_query)
    bins = tl.arange(0, BINS)
    begins = tl.load(HISTOGRAM.ends + bins, mask=bins < HISTOGRAM.bins, other=2147483647)
    first, end = tl.sum((begins <= nearest).to(tl.int32), 0) - 1, tl.sum((begins <= farthest).to(tl.int32), 0)
    for at in range(first, end):
        inside = (apart >= tl.load(HISTOGRAM.ends + at)) & (apart < tl.load(HISTOGRAM.ends + at + 1))
        total = tl.sum(tl.where(inside, weight, 0.0))
        tl.atomic_add(HISTOGRAM.sums + pair * HISTOGRAM.bins + at, total.to(tl.float64), sem="relaxed")
