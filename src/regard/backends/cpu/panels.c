/* Packs a matrix that is stored by columns, as torch's weights are, in panels. */
#include "byte_panels.h"
#include "variants.h"

/* Column c of the matrix is at `matrix + c * stride`. */
void EXPORTED(regard_pack_panels)(const float *matrix, int64_t stride, int64_t terms, int64_t columns, float *packed) {
    for (int64_t first = 0; first < panel_columns(columns); first += LANES) {
        float *panel = packed + first / PANEL_COLUMNS * PANEL_COLUMNS * terms + first % PANEL_COLUMNS;
        for (int64_t a = 0; a < terms; a += LANES) {
            lanes block[LANES];
            for (int l = 0; l < LANES; l++)
                block[l] = first + l < columns ? load_partial(matrix + (first + l) * stride + a, terms - a) : (lanes){0};
            transpose(block);
            for (int l = 0; l < LANES && a + l < terms; l++) store(panel + (a + l) * PANEL_COLUMNS, block[l]);
        }
    }
}

/* Whether the products of bytes take less time than those of floats. */
int64_t EXPORTED(regard_multiplies_bytes)(void) { return BYTE_PRODUCTS; }

/* The same, rounded to bytes; scales: of each column, and 0 of those beyond. */
void EXPORTED(regard_pack_bytes)(const float *matrix, int64_t stride, int64_t terms, int64_t columns, int32_t *packed,
                                 float *scales) {
    int64_t words = word_count(terms);
    for (int64_t column = 0; column < panel_columns(columns); column++) {
        const float *own = matrix + column * stride;
        uint8_t *panel = (uint8_t *)(packed + column / PANEL_COLUMNS * PANEL_COLUMNS * words + column % PANEL_COLUMNS);
        float largest = column < columns ? largest_size(own, terms) : 0.0f, unit = byte_unit(largest);
        scales[column] = unit == 0.0f ? largest * 0.0f : largest / LARGEST_BYTE;
        for (int64_t a = 0; a < TERMS_OF_WORD * words; a += LANES) {
            lanes numbers = column < columns && a < terms ? load_partial(own + a, terms - a) : (lanes){0};
            bits whole = round_lanes(numbers, unit) + BYTE_SHIFT;
            for (int lane = 0; lane < LANES && a + lane < TERMS_OF_WORD * words; lane++)
                panel[(a + lane) / TERMS_OF_WORD * PANEL_COLUMNS * TERMS_OF_WORD + (a + lane) % TERMS_OF_WORD] =
                    (uint8_t)whole[lane];
        }
    }
}
