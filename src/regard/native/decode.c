/* A few rows against many keys, read once: scores, the online softmax, and the sum of values, chunk by chunk.
 *
 * Source: Milakov and Gimelshein 2018 (arXiv 1805.02867) for the softmax, Dao, Haziza, Massa and Sizov 2023 (flash
 * decoding) for the parts. */
#include "decode.h"
#include "row_lanes.h"
#include "typed_rows.h"

#include <math.h>
#include <stdlib.h>

/* As many running sums as the processor has room for beside what is read. */
enum {
    KEYS = LANES == 16 ? 4 : 2,
    VECTORS = LANES == 16 ? 4 : 2,
    TRANSPOSE_STEPS = LANES == 16 ? 4 : LANES == 8 ? 3 : 2,
};

/* Constants that the compiler specialises the code for: the dtype of keys and values, dims of whole groups of vectors,
 * how many rows go at once, and whether bfloat16 is multiplied in pairs (see load_terms). */
struct kind {
    int dtype, whole, rows, paired;
};

/* Rows that are read next: they are fetched from memory while there is other work to do. None where `rows` is null. */
struct next {
    const void *rows;
    int64_t stride, entries;
};

INLINE void prefetch_row(const struct next next, int64_t number, const struct kind kind) {
    if (!next.rows) return;
    const char *bytes = row_at(next.rows, number, next.stride, kind.dtype);
    int64_t size = next.entries * entry_bytes(kind.dtype);
    for (int64_t byte = 0; byte < size; byte += 64) __builtin_prefetch(bytes + byte, 0, 3);
    if ((int64_t)((uintptr_t)bytes % PAGE) < size) __builtin_prefetch((const char *)((uintptr_t)bytes + AHEAD), 0, 3);
}

/* Where the lower halves of blocks stand in two vectors, for blocks of LANES, half of it, and so on to 2. */
static const bits LOWER_HALVES[] = {
#if defined(__AVX512F__)
    {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23},
    {0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27},
    {0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29},
    {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30}
#elif defined(__AVX__)
    {0, 1, 2, 3, 8, 9, 10, 11},
    {0, 1, 4, 5, 8, 9, 12, 13},
    {0, 2, 4, 6, 8, 10, 12, 14}
#else
    {0, 1, 4, 5},
    {0, 2, 4, 6}
#endif
};

/* The sums over the lanes of as many vectors as there are lanes: one in each lane, in their order. Each step adds the
 * upper halves of all blocks to the lower, and packs two vectors into one. */
INLINE lanes sum_vectors(lanes *vectors) {
    UNROLL for (int step = 0, size = LANES; step < TRANSPOSE_STEPS; step++, size /= 2)
        UNROLL for (int v = 0; v < size; v += 2) vectors[v / 2] =
            SHUFFLE(vectors[v], vectors[v + 1], LOWER_HALVES[step]) +
            SHUFFLE(vectors[v], vectors[v + 1], LOWER_HALVES[step] + size / 2);
    return vectors[0];
}

/* The scores of a group of queries with the `count` keys of a chunk: target[row][key]. */
INLINE void chunk_scores(const struct decode *problem, const float *query, const void *key, int64_t count,
                         float (*target)[CHUNK], const struct next next, const struct kind kind) {
    int64_t dim = problem->dim, terms = term_count(dim, kind.paired), padded = round_up_to_lanes(terms);
    const float factor = kind.paired ? problem->scale : 1.0f; /* floats have it in the query */
    for (int64_t j = 0; j < count; j += KEYS) {
        lanes sum[ROWS][KEYS] = {{{0}}};
        const void *rows[KEYS];
        UNROLL for (int i = 0; i < KEYS; i++) rows[i] =
            row_at(key, j + i < count ? j + i : count - 1, problem->key_row, kind.dtype);
        for (int i = 0; i < KEYS; i++) prefetch_row(next, j + i, kind);
        for (int64_t a = 0; a < terms; a += LANES) {
            lanes entry[KEYS];
            UNROLL for (int i = 0; i < KEYS; i++) entry[i] =
                load_terms(rows[i], a, dim, 1.0f, kind.dtype, kind.whole, kind.paired);
            UNROLL for (int r = 0; r < kind.rows; r++) {
                lanes own = load(query + r * padded + a);
                UNROLL for (int i = 0; i < KEYS; i++) sum[r][i] =
                    kind.paired ? add_pairs(sum[r][i], own, entry[i]) : sum[r][i] + own * entry[i];
            }
        }
        float sums[ROWS * KEYS];
        if (kind.rows == 1)
            UNROLL for (int i = 0; i < KEYS; i++) sums[i] = sum_lanes(sum[0][i]) * factor;
        else
            UNROLL for (int s = 0; s < ROWS * KEYS; s += LANES) store(sums + s, sum_vectors(&sum[0][0] + s) * factor);
        UNROLL for (int r = 0; r < kind.rows; r++) memcpy(target[r] + j, sums + r * KEYS, KEYS * sizeof(float));
    }
}

/* One more chunk of a row's online softmax: scores become terms of weights. Returns the factor of the earlier chunks'
 * sums. */
INLINE float online_softmax(float *scores, float *maximum, float *total, const int paired) {
    lanes limit = broadcast(*maximum); /* NaN is no maximum */
    UNROLL for (int j = 0; j < CHUNK; j += LANES) limit = max_lanes(load(scores + j), limit);
    float now = max_of_lanes(limit), shift = now == -INFINITY ? 0.0f : now;
    float rescale = *maximum == -INFINITY ? 0.0f : expf(*maximum - shift);
    lanes sum = {0};
    for (int j = 0; j < CHUNK; j += LANES) {
        lanes weight = exp_or_zero(load(scores + j) - shift);
        store_terms(scores, j, weight, paired);
        sum += weight;
    }
    *total = *total * rescale + sum_lanes(sum);
    *maximum = now;
    return rescale;
}

/* The term of a sum over rows from a column on: a row's entries, or those of two rows. */
INLINE lanes load_terms_of_rows(const void *rows, int64_t term, int64_t stride, int64_t count, int64_t column,
                                int64_t dim, const struct kind kind) {
    if (!kind.paired) return load_entries(row_at(rows, term, stride, kind.dtype), column, dim, kind.dtype, kind.whole);
    return pair_rows(rows, term, stride, count, column, dim, kind.whole);
}

/* Prefetches as many rows as a term has. */
INLINE void prefetch_terms(const struct next next, int64_t term, const struct kind kind) {
    if (!kind.paired) prefetch_row(next, term, kind);
    if (kind.paired) prefetch_row(next, 2 * term, kind), prefetch_row(next, 2 * term + 1, kind);
}

/* output = rescale * output + weights . values, for a group of rows and the `count` values of a chunk. */
INLINE void add_values(const struct decode *problem, float (*weights)[CHUNK], const float *rescale, const void *value,
                       int64_t count, float *output, const struct next next, const struct kind kind) {
    int64_t dim = problem->value_dim;
    for (int64_t a = 0; a < dim; a += VECTORS * LANES) {
        lanes sum[ROWS][VECTORS] = {{{0}}}; /* of this chunk alone: rounded once per chunk */
        for (int64_t j = 0; j < term_count(count, kind.paired); j++) {
            lanes entry[VECTORS];
            if (a == 0) prefetch_terms(next, j, kind);
            UNROLL for (int v = 0; v < VECTORS; v++) entry[v] =
                load_terms_of_rows(value, j, problem->value_row, count, a + v * LANES, dim, kind);
            UNROLL for (int r = 0; r < kind.rows; r++) {
                lanes own = broadcast_bits(weights[r] + j);
                UNROLL for (int v = 0; v < VECTORS; v++) sum[r][v] =
                    kind.paired ? add_pairs(sum[r][v], own, entry[v]) : sum[r][v] + entry[v] * own;
            }
        }
        UNROLL for (int r = 0; r < kind.rows; r++) UNROLL for (int v = 0; v < VECTORS; v++) {
            int64_t begin = a + v * LANES;
            lanes earlier = load_entries(output + r * dim, begin, dim, 0, kind.whole);
            if (begin < dim)
                store_partial(output + r * dim + begin, earlier * rescale[r] + sum[r][v],
                              kind.whole ? LANES : dim - begin);
        }
    }
}

INLINE void add_bias(const struct decode *problem, const float *bias, int64_t row, int64_t first, int64_t count,
                     float *scores) {
    if (bias && row < problem->rows)
        for (int64_t j = 0; j < count; j++) scores[j] += bias[row * problem->bias_row + first + j];
    if (problem->limits && row < problem->rows && problem->limits[row] < first + count)
        count = problem->limits[row] < first ? 0 : problem->limits[row] - first;
    for (int64_t j = count; j < CHUNK; j++) scores[j] = -INFINITY;
}

/* The state of a thread for the rows of a head, with rows of padding: the scaled query, 0 there and beyond dim, and
 * what was added up of the values. */
struct scratch_rows {
    int64_t rows;
    float *query, *output;
};

INLINE void pack_query(const struct decode *problem, int64_t batch, int64_t own, const struct scratch_rows *scratch,
                       const int paired) {
    int64_t padded = round_up_to_lanes(term_count(problem->dim, paired));
    const void *query =
        row_at(problem->query, 1, batch * problem->query_batch + own * problem->query_head, problem->query_dtype);
    for (int64_t r = 0; r < scratch->rows; r++)
        for (int64_t a = 0; a < padded; a += LANES)
            store(scratch->query + r * padded + a,
                  r < problem->rows ? load_terms(row_at(query, r, problem->query_row, problem->query_dtype), a,
                                                 problem->dim, problem->scale, problem->query_dtype, 0, paired)
                                    : broadcast(0.0f));
}

/* Writes the output of a part: sums, in rows of a stride, divided by their total weight, and the log-sum-exp. */
INLINE void write_part(const struct decode *problem, int64_t unit, const float *sums, int64_t stride,
                       const float *maximum, const float *total) {
    float *output = problem->output + unit * problem->rows * problem->value_dim,
          *lse = problem->lse + unit * problem->rows;
    for (int64_t r = 0; r < problem->rows; r++) {
        float share = total[r] == 0.0f ? 0.0f : 1.0f / total[r];
        for (int64_t a = 0; a < problem->value_dim; a++) output[r * problem->value_dim + a] = sums[r * stride + a] * share;
        lse[r] = total[r] == 0.0f ? -INFINITY : maximum[r] + logf(total[r]);
    }
}

/* All rows of one head with one part of its keys. */
INLINE void process_part(const struct decode *problem, const struct scratch_rows *scratch, int64_t head, int64_t part,
                         const struct kind kind) {
    int64_t batch = head / problem->heads, own = head % problem->heads,
            padded = round_up_to_lanes(term_count(problem->dim, kind.paired));
    int64_t first = part * problem->part,
            end = first + problem->part < problem->columns ? first + problem->part : problem->columns;
    const void *key = row_at(problem->key, 1, batch * problem->key_batch + own * problem->key_head, kind.dtype);
    const void *value =
        row_at(problem->value, 1, batch * problem->value_batch + own * problem->value_head, kind.dtype);
    const float *bias = problem->bias ? problem->bias + batch * problem->bias_batch + own * problem->bias_head : 0;
    float maximum[MOST_ROWS], total[MOST_ROWS] = {0};
    for (int64_t r = 0; r < scratch->rows; r++) maximum[r] = -INFINITY;
    pack_query(problem, batch, own, scratch, kind.paired);
    memset(scratch->output, 0, (size_t)(scratch->rows * problem->value_dim) * sizeof(float));
    for (; first < end; first += CHUNK) {
        int64_t count = end - first < CHUNK ? end - first : CHUNK;
        const void *keys = row_at(key, first, problem->key_row, kind.dtype),
                   *values = row_at(value, first, problem->value_row, kind.dtype);
        const void *next_keys = end - first > CHUNK ? row_at(keys, CHUNK, problem->key_row, kind.dtype) : 0;
        for (int64_t row = 0; row < scratch->rows; row += kind.rows) {
            float weights[ROWS][CHUNK], rescale[ROWS];
            struct next value_next = {row ? 0 : values, problem->value_row, problem->value_dim};
            struct next key_next = {row + kind.rows < scratch->rows ? 0 : next_keys, problem->key_row, problem->dim};
            chunk_scores(problem, scratch->query + row * padded, keys, count, weights, value_next, kind);
            for (int64_t r = 0; r < kind.rows; r++) {
                add_bias(problem, bias, row + r, first, count, weights[r]);
                rescale[r] = online_softmax(weights[r], maximum + row + r, total + row + r, kind.paired);
            }
            add_values(problem, weights, rescale, values, count, scratch->output + row * problem->value_dim, key_next,
                       kind);
        }
    }
    write_part(problem, head * problem->parts + part, scratch->output, problem->value_dim, maximum, total);
}

INLINE void process_unit(const struct decode *problem, const struct scratch_rows *scratch_rows, int64_t unit,
                         const int dtype, const int whole) {
    int64_t head = unit / problem->parts, part = unit % problem->parts;
    if (problem->rows == 1) /* of which most is waiting for memory */
        process_part(problem, scratch_rows, head, part, (struct kind){dtype, whole, 1, 0});
    else if (in_pairs(dtype) && problem->query_dtype == dtype)
        process_part(problem, scratch_rows, head, part, (struct kind){dtype, whole, ROWS, 1});
    else
        process_part(problem, scratch_rows, head, part, (struct kind){dtype, whole, ROWS, 0});
}

INLINE void process_unit_in_lanes(const struct decode *problem, const struct lane_scratch *scratch, int64_t unit,
                                  const int dtype) {
    int64_t head = unit / problem->parts, first = unit % problem->parts * problem->part, end = first + problem->part;
    end = end < problem->columns ? end : problem->columns;
    if (in_pairs(dtype) && problem->query_dtype == dtype)
        process_lanes(problem, scratch, head / problem->heads, head % problem->heads, first, end, dtype, 1);
    else
        process_lanes(problem, scratch, head / problem->heads, head % problem->heads, first, end, dtype, 0);
    write_part(problem, unit, scratch->output, round_up_to_lanes(problem->value_dim), scratch->maximum,
               scratch->total);
}

/* Takes one part of one head after another while any is left; any number of threads may call it at once. */
void EXPORTED(regard_decode)(struct decode *problem) {
    const int64_t group = VECTORS * LANES;
    const int whole = problem->dim % group == 0 && problem->value_dim % group == 0;
    int64_t rows = problem->rows == 1 ? 1 : (problem->rows + ROWS - 1) / ROWS * ROWS,
            query = rows * round_up_to_lanes(problem->dim), unit;
    int64_t floats = query + rows * problem->value_dim;
    const int rows_in_lanes = 2 * problem->rows > LANES;
    if (rows_in_lanes) floats = lane_scratch_floats(problem);
    float *numbers = aligned_alloc(64, (size_t)(floats * 4 + 64) / 64 * 64);
    if (!numbers) {
        problem->failed = 1;
        return;
    }
    struct scratch_rows scratch_rows = {rows, numbers, numbers + query};
    struct lane_scratch lane_memory = lane_scratch(problem, numbers);
    while ((unit = __atomic_fetch_add(&problem->next_unit, 1, __ATOMIC_RELAXED)) < problem->unit_count) {
        if (rows_in_lanes)
            BY_DTYPE(problem->dtype, process_unit_in_lanes(problem, &lane_memory, unit, DTYPE));
        else if (whole)
            BY_DTYPE(problem->dtype, process_unit(problem, &scratch_rows, unit, DTYPE, 1));
        else
            BY_DTYPE(problem->dtype, process_unit(problem, &scratch_rows, unit, DTYPE, 0));
    }
    free(numbers);
}
