/* Lanes that change places: the transpose of LANES vectors of LANES lanes, the sum over the lanes of each, and maxima over
 * blocks of lanes. */
#ifndef REGARD_TRANSPOSE_H
#define REGARD_TRANSPOSE_H

#include "simd.h"

#if defined(__clang__)
#define FOR_ALL_LANES _Pragma("unroll")
#else
#define FOR_ALL_LANES _Pragma("GCC unroll 16")
#endif

/* One step: of two vectors whose numbers differ in the bit `step` alone, the lower one's lanes that have that bit
 * change places with the higher one's that have it not. */
#define TRANSPOSE_STEP(block, step)                                                                   \
    FOR_ALL_LANES for (int i = 0; i < LANES; i++) if (!(i & (step))) {                        \
        lanes low = (block)[i], high = (block)[i + (step)];                                   \
        (block)[i] = SHUFFLE(low, high, ALL_LANES(LOWER_LANE, step));                        \
        (block)[i + (step)] = SHUFFLE(low, high, ALL_LANES(HIGHER_LANE, step));              \
    }

/* The source of lane l among the lanes of two vectors side by side. */
#define LOWER_LANE(l, step) ((l) & (step) ? (l) - (step) + LANES : (l))
#define HIGHER_LANE(l, step) ((l) & (step) ? (l) + LANES : (l) + (step))

#define FOUR(LANE, l, step) LANE(l, step), LANE(l + 1, step), LANE(l + 2, step), LANE(l + 3, step)
#if defined(__AVX512F__)
#define ALL_LANES(LANE, step) \
    ((bits){FOUR(LANE, 0, step), FOUR(LANE, 4, step), FOUR(LANE, 8, step), FOUR(LANE, 12, step)})
#elif defined(__AVX__)
#define ALL_LANES(LANE, step) ((bits){FOUR(LANE, 0, step), FOUR(LANE, 4, step)})
#else
#define ALL_LANES(LANE, step) ((bits){FOUR(LANE, 0, step)})
#endif

/* Entry i of vector j becomes entry j of vector i. */
INLINE void transpose(lanes *block) {
    TRANSPOSE_STEP(block, 1)
    TRANSPOSE_STEP(block, 2)
#if defined(__AVX__)
    TRANSPOSE_STEP(block, 4)
#endif
#if defined(__AVX512F__)
    TRANSPOSE_STEP(block, 8)
#endif
}

/* Half of each vector's sum is added to its other half, and vectors whose numbers differ in the bit `step` share one. */
#define SUM_STEP(vectors, step)                                                               \
    FOR_ALL_LANES for (int i = 0; i < (step); i++) {                                          \
        lanes low = (vectors)[i], high = (vectors)[i + (step)];                               \
        (vectors)[i] = SHUFFLE(low, high, ALL_LANES(KEPT_LANE, step)) +                       \
                       SHUFFLE(low, high, ALL_LANES(MOVED_LANE, step));                       \
    }

#define KEPT_LANE(l, step) ((l) & (step) ? (l) + LANES : (l))
#define MOVED_LANE(l, step) ((l) & (step) ? (l) - (step) + LANES : (l) + (step))

/* The sums over the lanes of as many vectors as there are lanes: that of vector i in lane i. */
INLINE lanes sum_vectors(lanes *vectors) {
#if defined(__AVX512F__)
    SUM_STEP(vectors, 8)
#endif
#if defined(__AVX__)
    SUM_STEP(vectors, 4)
#endif
    SUM_STEP(vectors, 2)
    SUM_STEP(vectors, 1)
    return vectors[0];
}

#define OTHER_LANE(l, step) ((l) ^ (step))
#define MAX_STEP(vector, step) max_lanes(vector, SHUFFLE(vector, vector, ALL_LANES(OTHER_LANE, step)))

/* The maxima of blocks of `size` lanes, a power of 2, in all lanes of each. */
INLINE lanes max_of_blocks(lanes values, const int size) {
    if (size > 1) values = MAX_STEP(values, 1);
    if (size > 2) values = MAX_STEP(values, 2);
#if defined(__AVX__)
    if (size > 4) values = MAX_STEP(values, 4);
#endif
#if defined(__AVX512F__)
    if (size > 8) values = MAX_STEP(values, 8);
#endif
    return values;
}

#endif
