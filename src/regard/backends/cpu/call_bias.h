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
INLINE void add_sums(const struct call_bias *bias, const struct place *at, float *tile) {
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

/* row[columns[lane]] for the columns of neighbouring pairs, which are neighbours or the same: they lie within as many
 * numbers as there are lanes, which are loaded together. The row has as many at least. */
INLINE lanes pick(const struct call_table *table, const float *row, const int32_t *columns) {
    int32_t first = columns[0], last = columns[LANES - 1], least = first < last ? first : last;
    least = (int32_t)min_int(least, table->count - LANES);
    lanes found = load(row + least);
    return SHUFFLE(found, found, load_bits(columns) - least);
}

INLINE void add_row(float *target, const struct call_table *table, const float *row, const int32_t *columns,
                    int64_t count) {
    int64_t j = 0;
    if (table->count >= LANES)
        for (; j + LANES <= count; j += LANES)
            store(target + j, load(target + j) + pick(table, row, columns + j) * LOG2_E);
    for (; j < count; j++) target[j] += row[columns[j]] * LOG2_E;
}

/* Of tables of queries whose column differs between the pairs of a tile. */
INLINE void add_query_table(const struct flash *problem, const struct place *at, float *tile) {
    const struct call_table *table = &problem->call_bias->query_table;
    for (int64_t r = 0; r < at->rows; r++)
        add_row(tile + r * BLOCK, table, table_row(table, at->batch, at->head, at->row + r),
                columns_of_row(problem, table, at->row + r, at->column), at->columns);
}

INLINE void add_key_table(const struct flash *problem, const struct place *at, float *tile) {
    const struct call_table *table = &problem->call_bias->key_table;
    float block[LANES * BLOCK] ALIGNED;
    /* A key's numbers for the rows of the tile are side by side, the last row's first: some keys at a time, as rows. */
    int64_t last = at->row + at->rows - 1;
    for (int64_t first = 0; first < at->columns; first += LANES) {
        int64_t count = min_int(at->columns - first, LANES);
        memset(block, 0, sizeof(block));
        for (int64_t j = 0; j < count; j++)
            add_row(block + j * BLOCK, table, table_row(table, at->batch, at->head, at->column + first + j),
                    columns_of_row(problem, table, last, at->column + first + j), at->rows);
        for (int64_t r = 0; r < at->rows; r += LANES) {
            lanes own[LANES];
            for (int l = 0; l < LANES; l++) own[l] = load(block + l * BLOCK + r);
            transpose(own);
            for (int64_t l = 0; l < min_int(at->rows - r, LANES); l++) {
                float *target = tile + (at->rows - 1 - r - l) * BLOCK + first;
                store(target, load(target) + own[l]);
            }
        }
    }
}

/* Floats for the numbers of a tile, and for what they are made with. */
enum { TILE_FLOATS = 3 * BLOCK * BLOCK, DIAGONALS = 2 * BLOCK };

/* The first diagonal of a tile in the vectors: that of its last row and first column. */
INLINE int64_t first_vector(const struct flash *problem, const struct place *at) {
    return MARGIN + problem->rows - BLOCK - at->row + at->column;
}

INLINE const float *query_vectors(const struct place *at, const struct call_vectors *vectors) {
    return vectors->queries + at->batch * vectors->query_batch + at->head * vectors->query_head +
           at->row * vectors->dim;
}

/* Products of the rows of a tile with the vectors of its diagonals, [BLOCK][DIAGONALS]; a row's own begin one diagonal
 * before those of the row above it. */
INLINE void add_vectors(const struct flash *problem, const struct place *at, float *tile, float *products) {
    const struct call_vectors *vectors = &problem->call_bias->vectors;
    const float *turned = vectors->turned + at->head * vectors->vector_head + first_vector(problem, at);
    for (int64_t r = 0; r < at->rows; r += GROUP)
        for (int64_t d = 0; d < DIAGONALS; d += PAIR)
            add_product((struct factor){query_vectors(at, vectors) + r * vectors->dim, vectors->dim, 1},
                        (struct vectors){turned + d, vectors->length, 0, vectors->dim}, products + r * DIAGONALS + d,
                        DIAGONALS, 0);
    for (int64_t r = 0; r < at->rows; r++)
        for (int64_t j = 0; j < at->columns; j += LANES)
            store(tile + r * BLOCK + j,
                  load(tile + r * BLOCK + j) + load_partial(products + r * DIAGONALS + BLOCK - 1 - r + j, at->columns - j));
}

/* The numbers that are added to the scores of a tile, times log2(e), [BLOCK][BLOCK], with memory behind them (call_bias.c). */
#define fill_call_bias SHARED(fill_call_bias)
void fill_call_bias(const struct flash *problem, const struct place *at, float *tile);

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

/* Loads ahead what a tile reads, or adds to, of the rows of a table: tables are so long that its rows lie pages apart. */
INLINE void load_table_ahead(const struct flash *problem, const struct call_table *table, const struct place *at,
                             const float *first_row, int64_t stride) {
    for (int64_t r = 0; r < at->rows; r++) {
        const int32_t *columns = columns_of_row(problem, table, at->row + r, at->column);
        int32_t first = columns[0], last = columns[at->columns - 1], least = first < last ? first : last;
        const char *entry = (const char *)(first_row + r * stride + least);
        for (int64_t byte = 0; byte <= (first + last - 2 * least) * 4; byte += LINE) fetch_line(entry + byte);
    }
}

/* Loads ahead, where a tile begins, the gradients that it adds to at its end, and the table of the rows after it. */
INLINE void load_call_bias_ahead(const struct flash *problem, const struct place *at) {
    const struct call_table *table = &problem->call_bias->query_table;
    if (!table->gradient) return;
    float *gradient = table_gradient(problem, table, problem->rows, at->batch, at->head, at->row);
    load_table_ahead(problem, table, at, gradient, table->count);
    struct place next = *at;
    next.row += BLOCK, next.rows = min_int(problem->rows - next.row, BLOCK);
    if (next.rows > 0)
        load_table_ahead(problem, table, &next, table_row(table, at->batch, at->head, next.row), table->row);
}

enum { CHAINS = 4 };

/* target[columns[k]] += gradients[k] for a vector of pairs, whose columns are all different: neighbours, one by one. */
INLINE void add_different(float *target, const int32_t *columns, lanes gradients) {
    int32_t first = columns[0], last = columns[LANES - 1], least = first < last ? first : last;
    bits lane = load_bits(columns) - least; /* 0 to LANES - 1 upwards or downwards: its own inverse */
    store(target + least, load(target + least) + SHUFFLE(gradients, gradients, lane));
}

/* target[c][columns[c][k]] += gradients[c * BLOCK + k], of some rows of a table at a time: in one alone each sum would
 * wait for the one before, where neighbours have the same column. */
INLINE void add_rows(float *const target[CHAINS], const int32_t *const columns[CHAINS], const float *gradients,
                     int64_t count, int chains) {
    int64_t k = 0;
    if (chains == CHAINS)
        for (; k + LANES <= count; k += LANES) {
            int different = 1;
            for (int c = 0; c < CHAINS; c++) {
                int32_t apart = columns[c][k] - columns[c][k + LANES - 1];
                different &= apart == LANES - 1 || apart == 1 - LANES;
            }
            if (different)
                for (int c = 0; c < CHAINS; c++)
                    add_different(target[c], columns[c] + k, load(gradients + c * BLOCK + k));
            else
                for (int64_t j = k; j < k + LANES; j++)
                    UNROLL for (int c = 0; c < CHAINS; c++) target[c][columns[c][j]] += gradients[c * BLOCK + j];
        }
    for (; k < count; k++)
        for (int c = 0; c < chains; c++) target[c][columns[c][k]] += gradients[c * BLOCK + k];
}

/* A block of so many columns of a tile as rows, from its last row to its first one. */
INLINE void transpose_columns(const float *tile, int64_t rows, int64_t first, float *target) {
    for (int64_t r = 0; r < rows; r += LANES) {
        lanes block[LANES];
        for (int64_t l = 0; l < LANES; l++)
            block[l] = r + l < rows ? load(tile + (rows - 1 - r - l) * BLOCK + first) : broadcast(0.0f);
        transpose(block);
        for (int l = 0; l < LANES; l++) store(target + l * BLOCK + r, block[l]);
    }
}

INLINE void add_query_table_gradient(const struct flash *problem, const struct place *at, const float *gradients,
                                     const float *of_rows) {
    const struct call_table *table = &problem->call_bias->query_table;
    int64_t only = only_column(problem, table, at);
    float *target[CHAINS];
    const int32_t *columns[CHAINS];
    for (int64_t r = 0; r < at->rows; r += CHAINS) {
        int chains = (int)min_int(at->rows - r, CHAINS);
        for (int c = 0; c < chains; c++) {
            target[c] = table_gradient(problem, table, problem->rows, at->batch, at->head, at->row + r + c);
            columns[c] = columns_of_row(problem, table, at->row + r + c, at->column);
            if (only >= 0) target[c][only] += of_rows[r + c];
        }
        if (only < 0) add_rows(target, columns, gradients + r * BLOCK, at->columns, chains);
    }
}

INLINE void add_key_table_gradient(const struct flash *problem, const struct place *at, const float *gradients,
                                   const float *of_columns) {
    const struct call_table *table = &problem->call_bias->key_table;
    int64_t only = only_column(problem, table, at), last = at->rows - 1;
    float *target[CHAINS], turned[LANES * BLOCK] ALIGNED;
    const int32_t *columns[CHAINS];
    for (int64_t j = 0; j < at->columns; j += CHAINS) {
        if (only < 0 && j % LANES == 0) transpose_columns(gradients, at->rows, j, turned);
        int chains = (int)min_int(at->columns - j, CHAINS);
        for (int c = 0; c < chains; c++) {
            target[c] = table_gradient(problem, table, problem->columns, at->batch, at->head, at->column + j + c);
            columns[c] = columns_of_row(problem, table, at->row + last, at->column + j + c);
            if (only >= 0) target[c][only] += of_columns[j + c];
        }
        if (only < 0) add_rows(target, columns, turned + j % LANES * BLOCK, at->rows, chains);
    }
}

/* The gradients of a tile by rows and diagonals, times the vectors of these, and the queries of those. */
INLINE void add_vectors_gradient(const struct flash *problem, const struct place *at, const float *gradients,
                                 float *skewed) {
    static const float whole[GROUP] = {1, 1, 1, 1, 1, 1, 1, 1};
    const struct call_vectors *vectors = &problem->call_bias->vectors;
    int64_t number = at->batch * problem->heads + at->head, first = first_vector(problem, at), dim = vectors->dim;
    int64_t padded = (problem->rows + BLOCK - 1) / BLOCK * BLOCK;
    const float *own = vectors->vectors + at->head * vectors->vector_head + first * dim;
    float *of_queries = vectors->grad_queries + (number * padded + at->row) * dim;
    float *of_vectors = vectors->grad_vectors + (number * vectors->length + first) * dim;
    memset(skewed, 0, BLOCK * DIAGONALS * sizeof(float));
    for (int64_t r = 0; r < at->rows; r++)
        memcpy(skewed + r * DIAGONALS + BLOCK - 1 - r, gradients + r * BLOCK, (size_t)at->columns * sizeof(float));
    for (int64_t a = 0; a < dim; a += PAIR) {
        for (int64_t r = 0; r < at->rows; r += GROUP)
            add_product((struct factor){skewed + r * DIAGONALS, DIAGONALS, 1},
                        (struct vectors){own + a, dim, 0, DIAGONALS}, of_queries + r * dim + a, dim, whole);
        for (int64_t d = 0; d < DIAGONALS; d += GROUP)
            add_product((struct factor){skewed + d, 1, DIAGONALS},
                        (struct vectors){query_vectors(at, vectors) + a, dim, 0, at->rows}, of_vectors + d * dim + a, dim,
                        whole);
    }
}

/* Adds the gradients of the numbers of a tile, 0 where there is no pair, to those of what they were made of. */
APART void add_call_bias_gradient(const struct flash *problem, const struct place *at, const float *gradients,
                                  float *memory) {
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
    if (bias->vectors.grad_queries) add_vectors_gradient(problem, at, gradients, memory);
    if (!problem->grad_relative_bias) return;
    float *line = problem->grad_relative_bias + number * (problem->rows + problem->columns - 1);
    for (int64_t r = 0; r < at->rows; r++)
        for (int64_t j = 0; j < at->columns; j++)
            line[diagonal_index(problem, at->row + r, at->column) + j] += gradients[r * BLOCK + j];
}

#endif
