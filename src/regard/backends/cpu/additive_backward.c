/* The gradient of the scores of a tile. With t = tanh(x + y), taken anew, and g the gradient of the score:
 *
 *   query[i, a] += sum over j of g (1 - t^2),    key[j, a] likewise over i,    weight[a] += sum over i and j of g t
 *
 * Rows go in blocks, keys in strips and features in chunks, so that what is added to stays near the processor.
 */
#include "additive_scores.h"
#include "transpose.h"

enum { FEATURE_GROUP = 4, ROWS_AT_ONCE = 2, ROW_BLOCK = 8, CHUNK = 32 };

/* What one call adds to before it goes to `sums`: short sums first, which also keeps their rounding small. */
struct block {
    int64_t columns;               /* of the strip, from its first on */
    const float *query[ROW_BLOCK]; /* prepared; a row of zeros where there is nothing to do by strips */
    float upstream[ROW_BLOCK][STRIP] __attribute__((aligned(64))); /* zero there, and beyond the tile */
    float key[CHUNK * STRIP] __attribute__((aligned(64)));
    float *query_sums;  /* (BLOCK, padded, LANES) */
    float *weight_sums; /* (padded, LANES) */
};

int64_t EXPORTED(regard_additive_scratch)(int64_t padded) { return padded * (LANES * (ROW_BLOCK + 1) + 1); }

/* g t and g (1 - t^2) for four features of one query and a vector of keys, with one reciprocal. By exponentials, with
 * P = exp(2x) exp(2y) and r = 2 / (1 + P): t = 1 - r and 1 - t^2 = r^2 P, whose error is relative also where t is -1.
 * What P is capped at is taken off r, so that r, and with it the slope, is 0 there. */
INLINE void four_feature_slopes(const float *query, const lanes *key, lanes upstream, lanes *products, lanes *slopes,
                        const enum method method) {
    const float rest = method == BY_CAPPED_EXPONENTIALS ? 2.0f / PRODUCT_CAP : 0.0f;
    lanes joint[FEATURE_GROUP], denominator[FEATURE_GROUP];
    UNROLL for (int a = 0; a < FEATURE_GROUP; a++) {
        joint[a] = key[a] * query[a];
        if (method == BY_CAPPED_EXPONENTIALS) joint[a] = min_lanes(PRODUCT_CAP, joint[a]);
        denominator[a] = joint[a] + 1.0f;
    }
    lanes low = denominator[0] * denominator[1], high = denominator[2] * denominator[3];
    lanes inverse = (method == BY_TANGENTS ? 1.0f : 2.0f) / (low * high);
    lanes inverse_low = inverse * high, inverse_high = inverse * low;
    lanes each[FEATURE_GROUP] = {inverse_low * denominator[1] - rest, inverse_low * denominator[0] - rest,
                                 inverse_high * denominator[3] - rest, inverse_high * denominator[2] - rest};
    UNROLL for (int a = 0; a < FEATURE_GROUP; a++) {
        if (method == BY_TANGENTS) {
            lanes tanh_value = (key[a] + query[a]) * each[a];
            products[a] = upstream * tanh_value;
            slopes[a] = upstream - products[a] * tanh_value;
        } else {
            lanes part = upstream * each[a];
            products[a] = upstream - part;
            slopes[a] = part * (each[a] * joint[a]);
        }
    }
}

/* Two queries and one strip, for the features from `begin` to `end` - 1. */
INLINE void row_pair_gradient(struct block *block, int first, const float *key, int64_t begin, int64_t end,
                              int64_t padded, const enum method method) {
    for (int64_t a = begin; a < end; a += FEATURE_GROUP) {
        lanes query_sums[ROWS_AT_ONCE][FEATURE_GROUP] = {{{0}}}, weight_sums[FEATURE_GROUP] = {{0}};
        for (int v = 0; v * LANES < block->columns; v++) {
            lanes entries[FEATURE_GROUP], key_sums[FEATURE_GROUP];
            float *key_at = block->key + (a - begin) * STRIP + v * LANES;
            UNROLL for (int b = 0; b < FEATURE_GROUP; b++) {
                entries[b] = load(key + (a + b) * STRIP + v * LANES);
                key_sums[b] = load(key_at + b * STRIP);
            }
            UNROLL for (int row = 0; row < ROWS_AT_ONCE; row++) {
                lanes products[FEATURE_GROUP], slopes[FEATURE_GROUP],
                    upstream = load(block->upstream[first + row] + v * LANES);
                four_feature_slopes(block->query[first + row] + a, entries, upstream, products, slopes, method);
                UNROLL for (int b = 0; b < FEATURE_GROUP; b++) {
                    weight_sums[b] += products[b];
                    query_sums[row][b] += slopes[b];
                    key_sums[b] += slopes[b];
                }
            }
            UNROLL for (int b = 0; b < FEATURE_GROUP; b++) store(key_at + b * STRIP, key_sums[b]);
        }
        for (int b = 0; b < FEATURE_GROUP; b++) {
            float *weight = block->weight_sums + (a + b) * LANES;
            store(weight, load(weight) + weight_sums[b]);
            for (int row = 0; row < ROWS_AT_ONCE; row++) {
                float *query = block->query_sums + ((first + row) * padded + a + b) * LANES;
                store(query, load(query) + query_sums[row][b]);
            }
        }
    }
}

/* One function for each way, so that it is not decided within. */
#define ROW_PAIR(name, method)                                                                                     \
    static void name(struct block *block, int row, const float *key, int64_t begin, int64_t end, int64_t padded) { \
        row_pair_gradient(block, row, key, begin, end, padded, method);                                            \
    }
ROW_PAIR(by_tangents, BY_TANGENTS)
ROW_PAIR(by_exponentials, BY_EXPONENTIALS)
ROW_PAIR(by_capped_exponentials, BY_CAPPED_EXPONENTIALS)

/* All rows of a block and one strip, in a way that is right for each; the sums of the keys go on to `key_sums`. */
static void block_gradient(const struct additive *problem, struct block *block, int rows, const float *key,
                           float *key_sums, enum method method) {
    void (*const pair)(struct block *, int, const float *, int64_t, int64_t, int64_t) =
        method == BY_TANGENTS ? by_tangents : method == BY_EXPONENTIALS ? by_exponentials : by_capped_exponentials;
    for (int64_t begin = 0; begin < problem->features; begin += CHUNK) {
        int64_t end = begin + CHUNK < problem->padded ? begin + CHUNK : problem->padded;
        memset(block->key, 0, sizeof(block->key));
        for (int row = 0; row < rows; row += ROWS_AT_ONCE)
            pair(block, row, key, begin, end, problem->padded);
        for (int64_t index = 0; index < (end - begin) * STRIP; index += LANES)
            store(key_sums + begin * STRIP + index, load(key_sums + begin * STRIP + index) + load(block->key + index));
    }
}

/* One query and `count` keys of a strip, tanh taken for each pair. Slopes have features in their lanes, and what is added
 * to has keys: they are transposed. */
INLINE void direct_gradient(const struct additive *problem, const void *query, const void *keys,
                            const float *upstream, int64_t count, float *query_sums, float *key_sums,
                            float *weight_sums, const int dtype) {
    for (int64_t a = 0; a < problem->features; a += LANES) {
        int64_t left = problem->features - a < LANES ? problem->features - a : LANES;
        lanes entries = load_entries(query, a, problem->features, dtype, 0), slope_sum = {0}, product_sum = {0};
        for (int64_t j = 0; j < count; j += LANES) {
            lanes slopes[LANES];
            for (int l = 0; l < LANES; l++) {
                slopes[l] = broadcast(0.0f);
                if (j + l >= count) continue;
                const void *key = row_at(keys, j + l, problem->key_row, dtype);
                lanes t = tanh_lanes(entries + load_entries(key, a, problem->features, dtype, 0));
                lanes product = upstream[j + l] * t;
                slopes[l] = upstream[j + l] - product * t;
                slope_sum += slopes[l], product_sum += product;
            }
            transpose(slopes);
            for (int64_t l = 0; l < left; l++) {
                float *target = key_sums + (a + l) * STRIP + j;
                store_partial(target, load_partial(target, count - j) + slopes[l], count - j);
            }
        }
        store_partial(query_sums + a, load_partial(query_sums + a, left) + slope_sum, left);
        for (int64_t lane = 0; lane < left; lane++) weight_sums[(a + lane) * LANES] += product_sum[lane];
    }
}

/* Rows `begin` to `end` - 1 of the tile, all of one head, at most BLOCK. */
static void row_block_gradient(const struct additive *problem, const struct tile *tile, const struct sums *sums,
                          struct block *block, const float *zeros, int64_t begin, int64_t end) {
    int64_t strips = (problem->columns + STRIP - 1) / STRIP, rows = tile->row_end - tile->row_begin;
    int64_t head = begin / rows, key_head = head / (problem->heads / problem->key_heads);
    int64_t first_row = tile->row_begin + begin % rows, padded = problem->padded;
    float *query_to = sums->query + (head * problem->rows + first_row) * problem->features;
    const float *pairs = tile->pairs + head * tile->pairs_head + begin % rows * tile->pairs_row;
    memset(block->query_sums, 0, (size_t)(ROW_BLOCK * padded * LANES) * sizeof(float));
    memset(block->weight_sums, 0, (size_t)(padded * LANES) * sizeof(float));
    for (int64_t strip = tile->column_begin / STRIP; strip * STRIP < tile->column_end; strip++) {
        int64_t index = key_head * strips + strip, first = strip * STRIP;
        int64_t column = first < tile->column_begin ? tile->column_begin : first;
        int64_t count = (first + STRIP < tile->column_end ? first + STRIP : tile->column_end) - column;
        float *key_to = sums->key + index * padded * STRIP;
        int by_strips = 0;
        enum method widest = BY_TANGENTS;
        memset(block->upstream, 0, sizeof(block->upstream));
        block->columns = column - first + count;
        for (int row = 0; row < ROW_BLOCK; row++) {
            block->query[row] = zeros;
            if (begin + row >= end) continue;
            const float *upstream = pairs + row * tile->pairs_row + column - tile->column_begin;
            int64_t query = head * problem->rows + first_row + row;
            enum method method = choose_method(problem, query, index);
            if (method == PER_PAIR) {
                const void *given = given_query(problem, head, first_row + row), *keys = given_key(problem, key_head, column);
                BY_DTYPE(problem->dtype,
                         direct_gradient(problem, given, keys, upstream, count, query_to + row * problem->features,
                                         key_to + column - first, block->weight_sums, DTYPE));
                continue;
            }
            block->query[row] = problem->prepared_query + query * padded;
            memcpy(block->upstream[row] + column - first, upstream, (size_t)count * sizeof(float));
            by_strips = row + 1;
            if (method > widest) widest = method;
        }
        if (by_strips)
            block_gradient(problem, block, by_strips, problem->prepared_key + index * padded * STRIP, key_to, widest);
    }
    for (int64_t a = 0; a < problem->features; a++) {
        sums->weight[a] += sum_floats(block->weight_sums + a * LANES);
        for (int64_t row = 0; row < end - begin; row++)
            query_to[row * problem->features + a] += sum_floats(block->query_sums + (row * padded + a) * LANES);
    }
}

void EXPORTED(regard_additive_backward)(const struct additive *problem, const struct tile *tile,
                                        const struct sums *sums) {
    int64_t rows = tile->row_end - tile->row_begin;
    struct block block;
    block.query_sums = sums->scratch;
    block.weight_sums = block.query_sums + ROW_BLOCK * problem->padded * LANES;
    float *zeros = block.weight_sums + problem->padded * LANES;
    memset(zeros, 0, (size_t)problem->padded * sizeof(float));
    for (int64_t begin = tile->begin, end; begin < tile->end; begin = end) {
        int64_t end_of_head = (begin / rows + 1) * rows;
        end = begin + ROW_BLOCK < tile->end ? begin + ROW_BLOCK : tile->end;
        if (end > end_of_head) end = end_of_head;
        row_block_gradient(problem, tile, sums, &block, zeros, begin, end);
    }
}
