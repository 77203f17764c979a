/* The transpose of LANES vectors of LANES lanes. */
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

#endif
