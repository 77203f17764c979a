/* The structure that Python and C share for a matrix that many rows are multiplied by, packed once for all of them. */
#ifndef REGARD_PACKED_MATRIX_H
#define REGARD_PACKED_MATRIX_H

#include <stdint.h>

/* x . matrix + bias. The matrix (terms, columns) is packed in panels: floats where there are no scales (panels.h), else
 * bytes, with a scale for each column (byte_panels.h). */
struct packed_matrix {
    const void *panels;
    const float *scales; /* (columns, whole panels), or null */
    const float *bias;   /* (columns), or null */
    int64_t terms, columns;
};

#endif
