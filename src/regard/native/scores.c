/* Preparation and scores of a tile. One vector holds as many keys as there are lanes; features go four at a time. */
#include "additive.h"
#include "lanes.h"

#include <math.h>

enum { GROUP = 4, VECTORS = STRIP / LANES < 4 ? STRIP / LANES : 4, WIDTH = VECTORS * LANES };

/* The largest |entry|, and infinity where one is NaN. The bits of numbers without their signs are in the same order. */
INLINE float bound_of(const float *entries, int64_t count) {
    bits largest = {0};
    for (int64_t a = 0; a < count; a += LANES) {
        bits size = (bits)magnitude(load_some(entries + a, count - a));
        bits more = size > largest;
        largest = (more & size) | (~more & largest);
    }
    int32_t sizes[LANES];
    memcpy(sizes, &largest, sizeof(sizes));
    for (int half = LANES / 2; half; half /= 2)
        for (int lane = 0; lane < half; lane++)
            if (sizes[lane + half] > sizes[lane]) sizes[lane] = sizes[lane + half];
    float bound;
    memcpy(&bound, sizes, sizeof(bound));
    return bound == bound ? bound : INFINITY;
}

void EXPORTED(regard_query_bounds)(const struct additive *of, int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; at++) {
        const float *row = of->query + (at / of->rows) * of->query_head + (at % of->rows) * of->query_row;
        of->query_bound[at] = bound_of(row, of->features);
    }
}

void EXPORTED(regard_key_bounds)(const struct additive *of, int64_t begin, int64_t end) {
    int64_t strips = (of->columns + STRIP - 1) / STRIP;
    for (int64_t at = begin; at < end; at++) {
        int64_t first = at % strips * STRIP;
        int64_t count = of->columns - first < STRIP ? of->columns - first : STRIP;
        const float *rows = of->key + at / strips * of->key_head + first * of->key_row;
        float bound = 0.0f;
        for (int64_t j = 0; j < count; j++) {
            float row = bound_of(rows + j * of->key_row, of->features);
            if (row > bound) bound = row;
        }
        of->key_bound[at] = bound;
    }
}

INLINE lanes prepared(lanes x, int64_t form) {
    if (form == TANGENTS) return tangent(x);
    return exponential(2.0f * -at_most(HELD, -at_most(HELD, x)));
}

void EXPORTED(regard_prepare_query)(const struct additive *of, int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; at++) {
        const float *row = of->query + (at / of->rows) * of->query_head + (at % of->rows) * of->query_row;
        float *to = of->prepared_query + at * of->padded;
        for (int64_t a = 0; a < of->padded; a += LANES)
            store(to + a, prepared(a < of->features ? load_some(row + a, of->features - a) : every(0.0f), of->form));
    }
}

void EXPORTED(regard_prepare_key)(const struct additive *of, int64_t begin, int64_t end) {
    int64_t strips = (of->columns + STRIP - 1) / STRIP;
    for (int64_t at = begin; at < end; at++) {
        int64_t first = at % strips * STRIP;
        int64_t count = of->columns - first < STRIP ? of->columns - first : STRIP;
        const float *rows = of->key + at / strips * of->key_head + first * of->key_row;
        float *to = of->prepared_key + at * of->padded * STRIP;
        for (int64_t a = 0; a < of->padded; a += LANES)
            for (int64_t j = 0; j < STRIP; j++) {
                lanes value = {0};
                if (j < count && a < of->features) value = load_some(rows + j * of->key_row + a, of->features - a);
                value = prepared(value, of->form);
                for (int lane = 0; lane < LANES; lane++) to[(a + lane) * STRIP + j] = value[lane];
            }
    }
}

/* w0 t0 + w1 t1 + w2 t2 + w3 t3 for one query and a vector of keys, with one reciprocal: n / d, where each half is
 * v0 / A0 + v1 / A1 = (v0 A1 + v1 A0) / (A0 A1). With EXPONENTIALS v is w, and the sum is (sum w - result) / 2. */
INLINE lanes four_features(const float *query, const float *key, const float *weight, const int form) {
    lanes over[GROUP], under[GROUP];
    UNROLLED for (int a = 0; a < GROUP; a++) {
        lanes entry = load(key + a * STRIP);
        /* At 2^30 the product of four is still finite, and 1 - tanh is below the precision of 1. */
        under[a] = (form == TANGENTS ? entry * query[a] : at_most(0x1p30f, entry * query[a])) + 1.0f;
        over[a] = form == TANGENTS ? (entry + query[a]) * weight[a] : every(weight[a]);
    }
    lanes low = over[0] * under[1] + over[1] * under[0], high = over[2] * under[3] + over[3] * under[2];
    lanes under_low = under[0] * under[1], under_high = under[2] * under[3];
    return (low * under_high + high * under_low) / (under_low * under_high);
}

/* The scores of one query with one strip. */
INLINE void row_of_scores(const struct additive *of, const float *query, const float *key, float *to,
                          const int form) {
    for (int part = 0; part < STRIP; part += WIDTH) {
        lanes sum[VECTORS] = {{0}};
        for (int64_t a = 0; a < of->features; a += GROUP)
            UNROLLED for (int v = 0; v < VECTORS; v++)
                sum[v] += four_features(query + a, key + a * STRIP + part + v * LANES, of->weight + a, form);
        for (int v = 0; v < VECTORS; v++)
            store(to + part + v * LANES, form == TANGENTS ? sum[v] : of->weight_sum - 2.0f * sum[v]);
    }
}

/* The scores of one query with `count` keys, tanh taken for each pair: right for every input, and the slowest. */
static void direct_scores(const struct additive *of, const float *query, const float *keys, int64_t count, float *to) {
    for (int64_t j = 0; j < count; j++) {
        const float *key = keys + j * of->key_row;
        lanes sum = {0};
        for (int64_t a = 0; a < of->features; a += LANES) {
            lanes x = load_some(query + a, of->features - a) + load_some(key + a, of->features - a);
            sum += load(of->weight + a) * tangent(x);
        }
        float lane_sums[LANES];
        store(lane_sums, sum);
        to[j] = sum_of_lanes(lane_sums);
    }
}

/* The scores of one row of one head with the columns from `from` to `from + count` - 1, which are of one strip. */
static void row_of_tile(const struct additive *of, int64_t head, int64_t row, int64_t from, int64_t count, float *to) {
    int64_t strip = from / STRIP, first = strip * STRIP, key_head = head / (of->heads / of->key_heads);
    int64_t query_at = head * of->rows + row, key_at = key_head * ((of->columns + STRIP - 1) / STRIP) + strip;
    enum way way = way_of(of, query_at, key_at);
    if (way == EACH_PAIR) {
        direct_scores(of, of->query + head * of->query_head + row * of->query_row,
                      of->key + key_head * of->key_head + from * of->key_row, count, to);
        return;
    }
    float part[STRIP], *target = count == STRIP ? to : part;
    const float *query = of->prepared_query + query_at * of->padded;
    const float *key = of->prepared_key + key_at * of->padded * STRIP;
    if (way == BY_TANGENTS)
        row_of_scores(of, query, key, target, TANGENTS);
    else
        row_of_scores(of, query, key, target, EXPONENTIALS);
    if (target == part) memcpy(to, part + from - first, (size_t)count * sizeof(float));
}

void EXPORTED(regard_scores)(const struct additive *of, const struct tile *tile) {
    int64_t rows = tile->row_end - tile->row_begin;
    for (int64_t begin = tile->begin, end; begin < tile->end; begin = end) {
        int64_t head = begin / rows; /* from here to the end of this head, or of this call */
        end = (head + 1) * rows < tile->end ? (head + 1) * rows : tile->end;
        for (int64_t from = tile->column_begin, next; from < tile->column_end; from = next) {
            next = (from / STRIP + 1) * STRIP < tile->column_end ? (from / STRIP + 1) * STRIP : tile->column_end;
            for (int64_t at = begin; at < end; at++) {
                float *to = tile->pairs + head * tile->pairs_head + at % rows * tile->pairs_row;
                row_of_tile(of, head, tile->row_begin + at % rows, from, next - from, to + from - tile->column_begin);
            }
        }
    }
}
