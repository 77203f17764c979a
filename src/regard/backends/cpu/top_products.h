/* The structure that Python and C share for the largest products of each row with the columns of a matrix, and the
 * log-sum-exp of all of them: the output layer of a search, whose logits nobody reads. */
#ifndef REGARD_TOP_PRODUCTS_H
#define REGARD_TOP_PRODUCTS_H

#include "packed_matrix.h"
#include "variants.h"

#include <stdint.h>

/* Everything is contiguous. */
struct top_products {
    int64_t next_unit, unit_count; /* units of rows: how many some thread has taken, and all */
    int64_t failed;                /* whether there was no memory */
    int64_t unit;                  /* rows of a unit, a multiple of GROUP */
    int64_t rows;
    int64_t count;       /* of the largest, at most the columns */
    const float *left;   /* (rows, terms of the matrix) */
    struct packed_matrix matrix;
    float *values;    /* (rows, count), the largest first */
    int64_t *indices; /* (rows, count): their columns */
    float *lse;       /* (rows) */
};

#endif
