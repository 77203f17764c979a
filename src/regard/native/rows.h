/* Rows of float32, or of bfloat16 where they are narrow: bfloat16 is the upper half of a float32. */
#ifndef REGARD_ROWS_H
#define REGARD_ROWS_H

#include "lanes.h"

typedef uint16_t halves __attribute__((vector_size(2 * LANES)));

/* A row's entries from `at` on, where it has `dim`; 0 beyond. whole: it is known that there are LANES of them. */
INLINE lanes entries(const void *row, int64_t at, int64_t dim, const int narrow, const int whole) {
    int64_t count = whole ? LANES : dim - at;
    if (count <= 0) return every(0.0f);
    if (!narrow) return load_some((const float *)row + at, count);
    halves half = {0};
    memcpy(&half, (const uint16_t *)row + at, count >= LANES ? sizeof(half) : (size_t)count * sizeof(uint16_t));
    return (lanes)(__builtin_convertvector(half, bits) << 16);
}

/* Writes a row's entries from `at` on, where it has `dim`: to bfloat16 by rounding to the nearest, ties to even. */
INLINE void write_entries(void *row, int64_t at, int64_t dim, const int narrow, lanes values) {
    int64_t count = dim - at < LANES ? dim - at : LANES;
    if (count <= 0) return;
    if (!narrow) {
        store_some((float *)row + at, values, count);
        return;
    }
    bits exact = (bits)values, nearest = exact + 0x7fff + ((exact >> 16) & 1), none = values != values;
    bits chosen = (none & (exact | 0x400000)) | (~none & nearest);
    halves half = __builtin_convertvector((chosen >> 16) & 0xffff, halves);
    memcpy((uint16_t *)row + at, &half, (size_t)count * sizeof(uint16_t));
}

/* The row of that number, where rows lie so many entries apart. */
INLINE const void *row_of(const void *rows, int64_t number, int64_t stride, const int narrow) {
    return (const char *)rows + number * stride * (narrow ? 2 : 4);
}

#endif
