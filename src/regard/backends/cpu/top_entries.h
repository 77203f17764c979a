/* The structure that Python and C share for the largest entries of each row, and the log-sum-exp of all of them. */
#ifndef REGARD_TOP_ENTRIES_H
#define REGARD_TOP_ENTRIES_H

#include "variants.h"

#include <stdint.h>

/* Everything is contiguous. Of equal entries the first counts as the larger; NaN is no entry, and makes the sum NaN. */
struct top_entries {
    int64_t next_unit, unit_count; /* rows: how many some thread has taken, and all */
    int64_t columns, count;        /* count: of the largest, at most the columns */
    const float *entries; /* (rows, columns) */
    float *values;        /* (rows, count), the largest first */
    int64_t *indices;     /* (rows, count): their columns */
    float *lse;           /* (rows) */
};

#endif
