/* A few rows against keys and values that are stored as codes: one block of tokens after another, as decode.c does it for
 * numbers. Scores are sums over dims with tokens in the lanes, outputs sums over tokens with dims in the lanes, so that
 * both are the same product (code_products.h).
 *
 * Source: Milakov and Gimelshein 2018 (arXiv 1805.02867) for the softmax; Liu et al. 2024, KIVI (arXiv 2402.02750) for
 * parameters of keys by channel and of values by token. */
#include "packed_decode.h"
#include "aligned_memory.h"
#include "code_products.h"

#include <math.h>

/* A word of parameters: scale and offset. */
INLINE lanes scales_of(bits word) { return (lanes)(word & -0x10000); }
INLINE lanes offsets_of(bits word) { return (lanes)(word << 16); }

INLINE bits load_words(const int32_t *source, int64_t count) { return (bits)load_partial((const float *)source, count); }

/* Whether the products are those of bytes. */
INLINE int are_bytes(const struct packed_decode *problem) {
    return BYTES && problem->in_bytes && problem->key.code <= INT8 && problem->value.code <= INT8;
}

/* The same, as the constant that it is in a variant that leaves all else to another. */
INLINE int in_bytes(const struct packed_decode *problem) { return ONLY_PAIRS ? BYTES : are_bytes(problem); }

/* Where one head is in memory: its first block, and the one that is read, with the codes of the next one. */
struct head_rows {
    const int32_t *all_codes, *all_parameters;
    int64_t code_block, parameter_block; /* words of a block */
    const int32_t *codes, *parameters, *next;
};

/* Goes to a block of a head, whose next one is fetched meanwhile. */
INLINE void go_to(struct head_rows *rows, const int64_t *pages, int64_t block, int64_t last) {
    int64_t here = pages ? pages[block] : block, next = pages && block < last ? pages[block + 1] : here + 1;
    rows->codes = rows->all_codes + here * rows->code_block;
    rows->parameters = rows->all_parameters + here * rows->parameter_block;
    rows->next = rows->all_codes + next * rows->code_block;
}

INLINE struct head_rows head_rows(const struct packed_rows *all, int64_t batch, int64_t head, int64_t parameters) {
    return (struct head_rows){.all_codes = all->codes + batch * all->code_batch + head * all->code_head,
                              .all_parameters =
                                  all->parameters + batch * all->parameter_batch + head * all->parameter_head,
                              .code_block = TOKENS * all->dim * code_bits(all->code) / 32,
                              .parameter_block = parameters};
}

/* The memory of a thread. Rows are those of the problem and of padding, whole tiles. */
struct packed_scratch {
    int64_t rows, width; /* width: value dim, whole vectors */
    float *query;        /* (rows, dim), times the scale */
    struct left_rows queries, weights;
    float *sums;                /* (rows): of the query's entries, times offsets by channel */
    float *scores;              /* (rows, TOKENS) */
    float *output;              /* (rows, width) */
    float *maximum, *rescale;   /* (rows): the largest score so far, and what earlier sums are multiplied by */
    float *total, *constants;   /* (rows, LANES): sums of weights, and of weights times offsets, which all dims get */
};

INLINE int64_t tile_of(int64_t rows) { return rows == 1 ? 1 : ROW_TILE; }

INLINE int64_t padded_rows(int64_t rows) { return (rows + tile_of(rows) - 1) / tile_of(rows) * tile_of(rows); }

INLINE int64_t scratch_floats(const struct packed_decode *problem) {
    int64_t rows = padded_rows(problem->rows), dim = problem->key.dim, width = round_up_to_lanes(problem->value.dim);
    /* Bytes take half as many floats as there are numbers in a row: two for each. */
    return rows * (2 * dim + dim / 2 + 2 * TOKENS + TOKENS / 2 + width + 2 * LANES + 5) + 12 * LANES;
}

/* The next `count` floats of some memory, from a vector on. */
INLINE float *take(float **memory, int64_t count) {
    float *taken = *memory;
    *memory += round_up_to_lanes(count);
    return taken;
}

INLINE struct left_rows take_left(float **memory, int64_t rows, int64_t count, float *factor) {
    struct left_rows left = {rows, count, take(memory, rows * count), 0, 0, factor};
    left.high = (int8_t *)take(memory, rows * count / 4), left.low = (int8_t *)take(memory, rows * count / 4);
    return left;
}

INLINE struct packed_scratch packed_scratch(const struct packed_decode *problem, float *memory) {
    struct packed_scratch scratch = {.rows = padded_rows(problem->rows),
                                     .width = round_up_to_lanes(problem->value.dim)};
    int64_t rows = scratch.rows;
    scratch.output = take(&memory, rows * scratch.width);
    scratch.scores = take(&memory, rows * TOKENS);
    scratch.query = take(&memory, rows * problem->key.dim);
    scratch.queries = take_left(&memory, rows, problem->key.dim, 0);
    scratch.weights = take_left(&memory, rows, TOKENS, 0);
    scratch.total = take(&memory, rows * LANES), scratch.constants = take(&memory, rows * LANES);
    float *one = take(&memory, 5 * rows);
    scratch.queries.factor = one, scratch.weights.factor = one + rows, scratch.sums = one + 2 * rows;
    scratch.maximum = one + 3 * rows, scratch.rescale = one + 4 * rows;
    return scratch;
}

/* The queries as the rows of products with keys; by channel, times the scales of a block, and their sum with its
 * offsets. parameters: of the block by channel, or null. */
INLINE void prepare_queries(const struct packed_decode *problem, const struct packed_scratch *scratch,
                            const int32_t *parameters) {
    int64_t dim = problem->key.dim;
    for (int64_t r = 0; r < scratch->rows; r++) {
        lanes sum = {0};
        for (int64_t a = 0; a < dim; a += LANES) {
            lanes entry = load_partial(scratch->query + r * dim + a, dim - a), scaled = entry;
            sum += entry * 0.0f; /* NaN, where the query is not finite */
            if (parameters) {
                bits word = load_words(parameters + a, dim - a);
                scaled = entry * scales_of(word), entry *= offsets_of(word);
            }
            store_partial(scratch->queries.numbers + r * dim + a, scaled, dim - a);
            sum += entry;
        }
        scratch->sums[r] = sum_lanes(sum);
    }
    if (in_bytes(problem)) round_rows(&scratch->queries);
}

/* What is subtracted from the scores of a row whose largest is this. */
INLINE float shift_of(float maximum) { return maximum == -INFINITY ? 0.0f : maximum; }

/* The scores of some rows with all tokens of a block, some vectors of them at once. */
INLINE void score_rows(const struct packed_decode *problem, const struct packed_scratch *scratch,
                       const struct head_rows *keys, int64_t row, const int rows, const int vectors, const int code,
                       const int bytes) {
    int64_t groups = problem->key.dim * code_bits(code) / 32;
    for (int64_t t = 0; t < TOKENS; t += vectors * LANES) {
        const char *ahead = row ? 0 : (const char *)(keys->next + groups * t);
        lanes sum[ROW_TILE * 4];
        multiply_codes(&scratch->queries, row, keys->codes + t, groups, TOKENS, LANES, ahead, sum, rows, vectors, code,
                       bytes);
        UNROLL for (int v = 0; v < vectors; v++) {
            bits word = problem->by_channel ? (bits){0} : load_words(keys->parameters + t + v * LANES, LANES);
            UNROLL for (int r = 0; r < rows; r++) {
                lanes score = sum[r * vectors + v];
                if (problem->by_channel)
                    score = score + scratch->sums[row + r];
                else
                    score = score * scales_of(word) + offsets_of(word) * scratch->sums[row + r];
                store(scratch->scores + (row + r) * TOKENS + t + v * LANES, score);
            }
        }
    }
}

/* Adds the bias of the pairs of a block to their scores; where there is no pair, the score is -inf, whatever it was. */
INLINE void add_bias(const struct packed_decode *problem, const float *bias, int64_t first, int64_t count,
                     float *scores) {
    int64_t begin = first ? 0 : problem->first;
    for (int64_t r = 0; r < problem->rows; r++) {
        float *own = scores + r * TOKENS;
        int64_t end = count;
        for (int64_t t = 0; t < begin; t++) own[t] = -INFINITY;
        if (bias)
            for (int64_t t = begin; t < count; t++) {
                float added = bias[r * problem->bias_row + first + t - problem->first];
                own[t] = added == -INFINITY ? added : own[t] + added;
            }
        if (problem->limits && problem->limits[r] < first + count)
            end = problem->limits[r] < first ? 0 : problem->limits[r] - first;
        for (int64_t t = end; t < TOKENS; t++) own[t] = -INFINITY;
    }
}

/* One more block of the softmax, in three steps, each of all rows before the next: every step of one row waits for sums over
 * its lanes, meanwhile those of the others go on. */
enum { VECTORS = TOKENS / LANES };

/* The largest score of a row so far, and what its earlier sums are multiplied by. */
INLINE void raise_maximum(const struct packed_scratch *scratch, int64_t row) {
    const float *scores = scratch->scores + row * TOKENS;
    lanes most = broadcast(scratch->maximum[row]);
    UNROLL for (int v = 0; v < VECTORS; v++) most = max_lanes(load(scores + v * LANES), most); /* NaN is no maximum */
    float maximum = max_of_lanes(most);
    lanes rescale = exp_or_zero(broadcast(scratch->maximum[row] - shift_of(maximum)));
    scratch->rescale[row] = rescale[0], scratch->maximum[row] = maximum;
}

/* The scores of a row become weights, and these times the scales of values numbers of the products with them. */
INLINE void weigh_row(const struct packed_scratch *scratch, int64_t row, const int32_t *parameters) {
    const float *scores = scratch->scores + row * TOKENS, shift = shift_of(scratch->maximum[row]);
    float *total = scratch->total + row * LANES, *constant = scratch->constants + row * LANES;
    lanes sum = load(total) * scratch->rescale[row], added = load(constant) * scratch->rescale[row];
    UNROLL for (int v = 0; v < VECTORS; v++) {
        lanes weight = exp_or_zero(load(scores + v * LANES) - shift);
        bits seen = weight != broadcast(0.0f), word = load_words(parameters + v * LANES, LANES);
        sum += weight;
        added += (lanes)(seen & (bits)(weight * offsets_of(word))); /* NaN of a token without weight is not met */
        store(scratch->weights.numbers + row * TOKENS + v * LANES, (lanes)(seen & (bits)(weight * scales_of(word))));
    }
    store(total, sum), store(constant, added);
}

INLINE void weigh_block(const struct packed_decode *problem, const struct packed_scratch *scratch,
                        const int32_t *parameters) {
    for (int64_t r = 0; r < scratch->rows; r++) raise_maximum(scratch, r);
    for (int64_t r = 0; r < scratch->rows; r++) weigh_row(scratch, r, parameters);
    if (in_bytes(problem)) round_rows(&scratch->weights);
}

/* output = rescale * output + weights . values for some rows and vectors of dims. filled: dims of the last vector. */
INLINE void add_dims(const struct packed_scratch *scratch, const struct head_rows *values, int64_t dim, int64_t row,
                     int64_t first, int64_t filled, const int rows, const int vectors, const int code,
                     const int bytes) {
    lanes sum[ROW_TILE * 4];
    int64_t groups = TOKENS * code_bits(code) / 32;
    const char *ahead = row ? 0 : (const char *)(values->next + groups * first);
    multiply_codes(&scratch->weights, row, values->codes + first, groups, dim, filled, ahead, sum, rows, vectors, code,
                   bytes);
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < vectors; v++) {
        float *output = scratch->output + (row + r) * scratch->width + first + v * LANES;
        store(output, load(output) * scratch->rescale[row + r] + sum[r * vectors + v]);
    }
}

INLINE void add_values(const struct packed_scratch *scratch, const struct head_rows *values, int64_t dim, int64_t row,
                       const int rows, const int vectors, const int code, const int bytes) {
    int64_t first = 0;
    for (; first + vectors * LANES <= dim; first += vectors * LANES)
        add_dims(scratch, values, dim, row, first, LANES, rows, vectors, code, bytes);
    for (; first < dim; first += LANES) {
        int64_t filled = dim - first < LANES ? dim - first : LANES;
        add_dims(scratch, values, dim, row, first, filled, rows, 1, code, bytes);
    }
}

/* For ROW_TILE rows in bytes there are twice as many sums as vectors. */
#define SCORES_OF(code, bytes)                                                                                 \
    APART void scores_##code##_##bytes(const struct packed_decode *problem, const struct packed_scratch *scratch, \
                                           const struct head_rows *keys) {                                         \
        if (scratch->rows == 1)                                                                                    \
            score_rows(problem, scratch, keys, 0, 1, 4, code, bytes);                                          \
        else                                                                                                       \
            for (int64_t row = 0; row < scratch->rows; row += ROW_TILE)                                            \
                score_rows(problem, scratch, keys, row, ROW_TILE, 2, code, bytes);                             \
    }
#define VALUES_OF(code, bytes)                                                                              \
    APART void values_##code##_##bytes(const struct packed_scratch *scratch, const struct head_rows *values, \
                                           int64_t dim) {                                                        \
        if (scratch->rows == 1)                                                                                 \
            add_values(scratch, values, dim, 0, 1, 4, code, bytes);                                         \
        else                                                                                                    \
            for (int64_t row = 0; row < scratch->rows; row += ROW_TILE)                                         \
                add_values(scratch, values, dim, row, ROW_TILE, 2, code, bytes);                            \
    }
#if defined(WITHOUT_PAIRS) /* which has these */
#define IN_NUMBERS(function) 0
#else
SCORES_OF(INT8, 0)
SCORES_OF(INT4, 0)
SCORES_OF(E4M3, 0)
SCORES_OF(E5M2, 0)
VALUES_OF(INT8, 0)
VALUES_OF(INT4, 0)
VALUES_OF(E4M3, 0)
VALUES_OF(E5M2, 0)
#define IN_NUMBERS(function) function##_0
#endif
#if defined(__AVX512VNNI__)
SCORES_OF(INT8, 1)
SCORES_OF(INT4, 1)
VALUES_OF(INT8, 1)
VALUES_OF(INT4, 1)
#define IN_BYTES(function) function##_1
#else
#define IN_BYTES(function) 0
#endif

/* By the code, and whether codes are multiplied in bytes. */
#define BOTH(function) {IN_NUMBERS(function), IN_BYTES(function)}
static void (*const scores_of[CODES][2])(const struct packed_decode *, const struct packed_scratch *,
                                     const struct head_rows *) = {
    BOTH(scores_INT8), BOTH(scores_INT4), {IN_NUMBERS(scores_E4M3)}, {IN_NUMBERS(scores_E5M2)}};
static void (*const values_of[CODES][2])(const struct packed_scratch *, const struct head_rows *, int64_t) = {
    BOTH(values_INT8), BOTH(values_INT4), {IN_NUMBERS(values_E4M3)}, {IN_NUMBERS(values_E5M2)}};

/* Begins a part: the queries of its head times the scale, zeros in rows of padding, and nothing added up so far. */
static void begin_part(const struct packed_decode *problem, const struct packed_scratch *scratch, int64_t head) {
    int64_t dim = problem->key.dim, numbers = problem->rows * dim;
    const float *query = problem->query + head * numbers;
    memset(scratch->query, 0, (size_t)(scratch->rows * dim) * sizeof(float));
    memset(scratch->output, 0, (size_t)(scratch->rows * scratch->width) * sizeof(float));
    for (int64_t a = 0; a < numbers; a++) scratch->query[a] = query[a] * problem->scale;
    for (int64_t r = 0; r < scratch->rows; r++) {
        scratch->maximum[r] = -INFINITY;
        store(scratch->total + r * LANES, broadcast(0.0f)), store(scratch->constants + r * LANES, broadcast(0.0f));
    }
}

static void write_part(const struct packed_decode *problem, const struct packed_scratch *scratch, int64_t unit) {
    int64_t dim = problem->value.dim;
    float *output = problem->output + unit * problem->rows * dim, *lse = problem->lse + unit * problem->rows;
    for (int64_t r = 0; r < problem->rows; r++) {
        float total = sum_lanes(load(scratch->total + r * LANES)), share = total == 0.0f ? 0.0f : 1.0f / total,
              constant = sum_lanes(load(scratch->constants + r * LANES));
        for (int64_t a = 0; a < dim; a++)
            output[r * dim + a] = (scratch->output[r * scratch->width + a] + constant) * share;
        lse[r] = total == 0.0f ? -INFINITY : scratch->maximum[r] + logf(total);
    }
}

/* All rows of one head with one part of its tokens. */
static void process_part(const struct packed_decode *problem, const struct packed_scratch *scratch, int64_t unit) {
    int64_t head = unit / problem->parts, batch = head / problem->heads, own = head % problem->heads;
    int64_t first = unit % problem->parts * problem->part, end = first + problem->part;
    struct head_rows keys = head_rows(&problem->key, batch, own, problem->by_channel ? problem->key.dim : TOKENS),
                     values = head_rows(&problem->value, batch, own, TOKENS);
    const float *bias = problem->bias ? problem->bias + batch * problem->bias_batch + own * problem->bias_head : 0;
    end = end < problem->columns ? end : problem->columns;
    int64_t last = (problem->columns - 1) / TOKENS;
    begin_part(problem, scratch, head);
    if (!problem->by_channel) prepare_queries(problem, scratch, 0);
    for (; first < end; first += TOKENS) {
        go_to(&keys, problem->pages, first / TOKENS, last), go_to(&values, problem->pages, first / TOKENS, last);
        if (problem->by_channel) prepare_queries(problem, scratch, keys.parameters);
        scores_of[row_of(problem->key.code)][in_bytes(problem)](problem, scratch, &keys);
        add_bias(problem, bias, first, end - first < TOKENS ? end - first : TOKENS, scratch->scores);
        weigh_block(problem, scratch, values.parameters);
        values_of[row_of(problem->value.code)][in_bytes(problem)](scratch, &values, problem->value.dim);
    }
    write_part(problem, scratch, unit);
}

/* Takes one part of one head after another while any is left; any number of threads may call it at once. */
void EXPORTED(regard_packed_decode)(struct packed_decode *problem) {
    LEAVE_UNLESS(are_bytes(problem), regard_packed_decode, problem);
    int64_t unit;
    float *memory = aligned_memory(4 * scratch_floats(problem));
    if (!memory) {
        problem->failed = 1;
        return;
    }
    struct packed_scratch scratch = packed_scratch(problem, memory);
    while ((unit = __atomic_fetch_add(&problem->next_unit, 1, __ATOMIC_RELAXED)) < problem->unit_count)
        process_part(problem, &scratch, unit);
    free_aligned(memory);
}
