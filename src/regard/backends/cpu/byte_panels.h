/* Products of rows with matrices of bytes, packed in panels of columns: four terms of a column are one word.
 *
 * A matrix (terms, columns) of whole numbers q in -127..127, each column times a scale of its own, is packed as
 * (columns / PANEL_COLUMNS, words, PANEL_COLUMNS) words of bytes q + 128. Rows are rounded to such numbers, too, before
 * they are multiplied: sums of products are exact, and the same on every processor. */
#ifndef REGARD_BYTE_PANELS_H
#define REGARD_BYTE_PANELS_H

#include "byte_products.h"
#include "packed_matrix.h"
#include "panels.h"

enum { TERMS_OF_WORD = 4, LARGEST_BYTE = 127, BYTE_SHIFT = 128 };

INLINE int64_t word_count(int64_t terms) { return (terms + TERMS_OF_WORD - 1) / TERMS_OF_WORD; }

/* Rows of bytes: `words` from one to the next, 0 beyond what is written. A number is a byte times the factor of its row;
 * the sums are of the bytes, times BYTE_SHIFT. */
struct byte_rows {
    int32_t *data;
    int64_t words;
    float *factors;
    int32_t *sums;
};

typedef int8_t lane_bytes __attribute__((vector_size(LANES)));

/* The largest size of so many numbers; NaN where one is not finite. */
INLINE float largest_size(const float *numbers, int64_t count) {
    lanes largest = {0}, check = {0};
    for (int64_t a = 0; a < count; a += LANES) {
        lanes own = load_partial(numbers + a, count - a);
        largest = max_lanes(largest, absolute(own));
        check += own * 0.0f;
    }
    return max_of_lanes(largest) + sum_lanes(check);
}

/* LANES numbers times a unit, rounded to whole numbers. */
INLINE bits round_lanes(lanes numbers, float unit) {
    const float nearest = 12582912.0f; /* 1.5 * 2^23: adding it rounds to a whole number, which the low bits then hold */
    return (bits)(numbers * unit + nearest) - 0x4b400000;
}

/* What numbers of which this is the largest size are multiplied by to be bytes. Where all are next to 0, or one is no
 * number, all bytes are 0. */
INLINE float byte_unit(float largest) {
    return largest > 0x1p-100f && largest < 0x1p100f ? LARGEST_BYTE / largest : 0.0f;
}

/* Rounds row `row` of so many numbers. */
INLINE void write_byte_row(const struct byte_rows *rows, int64_t row, const float *numbers, int64_t terms) {
    float largest = largest_size(numbers, terms), unit = byte_unit(largest);
    int8_t *target = (int8_t *)(rows->data + row * rows->words);
    bits sum = {0};
    for (int64_t a = 0; a < terms; a += LANES) {
        bits whole = round_lanes(load_partial(numbers + a, terms - a), unit);
        lane_bytes own = __builtin_convertvector(whole, lane_bytes);
        sum += whole;
        memcpy(target + a, &own, (size_t)min_int(LANES, TERMS_OF_WORD * rows->words - a)); /* 0 to the end of a word */
    }
    int32_t total = 0;
    for (int lane = 0; lane < LANES; lane++) total += sum[lane];
    rows->sums[row] = BYTE_SHIFT * total;
    rows->factors[row] = unit == 0.0f ? largest * 0.0f : largest / LARGEST_BYTE;
}

/* The products of GROUP rows with two vectors of columns of a panel. */
INLINE void multiply_words(const struct byte_rows *left, int64_t row, const int32_t *panel, bits (*sum)[2]) {
    enum { HALF = AT_ONCE / 2 };
    const int32_t *entry = left->data + row * left->words, *other = entry + HALF * left->words;
    for (int64_t w = 0; w < left->words; w++, panel += PANEL_COLUMNS) {
        bits first = (bits)load((const float *)panel), second = (bits)load((const float *)(panel + LANES));
        UNROLL for (int r = 0; r < AT_ONCE; r++) {
            bits own = (bits)broadcast_bits(
                (const float *)((r < HALF ? entry + r * left->words : other + (r - HALF) * left->words) + w));
            add_byte_products(&sum[r][0], first, own);
            add_byte_products(&sum[r][1], second, own);
        }
    }
}

/* into = left . panel times factors and scales, for the columns of one panel and so many rows, in whole groups. */
APART void multiply_byte_panel(const struct byte_rows *left, const int32_t *panel, const float *scales, float *into,
                               int64_t stride, int64_t rows) {
    for (int64_t column = 0; column < PANEL_COLUMNS; column += PAIR)
        for (int64_t row = 0; row < rows; row += AT_ONCE) {
            bits sum[AT_ONCE][2] = {{{0}}};
            multiply_words(left, row, panel + column, sum);
            UNROLL for (int r = 0; r < AT_ONCE; r++) UNROLL for (int v = 0; v < 2; v++) {
                lanes whole = __builtin_convertvector(sum[r][v] - left->sums[row + r], lanes);
                store(into + (row + r) * stride + column + v * LANES,
                      whole * left->factors[row + r] * load(scales + column + v * LANES));
            }
        }
}

/* Memory of a thread for so many rows of bytes, of at most so many terms. */
INLINE int64_t byte_rows_floats(int64_t rows, int64_t terms) { return rows * (word_count(terms) + 2) + 48; }

INLINE struct byte_rows take_byte_rows(float **memory, int64_t rows, int64_t terms) {
    int32_t *data = (int32_t *)take_floats(memory, rows * word_count(terms));
    float *factors = take_floats(memory, rows);
    return (struct byte_rows){data, 0, factors, (int32_t *)take_floats(memory, rows)};
}

/* The left factor of a packed matrix: rows as they are, and rounded to bytes where the matrix is of bytes. */
struct left_factor {
    struct scratch_rows rows;
    struct byte_rows bytes;
};

INLINE struct left_factor left_factor(const struct scratch_rows rows, struct byte_rows bytes,
                                      const struct packed_matrix *matrix, int64_t count) {
    bytes.words = word_count(matrix->terms);
    if (matrix->scales)
        for (int64_t r = 0; r < count; r++) write_byte_row(&bytes, r, scratch_row(rows, r), matrix->terms);
    return (struct left_factor){rows, bytes};
}

/* into = left . matrix for the panel of columns from `first` on and so many rows, in whole groups; without the bias. */
APART void multiply_columns(const struct left_factor *left, const struct packed_matrix *matrix, int64_t first,
                            float *into, int64_t stride, int64_t rows) {
    if (matrix->scales)
        multiply_byte_panel(&left->bytes, (const int32_t *)matrix->panels + first * left->bytes.words,
                            matrix->scales + first, into, stride, rows);
    else
        multiply_panel(left->rows, (const float *)matrix->panels + first * matrix->terms, matrix->terms, into, stride,
                       rows, 0);
}

#endif
