/* The structure that Python and C share for the product of a few rows with a matrix, which is read once.
 *
 * output[row][column] = rows[row] . matrix[column] (+ bias[column])
 */
#ifndef REGARD_GEMV_H
#define REGARD_GEMV_H

#include "variants.h"

#include <stdint.h>

/* Rows and the matrix have contiguous last axes, strides are in elements. The matrix is of the `dtype`
 * (typed_rows.h), all else is float32. */
struct gemv {
    int64_t next_unit, unit_count; /* how many units of columns some thread has taken, and how many there are */
    int64_t unit;         /* columns in a unit, the last of what is left */
    int64_t rows, columns, dim, dtype;
    const float *input; /* (rows, dim) */
    int64_t input_row;
    const void *matrix; /* (columns, dim) */
    int64_t matrix_row;
    const float *bias; /* (columns), or null */
    float *output;     /* (rows, columns), contiguous */
};

#endif
