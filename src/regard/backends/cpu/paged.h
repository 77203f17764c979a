/* The structures that Python and C share for attention of a few tokens of each sequence to keys in pages.
 *
 * Keys and values of all sequences are in one memory; those of a sequence are runs of neighbouring rows. For each head
 * and run regard_decode (decode.h) computes a part, and who is the last with a part of a group of tokens merges them.
 */
#ifndef REGARD_PAGED_H
#define REGARD_PAGED_H

#include "variants.h"

#include <stdint.h>

/* The keys of a run, and the tokens that attend to them: neighbours of one sequence. */
struct paged_run {
    int64_t token, tokens;    /* the first token, of all of the step, and how many there are */
    int64_t key, keys;        /* the first row in the memory, and how many there are */
    int64_t limit;            /* the keys of the run that the first token sees, each next one sees one more; not cut */
    int64_t row;              /* where its part begins among the rows of all parts */
    int64_t group;            /* the number of the tokens' group */
    int64_t first_run, runs;  /* the runs of the group */
};

/* Strides are in elements, the last axes of key and value are contiguous. Key and value are of the `dtype`, the query of
 * `query_dtype` (typed_rows.h); all else is float32. */
struct paged {
    int64_t next_unit, unit_count; /* how many runs of all heads some thread has taken, and how many there are */
    int64_t failed;                /* whether there was no memory */
    int64_t heads, group_heads;    /* of keys, and the query heads of each */
    int64_t tokens, dim, value_dim, dtype, query_dtype;
    int64_t part_rows;  /* the rows of all parts of a head */
    float scale;        /* of the query */
    const void *query;  /* (heads, tokens, group_heads, dim), contiguous */
    const void *key;    /* (heads, rows, dim) */
    int64_t key_head, key_row;
    const void *value;  /* (heads, rows, value_dim) */
    int64_t value_head, value_row;
    const struct paged_run *runs;
    int64_t *left;      /* (groups, heads): the runs that are not computed yet */
    float *part, *part_lse; /* (heads, part_rows, value_dim) and (heads, part_rows), of groups with several runs */
    float *output;      /* (heads, tokens, group_heads, value_dim), contiguous */
    float *lse;         /* (heads, tokens, group_heads), contiguous */
};

#endif
