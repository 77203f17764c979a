/* A few rows times a matrix, which is read once from beginning to end: that takes all the time. */
#include "gemv.h"
#include "prefetch.h"
#include "typed_rows.h"

/* Rows and columns of one block. */
enum { ROWS = 4, COLUMNS = 4 };

/* Bytes of a column ahead of use at which memory is fetched. */
enum { AHEAD = 2048 };

/* The same where columns are read one after another, and how many sums then run side by side. */
enum { AHEAD_IN_ORDER = 4096, SUMS = 4 };

/* Constants that the compiler specialises the code for: the dtype of the matrix, whole vectors, and how many rows and
 * columns go at once. */
struct kind {
    int dtype, whole, rows, columns;
};

/* Fetches the line of a column that is read AHEAD bytes later, in the next block of columns where this one ends before. */
INLINE void prefetch_ahead(const struct gemv *problem, const void *column, int64_t entry, const struct kind kind) {
    int64_t ahead = AHEAD / entry_bytes(kind.dtype), later = entry + (ahead < problem->dim ? ahead : problem->dim);
    if (later >= problem->dim) later += kind.columns * problem->matrix_row - problem->dim;
    const char *line = row_at(column, later, 1, kind.dtype);
    fetch_line(line);
    find_page_ahead(line, LINE);
}

/* The products of some rows with some columns of the matrix. */
INLINE void gemv_block(const struct gemv *problem, int64_t row, int64_t column, const struct kind kind) {
    const void *matrix = row_at(problem->matrix, column, problem->matrix_row, kind.dtype);
    const float *input = problem->input + row * problem->input_row;
    lanes sum[ROWS][COLUMNS] = {{{0}}};
    for (int64_t a = 0; a < problem->dim; a += LANES) {
        lanes entry[COLUMNS];
        UNROLL for (int c = 0; c < kind.columns; c++) {
            const void *own = row_at(matrix, c, problem->matrix_row, kind.dtype);
            if (row == 0 && a * entry_bytes(kind.dtype) % LINE == 0) prefetch_ahead(problem, own, a, kind);
            entry[c] = load_entries(own, a, problem->dim, kind.dtype, kind.whole);
        }
        UNROLL for (int r = 0; r < kind.rows; r++) {
            lanes own = load_entries(input + r * problem->input_row, a, problem->dim, 0, kind.whole);
            UNROLL for (int c = 0; c < kind.columns; c++) sum[r][c] += own * entry[c];
        }
    }
    for (int r = 0; r < kind.rows; r++)
        for (int c = 0; c < kind.columns; c++)
            problem->output[(row + r) * problem->columns + column + c] =
                sum_lanes(sum[r][c]) + (problem->bias ? problem->bias[column + c] : 0.0f);
}

/* The product of one row with one column of the matrix. Columns in the order of memory, one at a time, are what processors
 * fetch fastest: several at once are several places in memory, each left after a few lines where columns are short. */
INLINE void single_product(const struct gemv *problem, int64_t column, const struct kind kind) {
    const void *own = row_at(problem->matrix, column, problem->matrix_row, kind.dtype);
    lanes sum[SUMS] = {{0}};
    for (int64_t a = 0; a < problem->dim; a += SUMS * LANES) {
        const char *ahead = (const char *)row_at(own, a, 1, kind.dtype) + AHEAD_IN_ORDER;
        for (int64_t byte = 0; byte < SUMS * LANES * entry_bytes(kind.dtype); byte += LINE) fetch_line(ahead + byte);
        UNROLL for (int i = 0; i < SUMS; i++) {
            int64_t from = a + i * LANES;
            sum[i] += load_entries(problem->input, from, problem->dim, 0, kind.whole) *
                      load_entries(own, from, problem->dim, kind.dtype, kind.whole);
        }
    }
    problem->output[column] =
        sum_lanes((sum[0] + sum[1]) + (sum[2] + sum[3])) + (problem->bias ? problem->bias[column] : 0.0f);
}

INLINE void process_columns(const struct gemv *problem, int64_t column, const struct kind kind) {
    int64_t row = 0;
    for (; row + ROWS <= problem->rows; row += ROWS)
        gemv_block(problem, row, column, (struct kind){kind.dtype, kind.whole, ROWS, kind.columns});
    for (; row + 2 <= problem->rows; row += 2)
        gemv_block(problem, row, column, (struct kind){kind.dtype, kind.whole, 2, kind.columns});
    if (row < problem->rows)
        gemv_block(problem, row, column, (struct kind){kind.dtype, kind.whole, 1, kind.columns});
}

INLINE void process_row(const struct gemv *problem, int64_t column, int64_t end, const int dtype, const int whole) {
    for (; column < end; column++) single_product(problem, column, (struct kind){dtype, whole, 1, 1});
}

INLINE void process_rows(const struct gemv *problem, int64_t column, int64_t end, const int dtype, const int whole) {
    for (; column + COLUMNS <= end; column += COLUMNS)
        process_columns(problem, column, (struct kind){dtype, whole, 0, COLUMNS});
    for (; column < end; column++) process_columns(problem, column, (struct kind){dtype, whole, 0, 1});
}

#define RANGE (const struct gemv *problem, int64_t column, int64_t end)
TABLE_BY_DTYPE(whole_row, RANGE, process_row(problem, column, end, DTYPE, 1))
TABLE_BY_DTYPE(any_row, RANGE, process_row(problem, column, end, DTYPE, 0))
TABLE_BY_DTYPE(whole_rows, RANGE, process_rows(problem, column, end, DTYPE, 1))
TABLE_BY_DTYPE(any_rows, RANGE, process_rows(problem, column, end, DTYPE, 0))

/* Takes one unit of columns after another while any is left; any number of threads may call it at once. */
void EXPORTED(regard_gemv)(struct gemv *problem) {
    const int whole = problem->dim % (SUMS * LANES) == 0;
    void(*const process) RANGE =
        (problem->rows == 1 ? whole ? whole_row : any_row : whole ? whole_rows : any_rows)[problem->dtype];
    int64_t unit;
    while ((unit = __atomic_fetch_add(&problem->next_unit, 1, __ATOMIC_RELAXED)) < problem->unit_count) {
        int64_t column = unit * problem->unit, end = column + problem->unit;
        process(problem, column, end < problem->columns ? end : problem->columns);
    }
}
