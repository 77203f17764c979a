/* A few rows against many keys, read once: scores, the online softmax, and the sum of values, chunk by chunk.
 *
 * Source: Milakov and Gimelshein 2018 (arXiv 1805.02867) for the softmax, Dao, Haziza, Massa and Sizov 2023 (flash
 * decoding) for the parts. */
#include "decode.h"
#include "prefetch.h"
#include "aligned_memory.h"
#include "row_lanes.h"
#include "typed_rows.h"

#include <math.h>

/* Few rows are computed as 1, ROWS or twice ROWS, with rows of padding; more than half as many as there are lanes go in
 * the lanes. */
enum { ROWS = LANES == 4 ? 2 : 4 };

/* How many keys, or vectors of a value, are read at once for ROWS rows: as many running sums as the processor has room
 * for beside what is read. The sums of keys fill one vector. */
enum { KEYS = LANES / ROWS, VECTORS = LANES == 16 ? 4 : 2 };

/* Constants that the compiler specialises the code for: the dtype of keys and values, dims of whole vectors of pairs,
 * how many rows there are with those of padding, and whether bfloat16 is multiplied in pairs (see load_terms). */
struct kind {
    int dtype, whole, rows, paired;
};

/* For twice ROWS rows half as many keys, or vectors, are read at once. */
INLINE int at_once(const int most, const struct kind kind) { return kind.rows > ROWS ? most / 2 : most; }

/* Where the term of a row and a key, or two keys, stands among the weights of a chunk: (blocks, rows, keys of a block),
 * where a block of keys with all rows is one vector of scores. */
INLINE int64_t place_of(int64_t row, int64_t term, const int rows, const int paired) {
    const int block = (LANES / rows) >> paired;
    return (term / block * rows + row) * block + term % block;
}

/* Rows that are read next: they are fetched from memory while there is other work to do. None where `rows` is null. */
struct next {
    const void *rows;
    int64_t stride, entries;
};

/* Fetches the entries of a row from one to another. */
INLINE void prefetch_entries(const struct next next, int64_t number, int64_t begin, int64_t end,
                             const struct kind kind) {
    if (!next.rows) return;
    const char *bytes = row_at(next.rows, number, next.stride, kind.dtype);
    int64_t size = entry_bytes(kind.dtype);
    for (int64_t byte = begin * size; byte < end * size; byte += LINE) fetch_line(bytes + byte);
    if (begin == 0) find_page_ahead(bytes, next.entries * size);
}

INLINE void prefetch_row(const struct next next, int64_t number, const struct kind kind) {
    prefetch_entries(next, number, 0, next.entries, kind);
}

/* The scores of the queries with the `count` keys of a chunk, at the places of their rows and keys. */
INLINE void chunk_scores(const struct decode *problem, const float *query, const void *key, int64_t count,
                         float *scores, const struct next next, const struct kind kind) {
    int64_t dim = problem->dim, terms = term_count(dim, kind.paired), padded = round_up_to_lanes(terms);
    const float factor = kind.paired ? problem->scale : 1.0f; /* floats have it in the query */
    const int keys = at_once(KEYS, kind);
    for (int64_t j = 0; j < count; j += keys) {
        lanes sum[ROWS * KEYS] = {{0}}; /* (rows, keys) */
        const void *rows[KEYS];
        UNROLL for (int i = 0; i < keys; i++) rows[i] =
            row_at(key, j + i < count ? j + i : count - 1, problem->key_row, kind.dtype);
        for (int i = 0; i < keys; i++) prefetch_row(next, j + i, kind);
        for (int64_t a = 0; a < terms; a += LANES) {
            lanes entry[KEYS];
            UNROLL for (int i = 0; i < keys; i++) entry[i] =
                load_terms(rows[i], a, dim, 1.0f, kind.dtype, kind.whole, kind.paired);
            UNROLL for (int r = 0; r < kind.rows; r++) {
                lanes own = load(query + r * padded + a);
                UNROLL for (int i = 0; i < keys; i++) {
                    lanes *one = sum + r * keys + i;
                    *one = kind.paired ? add_pairs(*one, own, entry[i]) : *one + own * entry[i];
                }
            }
        }
        if (kind.rows == 1)
            UNROLL for (int i = 0; i < keys; i++) scores[j + i] = sum_lanes(sum[i]) * factor;
        else
            store(scores + j * kind.rows, sum_vectors(sum) * factor);
    }
}

/* The softmax of all rows so far: the largest score of a row, in all lanes that its keys of a block have, and the sums
 * of its weights over the keys of each of these lanes. */
struct softmax {
    lanes maximum, total;
};

/* One more chunk of the softmax: scores become terms of weights. Returns the factors of the earlier chunks' sums. */
INLINE lanes online_softmax(struct softmax *softmax, float *scores, const struct kind kind) {
    const int count = kind.rows * CHUNK;
    lanes limit = softmax->maximum, sum = {0};
    UNROLL for (int i = 0; i < count; i += LANES) limit = max_lanes(load(scores + i), limit); /* NaN is no maximum */
    limit = max_of_blocks(limit, LANES / kind.rows);
    lanes shift = (lanes)((bits)limit & (limit != broadcast(-INFINITY)));
    lanes rescale = exp_or_zero(softmax->maximum - shift);
    for (int i = 0; i < count; i += LANES) {
        lanes weight = exp_or_zero(load(scores + i) - shift);
        store_terms(scores, i, weight, kind.paired);
        sum += weight;
    }
    *softmax = (struct softmax){limit, softmax->total * rescale + sum};
    return rescale;
}

/* The term of a sum over rows from a column on: a row's entries, or those of two rows. */
INLINE lanes load_terms_of_rows(const void *rows, int64_t term, int64_t stride, int64_t count, int64_t column,
                                int64_t dim, const struct kind kind) {
    if (!kind.paired) return load_entries(row_at(rows, term, stride, kind.dtype), column, dim, kind.dtype, kind.whole);
    return pair_rows(rows, term, stride, count, column, dim, kind.whole);
}

/* Fetches as many rows as a term has, a part of their entries each time, so that memory is never waited for. */
INLINE void prefetch_terms(const struct next next, int64_t term, int64_t begin, int64_t end, const struct kind kind) {
    const int rows = kind.paired ? 2 : 1;
    for (int i = 0; i < rows; i++) prefetch_entries(next, rows * term + i, begin, end, kind);
}

/* output = rescale * output + weights . values, for all rows, some vectors of columns and the `count` values of a
 * chunk. factors: rescale, in memory. */
INLINE void add_columns(const struct decode *problem, const float *weights, const float *factors, const void *value,
                        int64_t count, float *output, int64_t column, const int vectors, const struct next next,
                        const struct kind kind) {
    int64_t dim = problem->value_dim, end = column + vectors * LANES;
    int64_t next_end = end < dim && end < next.entries ? end : next.entries;
    lanes sum[ROWS * VECTORS] = {{0}}; /* (rows, vectors) of this chunk alone: rounded once per chunk */
    for (int64_t j = 0; j < term_count(count, kind.paired); j++) {
        lanes entry[VECTORS];
        prefetch_terms(next, j, column, next_end, kind);
        UNROLL for (int v = 0; v < vectors; v++) entry[v] =
            load_terms_of_rows(value, j, problem->value_row, count, column + v * LANES, dim, kind);
        UNROLL for (int r = 0; r < kind.rows; r++) {
            lanes own = broadcast_bits(weights + place_of(r, j, kind.rows, kind.paired));
            UNROLL for (int v = 0; v < vectors; v++) {
                lanes *one = sum + r * vectors + v;
                *one = kind.paired ? add_pairs(*one, own, entry[v]) : *one + entry[v] * own;
            }
        }
    }
    UNROLL for (int r = 0; r < kind.rows; r++) UNROLL for (int v = 0; v < vectors; v++) {
        int64_t begin = column + v * LANES;
        lanes earlier = load_entries(output + r * dim, begin, dim, 0, kind.whole);
        lanes now = earlier * factors[r * (LANES / kind.rows)] + sum[r * vectors + v];
        store_partial(output + r * dim + begin, now, kind.whole ? LANES : dim - begin);
    }
}

/* The same for all columns. */
INLINE void add_values(const struct decode *problem, const float *weights, lanes rescale, const void *value,
                       int64_t count, float *output, const struct next next, const struct kind kind) {
    int64_t dim = problem->value_dim, column = 0;
    const int most = at_once(VECTORS, kind);
    float factors[LANES];
    store(factors, rescale);
    for (; column + (most - 1) * LANES < dim; column += most * LANES)
        add_columns(problem, weights, factors, value, count, output, column, most, next, kind);
    if (most > 2 && column + LANES < dim) {
        add_columns(problem, weights, factors, value, count, output, column, 2, next, kind);
        column += 2 * LANES;
    }
    if (column < dim) add_columns(problem, weights, factors, value, count, output, column, 1, next, kind);
}

/* Adds the bias of the pairs of a chunk to their scores; where there is no pair, the score is -inf. */
INLINE void add_bias(const struct decode *problem, const float *bias, int64_t first, int64_t count, float *scores,
                     const struct kind kind) {
    for (int64_t r = 0; r < kind.rows; r++) {
        int64_t end = count;
        if (bias && r < problem->rows)
            for (int64_t j = 0; j < count; j++)
                scores[place_of(r, j, kind.rows, 0)] += bias[r * problem->bias_row + first + j];
        if (problem->limits && r < problem->rows && problem->limits[r] < first + count)
            end = problem->limits[r] < first ? 0 : problem->limits[r] - first;
        for (int64_t j = end; j < CHUNK; j++) scores[place_of(r, j, kind.rows, 0)] = -INFINITY;
    }
}

/* The state of a thread for the rows of a head, with rows of padding: the scaled query, 0 there and beyond dim, and
 * what was added up of the values. */
struct scratch_rows {
    int64_t rows;
    float *query, *output;
};

APART void pack_query(const struct decode *problem, int64_t batch, int64_t own, const struct scratch_rows *scratch,
                      int paired) {
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
APART void write_part(const struct decode *problem, int64_t unit, const float *sums, int64_t stride,
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
    int64_t batch = head / problem->heads, own = head % problem->heads;
    int64_t first = part * problem->part,
            end = first + problem->part < problem->columns ? first + problem->part : problem->columns;
    const void *key = row_at(problem->key, 1, batch * problem->key_batch + own * problem->key_head, kind.dtype);
    const void *value =
        row_at(problem->value, 1, batch * problem->value_batch + own * problem->value_head, kind.dtype);
    const float *bias = problem->bias ? problem->bias + batch * problem->bias_batch + own * problem->bias_head : 0;
    struct softmax softmax = {broadcast(-INFINITY), {0}};
    pack_query(problem, batch, own, scratch, kind.paired);
    memset(scratch->output, 0, (size_t)(scratch->rows * problem->value_dim) * sizeof(float));
    for (; first < end; first += CHUNK) {
        int64_t count = end - first < CHUNK ? end - first : CHUNK;
        const void *keys = row_at(key, first, problem->key_row, kind.dtype),
                   *values = row_at(value, first, problem->value_row, kind.dtype);
        float weights[2 * ROWS * CHUNK];
        /* A whole chunk ahead: rows of 16 bits are read up to a fifth faster than fetched in the chunk that reads them. */
        struct next value_next = {0, problem->value_row, problem->value_dim}, key_next = {0, problem->key_row, problem->dim};
        if (end - first > CHUNK) value_next.rows = row_at(values, CHUNK, problem->value_row, kind.dtype);
        if (end - first > 2 * CHUNK) key_next.rows = row_at(keys, 2 * CHUNK, problem->key_row, kind.dtype);
        chunk_scores(problem, scratch->query, keys, count, weights, value_next, kind);
        add_bias(problem, bias, first, count, weights, kind);
        lanes rescale = online_softmax(&softmax, weights, kind);
        add_values(problem, weights, rescale, values, count, scratch->output, key_next, kind);
    }
    float maximum[2 * ROWS], total[2 * ROWS];
    for (int r = 0, block = LANES / kind.rows; r < kind.rows; r++) {
        maximum[r] = softmax.maximum[r * block], total[r] = 0.0f;
        for (int i = 0; i < block; i++) total[r] += softmax.total[r * block + i];
    }
    write_part(problem, head * problem->parts + part, scratch->output, problem->value_dim, maximum, total);
}

/* The same with the dims as the compiler's constant. */
INLINE void process_dims(const struct decode *problem, const struct scratch_rows *scratch, int64_t head, int64_t part,
                         int whole, const int dtype, const int rows, const int paired) {
    if (whole)
        process_part(problem, scratch, head, part, (struct kind){dtype, 1, rows, paired});
    else
        process_part(problem, scratch, head, part, (struct kind){dtype, 0, rows, paired});
}

/* Whether rows are multiplied in pairs; never a single one, most of whose time is waiting for memory. */
INLINE int is_paired(const struct decode *problem) {
    return PAIRS && problem->rows > 1 && problem->dtype == BFLOAT16 && problem->query_dtype == BFLOAT16;
}

INLINE void process_rows(const struct decode *problem, const struct scratch_rows *scratch, int64_t head, int64_t part,
                         int whole, const int dtype, const int rows) {
    if (in_pairs(dtype) && (ONLY_PAIRS || is_paired(problem)))
        process_dims(problem, scratch, head, part, whole, dtype, rows, 1);
    else
        process_dims(problem, scratch, head, part, whole, dtype, rows, 0);
}

#define PART (const struct decode *problem, const struct scratch_rows *scratch, int64_t head, int64_t part, int whole)
TABLE_BY_DTYPE(process_one_row, PART, process_dims(problem, scratch, head, part, whole, DTYPE, 1, 0))
TABLE_BY_DTYPE(process_few_rows, PART, process_rows(problem, scratch, head, part, whole, DTYPE, ROWS))
TABLE_BY_DTYPE(process_more_rows, PART, process_rows(problem, scratch, head, part, whole, DTYPE, 2 * ROWS))

INLINE void process_unit(const struct decode *problem, const struct scratch_rows *scratch, int64_t unit, int whole) {
    int64_t head = unit / problem->parts, part = unit % problem->parts;
    if (!ONLY_PAIRS && problem->rows == 1)
        process_one_row[problem->dtype](problem, scratch, head, part, whole);
    else if (LANES > 2 * ROWS && problem->rows > ROWS) /* fewer lanes have at most ROWS rows here */
        process_more_rows[problem->dtype](problem, scratch, head, part, whole);
    else
        process_few_rows[problem->dtype](problem, scratch, head, part, whole);
}

INLINE void process_unit_in_lanes(const struct decode *problem, const struct lane_scratch *scratch, int64_t unit,
                                  const int dtype) {
    int64_t head = unit / problem->parts, first = unit % problem->parts * problem->part, end = first + problem->part;
    end = end < problem->columns ? end : problem->columns;
    if (in_pairs(dtype) && (ONLY_PAIRS || is_paired(problem)))
        process_lanes(problem, scratch, head / problem->heads, head % problem->heads, first, end, dtype, 1);
    else
        process_lanes(problem, scratch, head / problem->heads, head % problem->heads, first, end, dtype, 0);
    write_part(problem, unit, scratch->output, round_up_to_lanes(problem->value_dim), scratch->maximum,
               scratch->total);
}

TABLE_BY_DTYPE(process_many_rows, (const struct decode *problem, const struct lane_scratch *scratch, int64_t unit),
               process_unit_in_lanes(problem, scratch, unit, DTYPE))

/* Takes one part of one head after another while any is left; any number of threads may call it at once. */
void EXPORTED(regard_decode)(struct decode *problem) {
    LEAVE_UNLESS(is_paired(problem), regard_decode, problem);
    const int64_t group = 2 * LANES; /* the entries of a vector of pairs */
    const int whole = problem->dim % group == 0 && problem->value_dim % group == 0;
    int64_t rows = problem->rows == 1 ? 1 : problem->rows > ROWS ? 2 * ROWS : ROWS,
            query = rows * round_up_to_lanes(problem->dim), unit;
    int64_t floats = query + rows * problem->value_dim;
    const int rows_in_lanes = 2 * problem->rows > LANES;
    if (rows_in_lanes) floats = lane_scratch_floats(problem);
    float *numbers = aligned_memory(floats * 4);
    if (!numbers) {
        problem->failed = 1;
        return;
    }
    struct scratch_rows scratch_rows = {rows, numbers, numbers + query};
    struct lane_scratch lane_memory = lane_scratch(problem, numbers);
    while ((unit = __atomic_fetch_add(&problem->next_unit, 1, __ATOMIC_RELAXED)) < problem->unit_count) {
        if (rows_in_lanes)
            process_many_rows[problem->dtype](problem, &lane_memory, unit);
        else
            process_unit(problem, &scratch_rows, unit, whole);
    }
    free_aligned(numbers);
}
