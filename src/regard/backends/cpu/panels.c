/* Packs a matrix that is stored by columns, as torch's weights are, in panels. */
#include "panels.h"
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
