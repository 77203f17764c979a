/* Monotonic attention, one row after another: the probabilities that a query stops at a key, from where the query before it
 * stopped. Rows of float32, without gaps; each of the units, heads of a batch, is on its own. */
#include <stdint.h>

#include "variants.h"

/* reached_j = (1 - stop_j-1) reached_j-1 + before_j and alignments_j = stop_j reached_j, which is the next row's before. */
void EXPORTED(regard_monotonic)(const float *stop, const float *before, int64_t units, int64_t rows, int64_t columns,
                                float *alignments, float *reached) {
    for (int64_t unit = 0; unit < units; unit++, before += columns) {
        const float *start = before;
        for (int64_t row = 0; row < rows; row++) {
            float passed = 0;
            for (int64_t j = 0; j < columns; j++) {
                const float here = passed + start[j];
                reached[j] = here;
                alignments[j] = stop[j] * here;
                passed = (1 - stop[j]) * here;
            }
            start = alignments;
            stop += columns, alignments += columns, reached += columns;
        }
    }
}

/* From the last row to the first, above_j the gradient in alignments_j and what comes from the row after it:
 * later_j = stop_j above_j + (1 - stop_j) later_j+1, of the row before, and that of stop_j is reached_j (above_j - later_j+1).
 * later: of the last row when it is called, of the row before the first when it is done. */
void EXPORTED(regard_monotonic_backward)(const float *stop, const float *reached, const float *of_alignments, float *later,
                                         int64_t units, int64_t rows, int64_t columns, float *of_stop) {
    for (int64_t unit = 0; unit < units; unit++, later += columns) {
        for (int64_t row = rows - 1; row >= 0; row--) {
            const int64_t first = (unit * rows + row) * columns;
            float next = 0;
            for (int64_t j = columns - 1; j >= 0; j--) {
                const float above = of_alignments[first + j] + later[j], own = stop[first + j];
                of_stop[first + j] = reached[first + j] * (above - next);
                later[j] = next = own * above + (1 - own) * next;
            }
        }
    }
}
