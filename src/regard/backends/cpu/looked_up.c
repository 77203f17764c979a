/* Products of rows with the vectors that their pairs have by distance: those with all vectors first, then one of them for
 * each pair. All numbers are float32, and last axes contiguous. */
#include "transpose.h"
#include "variants.h"

/* The most vectors: the products of a row with all of them stay in the core's cache. */
enum { MOST_VECTORS = 1024 };

/* Of each batch and head, number (row, pair) of `result` is at row * result_row + pair * result_pair. */
struct looked_up {
    int64_t batches, heads, rows, pairs, dim, count; /* pairs: of each row; count: of vectors */
    const float *left;                               /* (batches, heads, rows, dim) */
    int64_t left_batch, left_head, left_row;
    const float *vectors; /* (heads, count, dim) */
    int64_t vectors_head, vectors_row;
    const int64_t *columns; /* (rows, pairs): which vector */
    float *result;
    int64_t result_row, result_pair, add; /* add: to what is there */
};

/* table[c] = row . vectors[c] * scale, in whole vectors of lanes; the last row stands for those beyond. */
INLINE void multiply_vectors_of(const struct looked_up *problem, const float *row, const float *vectors, float scale,
                                float *table) {
    for (int64_t c = 0; c < problem->count; c += LANES) {
        lanes sum[LANES] = {{0}};
        const float *other[LANES];
        FOR_ALL_LANES for (int i = 0; i < LANES; i++)
            other[i] = vectors + (c + i < problem->count ? c + i : problem->count - 1) * problem->vectors_row;
        int64_t a = 0;
        for (; a + LANES <= problem->dim; a += LANES) {
            lanes own = load(row + a);
            FOR_ALL_LANES for (int i = 0; i < LANES; i++) sum[i] += own * load(other[i] + a);
        }
        if (a < problem->dim) {
            lanes own = load_partial(row + a, problem->dim - a);
            FOR_ALL_LANES for (int i = 0; i < LANES; i++) sum[i] += own * load_partial(other[i] + a, problem->dim - a);
        }
        store(table + c, sum_vectors(sum) * scale);
    }
}

void EXPORTED(regard_looked_up)(const struct looked_up *problem, double scale) {
    float table[MOST_VECTORS + LANES], *result = problem->result;
    for (int64_t unit = 0; unit < problem->batches * problem->heads; unit++) {
        const int64_t batch = unit / problem->heads, head = unit % problem->heads;
        const float *row = problem->left + batch * problem->left_batch + head * problem->left_head;
        const int64_t *columns = problem->columns;
        for (int64_t i = 0; i < problem->rows; i++, row += problem->left_row, columns += problem->pairs) {
            float *to = result + i * problem->result_row;
            multiply_vectors_of(problem, row, problem->vectors + head * problem->vectors_head, (float)scale, table);
            if (problem->add)
                for (int64_t j = 0; j < problem->pairs; j++, to += problem->result_pair) *to += table[columns[j]];
            else
                for (int64_t j = 0; j < problem->pairs; j++, to += problem->result_pair) *to = table[columns[j]];
        }
        result += problem->rows * problem->pairs;
    }
}
