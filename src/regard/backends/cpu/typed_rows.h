/* Rows of float32, bfloat16 or float16, which are widened to float32 as they are read, and rounded as they are written. */
#ifndef REGARD_TYPED_ROWS_H
#define REGARD_TYPED_ROWS_H

#include "simd.h"
#include "variants.h"

/* The dtypes of entries. The values are those of `library.DTYPES` in Python. */
enum { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

typedef uint16_t halves __attribute__((vector_size(2 * LANES)));

/* The bits of halves, each in the lower half of a lane. */
INLINE bits extend_halves(halves half) {
#if defined(__AVX512F__)
    return (bits)_mm512_cvtepu16_epi32((__m256i)half);
#else
    return __builtin_convertvector(half, bits);
#endif
}

/* bfloat16 is the upper half of a float32. */
INLINE lanes widen_bfloat16(halves half) { return (lanes)(extend_halves(half) << 16); }

/* Rounds to nearest, ties to even; NaN stays NaN. */
INLINE halves round_to_bfloat16(lanes values) {
    bits exact = (bits)values, nearest = exact + 0x7fff + ((exact >> 16) & 1), none = values != values;
    bits chosen = (none & (exact | 0x400000)) | (~none & nearest);
    return __builtin_convertvector((chosen >> 16) & 0xffff, halves);
}

/* LANES floats rounded to bfloat16, the halves of LANES / 2 pairs. */
INLINE void store_pairs(uint16_t *target, lanes values) {
#if defined(__AVX512BF16__)
    __m256bh rounded = _mm512_cvtneps_pbh((__m512)values);
    memcpy(target, &rounded, sizeof(rounded));
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    bfloat16x4_t rounded = vcvt_bf16_f32((float32x4_t)values);
    memcpy(target, &rounded, sizeof(rounded));
#else
    halves rounded = round_to_bfloat16(values);
    memcpy(target, &rounded, sizeof(rounded));
#endif
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

/* The first `count` halves, as many as there are lanes; the others are 0. */
INLINE halves load_halves(const uint16_t *source, int64_t count) {
    halves half = {0};
    if (count >= LANES)
        memcpy(&half, source, sizeof(half)); /* of a size that the compiler knows */
    else if (count > 0)
#if defined(__AVX512BW__) && defined(__AVX512VL__)
        half = (halves)_mm256_maskz_loadu_epi16((__mmask16)((1u << count) - 1), source);
#else
        memcpy(&half, source, (size_t)count * sizeof(uint16_t));
#endif
    return half;
}

/* The first `count` halves, as many as there are in pairs of halves in all lanes; the others are 0. */
INLINE lanes load_pairs(const uint16_t *source, int64_t count) {
    lanes pairs = {0};
    if (count >= 2 * LANES)
        memcpy(&pairs, source, sizeof(pairs));
    else if (count > 0)
#if defined(__AVX512BW__)
        pairs = (lanes)_mm512_maskz_loadu_epi16((__mmask32)((1u << count) - 1), source);
#else
        memcpy(&pairs, source, (size_t)count * sizeof(uint16_t));
#endif
    return pairs;
}

/* LANES entries of a row of `dim` from a column on, 0 beyond. whole: there are LANES of them for certain. */
INLINE lanes load_entries(const void *row, int64_t column, int64_t dim, const int dtype, const int whole) {
    int64_t count = whole ? LANES : dim - column;
    if (count <= 0) return broadcast(0.0f);
    if (dtype == FLOAT32) return load_partial((const float *)row + column, count);
    return widen_halves(load_halves((const uint16_t *)row + column, count), dtype);
}

/* Whether entries of a dtype are multiplied in pairs by this variant. */
INLINE int in_pairs(const int dtype) { return PAIRS && (ONLY_PAIRS || dtype == BFLOAT16); }

/* Terms of a product (microkernel.h) from a row of `dim` entries: how many there are, and LANES of them from a term on,
 * 0 beyond, which are entries times a factor, or, `paired`, pairs of bfloat16 as they are. whole: there are so many for
 * certain. */
INLINE int64_t term_count(int64_t dim, const int paired) { return paired ? (dim + 1) / 2 : dim; }

INLINE lanes load_terms(const void *row, int64_t term, int64_t dim, float factor, const int dtype, const int whole,
                        const int paired) {
    if (!paired) return load_entries(row, term, dim, dtype, whole) * factor;
    return load_pairs((const uint16_t *)row + 2 * term, whole ? 2 * LANES : dim - 2 * term);
}

/* A term of a sum over `count` rows, in pairs: LANES entries of row 2 term and of the next one, from a column on; zeros
 * where there is no next row. whole: there are so many columns for certain. */
INLINE lanes pair_rows(const void *rows, int64_t term, int64_t stride, int64_t count, int64_t column, int64_t dim,
                       const int whole) {
    const uint16_t *row = (const uint16_t *)rows + 2 * term * stride + column;
    int64_t columns = whole ? LANES : dim - column;
    halves even = load_halves(row, columns), odd = {0};
    if (2 * term + 1 < count) odd = load_halves(row + stride, columns);
    return (lanes)(extend_halves(even) | extend_halves(odd) << 16);
}

/* Pairs of two rows of floats, entry by entry, rounded to bfloat16. */
INLINE lanes round_to_pairs(lanes first, lanes second) {
    halves even, odd;
    store_pairs((uint16_t *)&even, first);
    store_pairs((uint16_t *)&odd, second);
    return (lanes)(extend_halves(even) | extend_halves(odd) << 16);
}

/* Stores LANES floats of a row of terms, from an entry on; `paired`, rounded to bfloat16, over what was read before. */
INLINE void store_terms(float *row, int64_t entry, lanes values, const int paired) {
    if (paired)
        store_pairs((uint16_t *)row + entry, values);
    else
        store(row + entry, values);
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
        if (!ONLY_PAIRS && (dtype) == FLOAT32) {                  \
            enum { DTYPE = FLOAT32 };                             \
            __VA_ARGS__;                                          \
        } else if (ONLY_PAIRS || (dtype) == BFLOAT16) {           \
            enum { DTYPE = BFLOAT16 };                            \
            __VA_ARGS__;                                          \
        } else {                                                  \
            enum { DTYPE = FLOAT16 };                             \
            __VA_ARGS__;                                          \
        }                                                         \
    } while (0)

/* A table of functions, one for each dtype as the constant DTYPE, each of them APART: table[dtype](arguments). */
#define ONE_DTYPE(table, dtype, parameters, ...) \
    APART void table##_##dtype parameters {     \
        enum { DTYPE = dtype };                  \
        __VA_ARGS__;                             \
    }
#if defined(WITHOUT_PAIRS)
#define TABLE_BY_DTYPE(table, parameters, ...)          \
    ONE_DTYPE(table, BFLOAT16, parameters, __VA_ARGS__) \
    static void(*const table[]) parameters = {0, table##_BFLOAT16};
#else
#define TABLE_BY_DTYPE(table, parameters, ...)              \
    ONE_DTYPE(table, FLOAT32, parameters, __VA_ARGS__)      \
    ONE_DTYPE(table, BFLOAT16, parameters, __VA_ARGS__)     \
    ONE_DTYPE(table, FLOAT16, parameters, __VA_ARGS__)      \
    static void(*const table[]) parameters = {table##_FLOAT32, table##_BFLOAT16, table##_FLOAT16};
#endif

INLINE int64_t entry_bytes(const int dtype) { return dtype == FLOAT32 ? 4 : 2; }

/* The address of a row by its number and the stride in entries. */
INLINE const void *row_at(const void *rows, int64_t number, int64_t stride, const int dtype) {
    return (const char *)rows + number * stride * entry_bytes(dtype);
}

#endif
