/* The largest of many numbers and their log-sum-exp, block after block of them. */
#ifndef REGARD_LARGEST_H
#define REGARD_LARGEST_H

#include "simd.h"

#include <math.h>

/* Of equal entries the first counts as the larger; NaN is no entry, and makes the sum NaN. */
struct largest {
    int64_t count;      /* of the largest */
    float *values;      /* (count), the largest first */
    int64_t *indices;   /* (count) */
    float maximum, sum; /* of all so far, and the sum of e^(entry - maximum) */
};

INLINE struct largest no_entries(int64_t count, float *values, int64_t *indices) {
    for (int64_t k = 0; k < count; k++) values[k] = -INFINITY, indices[k] = k;
    return (struct largest){count, values, indices, -INFINITY, 0.0f};
}

/* Puts an entry that is larger than the last of the largest into its place among them. */
APART void insert_entry(const struct largest *found, float entry, int64_t index) {
    int64_t place = found->count - 1;
    for (; place > 0 && found->values[place - 1] < entry; place--) {
        found->values[place] = found->values[place - 1];
        found->indices[place] = found->indices[place - 1];
    }
    found->values[place] = entry;
    found->indices[place] = index;
}

INLINE int any_lane(bits found) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)found, (__m512i)found) != 0;
#else
    int any = 0;
    for (int lane = 0; lane < LANES; lane++) any |= found[lane];
    return any != 0;
#endif
}

/* Adds so many entries, the first of which has the number `first`. */
INLINE void add_entries(struct largest *found, const float *entries, int64_t count, int64_t first) {
    lanes maxima = broadcast(-INFINITY), sum = {0};
    float least = found->count ? found->values[found->count - 1] : INFINITY, largest = found->maximum;
    int64_t whole = count / LANES * LANES;
    for (int64_t a = 0; a < whole; a += LANES) {
        lanes own = load(entries + a);
        maxima = max_lanes(maxima, own);
        if (!any_lane(own > broadcast(least))) continue;
        for (int64_t c = a; c < a + LANES; c++)
            if (entries[c] > found->values[found->count - 1]) insert_entry(found, entries[c], first + c);
        least = found->values[found->count - 1];
    }
    float of_lanes = max_of_lanes(maxima);
    largest = of_lanes <= largest ? largest : of_lanes;
    for (int64_t c = whole; c < count; c++) {
        largest = entries[c] <= largest ? largest : entries[c];
        if (found->count && entries[c] > found->values[found->count - 1]) insert_entry(found, entries[c], first + c);
    }
    float shift = largest - largest == 0.0f ? largest : 0.0f;
    if (largest != found->maximum) found->sum *= found->maximum == -INFINITY ? 0.0f : expf(found->maximum - shift);
    found->maximum = largest;
    for (int64_t a = 0; a < whole; a += LANES) sum += exp_or_zero(load(entries + a) - shift);
    found->sum += sum_lanes(sum);
    for (int64_t c = whole; c < count; c++) found->sum += expf(entries[c] - shift);
}

/* The logarithm of the sum of e^entry over all entries. */
INLINE float log_of_sum(const struct largest *found) {
    return found->maximum - found->maximum == 0.0f ? found->maximum + logf(found->sum) : found->maximum;
}

#endif
