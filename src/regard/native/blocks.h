/* Blocks of rows laid out for products, the tiles of a mask, and powers of 2: what both passes share. */
#ifndef REGARD_BLOCKS_H
#define REGARD_BLOCKS_H

#include "flash.h"
#include "products.h"
#include "rows.h"
#include "transpose.h"

#include <math.h>
#include <stdlib.h>

#define LOG2_E 1.44269504f
#define LN_2 0.69314718f

#define ALIGNED __attribute__((aligned(64)))

INLINE int64_t whole_pairs(int64_t dim) { return (dim + PAIR - 1) / PAIR * PAIR; }

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* Memory for so many floats, 64 bytes after 64 bytes; it is taken off the front of a thread's room. */
INLINE float *taken_off(float **room, int64_t floats) {
    float *taken = *room;
    *room += (floats + 15) / 16 * 16;
    return taken;
}

INLINE const void *rows_of(const struct rows *rows, int64_t batch, int64_t head, int64_t first, const int narrow) {
    return row_of(rows->at, 1, batch * rows->batch + head * rows->head + first * rows->row, narrow);
}

/* The larger of each two; NaN where the second is. */
INLINE lanes larger(lanes first, lanes second) {
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

/* 2^x for x <= 0, and 0 from -127 on down; NaN stays. 2^x = 2^n 2^r with |r| <= 1/2; the latter by a fit of least
 * relative error, 2e-9 before rounding. */
INLINE lanes power_of_two(lanes x) {
    const float shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds to a whole number, which then stands in its bits */
    x = larger(every(-127.0f), x);
    lanes shifted = x + shift, r = x - (shifted - shift);
    lanes p = every(0x1.41d334p-13f);
    p = p * r + 0x1.5f456ap-10f;
    p = p * r + 0x1.3b2dbcp-7f;
    p = p * r + 0x1.c6aed4p-5f;
    p = p * r + 0x1.ebfbdap-3f;
    p = p * r + 0x1.62e430p-1f;
    p = p * r + 1.0f;
    return (lanes)(((bits)shifted - 0x4b400000 + 127) << 23) * p;
}

/* `count` rows times a factor as to[row][padded], with 0 beyond them up to BLOCK rows, and beyond their dim. */
INLINE void lay_rows(const void *rows, int64_t stride, int64_t count, int64_t dim, float factor, float *to,
                     const int narrow) {
    int64_t padded = whole_pairs(dim);
    for (int64_t i = 0; i < count; i++) {
        const void *row = row_of(rows, i, stride, narrow);
        for (int64_t a = 0; a < padded; a += LANES) store(to + i * padded + a, entries(row, a, dim, narrow, 0) * factor);
    }
    memset(to + count * padded, 0, (size_t)((BLOCK - count) * padded) * sizeof(float));
}

/* `count` rows as columns, to[entry][BLOCK], with 0 in the columns beyond them. There is room for whole pairs of
 * vectors of entries. */
INLINE void lay_columns(const void *rows, int64_t stride, int64_t count, int64_t dim, float *to, const int narrow) {
    for (int64_t i = 0; i < BLOCK; i += LANES)
        for (int64_t a = 0; a < dim; a += LANES) {
            lanes block[LANES];
            for (int l = 0; l < LANES; l++)
                block[l] = i + l < count ? entries(row_of(rows, i + l, stride, narrow), a, dim, narrow, 0) : every(0.0f);
            transpose(block);
            for (int l = 0; l < LANES; l++) store(to + (a + l) * BLOCK + i, block[l]);
        }
}

/* The runs of a block of rows, gone through from left to right. */
struct cursor {
    int64_t run, end, column;
};

INLINE struct cursor beginning_of(const struct flash *of, int64_t block) {
    int64_t run = of->first[block], end = of->first[block + 1];
    return (struct cursor){run, end, run < end ? of->runs[3 * run] : INT64_MAX};
}

/* The number of the tile at the cursor among those with bits, or -1 where all its pairs exist; on to the next. */
INLINE int64_t next_tile(const struct flash *of, struct cursor *at) {
    const int64_t *run = of->runs + 3 * at->run;
    int64_t tile = run[2] < 0 ? -1 : run[2] + (at->column - run[0]) / BLOCK;
    at->column += BLOCK;
    if (at->column >= run[1]) at->column = ++at->run < at->end ? of->runs[3 * at->run] : INT64_MAX;
    return tile;
}

/* The bits of a tile for one head; null where all its pairs exist. */
INLINE const uint64_t *words_of(const struct flash *of, int64_t batch, int64_t head, int64_t tile) {
    return tile < 0 ? 0 : of->bits + batch * of->bits_batch + head * of->bits_head + tile * BLOCK;
}

/* Of a group of rows of a tile: whether any pair is missing, and from which column to which there are any pairs. */
struct extent {
    int partial;
    int64_t from, to;
};

INLINE struct extent extent_of(const uint64_t *words, int64_t count) {
    uint64_t exists = count < BLOCK ? ((uint64_t)1 << count) - 1 : ~(uint64_t)0, some = 0;
    if (!words) return (struct extent){count < BLOCK, 0, count};
    for (int r = 0; r < GROUP; r++) some |= words[r];
    some &= exists;
    if (!some) return (struct extent){1, 0, 0};
    return (struct extent){1, __builtin_ctzll(some), BLOCK - __builtin_clzll(some)};
}

INLINE int64_t low_of(const struct extent extent) { return extent.from / PAIR * PAIR; }

INLINE int64_t high_of(const struct extent extent) { return (extent.to + PAIR - 1) / PAIR * PAIR; }

/* The bits of a row, with those of columns that are not there cleared. */
INLINE uint64_t word_of(const uint64_t *words, int row, int64_t count) {
    uint64_t exists = count < BLOCK ? ((uint64_t)1 << count) - 1 : ~(uint64_t)0;
    return words ? words[row] & exists : exists;
}

/* The lanes from column `at` on whose pairs exist as they are, and `otherwise` in the others. */
INLINE lanes where_bits(uint64_t word, int64_t at, lanes values, float otherwise) {
#if defined(__AVX512F__)
    return (lanes)_mm512_mask_blend_ps((__mmask16)(word >> at), _mm512_set1_ps(otherwise), (__m512)values);
#else
    const bits all = {1, 2, 4, 8,
#if defined(__AVX__)
                      16, 32, 64, 128
#endif
    };
    bits exists = ((all & (int32_t)(word >> at)) != 0);
    return (lanes)((exists & (bits)values) | (~exists & (bits)every(otherwise)));
#endif
}

/* What a product of scaled query and key becomes on its way to the softmax, and its own slope on that way. */
INLINE lanes capped(const struct flash *of, lanes product, lanes *slope) {
    if (of->softcap == 0.0f) return product;
    lanes tangents = tangent(product);
    if (slope) *slope = 1.0f - tangents * tangents;
    return tangents * (of->softcap * LOG2_E);
}

/* What the query is multiplied by, so that its products with keys are what `capped` takes. */
INLINE float query_factor(const struct flash *of) {
    return of->softcap == 0.0f ? of->scale * LOG2_E : of->scale / of->softcap;
}

/* What the gradient of a key, summed up over queries that were multiplied by `query_factor`, is multiplied by: their
 * quotient would be 0 / 0 where the scale is 0. */
INLINE float key_gradient_factor(const struct flash *of) { return of->softcap == 0.0f ? LN_2 : of->softcap; }

/* Which weights are kept, as regard.dropout says it: mixed bits of row and column that are at least the threshold. */
INLINE bits kept_of(const struct flash *of, int32_t row, int64_t column) {
    bits noise;
    memcpy(&noise, of->column_noise + column, sizeof(noise));
    noise += row;
    noise ^= noise >> 16;
    noise *= 0x7feb352d;
    noise ^= noise >> 15;
    noise *= (int32_t)0x846ca68b;
    return noise >= (int32_t)of->threshold;
}

INLINE lanes where(bits kept, lanes values) { return (lanes)(kept & (bits)values); }

INLINE int32_t noise_of(const struct flash *of, int64_t batch, int64_t head, int64_t row) {
    return of->row_noise ? of->row_noise[(batch * of->heads + head) * of->rows + smaller(row, of->rows - 1)] : 0;
}

/* Where a row's pairs begin on a line of diagonals, from a column on; rows of padding are as the last row. */
INLINE int64_t on_line(const struct flash *of, int64_t row, int64_t column) {
    return of->rows - 1 - smaller(row, of->rows - 1) + column;
}

/* What is added to a row's scores from a column on. */
INLINE const float *line_of(const struct flash *of, int64_t head, int64_t row, int64_t column) {
    return of->line ? of->line + head * of->line_head + on_line(of, row, column) : 0;
}

#endif
