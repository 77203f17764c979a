/* A few rows times a matrix. All the time goes into reading the matrix: once, from its beginning to its end. */
#include "linear.h"
#include "rows.h"

/* Rows and columns that go at once. */
enum { ROWS = 4, COLUMNS = 4 };

/* So many bytes before it is needed, memory is asked for. */
enum { AHEAD = 2048, LINE = 64 };

/* What the compiler makes code of its own for: a matrix in bfloat16, whole vectors, and how many rows and columns go at
 * once. */
struct kind {
    int narrow, whole, rows, columns;
};

/* The products of some rows with some columns of the matrix. */
INLINE void products_of(const struct linear *of, int64_t row, int64_t column, const struct kind kind) {
    const void *matrix = row_of(of->matrix, column, of->matrix_row, kind.narrow);
    const float *input = of->input + row * of->input_row;
    lanes sum[ROWS][COLUMNS] = {{{0}}};
    for (int64_t a = 0; a < of->dim; a += LANES) {
        lanes entry[COLUMNS];
        UNROLLED for (int c = 0; c < kind.columns; c++) {
            const void *own = row_of(matrix, c, of->matrix_row, kind.narrow);
            if (row == 0 && a * (kind.narrow ? 2 : 4) % LINE == 0)
                __builtin_prefetch((const char *)((uintptr_t)row_of(own, a, 1, kind.narrow) + AHEAD), 0, 0);
            entry[c] = entries(own, a, of->dim, kind.narrow, kind.whole);
        }
        UNROLLED for (int r = 0; r < kind.rows; r++) {
            lanes own = entries(input + r * of->input_row, a, of->dim, 0, kind.whole);
            UNROLLED for (int c = 0; c < kind.columns; c++) sum[r][c] += own * entry[c];
        }
    }
    for (int r = 0; r < kind.rows; r++)
        for (int c = 0; c < kind.columns; c++)
            of->output[(row + r) * of->columns + column + c] =
                sum_of(sum[r][c]) + (of->bias ? of->bias[column + c] : 0.0f);
}

INLINE void columns_of(const struct linear *of, int64_t column, const struct kind kind) {
    int64_t row = 0;
    for (; row + ROWS <= of->rows; row += ROWS)
        products_of(of, row, column, (struct kind){kind.narrow, kind.whole, ROWS, kind.columns});
    for (; row + 2 <= of->rows; row += 2)
        products_of(of, row, column, (struct kind){kind.narrow, kind.whole, 2, kind.columns});
    if (row < of->rows) products_of(of, row, column, (struct kind){kind.narrow, kind.whole, 1, kind.columns});
}

INLINE void unit_of(const struct linear *of, int64_t unit, const int narrow, const int whole) {
    int64_t column = unit * of->unit, end = column + of->unit < of->columns ? column + of->unit : of->columns;
    for (; column + COLUMNS <= end; column += COLUMNS) columns_of(of, column, (struct kind){narrow, whole, 0, COLUMNS});
    for (; column < end; column++) columns_of(of, column, (struct kind){narrow, whole, 0, 1});
}

/* Takes one unit after another, as long as any is left: for as many threads at once as like. */
void EXPORTED(regard_linear)(struct linear *of) {
    const int whole = of->dim % LANES == 0;
    int64_t unit;
    while ((unit = __atomic_fetch_add(&of->taken, 1, __ATOMIC_RELAXED)) < of->units) {
        if (of->narrow && whole)
            unit_of(of, unit, 1, 1);
        else if (of->narrow)
            unit_of(of, unit, 1, 0);
        else if (whole)
            unit_of(of, unit, 0, 1);
        else
            unit_of(of, unit, 0, 0);
    }
}
