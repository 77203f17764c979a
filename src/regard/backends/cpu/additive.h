/* Structures that Python and C share for additive scores. Everything is row-major, contiguous in its last axis. Queries,
 * keys, values and the output are of one dtype (typed_rows.h), all else is float32.
 *
 * score(i, j) = sum over a of weight[a] * tanh(query[i, a] + key[j, a])
 */
#ifndef REGARD_ADDITIVE_H
#define REGARD_ADDITIVE_H

#include "variants.h"

#include <stdint.h>

/* Keys go in strips of this many, transposed, whatever the number of lanes: all variants read the same preparation. */
enum { STRIP = 64 };

/* Attention takes at most so many rows at once. */
enum { BAND = 32 };

/* The preparation of queries and keys. */
enum form {
    EXPONENTIALS, /* exp(2x) of each entry: tanh(x + y) = 1 - 2 / (1 + exp(2x) exp(2y)) */
    TANGENTS,     /* tanh(x) of each entry, all within [-1, 1]: tanh(x + y) = (s + t) / (1 + s t), exact near 0 */
    DIRECT        /* nothing: too few queries to be worth it, tanh(x + y) is taken for each pair */
};

/* Strides are in elements. `padded` is the features rounded up to whole groups of 16, where weight is 0. */
struct additive {
    int64_t next_unit, unit_count; /* strips to be prepared: how many some thread has taken, and all */
    int64_t dtype, heads, key_heads, rows, columns, features, padded, form;
    const void *query; /* (heads, rows, features) */
    int64_t query_head, query_row;
    const void *key; /* (key_heads, columns, features) */
    int64_t key_head, key_row;
    const float *weight;   /* (padded) */
    float *prepared_query; /* (heads, rows, padded) */
    float *query_bound;    /* (heads, rows): the largest |x| of the row, infinity where one is NaN */
    float *prepared_key;   /* (key_heads, strips, padded, STRIP) */
    float *key_bound;      /* (key_heads, strips): likewise */
    float weight_sum;
    float weight_bound; /* the largest |weight|, infinity where one is NaN */
};

/* Some of the rows and columns, and the part of them that one call does: `begin` to `end` - 1, where number
 * head * (row_end - row_begin) + row - row_begin stands for one row of one head. */
struct tile {
    int64_t row_begin, row_end, column_begin, column_end, begin, end;
    float *pairs; /* (heads, row_end - row_begin, column_end - column_begin): the scores, or their gradient */
    int64_t pairs_head, pairs_row;
};

/* A number for each pair of a tile, (batches, heads of a batch, rows, columns), or null. */
struct pairs {
    const float *data;
    int64_t heads, batch, head, row;
};

/* Attention to a tile, and what its rows have from all tiles so far. */
struct additive_forward {
    int64_t next_unit, unit_count; /* bands of rows: how many some thread has taken, and all */
    int64_t failed;       /* whether there was no memory */
    const struct additive *scores;
    int64_t row_begin, row_end, column_begin, column_end;
    int64_t band;       /* rows that are taken at once, at most BAND */
    struct pairs bias; /* to the scores, -infinity where there is no pair */
    struct pairs dropout_mask; /* 0 for weights that are dropped, else 1 */
    float softcap;          /* the score becomes softcap tanh(score / softcap); 0 for none */
    float keep_probability; /* of dropout: the output is divided by it */
    const void *value;      /* (key_heads, columns, value_dim) */
    int64_t value_head, value_row, value_dim;
    void *output;   /* (heads, rows, value_dim): the sum of exp(score - lse) dropout_mask value / keep_probability */
    float *before;  /* the same as of the tiles before, in float32; null where the rows are in no other tile */
    int64_t more;   /* whether the rows are in a later tile: what they have goes to `before` then, not to `output` */
    float *lse;     /* (heads, rows): log of the sum of exp(score), -infinity where there was none */
    float *maximum; /* (heads, rows): the largest score, likewise */
    float *total;   /* (heads, rows): the sum of exp(score - largest) */
};

/* What the gradient of the output of a tile gives its scores and the values. */
struct additive_backward {
    int64_t failed; /* whether there was no memory */
    const struct additive *scores;
    const struct tile *tile; /* `pairs` receives the gradient of the scores */
    float *bias_gradient;    /* in the layout of `pairs`: the same before the slope of the softcap; or null */
    struct pairs bias, dropout_mask;
    float softcap, keep_probability;
    const void *value; /* (key_heads, columns, value_dim) */
    int64_t value_head, value_row, value_dim;
    const void *upstream; /* (heads, rows, value_dim), the gradient of the output */
    int64_t upstream_head, upstream_row;
    const void *output; /* likewise */
    int64_t output_head, output_row;
    const float *lse;          /* (heads, rows); infinity for rows that take no part */
    const float *lse_gradient; /* (heads, rows) */
    float *value_gradient;     /* (key_heads, strips, STRIP, value_padded), added to */
    int64_t value_padded;      /* value_dim rounded up to whole groups of 32 */
};

/* Where a gradient is added. The weight is left out: Python multiplies by it, once, at the end. */
struct sums {
    float *query;   /* (heads, rows, features) */
    float *key;     /* (key_heads, strips, padded, STRIP) */
    double *weight; /* (padded) */
    float *scratch; /* as many floats as regard_additive_scratch returns */
};

/* How the scores of one query and one strip are computed; a later method by exponentials is right where an earlier
 * is. */
enum method { BY_TANGENTS, BY_EXPONENTIALS, BY_CAPPED_EXPONENTIALS, PER_PAIR };

/* Products of exponentials are capped here: that of four is still finite, and 1 - tanh is below the precision of 1.
 * exp(2 * 10) is below it. */
#define PRODUCT_CAP 0x1p30f
#define UNCAPPED_SUM 10.0f

/* exp(2 * 43) and its reciprocal are still finite, normal numbers: larger entries are replaced by it. */
#define EXPONENT_CAP 43.0f

/* Query and key may not both be large: x = 50 and y = -49 must be added as they are. An entry may be taken as 43 where
 * the other is below 33, for there |x + y| > 10 and tanh is 1 in float32. A bound of infinity may stand for NaN. */
static inline enum method choose_method(const struct additive *scores, int64_t query, int64_t strip) {
    if (scores->form == DIRECT || !(scores->weight_bound < 0x1p30f)) return PER_PAIR;
    if (scores->form == TANGENTS) return BY_TANGENTS;
    float x = scores->query_bound[query], y = scores->key_bound[strip];
    float larger = x > y ? x : y, smaller = x > y ? y : x;
    if (x + y <= UNCAPPED_SUM) return BY_EXPONENTIALS;
    return larger <= EXPONENT_CAP || smaller <= EXPONENT_CAP - 10.0f ? BY_CAPPED_EXPONENTIALS : PER_PAIR;
}

#endif
