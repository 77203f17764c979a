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

/* The other way round: result = added + the sum over pairs of weight * vectors[column], of each row (batches, heads, rows,
 * dim). The weights of a vector are summed first. */
struct added_vectors {
    int64_t batches, heads, rows, pairs, dim, count;
    const float *weights; /* (batches, heads, rows, pairs) */
    int64_t weights_batch, weights_head, weights_row;
    const float *added; /* (batches, heads, rows, dim) */
    int64_t added_batch, added_head, added_row;
    const float *vectors; /* (heads, count, dim) */
    int64_t vectors_head, vectors_row;
    const int64_t *columns; /* (rows, pairs): which vector */
    float *result;          /* (batches, heads, rows, dim), without gaps */
};

enum { AT_ONCE_ADDED = 4 };

/* So many vectors of lanes of a row: what is added, and each vector times the sum of its weights. */
INLINE void add_vectors_at(const struct added_vectors *problem, const float *sums, const float *vectors,
                           const float *added, float *result, const int at_once) {
    lanes own[AT_ONCE_ADDED];
    UNROLL for (int v = 0; v < at_once; v++) own[v] = load(added + v * LANES);
    for (int64_t c = 0; c < problem->count; c++, vectors += problem->vectors_row)
        UNROLL for (int v = 0; v < at_once; v++) own[v] += sums[c] * load(vectors + v * LANES);
    UNROLL for (int v = 0; v < at_once; v++) store(result + v * LANES, own[v]);
}

INLINE void add_vectors_to(const struct added_vectors *problem, const float *sums, const float *vectors,
                           const float *added, float *result) {
    int64_t a = 0;
    for (; a + AT_ONCE_ADDED * LANES <= problem->dim; a += AT_ONCE_ADDED * LANES)
        add_vectors_at(problem, sums, vectors + a, added + a, result + a, AT_ONCE_ADDED);
    for (; a + LANES <= problem->dim; a += LANES)
        add_vectors_at(problem, sums, vectors + a, added + a, result + a, 1);
    for (; a < problem->dim; a++) {
        float own = added[a];
        for (int64_t c = 0; c < problem->count; c++) own += sums[c] * vectors[c * problem->vectors_row + a];
        result[a] = own;
    }
}

void EXPORTED(regard_added_vectors)(const struct added_vectors *problem) {
    float sums[MOST_VECTORS], *result = problem->result;
    for (int64_t unit = 0; unit < problem->batches * problem->heads; unit++) {
        const int64_t batch = unit / problem->heads, head = unit % problem->heads;
        const float *weights = problem->weights + batch * problem->weights_batch + head * problem->weights_head;
        const float *added = problem->added + batch * problem->added_batch + head * problem->added_head;
        const int64_t *columns = problem->columns;
        for (int64_t i = 0; i < problem->rows; i++, columns += problem->pairs, result += problem->dim) {
            memset(sums, 0, (size_t)problem->count * sizeof(float));
            for (int64_t j = 0; j < problem->pairs; j++) sums[columns[j]] += weights[i * problem->weights_row + j];
            add_vectors_to(problem, sums, problem->vectors + head * problem->vectors_head, added + i * problem->added_row,
                           result);
        }
    }
}
