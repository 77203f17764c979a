/* Products of rows with a matrix that are ranked, block after block of columns, while they are in the core's cache. */
#include "top_products.h"
#include "byte_panels.h"
#include "largest.h"

/* Columns of a block. */
enum { COLUMNS_AT_ONCE = 8 * PANEL_COLUMNS };

static void add_bias(const struct top_products *problem, const struct scratch_rows block, int64_t rows, int64_t first,
                     int64_t columns) {
    for (int64_t row = 0; row < rows; row++) {
        float *own = scratch_row(block, row);
        for (int64_t a = 0; a < columns; a += LANES)
            store(own + a, load(own + a) + load_partial(problem->matrix.bias + first + a, columns - a));
    }
}

/* The memory of a thread. */
struct rank_memory {
    struct scratch_rows left, block;
    struct byte_rows bytes;
    struct largest *found;
};

/* The rows of a unit, from `first` on. */
static void rank_rows(const struct top_products *problem, const struct rank_memory *memory, int64_t first) {
    const struct packed_matrix *matrix = &problem->matrix;
    int64_t rows = min_int(problem->unit, problem->rows - first), groups = (rows + GROUP - 1) / GROUP * GROUP;
    for (int64_t r = 0; r < rows; r++) {
        int64_t row = first + r, place = row * problem->count;
        memcpy(scratch_row(memory->left, r), problem->left + row * matrix->terms, (size_t)matrix->terms * sizeof(float));
        memory->found[r] = no_entries(problem->count, problem->values + place, problem->indices + place);
    }
    struct left_factor left = left_factor(memory->left, memory->bytes, matrix, groups);
    for (int64_t column = 0; column < matrix->columns; column += COLUMNS_AT_ONCE) {
        int64_t columns = min_int(COLUMNS_AT_ONCE, matrix->columns - column);
        for (int64_t of_panel = 0; of_panel < columns; of_panel += PANEL_COLUMNS)
            multiply_columns(&left, matrix, column + of_panel, memory->block.data + of_panel, memory->block.stride, groups);
        if (matrix->bias) add_bias(problem, memory->block, rows, column, columns);
        for (int64_t r = 0; r < rows; r++)
            add_entries(memory->found + r, scratch_row(memory->block, r), columns, column);
    }
    for (int64_t r = 0; r < rows; r++) problem->lse[first + r] = log_of_sum(memory->found + r);
}

/* Runs one unit of rows after another while any is left; any number of threads may call it at once. */
void EXPORTED(regard_top_products)(struct top_products *problem) {
    int64_t rows = problem->unit, terms = problem->matrix.terms, unit;
    int64_t floats = rows * (panel_columns(terms) + COLUMNS_AT_ONCE + (int64_t)sizeof(struct largest)) +
                     byte_rows_floats(rows, terms);
    float *room = aligned_memory(floats * 4), *left = room;
    if (!room) {
        problem->failed = 1;
        return;
    }
    memset(room, 0, (size_t)floats * sizeof(float));
    struct rank_memory memory = {.left = take_rows(&left, rows, terms), .block = take_rows(&left, rows, COLUMNS_AT_ONCE),
                                 .bytes = take_byte_rows(&left, rows, terms), .found = (struct largest *)left};
    while ((unit = __atomic_fetch_add(&problem->next_unit, 1, __ATOMIC_RELAXED)) < problem->unit_count)
        rank_rows(problem, &memory, unit * rows);
    free_aligned(room);
}
