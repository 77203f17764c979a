/* What the Python side and the C side agree on for the product of a few rows with a matrix, which is read once.
 *
 * output[row][column] = rows[row] . matrix[column] (+ bias[column])
 */
#ifndef REGARD_LINEAR_H
#define REGARD_LINEAR_H

#include "variants.h"

#include <stdint.h>

/* Rows and the matrix have contiguous last axes, strides are in elements. The matrix is float32, or bfloat16 where `narrow`;
 * all else is float32. */
struct linear {
    int64_t taken, units; /* how many units of columns some thread has taken, and how many there are */
    int64_t unit;         /* columns in a unit, the last of what is left */
    int64_t rows, columns, dim, narrow;
    const float *input; /* (rows, dim) */
    int64_t input_row;
    const void *matrix; /* (columns, dim) */
    int64_t matrix_row;
    const float *bias; /* (columns), or null */
    float *output;     /* (rows, columns), contiguous */
};

#endif
