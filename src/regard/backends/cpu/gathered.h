/* The structure that Python and C share for attention to listed keys.
 *
 * A list is that of some query heads of one key head and of `rows` neighbouring queries; its rows are computed in pieces
 * of at most `height` queries. */
#ifndef REGARD_GATHERED_H
#define REGARD_GATHERED_H

#include "variants.h"

#include <stdint.h>

/* The most pieces of lists that a thread takes at a time. */
enum { PIECES_AT_ONCE = 16 };

/* Strides are in elements, of batch, head and row. Query, key and value are of the `dtype`, with contiguous last axes; all
 * else is float32 or whole numbers. */
struct gathered {
    int64_t next_unit, unit_count; /* how many units some thread has taken, and how many there are */
    int64_t failed;                /* whether there was no memory */
    int64_t at_once;               /* pieces of lists of a unit, at most PIECES_AT_ONCE */
    int64_t batches, heads, key_heads, queries, keys, dim, value_dim, dtype;
    int64_t list_heads;           /* heads that have lists: those of the keys, or all */
    int64_t lists, rows, height;  /* lists of a head, the queries of each, and of a piece */
    int64_t length, columns;      /* blocks that a list names, and the keys of a block */
    int64_t first, blocks, block; /* what is subtracted for the number of a key; how many blocks there are, from which on */
    float scale, softcap;         /* no softcap where it is 0 */
    const int32_t *indices;       /* (batch, head, list, length); strides are 0 where all share them */
    int64_t index_batch, index_head;
    const int32_t *spans; /* (batch, query, 2), or null: the first key of a row, and the one after its last */
    int64_t span_batch;
    const void *query;
    int64_t query_batch, query_head, query_row;
    const void *key;
    int64_t key_batch, key_head, key_row;
    const void *value;
    int64_t value_batch, value_head, value_row;
    const float *added; /* (batch, head, query, length * columns), or null */
    int64_t added_batch, added_head;
    const float *factors; /* likewise, of weights */
    int64_t factor_batch, factor_head;
    float *output; /* (batch, head, query, value_dim), contiguous */
    float *lse;    /* (batch, head, query), contiguous */
    /* Of the backward pass: what comes from above, contiguous as the output and the log-sum-exp; and the gradients, in
     * rows of whole vectors; that of `added` is (batch, head, query, length * columns), or null. */
    const float *grad_output, *delta;
    float *grad_query, *grad_key, *grad_value, *grad_added;
    int64_t grad_row, grad_value_row; /* strides of rows of the first two and of the third */
};

#endif
