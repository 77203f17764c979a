/* Products of rows with a matrix that are ranked, block after block of columns, while they are in the core's cache. */
#include "top_products.h"
#include "largest.h"
#include "panels.h"

/* Columns of a block. */
enum { COLUMNS_AT_ONCE = 8 * PANEL_COLUMNS };

static void add_bias(const struct top_products *problem, const struct scratch_rows block, int64_t rows, int64_t first,
                     int64_t columns) {
    for (int64_t row = 0; row < rows; row++) {
        float *own = scratch_row(block, row);
        for (int64_t a = 0; a < columns; a += LANES)
            store(own + a, load(own + a) + load_partial(problem->bias + first + a, columns - a));
    }
}

/* The rows of a unit, from `first` on. */
static void rank_rows(const struct top_products *problem, const struct scratch_rows left, const struct scratch_rows block,
                      struct largest *found, int64_t first) {
    int64_t rows = min_int(problem->unit, problem->rows - first), groups = (rows + GROUP - 1) / GROUP * GROUP;
    for (int64_t r = 0; r < rows; r++) {
        int64_t row = first + r, place = row * problem->count;
        memcpy(scratch_row(left, r), problem->left + row * problem->terms, (size_t)problem->terms * sizeof(float));
        found[r] = no_entries(problem->count, problem->values + place, problem->indices + place);
    }
    for (int64_t column = 0; column < problem->columns; column += COLUMNS_AT_ONCE) {
        int64_t columns = min_int(COLUMNS_AT_ONCE, problem->columns - column);
        multiply_packed(left, problem->panels + column * problem->terms, problem->terms, columns, block, groups, 0);
        if (problem->bias) add_bias(problem, block, rows, column, columns);
        for (int64_t r = 0; r < rows; r++) add_entries(found + r, scratch_row(block, r), columns, column);
    }
    for (int64_t r = 0; r < rows; r++) problem->lse[first + r] = log_of_sum(found + r);
}

/* Runs one unit of rows after another while any is left; any number of threads may call it at once. */
void EXPORTED(regard_top_products)(struct top_products *problem) {
    int64_t rows = problem->unit, unit;
    int64_t floats = rows * (panel_columns(problem->terms) + COLUMNS_AT_ONCE + (int64_t)sizeof(struct largest));
    float *room = aligned_memory(floats * 4), *memory = room;
    if (!room) {
        problem->failed = 1;
        return;
    }
    memset(room, 0, (size_t)floats * sizeof(float));
    struct scratch_rows left = take_rows(&memory, rows, problem->terms), block = take_rows(&memory, rows, COLUMNS_AT_ONCE);
    struct largest *found = (struct largest *)memory;
    while ((unit = __atomic_fetch_add(&problem->next_unit, 1, __ATOMIC_RELAXED)) < problem->unit_count)
        rank_rows(problem, left, block, found, unit * rows);
    free_aligned(room);
}
