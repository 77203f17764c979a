/* Rows of entries as the terms of products (tile.h): what all sources of tiles call. Terms in pairs are bfloat16 as it is in
 * memory, for the variant that multiplies them so, and which calls these functions. */
#include "tile.h"

INLINE void pack_row_terms_of(const void *rows, int64_t stride, int64_t count, int64_t dim, float factor, float *target,
                              const int dtype, const int paired) {
    int64_t padded = padded_terms(dim, paired);
    for (int64_t i = 0; i < count; i++) {
        const void *row = row_at(rows, i, stride, dtype);
        for (int64_t a = 0; a < padded; a += LANES)
            store(target + i * padded + a, load_terms(row, a, dim, factor, dtype, 0, paired));
    }
}

void pack_row_terms(const void *rows, int64_t stride, int64_t count, int64_t dim, float factor, float *target,
                    int64_t dtype, int paired) {
    int64_t padded = padded_terms(dim, paired);
    if (paired)
        pack_row_terms_of(rows, stride, count, dim, factor, target, BFLOAT16, 1);
    else
        BY_DTYPE(dtype, pack_row_terms_of(rows, stride, count, dim, factor, target, DTYPE, 0));
    memset(target + count * padded, 0, (size_t)((BLOCK - count) * padded) * sizeof(float));
}

void pack_rows_as_terms(const void *rows, int64_t stride, int64_t count, int64_t dim, float factor, float *target,
                        int64_t dtype, int paired) {
    if (!paired) {
        pack_rows(rows, stride, count, dim, factor, target, dtype);
        return;
    }
    int64_t padded = padded_dim(dim), terms = term_count(count, paired);
    for (int64_t i = 0; i < terms; i++)
        for (int64_t a = 0; a < padded; a += LANES)
            store(target + i * padded + a, pair_rows(rows, i, stride, count, a, dim, 0));
    memset(target + terms * padded, 0, (size_t)((BLOCK / 2 - terms) * padded) * sizeof(float));
}

INLINE void pack_columns_of(int64_t end, const void *rows, int64_t stride, int64_t count, int64_t dim, float factor,
                            float *target, int64_t width, const int dtype, const int paired) {
    for (int64_t i = 0; i < end; i += LANES)
        for (int64_t a = 0; a < term_count(dim, paired); a += LANES) {
            lanes block[LANES];
            for (int l = 0; l < LANES; l++)
                block[l] = i + l < count
                               ? load_terms(row_at(rows, i + l, stride, dtype), a, dim, factor, dtype, 0, paired)
                               : broadcast(0.0f);
            transpose(block);
            for (int l = 0; l < LANES; l++) store(target + (a + l) * width + i, block[l]);
        }
}

void pack_columns_up_to(int64_t end, const void *rows, int64_t stride, int64_t count, int64_t dim, float factor,
                        float *target, int64_t width, int64_t dtype, int paired) {
    if (paired)
        pack_columns_of(end, rows, stride, count, dim, factor, target, width, BFLOAT16, 1);
    else
        BY_DTYPE(dtype, pack_columns_of(end, rows, stride, count, dim, factor, target, width, DTYPE, 0));
}
