/* Products of rows in scratch memory with matrices that are packed in panels of columns.
 *
 * A matrix of (terms, columns) is packed as (columns / PANEL_COLUMNS, terms, PANEL_COLUMNS), 0 in the columns beyond. */
#ifndef REGARD_PANELS_H
#define REGARD_PANELS_H

#include "tile.h"

/* Columns of a panel, whatever the number of lanes. */
enum { PANEL_COLUMNS = 32 };

/* Terms of a panel that are multiplied for all rows before the next: they stay in the cache nearest to the processor. */
enum { TERMS_AT_ONCE = 256 };

/* Rows of scratch memory: `stride` floats from one to the next, all 0 beyond what is written. */
struct scratch_rows {
    float *data;
    int64_t stride;
};

INLINE int64_t panel_columns(int64_t columns) { return (columns + PANEL_COLUMNS - 1) / PANEL_COLUMNS * PANEL_COLUMNS; }

INLINE struct scratch_rows take_rows(float **memory, int64_t rows, int64_t columns) {
    int64_t stride = panel_columns(columns);
    return (struct scratch_rows){take_floats(memory, rows * stride), stride};
}

INLINE float *scratch_row(const struct scratch_rows rows, int64_t row) { return rows.data + row * rows.stride; }

/* into = left . panel for the columns of one panel and so many rows, in whole groups; add: to what is there. */
APART void multiply_panel(const struct scratch_rows left, const float *panel, int64_t terms, float *into,
                           int64_t stride, int64_t rows, int add) {
    const float ones[GROUP] = {1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f};
    for (int64_t begin = 0; begin < terms; begin += TERMS_AT_ONCE) {
        int64_t end = min_int(begin + TERMS_AT_ONCE, terms);
        for (int64_t column = 0; column < PANEL_COLUMNS; column += PAIR)
            for (int64_t row = 0; row < rows; row += GROUP)
                add_product((struct factor){scratch_row(left, row), left.stride, 1},
                            (struct vectors){panel + column, PANEL_COLUMNS, begin, end},
                            into + row * stride + column, stride, add || begin ? ones : 0);
    }
}

/* The same for all columns of a packed matrix. */
APART void multiply_packed(const struct scratch_rows left, const float *packed, int64_t terms, int64_t columns,
                           const struct scratch_rows into, int64_t rows, int add) {
    for (int64_t first = 0; first < panel_columns(columns); first += PANEL_COLUMNS)
        multiply_panel(left, packed + first * terms, terms, into.data + first, into.stride, rows, add);
}

#endif
