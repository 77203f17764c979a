/* The k largest of each row of numbers that come block by block: a few vectors in descending order. */
#ifndef REGARD_TOPK_H
#define REGARD_TOPK_H

#include "tile.h"

/* The largest exponents of each row so far: k rounded up to whole vectors. */
struct topk_rows {
    float *exponents; /* [rows][count], descending */
    int32_t *columns; /* [rows][count] */
    int64_t count;
};

INLINE struct topk_rows topk_row(const struct topk_rows *first, int64_t row) {
    return (struct topk_rows){first->exponents + row * first->count, first->columns + row * first->count, first->count};
}

/* A bit for each lane: whether it is above a limit. */
INLINE uint32_t lanes_above(lanes values, float limit) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)values, _mm512_set1_ps(limit), _CMP_GT_OQ);
#elif defined(__AVX__)
    return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps((__m256)values, _mm256_set1_ps(limit), _CMP_GT_OQ));
#elif defined(__SSE__)
    return (uint32_t)_mm_movemask_ps(_mm_cmpgt_ps((__m128)values, _mm_set1_ps(limit)));
#else
    bits above = values > broadcast(limit);
    uint32_t found = 0;
    for (int lane = 0; lane < LANES; lane++) found |= (uint32_t)(above[lane] & 1) << lane;
    return found;
#endif
}

/* Lane l comes from the lane before it, the first from the last one of the vector before. */
#define PREVIOUS_LANE(l, step) (LANES - 1 + (l) + (step))

/* Inserts a number into a descending row and drops the last one: new[n] = max(old[n], min(old[n - 1], exponent)). */
INLINE void insert(const struct topk_rows row, float exponent, int32_t column) {
    const bits previous_lane = ALL_LANES(PREVIOUS_LANE, 0);
    for (int64_t n = row.count - LANES; n >= 0; n -= LANES) {
        lanes own = load(row.exponents + n), columns = load((float *)row.columns + n);
        lanes before = n ? load(row.exponents + n - LANES) : broadcast(INFINITY);
        lanes before_columns = n ? load((float *)row.columns + n - LANES) : broadcast(0.0f);
        before = SHUFFLE(before, own, previous_lane), before_columns = SHUFFLE(before_columns, columns, previous_lane);
        bits moves = own < exponent, moved = before < exponent;
        bits chosen = (moved & (bits)before_columns) | (~moved & column);
        store(row.exponents + n, max_lanes(own, min_lanes(exponent, before)));
        store((float *)row.columns + n, (lanes)((moves & chosen) | (~moves & (bits)columns)));
        if (own[0] >= exponent) break;
    }
}

/* Inserts those of a row of exponents that are among its k largest. */
static void insert_row(const struct topk_rows row, int64_t k, const float *exponents, int64_t low, int64_t high,
                       int64_t column) {
    uint64_t left = 0;
    for (int64_t j = low; j < high; j += LANES)
        left |= (uint64_t)lanes_above(load(exponents + j), row.exponents[k - 1]) << j;
    for (; left; left &= left - 1) {
        int j = __builtin_ctzll(left);
        insert(row, exponents[j], (int32_t)(column + j));
    }
}

#endif
