/* Packed blocks of rows, the tiles of a mask, and exponentials: shared by the forward and backward pass. */
#ifndef REGARD_TILE_H
#define REGARD_TILE_H

#include "flash.h"
#include "microkernel.h"
#include "prefetch.h"
#include "aligned_memory.h"
#include "typed_rows.h"
#include "transpose.h"

#include <math.h>

#define LOG2_E 1.44269504f
#define LN_2 0.69314718f

#define ALIGNED __attribute__((aligned(64)))

INLINE int64_t padded_dim(int64_t dim) { return (dim + PAIR - 1) / PAIR * PAIR; }

/* Takes note of numbers that are written: the check is 0 as long as all are finite. */
INLINE void check_finite(lanes *check, lanes written) { *check += written * 0.0f; }

/* Sets `nonfinite` if a thread wrote a number that is not finite. */
INLINE void finish_check(struct flash *problem, lanes check) {
    if (sum_lanes(check) != 0.0f) __atomic_store_n(&problem->nonfinite, 1, __ATOMIC_RELAXED);
}

INLINE int64_t min_int(int64_t a, int64_t b) { return a < b ? a : b; }

/* Takes memory for some floats, aligned to 64 bytes, off the front of a thread's memory. */
INLINE float *take_floats(float **memory, int64_t floats) {
    float *taken = *memory;
    *memory += (floats + 15) / 16 * 16;
    return taken;
}

INLINE const void *head_rows(const struct rows *rows, int64_t batch, int64_t head, int64_t first,
                             const int dtype) {
    return row_at(rows->data, 1, batch * rows->batch + head * rows->head + first * rows->row, dtype);
}

/* Where a float of rows that are not vectors is, such as a log-sum-exp. */
INLINE float *row_number(const struct rows *rows, int64_t batch, int64_t head, int64_t row) {
    return (float *)rows->data + batch * rows->batch + head * rows->head + row * rows->row;
}

/* A log-sum-exp times log2(e), and `rest`, what rounding it to a float takes away. Where scores are large the rounding
 * would change all weights of a row by as much as all other errors together. */
INLINE float in_base_2(float lse, float *rest) {
    double exact = lse * 1.4426950408889634;
    float rounded = (float)exact;
    *rest = isinf(rounded) ? 0.0f : (float)(exact - rounded);
    return rounded;
}

/* The log-sum-exp of a row whose sum is relative to 2^maximum, rounded once. */
INLINE float log_sum(float maximum, float total) {
    return total == 0.0f ? -INFINITY : (float)(0.6931471805599453 * maximum + logf(total));
}

/* 2^x for x <= 0, and 0 from -127 on down; NaN stays. 2^x = 2^n 2^r with |r| <= 1/2; the latter by a fit of least
 * relative error, 2e-9 before rounding. */
INLINE lanes exp2_lanes(lanes x) {
    const float shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds to a whole number, which then stands in its bits */
#if !defined(__AVX512F__)
    x = max_lanes(broadcast(-127.0f), x);
#endif
    lanes shifted = x + shift, n = shifted - shift, r = x - n;
    lanes p = broadcast(0x1.41d334p-13f);
    p = p * r + 0x1.5f456ap-10f;
    p = p * r + 0x1.3b2dbcp-7f;
    p = p * r + 0x1.c6aed4p-5f;
    p = p * r + 0x1.ebfbdap-3f;
    p = p * r + 0x1.62e430p-1f;
    p = p * r + 1.0f;
#if defined(__AVX512F__)
    __mmask16 above = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-127.0f), _CMP_NLE_UQ); /* NaN is above, too */
    return (lanes)_mm512_maskz_scalef_ps(above, (__m512)p, (__m512)n);
#else
    return (lanes)(((bits)shifted - 0x4b400000 + 127) << 23) * p;
#endif
}

/* The natural logarithm of numbers of at least 1, of which 0 gives none; NaN stays. x = 2^n m with m from 1/sqrt(2) to
 * sqrt(2), and ln m = 2 artanh(s) = 2 (s + s^3/3 + s^5/5 + ...) with s = (m - 1) / (m + 1), at most 0.172. */
INLINE lanes log_lanes(lanes x) {
    bits shifted = (bits)x - 0x3f3504f3, exponent = shifted >> 23;
    lanes m = (lanes)((bits)x - (exponent << 23)), s = (m - 1.0f) / (m + 1.0f), square = s * s;
    lanes series = square * (1.0f / 9.0f) + 1.0f / 7.0f;
    series = series * square + 1.0f / 5.0f;
    series = series * square + 1.0f / 3.0f;
    series = series * square * s + s;
    return __builtin_convertvector(exponent, lanes) * LN_2 + 2.0f * series + 0.0f * x;
}

/* 1 / (1 + 2^-x), and `complement`, 1 less that, without cancellation. */
INLINE lanes sigmoid_lanes(lanes x, lanes *complement) {
    lanes power = exp2_lanes(-absolute(x)), share = 1.0f / (power + 1.0f), other = power * share;
    bits negative = x < 0.0f;
    *complement = (lanes)((negative & (bits)share) | (~negative & (bits)other));
    return (lanes)((negative & (bits)other) | (~negative & (bits)share));
}

/* Scores less the log-sum-exp of their rows, see in_base_2. Where that is a row's only score, they differ by no more than
 * rounding a log-sum-exp in natural units changes it: such a difference is 0, so that the weight of one key is 1. */
INLINE lanes less_log_sum(lanes score, lanes lse, lanes rest) {
    lanes difference = score - lse - rest;
    bits rounding = absolute(difference) < absolute(lse) * 0x1.0001p-24f; /* half of a last bit; never where infinite */
    return (lanes)(~rounding & (bits)difference);
}

/* The dot product of two rows of entries. */
INLINE float dot_entries(const void *first, const void *second, int64_t dim, int64_t dtype) {
    lanes sum = {0};
    BY_DTYPE(dtype, for (int64_t a = 0; a < dim; a += LANES)
        sum += load_entries(first, a, dim, DTYPE, 0) * load_entries(second, a, dim, DTYPE, 0));
    return sum_lanes(sum);
}

APART void prefetch_rows(const struct rows *rows, int64_t batch, int64_t head, int64_t first, int64_t count,
                         int64_t dim, int dtype) {
    for (int64_t i = 0; i < count; i++) {
        const char *row = head_rows(rows, batch, head, first + i, dtype);
        for (int64_t byte = 0; byte < dim * entry_bytes(dtype); byte += LINE) fetch_line(row + byte);
    }
}

/* Loads a block of rows ahead if they are not neighbours: the processor does so by itself only within a page. */
INLINE void load_ahead(const struct rows *rows, int64_t batch, int64_t head, int64_t first, int64_t count, int64_t dim,
                       int dtype) {
    if (rows->row > dim) prefetch_rows(rows, batch, head, first, count, dim, dtype);
}

/* The terms of a row, rounded up to whole pairs of vectors. */
INLINE int64_t padded_terms(int64_t dim, const int paired) { return padded_dim(term_count(dim, paired)); }

/* Packs the terms of `count` rows, floats times a factor, as target[row][padded terms]: 0 beyond them up to BLOCK rows,
 * and beyond their dim (tile_packing.c). */
#define pack_row_terms SHARED(pack_row_terms)
void pack_row_terms(const void *rows, int64_t stride, int64_t count, int64_t dim, float factor, float *target,
                    int64_t dtype, int paired);

/* The same of entries, as floats. */
INLINE void pack_rows(const void *rows, int64_t stride, int64_t count, int64_t dim, float factor, float *target,
                      int64_t dtype) {
    pack_row_terms(rows, stride, count, dim, factor, target, dtype, 0);
}

/* Packs `count` rows as the right factor of a sum over rows: target[term][padded dim], where a term is an entry of one
 * row times a factor, or, `paired`, of two as they are; 0 up to BLOCK rows, and beyond their dim. */
#define pack_rows_as_terms SHARED(pack_rows_as_terms)
void pack_rows_as_terms(const void *rows, int64_t stride, int64_t count, int64_t dim, float factor, float *target,
                        int64_t dtype, int paired);

/* Packs the terms of `count` rows, floats times a factor, as columns, target[term][width], 0 in the columns beyond them
 * up to `end`. There is memory for whole pairs of vectors of terms. */
#define pack_columns_up_to SHARED(pack_columns_up_to)
void pack_columns_up_to(int64_t end, const void *rows, int64_t stride, int64_t count, int64_t dim, float factor,
                        float *target, int64_t width, int64_t dtype, int paired);

/* The same up to the whole width. */
INLINE void pack_transposed_terms(const void *rows, int64_t stride, int64_t count, int64_t dim, float factor,
                                  float *target, int64_t width, int64_t dtype, int paired) {
    pack_columns_up_to(width, rows, stride, count, dim, factor, target, width, dtype, paired);
}

/* The same of entries, as floats. */
INLINE void pack_transposed(const void *rows, int64_t stride, int64_t count, int64_t dim, float factor, float *target,
                            int64_t width, int64_t dtype) {
    pack_transposed_terms(rows, stride, count, dim, factor, target, width, dtype, 0);
}

/* How weights follow from scores: by a softmax, by a sigmoid of each, or by the softmaxes of landmark attention. */
enum weighing { BY_SOFTMAX, BY_SIGMOID, BY_LANDMARKS };

/* The position in the runs of a block of rows, from left to right. */
struct cursor {
    int64_t run, end, column;
};

INLINE struct cursor first_tile(const struct flash *problem, int64_t block) {
    int64_t run = problem->first[block], end = problem->first[block + 1];
    return (struct cursor){run, end, run < end ? problem->runs[3 * run] : INT64_MAX};
}

/* How many columns the tile has that begins at one. */
INLINE int64_t columns_from(const struct flash *problem, int64_t column) {
    return min_int(problem->columns - column, problem->tile_columns);
}

/* The number of the tile at the cursor among those with bits, or -1 where all its pairs exist; moves to the next
 * tile. */
INLINE int64_t next_tile(const struct flash *problem, struct cursor *state) {
    const int64_t *run = problem->runs + 3 * state->run;
    int64_t tile = run[2] < 0 ? -1 : run[2] + (state->column - run[0]) / problem->tile_columns;
    state->column += problem->tile_columns;
    if (state->column >= run[1]) state->column = ++state->run < state->end ? problem->runs[3 * state->run] : INT64_MAX;
    return tile;
}

/* The bits of a tile for one head; null where all its pairs exist. */
INLINE const uint64_t *tile_words(const struct flash *problem, int64_t batch, int64_t head, int64_t tile) {
    return tile < 0 ? 0 : problem->bits + batch * problem->bits_batch + head * problem->bits_head + tile * BLOCK;
}

/* For a group of rows of a tile: whether any pair is missing, and the range of columns that has any pairs. */
struct extent {
    int partial;
    int64_t begin, end;
};

INLINE struct extent tile_extent(const uint64_t *words, int64_t count) {
    uint64_t exists = count < BLOCK ? ((uint64_t)1 << count) - 1 : ~(uint64_t)0, some = 0;
    if (!words) return (struct extent){count < BLOCK, 0, count};
    for (int r = 0; r < GROUP; r++) some |= words[r];
    some &= exists;
    if (!some) return (struct extent){1, 0, 0};
    return (struct extent){1, __builtin_ctzll(some), BLOCK - __builtin_clzll(some)};
}

/* All columns of a tile, for rows that have any pair. */
INLINE struct extent whole_tile(const uint64_t *words, int64_t count) {
    return (struct extent){words || count < BLOCK, 0, count};
}

INLINE int64_t aligned_begin(const struct extent extent) { return extent.begin / PAIR * PAIR; }

INLINE int64_t aligned_end(const struct extent extent) { return (extent.end + PAIR - 1) / PAIR * PAIR; }

/* The bits of a row, with those of columns beyond the last one cleared. */
INLINE uint64_t row_word(const uint64_t *words, int row, int64_t count) {
    uint64_t exists = count < BLOCK ? ((uint64_t)1 << count) - 1 : ~(uint64_t)0;
    return words ? words[row] & exists : exists;
}

/* The lanes whose pairs exist, and `otherwise` in the others; the first lane is the given column. */
INLINE lanes select_bits(uint64_t word, int64_t column, lanes values, float otherwise) {
#if defined(__AVX512F__)
    return (lanes)_mm512_mask_blend_ps((__mmask16)(word >> column), _mm512_set1_ps(otherwise), (__m512)values);
#else
    const bits all = {1, 2, 4, 8,
#if defined(__AVX__)
                      16, 32, 64, 128
#endif
    };
    bits exists = ((all & (int32_t)(word >> column)) != 0);
    return (lanes)((exists & (bits)values) | (~exists & (bits)broadcast(otherwise)));
#endif
}

/* The bytes of up to LANES pairs, as lanes that are all ones where the pair exists. */
INLINE bits pairs_exist(const uint8_t *keep, int64_t count) {
    typedef uint8_t bytes __attribute__((vector_size(LANES)));
    bytes some = {0};
    if (count >= LANES)
        memcpy(&some, keep, sizeof(some)); /* of a size that the compiler knows */
    else
#if defined(__AVX512BW__) && defined(__AVX512VL__)
        some = (bytes)_mm_maskz_loadu_epi8((__mmask16)((1u << count) - 1), keep);
#else
        memcpy(&some, keep, (size_t)count);
#endif
    return __builtin_convertvector(some, bits) != 0;
}

/* The score of a scaled product, through the softcap where there is one, in units of log2(e); and its slope. */
INLINE lanes apply_softcap(const struct flash *problem, lanes product, lanes *slope) {
    if (problem->softcap == 0.0f) return product;
    lanes tangents = tanh_lanes(product);
    if (slope) *slope = 1.0f - tangents * tangents;
    return tangents * (problem->softcap * LOG2_E);
}

/* The factor of the query, so that its products with keys are the input of `apply_softcap`. */
INLINE float query_factor(const struct flash *problem) {
    return problem->softcap == 0.0f ? problem->scale * LOG2_E : problem->scale / problem->softcap;
}

/* The factor of products of packed queries and keys: floats have it in the query, pairs of bfloat16 are packed as they
 * are. */
INLINE float score_factor(const struct flash *problem, const int paired) {
    return paired ? query_factor(problem) : 1.0f;
}

/* The factor of the gradient of a key that is summed over queries times `query_factor`. It is scale / query_factor,
 * written so that a scale of 0 does not give 0 / 0. */
INLINE float key_gradient_factor(const struct flash *problem) {
    return problem->softcap == 0.0f ? LN_2 : problem->softcap;
}

/* The dropout mask, ones where a weight is not dropped: those whose sum of the hashes of row and column, mixed, is at
 * least the threshold. See core/dropout.py. */
INLINE bits dropout_mask(const struct flash *problem, bits hash) {
    hash ^= hash >> 16;
    hash *= 0x7feb352d;
    hash ^= hash >> 15;
    hash *= (int32_t)0x846ca68b;
    return hash >= (int32_t)problem->threshold;
}

INLINE lanes zero_unless(bits kept, lanes values) { return (lanes)(kept & (bits)values); }

INLINE bits load_bits(const int32_t *source) {
    bits value;
    memcpy(&value, source, sizeof(value));
    return value;
}

INLINE int32_t row_hash_at(const struct flash *problem, int64_t batch, int64_t head, int64_t row) {
    return problem->row_hashes
               ? problem->row_hashes[(batch * problem->heads + head) * problem->rows + min_int(row, problem->rows - 1)]
               : 0;
}

/* The index in the relative bias of a row's pair with a column; rows of padding are as the last row. */
INLINE int64_t diagonal_index(const struct flash *problem, int64_t row, int64_t column) {
    return problem->rows - 1 - min_int(row, problem->rows - 1) + column;
}

/* The relative bias of a row from a column on, or null. */
INLINE const float *row_bias(const struct flash *problem, int64_t head, int64_t row, int64_t column) {
    return problem->relative_bias
               ? problem->relative_bias + head * problem->relative_bias_head + diagonal_index(problem, row, column)
               : 0;
}

#endif
