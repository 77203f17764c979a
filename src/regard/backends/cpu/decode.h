/* The structure that Python and C share for attention of a few rows to many keys.
 *
 * output = sum over j of exp(score(j) - lse) value[j], with score(j) = query . key[j] + bias[j]
 */
#ifndef REGARD_DECODE_H
#define REGARD_DECODE_H

#include "variants.h"

#include <stdint.h>

/* There are no more rows. */
enum { MOST_ROWS = 64 };

/* Keys of one chunk. */
enum { CHUNK = 64 };

/* Strides are in elements, of batch, head and row; the last axes of query, key, value and bias are contiguous. Key and
 * value are of the `dtype`, the query of `query_dtype` (typed_rows.h); all else is float32. */
struct decode {
    int64_t next_unit,
        unit_count;       /* how many of the parts of all heads some thread has taken, and how many there are */
    int64_t failed;       /* whether there was no memory */
    int64_t heads, rows, columns, dim, value_dim, dtype, query_dtype;
    int64_t parts, part; /* the keys are cut in so many parts, each of `part` keys, the last of what is left */
    float scale;         /* of the query */
    const void *query;   /* (batch, heads, rows, dim) */
    int64_t query_batch, query_head, query_row;
    const void *key; /* (batch, heads, columns, dim) */
    int64_t key_batch, key_head, key_row;
    const void *value; /* (batch, heads, columns, value_dim) */
    int64_t value_batch, value_head, value_row;
    const float *bias; /* (batch, heads, rows, columns), or null */
    int64_t bias_batch, bias_head, bias_row;
    const int32_t *limits; /* (rows): each attends to the keys before its limit; null where all attend to all */
    int64_t least_limit;   /* the smallest of them */
    float *output; /* (batch, heads, parts, rows, value_dim), contiguous */
    float *lse;    /* (batch, heads, parts, rows), contiguous */
};

#endif
