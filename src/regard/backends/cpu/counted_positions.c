/* Positions that gates count, and the numbers of a table at them: rows of float32, without gaps. */
#include <stdint.h>

#include "variants.h"

/* result_j = the table at the sum of the gates from j on, at most its last place, interpolated between two neighbours. Of a
 * sum that is NaN so is the number. */
void EXPORTED(regard_counted_positions)(const float *gates, const float *table, int64_t rows, int64_t columns,
                                        int64_t positions, float *result) {
    const int64_t last = positions - 1;
    for (int64_t row = 0; row < rows; row++, gates += columns, result += columns, table += positions) {
        double sum = 0.0;
        for (int64_t j = columns - 1; j >= 0; j--) {
            sum += gates[j];
            const double place = sum > (double)last ? (double)last : sum;
            const int64_t below = place >= 0.0 ? (int64_t)place : 0, above = below < last ? below + 1 : last;
            result[j] = (float)(table[below] + (place - (double)below) * ((double)table[above] - table[below]));
        }
    }
}
