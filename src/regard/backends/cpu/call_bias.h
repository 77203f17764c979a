/* What the content of one call adds to the scores of a tile: sums along rows and columns, and tables of each query and
 * key that are read by distance; and their gradients. A tile's numbers are filled in at once, and stand beside its
 * scores as those of a relative bias do. */
#ifndef REGARD_CALL_BIAS_H
#define REGARD_CALL_BIAS_H

#include "tile.h"

/* Of sums (2, batch, heads, length), the higher and the lower terms, the number of a row or column. */
INLINE const float *sums_of(const struct call_sums *sums, int64_t batch, int64_t head, int64_t first) {
    return sums->data + batch * sums->batch + head * sums->head + first;
}

INLINE const float *table_row(const struct call_table *table, int64_t batch, int64_t head, int64_t row) {
    return table->data + batch * table->batch + head * table->head + row * table->row;
}

INLINE float *table_gradient(const struct flash *problem, const struct call_table *table, int64_t length, int64_t batch,
                             int64_t head, int64_t row) {
    return table->gradient + ((batch * problem->heads + head) * length + row) * table->count;
}

/* The columns of a table that the pairs of a row have, from the first column of a tile on. */
INLINE const int32_t *columns_of_row(const struct flash *problem, const struct call_table *table, int64_t row,
                                     int64_t column) {
    return table->columns + diagonal_index(problem, row, column);
}

/* A tile: its query head, first row and column, and how many there are. */
struct place {
    int64_t batch, head, row, column, rows, columns;
};

/* The one column of a table that all pairs of a tile have, far from the diagonal; -1 where they differ. */
INLINE int64_t only_column(const struct flash *problem, const struct call_table *table, const struct place *at) {
    int32_t first = columns_of_row(problem, table, at->row + at->rows - 1, at->column)[0],
            last = columns_of_row(problem, table, at->row, at->column)[at->columns - 1];
    return first == last ? first : -1;
}

/* c_i - c_j, each of two terms. */
INLINE void fill_sums(const struct call_bias *bias, const struct place *at, float *tile) {
    const struct call_sums *of_rows = &bias->row_sums, *of_columns = &bias->column_sums;
    const float *row = sums_of(of_rows, at->batch, at->head, at->row),
                *column = sums_of(of_columns, at->batch, at->head, at->column);
    for (int64_t j = 0; j < at->columns; j += LANES) {
        lanes high = load_partial(column + j, at->columns - j),
              low = load_partial(column + of_columns->terms + j, at->columns - j);
        for (int64_t r = 0; r < at->rows; r++) {
            float *target = tile + r * BLOCK + j;
            store(target, load(target) + ((row[r] - high) + (row[of_rows->terms + r] - low)));
        }
    }
}

INLINE void fill_query_table(const struct flash *problem, const struct place *at, float *tile) {
    const struct call_table *table = &problem->call_bias->query_table;
    int64_t only = only_column(problem, table, at);
    for (int64_t r = 0; r < at->rows; r++, tile += BLOCK) {
        const float *row = table_row(table, at->batch, at->head, at->row + r);
        const int32_t *columns = columns_of_row(problem, table, at->row + r, at->column);
        if (only >= 0)
            for (int64_t j = 0; j < at->columns; j += LANES) store(tile + j, load(tile + j) + row[only]);
        else
            for (int64_t j = 0; j < at->columns; j++) tile[j] += row[columns[j]];
    }
}

INLINE void fill_key_table(const struct flash *problem, const struct place *at, float *tile) {
    const struct call_table *table = &problem->call_bias->key_table;
    int64_t only = only_column(problem, table, at);
    if (only >= 0) {
        float numbers[BLOCK] ALIGNED;
        memset(numbers, 0, sizeof(numbers));
        for (int64_t j = 0; j < at->columns; j++)
            numbers[j] = table_row(table, at->batch, at->head, at->column + j)[only];
        for (int64_t r = 0; r < at->rows; r++, tile += BLOCK)
            for (int64_t j = 0; j < at->columns; j += LANES) store(tile + j, load(tile + j) + load(numbers + j));
        return;
    }
    for (int64_t j = 0; j < at->columns; j++) { /* a key's numbers for the rows of the tile are side by side */
        const float *row = table_row(table, at->batch, at->head, at->column + j);
        const int32_t *columns = columns_of_row(problem, table, at->row, at->column + j);
        for (int64_t r = 0; r < at->rows; r++) tile[r * BLOCK + j] += row[columns[-r]];
    }
}

/* The numbers that are added to the scores of a tile, times log2(e), [BLOCK][BLOCK]. */
APART void fill_call_bias(const struct flash *problem, const struct place *at, float *tile) {
    const struct call_bias *bias = problem->call_bias;
    for (int64_t r = 0; r < BLOCK; r++) {
        const float *line = row_bias(problem, at->head, at->row + r, at->column);
        for (int64_t j = 0; j < BLOCK; j += LANES)
            store(tile + r * BLOCK + j,
                  line && j < at->columns ? load_partial(line + j, at->columns - j) : broadcast(0.0f));
    }
    if (bias->row_sums.data) fill_sums(bias, at, tile);
    if (bias->query_table.data) fill_query_table(problem, at, tile);
    if (bias->key_table.data) fill_key_table(problem, at, tile);
}

/* Sums of the gradients of a tile over its columns, and over its rows. */
INLINE void tile_sums(const struct place *at, const float *gradients, float *of_rows, float *of_columns) {
    lanes columns[BLOCK / LANES] = {{0}};
    for (int64_t r = 0; r < at->rows; r++) {
        lanes sum = {0};
        UNROLL for (int v = 0; v < BLOCK / LANES; v++) {
            lanes own = load(gradients + r * BLOCK + v * LANES);
            sum += own, columns[v] += own;
        }
        of_rows[r] = sum_lanes(sum);
    }
    for (int v = 0; v < BLOCK / LANES; v++) store(of_columns + v * LANES, columns[v]);
}

INLINE void add_query_table_gradient(const struct flash *problem, const struct place *at, const float *gradients,
                                     const float *of_rows) {
    const struct call_table *table = &problem->call_bias->query_table;
    int64_t only = only_column(problem, table, at);
    for (int64_t r = 0; r < at->rows; r++) {
        float *target = table_gradient(problem, table, problem->rows, at->batch, at->head, at->row + r);
        const int32_t *columns = columns_of_row(problem, table, at->row + r, at->column);
        if (only >= 0)
            target[only] += of_rows[r];
        else
            for (int64_t j = 0; j < at->columns; j++) target[columns[j]] += gradients[r * BLOCK + j];
    }
}

INLINE void add_key_table_gradient(const struct flash *problem, const struct place *at, const float *gradients,
                                   const float *of_columns) {
    const struct call_table *table = &problem->call_bias->key_table;
    int64_t only = only_column(problem, table, at);
    for (int64_t j = 0; j < at->columns; j++) {
        float *target = table_gradient(problem, table, problem->columns, at->batch, at->head, at->column + j);
        const int32_t *columns = columns_of_row(problem, table, at->row, at->column + j);
        if (only >= 0)
            target[only] += of_columns[j];
        else
            for (int64_t r = 0; r < at->rows; r++) target[columns[-r]] += gradients[r * BLOCK + j];
    }
}

/* Adds the gradients of the numbers of a tile, 0 where there is no pair, to those of what they were made of. */
APART void add_call_bias_gradient(const struct flash *problem, const struct place *at, const float *gradients) {
    const struct call_bias *bias = problem->call_bias;
    float of_rows[BLOCK] ALIGNED, of_columns[BLOCK] ALIGNED;
    int64_t number = at->batch * problem->heads + at->head;
    tile_sums(at, gradients, of_rows, of_columns);
    if (bias->row_sums.gradient) {
        float *rows = bias->row_sums.gradient + number * problem->rows + at->row,
              *columns = bias->column_sums.gradient + number * problem->columns + at->column;
        for (int64_t r = 0; r < at->rows; r++) rows[r] += of_rows[r];
        for (int64_t j = 0; j < at->columns; j++) columns[j] -= of_columns[j];
    }
    if (bias->query_table.gradient) add_query_table_gradient(problem, at, gradients, of_rows);
    if (bias->key_table.gradient) add_key_table_gradient(problem, at, gradients, of_columns);
    if (!problem->grad_relative_bias) return;
    float *line = problem->grad_relative_bias + number * (problem->rows + problem->columns - 1);
    for (int64_t r = 0; r < at->rows; r++)
        for (int64_t j = 0; j < at->columns; j++)
            line[diagonal_index(problem, at->row + r, at->column) + j] += gradients[r * BLOCK + j];
}

#endif
