/* The scores of one query with keys of one strip. A vector holds as many keys as there are lanes; features go four at
 * a time. */
#ifndef REGARD_SCORES_H
#define REGARD_SCORES_H

#include "additive.h"
#include "lanes.h"

enum { FEATURES = 4, VECTORS = STRIP / LANES < 4 ? STRIP / LANES : 4, WIDTH = VECTORS * LANES };

INLINE int64_t strips_of(const struct additive *of) { return (of->columns + STRIP - 1) / STRIP; }

/* w0 t0 + w1 t1 + w2 t2 + w3 t3 for one query and a vector of keys, with one reciprocal: n / d, where each half is
 * v0 / A0 + v1 / A1 = (v0 A1 + v1 A0) / (A0 A1). By exponentials v is w, and the sum is (sum w - result) / 2. */
INLINE lanes four_features(const float *query, const float *key, const float *weight, const enum way way) {
    lanes over[FEATURES], under[FEATURES];
    UNROLLED for (int a = 0; a < FEATURES; a++) {
        lanes entry = load(key + a * STRIP), joint = entry * query[a];
        under[a] = (way == BY_CAPPED_EXPONENTIALS ? at_most(CAP, joint) : joint) + 1.0f;
        over[a] = way == BY_TANGENTS ? (entry + query[a]) * weight[a] : every(weight[a]);
    }
    lanes low = over[0] * under[1] + over[1] * under[0], high = over[2] * under[3] + over[3] * under[2];
    lanes under_low = under[0] * under[1], under_high = under[2] * under[3];
    return (low * under_high + high * under_low) / (under_low * under_high);
}

/* The scores of one query with one strip. */
INLINE void row_of_scores(const struct additive *of, const float *query, const float *key, float *to,
                          const enum way way) {
    for (int part = 0; part < STRIP; part += WIDTH) {
        lanes sum[VECTORS] = {{0}};
        for (int64_t a = 0; a < of->features; a += FEATURES)
            UNROLLED for (int v = 0; v < VECTORS; v++)
                sum[v] += four_features(query + a, key + a * STRIP + part + v * LANES, of->weight + a, way);
        for (int v = 0; v < VECTORS; v++)
            store(to + part + v * LANES, way == BY_TANGENTS ? sum[v] : of->weight_sum - 2.0f * sum[v]);
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
        to[j] = sum_of(sum);
    }
}

/* The scores of one row of one head with the columns from `from` to `from + count` - 1, which are of one strip. */
static void strip_of_scores(const struct additive *of, int64_t head, int64_t row, int64_t from, int64_t count,
                            float *to) {
    int64_t strip = from / STRIP, first = strip * STRIP, key_head = head / (of->heads / of->key_heads);
    int64_t query_at = head * of->rows + row, key_at = key_head * strips_of(of) + strip;
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
        row_of_scores(of, query, key, target, BY_TANGENTS);
    else if (way == BY_EXPONENTIALS)
        row_of_scores(of, query, key, target, BY_EXPONENTIALS);
    else
        row_of_scores(of, query, key, target, BY_CAPPED_EXPONENTIALS);
    if (target == part) memcpy(to, part + from - first, (size_t)count * sizeof(float));
}

#endif
