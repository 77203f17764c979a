/* Rows of float32, bfloat16 or float16, which are widened to float32 as they are read, and rounded as they are written. */
#ifndef REGARD_TYPED_ROWS_H
#define REGARD_TYPED_ROWS_H

#include "simd.h"

/* The dtypes of entries. The values are those of `library.DTYPES` in Python. */
enum { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

typedef uint16_t halves __attribute__((vector_size(2 * LANES)));

/* bfloat16 is the upper half of a float32. */
INLINE lanes widen_bfloat16(halves half) { return (lanes)(__builtin_convertvector(half, bits) << 16); }

/* Rounds to nearest, ties to even; NaN stays NaN. */
INLINE halves round_to_bfloat16(lanes values) {
    bits exact = (bits)values, nearest = exact + 0x7fff + ((exact >> 16) & 1), none = values != values;
    bits chosen = (none & (exact | 0x400000)) | (~none & nearest);
    return __builtin_convertvector((chosen >> 16) & 0xffff, halves);
}

/* float16 has 5 bits of exponent and 10 of mantissa. As the bits of a float32, it is 2^-112 times its value: exact for
 * all numbers, those below the normal ones included. Infinity and NaN have the largest exponent in both. */
INLINE lanes widen_float16(halves half) {
#if defined(__AVX512F__)
    return (lanes)_mm512_cvtph_ps((__m256i)half);
#elif defined(__AVX__) && defined(__F16C__)
    return (lanes)_mm256_cvtph_ps((__m128i)half);
#else
    bits all = __builtin_convertvector(half, bits), magnitude = (all & 0x7fff) << 13;
    lanes scaled = (lanes)magnitude * 0x1p112f;
    bits special = magnitude >= 0x0f800000;
    bits chosen = (special & (magnitude | 0x7f800000)) | (~special & (bits)scaled);
    return (lanes)(chosen | (all & 0x8000) << 16);
#endif
}

/* Rounds to nearest, ties to even; from 65,520 on to infinity; NaN stays NaN. */
INLINE halves round_to_float16(lanes values) {
#if defined(__AVX512F__)
    return (halves)_mm512_cvtps_ph((__m512)values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__AVX__) && defined(__F16C__)
    return (halves)_mm256_cvtps_ph((__m256)values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    bits exact = (bits)values, magnitude = exact & 0x7fffffff;
    /* Normal numbers: the exponent less 112, and 13 bits of the mantissa rounded off. */
    bits normal = (magnitude + 0xfff + ((magnitude >> 13) & 1) - (112 << 23)) >> 13;
    /* Below 2^-14, adding 1/2 leaves steps of 2^-24, those of float16, in the lowest bits: it rounds there. */
    bits tiny = (bits)((lanes)magnitude + 0.5f) - 0x3f000000;
    bits below = magnitude < 0x38800000, above = magnitude >= 0x477ff000, none = magnitude > 0x7f800000;
    bits chosen = (below & tiny) | (~below & normal);
    chosen = (above & 0x7c00) | (~above & chosen);
    chosen |= none & 0x0200;
    return __builtin_convertvector((chosen | ((exact >> 16) & 0x8000)) & 0xffff, halves);
#endif
}

INLINE lanes widen_halves(halves half, const int dtype) {
    return dtype == BFLOAT16 ? widen_bfloat16(half) : widen_float16(half);
}

INLINE halves round_to_halves(lanes values, const int dtype) {
    return dtype == BFLOAT16 ? round_to_bfloat16(values) : round_to_float16(values);
}

/* LANES entries of a row of `dim` from a column on, 0 beyond. whole: there are LANES of them for certain. */
INLINE lanes load_entries(const void *row, int64_t column, int64_t dim, const int dtype, const int whole) {
    int64_t count = whole ? LANES : dim - column;
    if (count <= 0) return broadcast(0.0f);
    if (dtype == FLOAT32) return load_partial((const float *)row + column, count);
    halves half = {0};
    memcpy(&half, (const uint16_t *)row + column, count >= LANES ? sizeof(half) : (size_t)count * sizeof(uint16_t));
    return widen_halves(half, dtype);
}

/* Stores LANES entries of a row of `dim` from a column on, as many as there are. */
INLINE void store_entries(void *row, int64_t column, int64_t dim, const int dtype, lanes values) {
    int64_t count = dim - column < LANES ? dim - column : LANES;
    if (count <= 0) return;
    if (dtype == FLOAT32) {
        store_partial((float *)row + column, values, count);
        return;
    }
    halves half = round_to_halves(values, dtype);
    memcpy((uint16_t *)row + column, &half, (size_t)count * sizeof(uint16_t));
}

/* Calls with the constant DTYPE for a dtype that is known when the program runs, so that each has code of its own. */
#define BY_DTYPE(dtype, ...)                                      \
    do {                                                          \
        if ((dtype) == FLOAT32) {                                 \
            enum { DTYPE = FLOAT32 };                             \
            __VA_ARGS__;                                          \
        } else if ((dtype) == BFLOAT16) {                         \
            enum { DTYPE = BFLOAT16 };                            \
            __VA_ARGS__;                                          \
        } else {                                                  \
            enum { DTYPE = FLOAT16 };                             \
            __VA_ARGS__;                                          \
        }                                                         \
    } while (0)

INLINE int64_t entry_bytes(const int dtype) { return dtype == FLOAT32 ? 4 : 2; }

/* The address of a row by its number and the stride in entries. */
INLINE const void *row_at(const void *rows, int64_t number, int64_t stride, const int dtype) {
    return (const char *)rows + number * stride * entry_bytes(dtype);
}

#endif
