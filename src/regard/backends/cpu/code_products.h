/* Products of rows of numbers with codes of 8 or 4 bits (packed_decode.h), which become numbers in registers alone. */
#ifndef REGARD_CODE_PRODUCTS_H
#define REGARD_CODE_PRODUCTS_H

#include "byte_products.h"
#include "packed_decode.h"
#include "prefetch.h"
#include "simd.h"

/* Whether the variant multiplies bytes, four at a time, and adds them up as whole numbers. */
#if defined(__AVX512VNNI__)
enum { BYTES = 1 };
#else
enum { BYTES = 0 };
#endif

/* Rows that are multiplied at once. */
enum { ROW_TILE = LANES == 4 ? 2 : 4 };

/* A row in bytes is high * BASE + low, both with a sign, in units of its largest number / LARGEST: 16 bits. */
enum { BASE = 256, LARGEST = 127 * BASE };

/* Some rows of `count` numbers each, or, `in_bytes`, of bytes; count is a multiple of 8. `factor`: the number that a unit
 * of a row stands for; 1 of numbers. */
struct left_rows {
    int64_t rows, count;
    float *numbers;
    int8_t *high, *low;
    float *factor;
};

/* Fetches what is read next, line by line, in the order in which it is in memory: where a number of bytes after its
 * beginning is a line's; null for nothing. Into the nearest cache: codes are so few that the lines on their way there do
 * not run out, and this is a quarter faster on Zen 5 than into the second cache. */
INLINE void fetch_next(const char *ahead, int64_t bytes) {
    if (ahead && bytes % LINE == 0) __builtin_prefetch(ahead + bytes, 0, 3);
}

typedef int8_t few_bytes __attribute__((vector_size(LANES)));

INLINE bits broadcast_word(const int8_t *source) {
    int32_t word;
    memcpy(&word, source, sizeof(word));
    return word + (bits){0};
}

/* Writes LANES numbers from a place on, or as many as there are, as bytes; each is multiplied by `unit` and rounded. */
INLINE void write_bytes(const struct left_rows *left, int64_t at, int64_t count, float unit) {
    const float nearest = 12582912.0f; /* 1.5 * 2^23: adding it rounds to a whole number, which the low bits then hold */
    bits whole = (bits)(load_partial(left->numbers + at, count) * unit + nearest) - 0x4b400000;
    few_bytes high = __builtin_convertvector((whole + BASE / 2) >> 8, few_bytes),
              low = __builtin_convertvector(whole, few_bytes);
    if (count >= LANES) /* of a size that the compiler knows */
        memcpy(left->high + at, &high, LANES), memcpy(left->low + at, &low, LANES);
    else
        memcpy(left->high + at, &high, (size_t)count), memcpy(left->low + at, &low, (size_t)count);
}

/* Rounds the numbers of all rows to bytes, in units of each row. A row with NaN becomes anything finite, or 0: who
 * multiplies adds NaN to the products. */
INLINE void round_rows(const struct left_rows *left) {
    for (int64_t r = 0; r < left->rows; r++) {
        int64_t a = r * left->count, end = a + left->count;
        lanes most = {0};
        for (int64_t b = a; b < end; b += LANES) most = max_lanes(absolute(load_partial(left->numbers + b, end - b)), most);
        const float largest = max_of_lanes(most);
        const int known = largest > 0x1p-100f && largest < 0x1p100f;
        const float unit = known ? LARGEST / largest : 0.0f;
        left->factor[r] = known ? largest / LARGEST : 0.0f;
        for (; a + LANES <= end; a += LANES) write_bytes(left, a, LANES, unit);
        if (a < end) write_bytes(left, a, end - a, unit);
    }
}

/* The words of a group, one in each lane of so many vectors; as many bytes are fetched ahead, from that vector on. */
INLINE void read_words(bits *word, const int32_t *codes, int64_t filled, const char *ahead, int64_t vector,
                       const int vectors) {
    UNROLL for (int v = 0; v < vectors; v++) {
        word[v] = (bits)load_partial((const float *)(codes + v * LANES), vectors == 1 ? filled : LANES);
        fetch_next(ahead, (vector + v) * LANES * 4);
    }
}

/* Number k of each word. A float of 8 bits has sign, exponent and mantissa in the order of a float, whose exponent is
 * biased by more: put in their places they are the number, subnormal or not, but for a power of two. */
INLINE lanes number_of(bits word, const int k, const int code) {
    bits first = word << (24 - 8 * (k % 4));
    if (code == E4M3) return (lanes)((first >> 4) & -0x78100000) * 0x1p120f;
    if (code == E5M2) return (lanes)((first >> 3) & -0x70200000) * 0x1p112f;
    return __builtin_convertvector((word >> (8 * (k % 4) + 4 * (k / 4))) & (code == INT4 ? 15 : 255), lanes);
}

/* sum[row][vector] of a tile: rows from `row` on, times `vectors` vectors of codes in `groups` words, each `stride` words
 * after the one before. filled: how many lanes of a single vector there are. As many bytes
 * as are read are fetched `ahead`; null for none. */
INLINE void multiply_numbers(const struct left_rows *left, int64_t row, const int32_t *codes, int64_t groups,
                             int64_t stride, int64_t filled, const char *ahead, lanes *sum, const int rows,
                             const int vectors, const int code) {
    const int per = code == INT4 ? 8 : 4;
    const float *numbers = left->numbers + row * left->count;
    for (int64_t g = 0; g < groups; g++) {
        bits word[4];
        read_words(word, codes + g * stride, filled, ahead, g * vectors, vectors);
        UNROLL for (int k = 0; k < per; k++) {
            lanes entry[4];
            UNROLL for (int v = 0; v < vectors; v++) entry[v] = number_of(word[v], k, code);
            UNROLL for (int r = 0; r < rows; r++) {
                lanes own = broadcast(numbers[r * left->count + g * per + k]);
                UNROLL for (int v = 0; v < vectors; v++) sum[r * vectors + v] += own * entry[v];
            }
        }
    }
}

#if defined(__AVX512VNNI__)
/* The same of bytes, where codes are whole numbers: exactly. */
INLINE void multiply_bytes(const struct left_rows *left, int64_t row, const int32_t *codes, int64_t groups,
                           int64_t stride, int64_t filled, const char *ahead, lanes *sum, const int rows,
                           const int vectors, const int code) {
    const int halves = code == INT4 ? 2 : 1;
    const int8_t *high = left->high + row * left->count, *low = left->low + row * left->count;
    bits upper[ROW_TILE * 4], lower[ROW_TILE * 4];
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < vectors; v++)
        upper[r * vectors + v] = lower[r * vectors + v] = (bits){0};
    for (int64_t g = 0; g < groups; g++) {
        bits word[4];
        read_words(word, codes + g * stride, filled, ahead, g * vectors, vectors);
        UNROLL for (int h = 0; h < halves; h++) {
            bits entry[4];
            UNROLL for (int v = 0; v < vectors; v++) entry[v] =
                code == INT8 ? word[v] : (word[v] >> (4 * h)) & 0x0f0f0f0f;
            UNROLL for (int r = 0; r < rows; r++) {
                int64_t at = r * left->count + (g * halves + h) * 4;
                bits of_high = broadcast_word(high + at), of_low = broadcast_word(low + at);
                UNROLL for (int v = 0; v < vectors; v++) {
                    add_byte_products(upper + r * vectors + v, entry[v], of_high);
                    add_byte_products(lower + r * vectors + v, entry[v], of_low);
                }
            }
        }
    }
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < vectors; v++) {
        lanes whole = __builtin_convertvector(upper[r * vectors + v], lanes) * (float)BASE +
                      __builtin_convertvector(lower[r * vectors + v], lanes);
        sum[r * vectors + v] = whole * left->factor[row + r];
    }
}
#endif

INLINE void multiply_codes(const struct left_rows *left, int64_t row, const int32_t *codes, int64_t groups,
                           int64_t stride, int64_t filled, const char *ahead, lanes *sum, const int rows,
                           const int vectors, const int code, const int in_bytes) {
#if defined(__AVX512VNNI__)
    if (in_bytes) {
        multiply_bytes(left, row, codes, groups, stride, filled, ahead, sum, rows, vectors, code);
        return;
    }
#endif
    (void)in_bytes;
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < vectors; v++) sum[r * vectors + v] = (lanes){0};
    multiply_numbers(left, row, codes, groups, stride, filled, ahead, sum, rows, vectors, code);
}

#endif
