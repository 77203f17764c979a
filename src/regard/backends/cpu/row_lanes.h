/* Many rows against a chunk of keys, with the rows in the lanes: no sum goes over lanes, and the softmax of all rows is
 * computed side by side. Keys and values of 16 bits are widened once for all rows; or, `paired`, bfloat16 is multiplied in
 * pairs, and weights are rounded to it (see load_terms). */
#ifndef REGARD_ROW_LANES_H
#define REGARD_ROW_LANES_H

#include "decode.h"
#include "prefetch.h"
#include "transpose.h"
#include "typed_rows.h"

#include <math.h>

/* Keys of a block of scores: times one or two vectors of rows, they are as many sums as there are registers for. */
enum { KEY_BLOCK = 8, NARROW_KEY_BLOCK = LANES == 16 ? 8 : 4 };

/* Values are read in panels of so many columns, which stay in the cache nearest to the processor for all rows. */
enum { PANEL_VECTORS = LANES == 16 ? 4 : 2, PANEL = PANEL_VECTORS * LANES, ROW_GROUP = 4 };

/* So many entries of keys and so many values are multiplied between fetches. */
enum { SCORE_STEP = 16, VALUE_STEP = 4 };

/* The memory of a thread. `rows`: those of the problem and of padding, whole vectors. */
struct lane_scratch {
    int64_t rows;
    float *query;   /* (terms, rows), floats times the scale; 0 in rows of padding */
    float *keys;    /* (KEY_BLOCK, terms), a copy where they cannot be read as they are */
    float *values;  /* (terms of CHUNK keys, PANEL), likewise */
    float *weights; /* (CHUNK, rows): scores, then e^(score - maximum), (terms of CHUNK keys, rows) */
    float *output;  /* (rows, value_dim) */
    float *maximum, *total, *rescale; /* (rows) */
};

INLINE int64_t lane_scratch_floats(const struct decode *problem) {
    int64_t rows = round_up_to_lanes(problem->rows);
    return rows * (problem->dim + CHUNK + round_up_to_lanes(problem->value_dim) + 3) +
           KEY_BLOCK * round_up_to_lanes(problem->dim) + CHUNK * PANEL;
}

/* `memory` has `lane_scratch_floats`, aligned to a vector; so are all parts that are read as vectors. */
INLINE struct lane_scratch lane_scratch(const struct decode *problem, float *memory) {
    struct lane_scratch scratch = {.rows = round_up_to_lanes(problem->rows)};
    int64_t rows = scratch.rows;
    scratch.query = memory;
    scratch.weights = scratch.query + rows * problem->dim;
    scratch.maximum = scratch.weights + rows * CHUNK;
    scratch.total = scratch.maximum + rows;
    scratch.rescale = scratch.total + rows;
    scratch.output = scratch.rescale + rows;
    scratch.keys = scratch.output + rows * round_up_to_lanes(problem->value_dim);
    scratch.values = scratch.keys + KEY_BLOCK * round_up_to_lanes(problem->dim);
    return scratch;
}

/* The rows of a chunk that are read next: line after line is fetched from memory, evenly over the steps of other work. */
struct upcoming {
    const char *row;
    int64_t rows, stride, bytes, byte; /* the rows left; in bytes: their stride and size, and how far this one is */
    int64_t lines, steps, owed;
};

INLINE struct upcoming upcoming(const void *rows, int64_t stride, int64_t dim, int64_t count, int64_t steps,
                                const int dtype) {
    int64_t bytes = dim * entry_bytes(dtype);
    return (struct upcoming){rows, count, stride * entry_bytes(dtype), bytes, 0, count * ((bytes + LINE - 1) / LINE), steps, 0};
}

/* Fetches the lines of one step. Where the next page begins is sought long before it is read. */
INLINE void fetch_step(struct upcoming *next) {
    for (next->owed += next->lines; next->owed >= next->steps && next->rows > 0; next->owed -= next->steps) {
        fetch_line(next->row + next->byte);
        next->byte += LINE;
        if (next->byte < next->bytes) continue;
        find_page_ahead(next->row, next->bytes);
        next->byte = 0;
        next->row += next->stride;
        next->rows--;
    }
}

/* Entries of a row from a column on as float32, up to the end of a vector; 0 beyond the row. */
INLINE void widen_entries(const void *row, int64_t begin, int64_t end, int64_t dim, float *target, const int dtype) {
    int64_t whole = end < dim ? end : dim, a = begin;
    for (; a + LANES <= whole; a += LANES) store(target + a - begin, load_entries(row, a, dim, dtype, 1));
    for (; a < end; a += LANES) store(target + a - begin, load_entries(row, a, dim, dtype, 0));
}

/* The terms of a row up to the end of a vector. */
INLINE void copy_terms(const void *row, int64_t dim, float *target, const int dtype, const int paired) {
    if (!paired)
        widen_entries(row, 0, round_up_to_lanes(dim), dim, target, dtype);
    else
        for (int64_t a = 0; a < term_count(dim, 1); a += LANES) store(target + a, load_terms(row, a, dim, 1.0f, dtype, 0, 1));
}

/* Scores of a block of `keys` with `vectors` of rows: weights[key][row]. */
INLINE void score_block(const struct lane_scratch *scratch, const float *const *key, int64_t terms, float factor,
                        int64_t row, float *weights, struct upcoming *next, const int keys, const int vectors,
                        const int paired) {
    lanes sum[KEY_BLOCK][2] = {{{0}}};
    const float *query = scratch->query + row;
    for (int64_t a = 0; a < terms; a++, query += scratch->rows) {
        if (a % SCORE_STEP == 0) fetch_step(next);
        lanes own[2];
        UNROLL for (int v = 0; v < vectors; v++) own[v] = load(query + v * LANES);
        UNROLL for (int i = 0; i < keys; i++) {
            lanes entry = broadcast_bits(key[i] + a);
            UNROLL for (int v = 0; v < vectors; v++) sum[i][v] =
                paired ? add_pairs(sum[i][v], entry, own[v]) : sum[i][v] + entry * own[v];
        }
    }
    UNROLL for (int i = 0; i < keys; i++) UNROLL for (int v = 0; v < vectors; v++)
        store(weights + i * scratch->rows + row + v * LANES, paired ? sum[i][v] * factor : sum[i][v]);
}

/* The scores of all rows with the `count` keys of a chunk; those of the last key beyond it. */
INLINE void lane_scores(const struct decode *problem, const struct lane_scratch *scratch, const void *key,
                        const void *value, int64_t count, const int dtype, const int paired) {
    int64_t dim = problem->dim, padded = round_up_to_lanes(dim), pairs = scratch->rows / (2 * LANES);
    int64_t terms = term_count(dim, paired), blocks = pairs * (KEY_BLOCK / NARROW_KEY_BLOCK) + scratch->rows / LANES % 2,
            steps = (count + KEY_BLOCK - 1) / KEY_BLOCK * blocks * ((terms + SCORE_STEP - 1) / SCORE_STEP);
    const int as_it_is = dtype == FLOAT32 || (paired && dim % 2 == 0);
    struct upcoming next = upcoming(value, problem->value_row, problem->value_dim, count, steps, dtype);
    for (int64_t j = 0; j < count; j += KEY_BLOCK) {
        const float *rows[KEY_BLOCK];
        for (int i = 0; i < KEY_BLOCK; i++) {
            const void *own = row_at(key, j + i < count ? j + i : count - 1, problem->key_row, dtype);
            rows[i] = as_it_is ? own : scratch->keys + i * padded;
            if (!as_it_is) copy_terms(own, dim, scratch->keys + i * padded, dtype, paired);
        }
        float *weights = scratch->weights + j * scratch->rows;
        int64_t row = 0;
        for (; row + 2 * LANES <= scratch->rows; row += 2 * LANES)
            UNROLL for (int i = 0; i < KEY_BLOCK; i += NARROW_KEY_BLOCK) score_block(
                scratch, rows + i, terms, problem->scale, row, weights + i * scratch->rows, &next, NARROW_KEY_BLOCK, 2,
                paired);
        if (row < scratch->rows)
            score_block(scratch, rows, terms, problem->scale, row, weights, &next, KEY_BLOCK, 1, paired);
    }
}

/* Adds the bias of `count` keys from `first` on. */
APART void add_lane_bias(const struct decode *problem, const struct lane_scratch *scratch, const float *bias,
                         int64_t first, int64_t count) {
    for (int64_t row = 0; row < problem->rows; row += LANES)
        for (int64_t j = 0; j < count; j += LANES) {
            lanes block[LANES];
            for (int l = 0; l < LANES; l++)
                block[l] = row + l < problem->rows ? load_entries(bias + (row + l) * problem->bias_row + first, j,
                                                                  count, FLOAT32, 0)
                                                   : broadcast(0.0f);
            transpose(block);
            for (int l = 0; l < LANES; l++) {
                float *target = scratch->weights + (j + l) * scratch->rows + row;
                store(target, load(target) + block[l]);
            }
        }
}

/* Sets scores to -infinity from each row's limit on. */
APART void apply_limits(const struct decode *problem, const struct lane_scratch *scratch, int64_t first,
                        int64_t count) {
    for (int64_t j = 0; j < count; j++)
        for (int64_t row = 0; row < problem->rows; row++)
            if (first + j >= problem->limits[row]) scratch->weights[j * scratch->rows + row] = -INFINITY;
}

/* One more chunk of the online softmax of all rows: scores become terms of weights, and `rescale` the factors of earlier
 * sums. */
INLINE void lane_softmax(const struct lane_scratch *scratch, int64_t count, const int paired) {
    const lanes none = broadcast(-INFINITY);
    for (int64_t row = 0; row < scratch->rows; row += LANES) {
        float *weights = scratch->weights + row;
        lanes before = load(scratch->maximum + row), maximum = before, sum = {0};
        for (int64_t j = 0; j < count; j++) maximum = max_lanes(load(weights + j * scratch->rows), maximum);
        bits nothing = maximum == none;
        lanes shift = (lanes)(~nothing & (bits)maximum), rescale = exp_or_zero(before - shift);
        for (int64_t j = 0; j < count; j++) {
            lanes weight = exp_or_zero(load(weights + j * scratch->rows) - shift);
            sum += weight;
            if (paired) {
                lanes next = {0};
                if (++j < count) next = exp_or_zero(load(weights + j * scratch->rows) - shift);
                sum += next;
                store(weights + j / 2 * scratch->rows, round_to_pairs(weight, next));
            } else
                store(weights + j * scratch->rows, weight);
        }
        store(scratch->maximum + row, maximum);
        store(scratch->rescale + row, rescale);
        store(scratch->total + row, load(scratch->total + row) * rescale + sum);
    }
}

/* output = rescale * output + weights . values, for a group of rows and the columns of a panel from `begin` on. */
INLINE void add_panel(const struct decode *problem, const struct lane_scratch *scratch, const float *value,
                      int64_t stride, int64_t begin, int64_t row, int64_t count, struct upcoming *next,
                      const int whole, const int paired) {
    lanes sum[ROW_GROUP][PANEL_VECTORS] = {{{0}}}; /* of this chunk alone: rounded once per chunk */
    int64_t dim = problem->value_dim, padded = round_up_to_lanes(dim);
    const float *weights = scratch->weights + row;
    for (int64_t j = 0; j < term_count(count, paired); j++, weights += scratch->rows) {
        if (j % VALUE_STEP == 0) fetch_step(next);
        lanes entry[PANEL_VECTORS];
        UNROLL for (int v = 0; v < PANEL_VECTORS; v++) entry[v] =
            whole ? load(value + j * stride + v * LANES)
                  : load_entries(value + j * stride, v * LANES, dim - begin, FLOAT32, 0);
        UNROLL for (int r = 0; r < ROW_GROUP; r++) {
            lanes own = broadcast_bits(weights + r);
            UNROLL for (int v = 0; v < PANEL_VECTORS; v++) sum[r][v] =
                paired ? add_pairs(sum[r][v], own, entry[v]) : sum[r][v] + own * entry[v];
        }
    }
    UNROLL for (int r = 0; r < ROW_GROUP; r++) UNROLL for (int v = 0; v < PANEL_VECTORS; v++) {
        if (begin + v * LANES >= dim) continue;
        float *target = scratch->output + (row + r) * padded + begin + v * LANES;
        store(target, load(target) * scratch->rescale[row + r] + sum[r][v]);
    }
}

/* Pairs of values, of a key and the next one, in a panel of columns. */
INLINE void pair_panel(const void *value, int64_t stride, int64_t count, int64_t begin, int64_t dim, float *panel) {
    for (int64_t j = 0; j < term_count(count, 1); j++, panel += PANEL)
        UNROLL for (int v = 0; v < PANEL_VECTORS; v++)
            store(panel + v * LANES, pair_rows(value, j, stride, count, begin + v * LANES, dim, 0));
}

/* Adds the `count` values of a chunk to the output, while the next `key_count` keys are fetched. */
INLINE void lane_values(const struct decode *problem, const struct lane_scratch *scratch, const void *value,
                        int64_t count, const void *next_key, int64_t key_count, const int dtype, const int paired) {
    int64_t dim = problem->value_dim, groups = (problem->rows + ROW_GROUP - 1) / ROW_GROUP,
            steps = (dim + PANEL - 1) / PANEL * groups * ((term_count(count, paired) + VALUE_STEP - 1) / VALUE_STEP);
    struct upcoming next = upcoming(next_key, problem->key_row, problem->dim, key_count, steps, dtype);
    for (int64_t begin = 0; begin < dim; begin += PANEL) {
        const float *panel = (const float *)value + begin;
        int64_t stride = problem->value_row;
        int whole = begin + PANEL <= dim;
        if (paired)
            pair_panel(value, stride, count, begin, dim, scratch->values);
        else if (dtype != FLOAT32)
            for (int64_t j = 0; j < count; j++)
                widen_entries(row_at(value, j, stride, dtype), begin, begin + PANEL, dim, scratch->values + j * PANEL,
                              dtype);
        if (dtype != FLOAT32) panel = scratch->values, stride = PANEL, whole = 1;
        for (int64_t row = 0; row < groups * ROW_GROUP; row += ROW_GROUP)
            if (whole)
                add_panel(problem, scratch, panel, stride, begin, row, count, &next, 1, paired);
            else
                add_panel(problem, scratch, panel, stride, begin, row, count, &next, 0, paired);
    }
}

APART void pack_query_lanes(const struct decode *problem, const struct lane_scratch *scratch, int64_t batch,
                            int64_t head, int paired) {
    const int64_t terms = term_count(problem->dim, paired);
    const void *query =
        row_at(problem->query, 1, batch * problem->query_batch + head * problem->query_head, problem->query_dtype);
    memset(scratch->query, 0, (size_t)(scratch->rows * terms) * sizeof(float));
    for (int64_t row = 0; row < problem->rows; row++)
        for (int64_t a = 0; a < terms; a += LANES) {
            int32_t apart[LANES];
            lanes own = load_terms(row_at(query, row, problem->query_row, problem->query_dtype), a, problem->dim,
                                   problem->scale, problem->query_dtype, 0, paired);
            memcpy(apart, &own, sizeof(own));
            for (int64_t l = 0; l < LANES && a + l < terms; l++)
                memcpy(scratch->query + (a + l) * scratch->rows + row, apart + l, sizeof(float));
        }
}

/* All rows of one head with the keys in [first, end). */
INLINE void process_lanes(const struct decode *problem, const struct lane_scratch *scratch, int64_t batch, int64_t head,
                          int64_t first, int64_t end, const int dtype, const int paired) {
    const void *key = row_at(problem->key, 1, batch * problem->key_batch + head * problem->key_head, dtype),
               *value = row_at(problem->value, 1, batch * problem->value_batch + head * problem->value_head, dtype);
    const float *bias = problem->bias ? problem->bias + batch * problem->bias_batch + head * problem->bias_head : 0;
    pack_query_lanes(problem, scratch, batch, head, paired);
    memset(scratch->output, 0,
           (size_t)(scratch->rows * round_up_to_lanes(problem->value_dim)) * sizeof(float));
    memset(scratch->total, 0, (size_t)scratch->rows * sizeof(float));
    for (int64_t row = 0; row < scratch->rows; row += LANES) store(scratch->maximum + row, broadcast(-INFINITY));
    for (; first < end; first += CHUNK) {
        int64_t count = end - first < CHUNK ? end - first : CHUNK, after = end - first - count;
        const void *keys = row_at(key, first, problem->key_row, dtype),
                   *values = row_at(value, first, problem->value_row, dtype);
        lane_scores(problem, scratch, keys, values, count, dtype, paired);
        if (bias) add_lane_bias(problem, scratch, bias, first, count);
        if (problem->limits && first + count > problem->least_limit) apply_limits(problem, scratch, first, count);
        lane_softmax(scratch, count, paired);
        lane_values(problem, scratch, values, count, row_at(keys, CHUNK, problem->key_row, dtype),
                    after < CHUNK ? after : CHUNK, dtype, paired);
    }
}

#endif
