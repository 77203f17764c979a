/* The gradient of the scores of a tile. With t = tanh(x + y), taken anew, and g the gradient of the score:
 *
 *   query[i, a] += sum over j of g (1 - t^2),    key[j, a] likewise over i,    weight[a] += sum over i and j of g t
 *
 * Rows go in blocks, keys in strips and features in chunks, so that what is added to stays near the processor.
 */
#include "additive.h"
#include "lanes.h"

enum { GROUP = 4, PAIR = 2, BLOCK = 8, CHUNK = 32, VECTORS = STRIP / LANES };

/* What one call adds to before it goes to `sums`: short sums first, which also keeps their rounding small. */
struct block {
    const float *query[BLOCK]; /* prepared; a row of zeros where there is nothing to do by strips */
    float upstream[BLOCK][STRIP] __attribute__((aligned(64))); /* zero there, and beyond the tile */
    float key[CHUNK * STRIP] __attribute__((aligned(64)));
    float *query_sums;  /* (BLOCK, padded, LANES) */
    float *weight_sums; /* (padded, LANES) */
};

int64_t EXPORTED(regard_scratch)(int64_t padded) { return padded * (LANES * (BLOCK + 1) + 1); }

/* g t and g (1 - t^2) for four features of one query and a vector of keys, with one reciprocal. By exponentials, with
 * P = exp(2x) exp(2y) and r = 2 / (1 + P): t = 1 - r and 1 - t^2 = r^2 P, whose error is relative also where t is -1.
 * What P is capped at is taken off r, so that r, and with it the slope, is 0 there. */
INLINE void four_slopes(const float *query, const lanes *key, lanes upstream, lanes *products, lanes *slopes,
                        const enum way way) {
    const float rest = way == BY_CAPPED_EXPONENTIALS ? 2.0f / CAP : 0.0f;
    lanes joint[GROUP], under[GROUP];
    UNROLLED for (int a = 0; a < GROUP; a++) {
        joint[a] = key[a] * query[a];
        if (way == BY_CAPPED_EXPONENTIALS) joint[a] = at_most(CAP, joint[a]);
        under[a] = joint[a] + 1.0f;
    }
    lanes low = under[0] * under[1], high = under[2] * under[3];
    lanes inverse = (way == BY_TANGENTS ? 1.0f : 2.0f) / (low * high);
    lanes of_low = inverse * high, of_high = inverse * low;
    lanes each[GROUP] = {of_low * under[1] - rest, of_low * under[0] - rest, of_high * under[3] - rest,
                         of_high * under[2] - rest};
    UNROLLED for (int a = 0; a < GROUP; a++) {
        if (way == BY_TANGENTS) {
            lanes tangent = (key[a] + query[a]) * each[a];
            products[a] = upstream * tangent;
            slopes[a] = upstream - products[a] * tangent;
        } else {
            lanes part = upstream * each[a];
            products[a] = upstream - part;
            slopes[a] = part * (each[a] * joint[a]);
        }
    }
}

/* Two queries and one strip, for the features from `begin` to `end` - 1. */
INLINE void pair_of_rows(struct block *block, int first, const float *key, int64_t begin, int64_t end, int64_t padded,
                         const enum way way) {
    for (int64_t a = begin; a < end; a += GROUP) {
        lanes query_sums[PAIR][GROUP] = {{{0}}}, weight_sums[GROUP] = {{0}};
        for (int v = 0; v < VECTORS; v++) {
            lanes entries[GROUP], key_sums[GROUP];
            float *key_at = block->key + (a - begin) * STRIP + v * LANES;
            UNROLLED for (int b = 0; b < GROUP; b++) {
                entries[b] = load(key + (a + b) * STRIP + v * LANES);
                key_sums[b] = load(key_at + b * STRIP);
            }
            UNROLLED for (int row = 0; row < PAIR; row++) {
                lanes products[GROUP], slopes[GROUP], upstream = load(block->upstream[first + row] + v * LANES);
                four_slopes(block->query[first + row] + a, entries, upstream, products, slopes, way);
                UNROLLED for (int b = 0; b < GROUP; b++) {
                    weight_sums[b] += products[b];
                    query_sums[row][b] += slopes[b];
                    key_sums[b] += slopes[b];
                }
            }
            UNROLLED for (int b = 0; b < GROUP; b++) store(key_at + b * STRIP, key_sums[b]);
        }
        for (int b = 0; b < GROUP; b++) {
            float *weight = block->weight_sums + (a + b) * LANES;
            store(weight, load(weight) + weight_sums[b]);
            for (int row = 0; row < PAIR; row++) {
                float *query = block->query_sums + ((first + row) * padded + a + b) * LANES;
                store(query, load(query) + query_sums[row][b]);
            }
        }
    }
}

/* One function for each way, so that it is not decided within. */
#define PAIR_OF_ROWS(name, way)                                                                                      \
    static void name(struct block *block, int row, const float *key, int64_t begin, int64_t end, int64_t padded) {   \
        pair_of_rows(block, row, key, begin, end, padded, way);                                                      \
    }
PAIR_OF_ROWS(by_tangents, BY_TANGENTS)
PAIR_OF_ROWS(by_exponentials, BY_EXPONENTIALS)
PAIR_OF_ROWS(by_capped_exponentials, BY_CAPPED_EXPONENTIALS)

/* All rows of a block and one strip, in a way that is right for each; the sums of the keys go on to `key_sums`. */
static void strip_of_block(const struct additive *of, struct block *block, int rows, const float *key, float *key_sums,
                           enum way way) {
    void (*const pair)(struct block *, int, const float *, int64_t, int64_t, int64_t) =
        way == BY_TANGENTS ? by_tangents : way == BY_EXPONENTIALS ? by_exponentials : by_capped_exponentials;
    for (int64_t begin = 0; begin < of->features; begin += CHUNK) {
        int64_t end = begin + CHUNK < of->padded ? begin + CHUNK : of->padded;
        memset(block->key, 0, sizeof(block->key));
        for (int row = 0; row < rows; row += PAIR)
            pair(block, row, key, begin, end, of->padded);
        for (int64_t at = 0; at < (end - begin) * STRIP; at += LANES)
            store(key_sums + begin * STRIP + at, load(key_sums + begin * STRIP + at) + load(block->key + at));
    }
}

/* One query and `count` keys of a strip, tanh taken for each pair. */
static void direct_gradient(const struct additive *of, const float *query, const float *keys, const float *upstream,
                            int64_t count, float *query_sums, float *key_sums, float *weight_sums) {
    for (int64_t j = 0; j < count; j++) {
        const float *key = keys + j * of->key_row;
        for (int64_t a = 0; a < of->features; a += LANES) {
            int64_t left = of->features - a;
            lanes t = tangent(load_some(query + a, left) + load_some(key + a, left));
            lanes product = upstream[j] * t, slope = upstream[j] - product * t;
            store_some(query_sums + a, load_some(query_sums + a, left) + slope, left);
            for (int lane = 0; lane < LANES && lane < left; lane++) {
                key_sums[(a + lane) * STRIP + j] += slope[lane];
                weight_sums[(a + lane) * LANES] += product[lane];
            }
        }
    }
}

/* Rows `begin` to `end` - 1 of the tile, all of one head, at most BLOCK. */
static void block_of_rows(const struct additive *of, const struct tile *tile, const struct sums *sums,
                          struct block *block, const float *zeros, int64_t begin, int64_t end) {
    int64_t strips = (of->columns + STRIP - 1) / STRIP, rows = tile->row_end - tile->row_begin;
    int64_t head = begin / rows, key_head = head / (of->heads / of->key_heads);
    int64_t first_row = tile->row_begin + begin % rows, padded = of->padded;
    float *query_to = sums->query + (head * of->rows + first_row) * of->features;
    const float *pairs = tile->pairs + head * tile->pairs_head + begin % rows * tile->pairs_row;
    memset(block->query_sums, 0, (size_t)(BLOCK * padded * LANES) * sizeof(float));
    memset(block->weight_sums, 0, (size_t)(padded * LANES) * sizeof(float));
    for (int64_t strip = tile->column_begin / STRIP; strip * STRIP < tile->column_end; strip++) {
        int64_t at = key_head * strips + strip, first = strip * STRIP;
        int64_t from = first < tile->column_begin ? tile->column_begin : first;
        int64_t count = (first + STRIP < tile->column_end ? first + STRIP : tile->column_end) - from;
        float *key_to = sums->key + at * padded * STRIP;
        int by_strips = 0;
        enum way widest = BY_TANGENTS;
        memset(block->upstream, 0, sizeof(block->upstream));
        for (int row = 0; row < BLOCK; row++) {
            block->query[row] = zeros;
            if (begin + row >= end) continue;
            const float *upstream = pairs + row * tile->pairs_row + from - tile->column_begin;
            int64_t query = head * of->rows + first_row + row;
            enum way way = way_of(of, query, at);
            if (way == EACH_PAIR) {
                direct_gradient(of, of->query + head * of->query_head + (first_row + row) * of->query_row,
                                of->key + key_head * of->key_head + from * of->key_row, upstream, count,
                                query_to + row * of->features, key_to + from - first, block->weight_sums);
                continue;
            }
            block->query[row] = of->prepared_query + query * padded;
            memcpy(block->upstream[row] + from - first, upstream, (size_t)count * sizeof(float));
            by_strips = row + 1;
            if (way > widest) widest = way;
        }
        if (by_strips) strip_of_block(of, block, by_strips, of->prepared_key + at * padded * STRIP, key_to, widest);
    }
    for (int64_t a = 0; a < of->features; a++) {
        sums->weight[a] += sum_of_lanes(block->weight_sums + a * LANES);
        for (int64_t row = 0; row < end - begin; row++)
            query_to[row * of->features + a] += sum_of_lanes(block->query_sums + (row * padded + a) * LANES);
    }
}

void EXPORTED(regard_gradient)(const struct additive *of, const struct tile *tile, const struct sums *sums) {
    int64_t rows = tile->row_end - tile->row_begin;
    struct block block;
    block.query_sums = sums->scratch;
    block.weight_sums = block.query_sums + BLOCK * of->padded * LANES;
    float *zeros = block.weight_sums + of->padded * LANES;
    memset(zeros, 0, (size_t)of->padded * sizeof(float));
    for (int64_t begin = tile->begin, end; begin < tile->end; begin = end) {
        int64_t end_of_head = (begin / rows + 1) * rows;
        end = begin + BLOCK < tile->end ? begin + BLOCK : tile->end;
        if (end > end_of_head) end = end_of_head;
        block_of_rows(of, tile, sums, &block, zeros, begin, end);
    }
}
