/* The largest of rows whose numbers come one block after another: a few in vectors, from the largest on. */
#ifndef REGARD_LEADING_H
#define REGARD_LEADING_H

#include "blocks.h"

/* The largest of each row so far, whole vectors of them: the last may be more than is asked for. */
struct leading {
    float *exponents; /* [rows][count], from the largest on */
    int32_t *columns; /* [rows][count] */
    int64_t count;
};

INLINE struct leading leading_of(const struct leading *first, int64_t row) {
    return (struct leading){first->exponents + row * first->count, first->columns + row * first->count, first->count};
}

/* A bit for each of the lanes: whether it is over a limit. */
INLINE uint32_t over(lanes values, float limit) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)values, _mm512_set1_ps(limit), _CMP_GT_OQ);
#elif defined(__AVX__)
    return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps((__m256)values, _mm256_set1_ps(limit), _CMP_GT_OQ));
#elif defined(__SSE__)
    return (uint32_t)_mm_movemask_ps(_mm_cmpgt_ps((__m128)values, _mm_set1_ps(limit)));
#else
    bits larger_ones = values > every(limit);
    uint32_t found = 0;
    for (int lane = 0; lane < LANES; lane++) found |= (uint32_t)(larger_ones[lane] & 1) << lane;
    return found;
#endif
}

/* Lane l comes from the lane before it, the first from the last one of the vector before. */
#define ONWARDS(l, step) (LANES - 1 + (l) + (step))

/* Those before it stay, it moves those behind it on by one, and the last falls out:
 * new[n] = max(old[n], min(old[n - 1], exponent)). */
INLINE void put_in(const struct leading row, float exponent, int32_t column) {
    const bits onwards = ALL_LANES(ONWARDS, 0);
    for (int64_t n = row.count - LANES; n >= 0; n -= LANES) {
        lanes own = load(row.exponents + n), columns = load((float *)row.columns + n);
        lanes before = n ? load(row.exponents + n - LANES) : every(INFINITY);
        lanes before_columns = n ? load((float *)row.columns + n - LANES) : every(0.0f);
        before = SHUFFLED(before, own, onwards), before_columns = SHUFFLED(before_columns, columns, onwards);
        bits moves = own < exponent, moved = before < exponent;
        bits chosen = (moved & (bits)before_columns) | (~moved & column);
        store(row.exponents + n, larger(own, at_most(exponent, before)));
        store((float *)row.columns + n, (lanes)((moves & chosen) | (~moves & (bits)columns)));
        if (own[0] >= exponent) break;
    }
}

/* A row of a tile goes into its largest so far, the last of which is the limit. */
static void put_in_all(const struct leading row, int64_t most, const float *products, float shift, uint64_t word,
                       int64_t low, int64_t high, int64_t column) {
    uint64_t left = 0;
    for (int64_t j = low; j < high; j += LANES)
        left |= (uint64_t)over(load(products + j) - shift, row.exponents[most - 1]) << j;
    for (left &= word; left; left &= left - 1) {
        int j = __builtin_ctzll(left);
        put_in(row, products[j] - shift, (int32_t)(column + j));
    }
}

#endif
