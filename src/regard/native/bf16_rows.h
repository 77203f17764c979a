/* Rows of float32 or bfloat16, which is the upper half of a float32. */
#ifndef REGARD_BF16_ROWS_H
#define REGARD_BF16_ROWS_H

#include "simd.h"

typedef uint16_t halves __attribute__((vector_size(2 * LANES)));

/* LANES entries of a row of `dim` from a column on, 0 beyond. whole: there are LANES of them for certain. */
INLINE lanes load_entries(const void *row, int64_t column, int64_t dim, const int is_bfloat16, const int whole) {
    int64_t count = whole ? LANES : dim - column;
    if (count <= 0) return broadcast(0.0f);
    if (!is_bfloat16) return load_partial((const float *)row + column, count);
    halves half = {0};
    memcpy(&half, (const uint16_t *)row + column, count >= LANES ? sizeof(half) : (size_t)count * sizeof(uint16_t));
    return (lanes)(__builtin_convertvector(half, bits) << 16);
}

/* Stores LANES entries of a row of `dim` from a column on; bfloat16 is rounded to nearest, ties to even. */
INLINE void store_entries(void *row, int64_t column, int64_t dim, const int is_bfloat16, lanes values) {
    int64_t count = dim - column < LANES ? dim - column : LANES;
    if (count <= 0) return;
    if (!is_bfloat16) {
        store_partial((float *)row + column, values, count);
        return;
    }
    bits exact = (bits)values, nearest = exact + 0x7fff + ((exact >> 16) & 1), none = values != values;
    bits chosen = (none & (exact | 0x400000)) | (~none & nearest);
    halves half = __builtin_convertvector((chosen >> 16) & 0xffff, halves);
    memcpy((uint16_t *)row + column, &half, (size_t)count * sizeof(uint16_t));
}

/* The address of a row by its number and the stride in entries. */
INLINE const void *row_at(const void *rows, int64_t number, int64_t stride, const int is_bfloat16) {
    return (const char *)rows + number * stride * (is_bfloat16 ? 2 : 4);
}

#endif
