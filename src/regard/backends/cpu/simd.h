/* SIMD vectors of floats, as wide as the variant allows, and functions of them. */
#ifndef REGARD_SIMD_H
#define REGARD_SIMD_H

#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
enum { LANES = 16 };
#elif defined(__AVX__)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif

#if defined(__SSE__)
#include <immintrin.h>
#elif defined(__ARM_NEON) && defined(__aarch64__)
#include <arm_neon.h>
#endif

typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef int32_t bits __attribute__((vector_size(4 * LANES)));
typedef float unaligned_lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

#if defined(__OPTIMIZE_SIZE__) /* the code for any x86-64 in wheels: a third smaller, and slower over codes alone */
#define INLINE static inline
#else
#define INLINE static inline __attribute__((always_inline))
#endif

/* Code that is long, or that several places call once for many numbers: a function of its own. Compilers take the longer
 * for each line, the longer the function that it is inlined into. */
#define APART static __attribute__((noinline, unused))

#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 8")
#endif

#if defined(__clang__)
#define SHUFFLE(first, second, source) shuffle(first, second, source)
INLINE lanes shuffle(lanes first, lanes second, bits source) {
    lanes result;
    UNROLL for (int lane = 0; lane < LANES; lane++)
        result[lane] = source[lane] < LANES ? first[source[lane]] : second[source[lane] - LANES];
    return result;
}
#else
#define SHUFFLE(first, second, source) __builtin_shuffle(first, second, source)
#endif

/* A number of entries, rounded up to whole vectors. */
INLINE int64_t round_up_to_lanes(int64_t entries) { return (entries + LANES - 1) / LANES * LANES; }

INLINE lanes broadcast(float value) { return value - (lanes){0}; }

/* The same bits in each lane, whatever number they are as a float. */
INLINE lanes broadcast_bits(const float *source) {
    int32_t word;
    memcpy(&word, source, sizeof(word));
    return (lanes)(word + (bits){0});
}

INLINE lanes load(const float *source) { return *(const unaligned_lanes *)source; }

INLINE void store(float *target, lanes value) { *(unaligned_lanes *)target = value; }

/* Loads the first `count` lanes; the others are 0. */
INLINE lanes load_partial(const float *source, int64_t count) {
    if (count >= LANES) return load(source);
#if defined(__AVX512F__)
    return (lanes)_mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1), source);
#endif
    lanes value = {0};
    memcpy(&value, source, (size_t)count * sizeof(float));
    return value;
}

INLINE void store_partial(float *target, lanes value, int64_t count) {
    if (count >= LANES)
        store(target, value);
    else
#if defined(__AVX512F__)
        _mm512_mask_storeu_ps(target, (__mmask16)((1u << count) - 1), (__m512)value);
#else
        memcpy(target, &value, (size_t)count * sizeof(float));
#endif
}

/* sum + left[2 i] right[2 i] + left[2 i + 1] right[2 i + 1] in lane i, of vectors of pairs of bfloat16. PAIRS: whether the
 * variant has an instruction for it. */
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
enum { PAIRS = 1 };
#else
enum { PAIRS = 0 };
#endif

INLINE lanes add_pairs(lanes sum, lanes left, lanes right) {
#if defined(__AVX512BF16__)
    return (lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)left, (__m512bh)right);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    return (lanes)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)left, (bfloat16x8_t)right);
#else
    const bits upper = (bits){0} - 0x10000;
    sum += (lanes)((bits)left << 16) * (lanes)((bits)right << 16);
    return sum + (lanes)((bits)left & upper) * (lanes)((bits)right & upper);
#endif
}

typedef float quad __attribute__((vector_size(16), aligned(4), may_alias));

INLINE float sum_floats(const float *entries) {
    quad sum = *(const quad *)entries;
    for (int lane = 4; lane < LANES; lane += 4) sum += *(const quad *)(entries + lane);
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

/* The sum over all lanes. */
INLINE float sum_lanes(lanes vector) {
    float apart[LANES];
    store(apart, vector);
    return sum_floats(apart);
}

INLINE lanes absolute(lanes x) { return (lanes)((bits)x & 0x7fffffff); }

/* The smaller of a number and each lane; NaN where the lane is NaN. */
INLINE lanes min_lanes(float limit, lanes value) {
#if defined(__AVX512F__)
    return (lanes)_mm512_min_ps(_mm512_set1_ps(limit), (__m512)value);
#elif defined(__AVX__)
    return (lanes)_mm256_min_ps(_mm256_set1_ps(limit), (__m256)value);
#elif defined(__SSE__)
    return (lanes)_mm_min_ps(_mm_set1_ps(limit), (__m128)value);
#elif defined(__ARM_NEON) && defined(__aarch64__)
    return (lanes)vminq_f32(vdupq_n_f32(limit), (float32x4_t)value);
#else
    bits over = broadcast(limit) < value;
    return (lanes)((over & (bits)broadcast(limit)) | (~over & (bits)value));
#endif
}

/* The larger number of each lane; NaN where the second is NaN. */
INLINE lanes max_lanes(lanes first, lanes second) {
#if defined(__AVX512F__)
    return (lanes)_mm512_max_ps((__m512)first, (__m512)second);
#elif defined(__AVX__)
    return (lanes)_mm256_max_ps((__m256)first, (__m256)second);
#elif defined(__SSE__)
    return (lanes)_mm_max_ps((__m128)first, (__m128)second);
#else
    bits over = first > second;
    return (lanes)((over & (bits)first) | (~over & (bits)second));
#endif
}

/* The largest number of all lanes. */
INLINE float max_of_lanes(lanes values) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)values);
#else
    float apart[LANES], largest;
    store(apart, values);
    largest = apart[0];
    for (int lane = 1; lane < LANES; lane++) largest = apart[lane] > largest ? apart[lane] : largest;
    return largest;
#endif
}

/* exp(x) - 1 + less for |x| <= 87: x = n ln 2 + r with |r| <= ln 2 / 2, and exp(r) = 1 + r + r^2 p(r), p by Chebyshev's
 * fit. With less = 0 it is exact near 0, where n is 0; with less = 1 it is exp(x). NaN stays. */
INLINE lanes expm1_plus(float less, lanes x) {
    const float shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer, which its low bits then hold */
    lanes shifted = x * 1.44269504f + shift;
    lanes n = shifted - shift;
    lanes r = x - n * 0.693359375f; /* ten bits of ln 2, so that the product is exact, and the rest of it */
    r = r + n * 2.12194440e-4f;
    lanes p = broadcast(0x1.a124f2p-13f);
    p = p * r + 0x1.6d4324p-10f;
    p = p * r + 0x1.1110e0p-7f;
    p = p * r + 0x1.5554eap-5f;
    p = p * r + 0x1.555556p-3f;
    p = p * r + 0.5f;
    p = (p * r) * r + r;
    lanes power = (lanes)(((bits)shifted - 0x4b400000 + 127) << 23); /* 2^n */
    return power * p + (power - (1.0f - less));
}

INLINE lanes exp_lanes(lanes x) { return expm1_plus(1.0f, x); }

/* e^x where x may be -infinity: 0 there, and NaN where x is NaN. */
INLINE lanes exp_or_zero(lanes x) {
    bits none = x < -87.0f;
    return (lanes)(~none & (bits)exp_lanes((lanes)((none & (bits)broadcast(-87.0f)) | (~none & (bits)x))));
}

/* tanh(x) = sign(x) m / (m + 2) with m = exp(2 |x|) - 1: relatively exact near 0, and 1 to the last bit from 16 on. */
INLINE lanes tanh_lanes(lanes x) {
    lanes m = expm1_plus(0.0f, 2.0f * min_lanes(16.0f, absolute(x)));
    return (lanes)((bits)(m / (m + 2.0f)) | ((bits)x & (bits)broadcast(-0.0f)));
}

#endif
