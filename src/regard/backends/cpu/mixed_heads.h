/* The structure that Python and C share for attention whose scores and weights are mixed over the heads.
 *
 * logit[h](i, j) = sum over e of before[h][e] score[e](i, j), where all heads may attend to the pair;
 * weight[g](i, j) = sum over h of after[g][h] exp(logit[h](i, j) - lse[h][i]); the output is that of flash.h.
 *
 * Source: Shazeer et al. 2020 (arXiv 2003.02436). A tile of all heads fits into a core's cache, and mixing it is a product
 * with a small matrix. Weights can be mixed once the sums of their rows are known: forward goes over the tiles twice, and
 * backward too, as the mean of a row's gradients is no product of the output and its gradient. */
#ifndef REGARD_MIXED_HEADS_H
#define REGARD_MIXED_HEADS_H

#include "flash.h"

/* Of the tensors of `tiles` only result and lse are used. The others are packed beforehand, in float32, with 0 in rows up
 * to whole blocks and in dims up to those that are padded. */
struct mixed_heads {
    struct flash tiles;
    int64_t padded_heads;         /* whole groups of GROUP */
    int64_t padded_dim, padded_value_dim; /* whole pairs of vectors */
    const float *before, *after;  /* (padded_heads, padded_heads), 0 beyond the heads; or null for the identity */
    const float *query;           /* (batch, heads, padded rows, padded dim), times query_factor */
    const float *key_columns;     /* (batch, key heads, blocks, dim, BLOCK) */
    const float *key_rows;        /* backward: (batch, key heads, padded columns, padded dim) */
    const float *value_rows;      /* forward: (batch, key heads, padded columns, padded value dim) */
    const float *value_columns;   /* backward: (batch, key heads, blocks, value dim, BLOCK) */
    const float *grad_output;     /* backward: (batch, heads, padded rows, padded value dim), over keep_probability */
    int64_t row_parts;            /* backward: every so many blocks of rows are a unit with its own sums */
    float *grad_query;            /* as query; of products with keys as they are */
    float *grad_key, *grad_value; /* (parts, batch, key heads, padded columns, padded dim or value dim), 0 before; the
                                     former of products with the packed query */
    float *grad_before, *grad_after; /* (parts, batch, padded heads, padded heads), of logits and scores times log2(e) */
};

#endif
