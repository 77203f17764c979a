/* The scores of one query with keys of one strip. A vector holds as many keys as there are lanes; features go four at
 * a time. */
#ifndef REGARD_ADDITIVE_SCORES_H
#define REGARD_ADDITIVE_SCORES_H

#include "additive.h"
#include "typed_rows.h"

#include <math.h>

enum { FEATURES = 4, VECTORS = STRIP / LANES < 4 ? STRIP / LANES : 4, WIDTH = VECTORS * LANES };

INLINE int64_t key_strip_count(const struct additive *problem) { return (problem->columns + STRIP - 1) / STRIP; }

/* w0 t0 + w1 t1 + w2 t2 + w3 t3 for one query and a vector of keys, with one reciprocal: n / d, where each half is
 * v0 / A0 + v1 / A1 = (v0 A1 + v1 A0) / (A0 A1). By exponentials v is w, and the sum is (sum w - result) / 2. */
INLINE lanes four_feature_terms(const float *query, const float *key, const float *weight, const enum method method) {
    lanes numerator[FEATURES], denominator[FEATURES];
    UNROLL for (int a = 0; a < FEATURES; a++) {
        lanes entry = load(key + a * STRIP), joint = entry * query[a];
        denominator[a] = (method == BY_CAPPED_EXPONENTIALS ? min_lanes(PRODUCT_CAP, joint) : joint) + 1.0f;
        numerator[a] = method == BY_TANGENTS ? (entry + query[a]) * weight[a] : broadcast(weight[a]);
    }
    lanes low = numerator[0] * denominator[1] + numerator[1] * denominator[0],
          high = numerator[2] * denominator[3] + numerator[3] * denominator[2];
    lanes denominator_low = denominator[0] * denominator[1], denominator_high = denominator[2] * denominator[3];
    return (low * denominator_high + high * denominator_low) / (denominator_low * denominator_high);
}

/* The scores of one query with some vectors of keys of a strip, from key `part` on. */
INLINE void part_scores(const struct additive *problem, const float *query, const float *key, float *target, int part,
                        const int vectors, const enum method method) {
    lanes sum[VECTORS] = {{0}};
    for (int64_t a = 0; a < problem->features; a += FEATURES)
        UNROLL for (int v = 0; v < vectors; v++) sum[v] +=
            four_feature_terms(query + a, key + a * STRIP + part + v * LANES, problem->weight + a, method);
    for (int v = 0; v < vectors; v++)
        store(target + part + v * LANES, method == BY_TANGENTS ? sum[v] : problem->weight_sum - 2.0f * sum[v]);
}

/* The scores of one query with the first `count` keys of a strip, and with others up to a whole vector. */
INLINE void row_scores(const struct additive *problem, const float *query, const float *key, float *target,
                       int64_t count, const enum method method) {
    int part = 0;
    for (; part + WIDTH <= count; part += WIDTH) part_scores(problem, query, key, target, part, VECTORS, method);
    if (count - part > WIDTH - LANES)
        part_scores(problem, query, key, target, part, VECTORS, method);
    else
        for (; part < count; part += LANES) part_scores(problem, query, key, target, part, 1, method);
}

/* The scores of one query with `count` keys, tanh taken for each pair: right for every input, and the slowest. */
INLINE void direct_scores(const struct additive *problem, const void *query, const void *keys, int64_t count,
                          float *target, const int dtype) {
    for (int64_t j = 0; j < count; j++) {
        const void *key = row_at(keys, j, problem->key_row, dtype);
        lanes sum = {0};
        for (int64_t a = 0; a < problem->features; a += LANES) {
            lanes x = load_entries(query, a, problem->features, dtype, 0) +
                      load_entries(key, a, problem->features, dtype, 0);
            sum += load(problem->weight + a) * tanh_lanes(x);
        }
        target[j] = sum_lanes(sum);
    }
}

/* Row `row` of one head as it was given, and row `column` of one key head. */
INLINE const void *given_query(const struct additive *problem, int64_t head, int64_t row) {
    return row_at(problem->query, 1, head * problem->query_head + row * problem->query_row, (int)problem->dtype);
}

INLINE const void *given_key(const struct additive *problem, int64_t key_head, int64_t column) {
    return row_at(problem->key, 1, key_head * problem->key_head + column * problem->key_row, (int)problem->dtype);
}

/* The numbers of a row's pairs from a column on, both within the tile, or null. */
INLINE const float *pair_numbers(const struct pairs *given, int64_t head, int64_t row, int64_t column) {
    if (!given->data) return 0;
    return given->data + head / given->heads * given->batch + head % given->heads * given->head + row * given->row +
           column;
}

INLINE int any_pair_exists(const float *bias, int64_t count) {
    int any = 0;
    for (int64_t j = 0; j < count; j++) any |= bias[j] != -INFINITY;
    return any;
}

/* The scores of one row of one head with `count` columns from `column` on, which are of one strip (additive_scores.c). */
#define strip_scores SHARED(strip_scores)
void strip_scores(const struct additive *problem, int64_t head, int64_t row, int64_t column, int64_t count, float *target);

#endif
