/* Structures that Python and C share for dot-product attention over the tiles that a mask leaves.
 *
 * score(i, j) = scale query[i] . key[j], through softcap tanh(. / softcap) where there is one,
 *               + relative_bias[j - i + rows - 1] + what the call_bias has of the pair;
 * output[i] = sum over j of weight(i, j) value[j], weight(i, j) = exp(score(i, j) - lse[i])
 *
 * or, where there is a landmark_size, with the scores that landmarks.h makes of these;
 * or, where there is a sigmoid_bias, weight(i, j) = 1 / (1 + exp(-score(i, j) - sigmoid_bias)), and lse[i] is the
 * logarithm of the sum of a row's weights.
 *
 * Source: Dao et al. 2022 (arXiv 2205.14135), algorithms 1, 2 and 4; Milakov and Gimelshein 2018 (arXiv 1805.02867) for
 * the online softmax. Powers are of 2 here: what the softmax is of is multiplied by log2(e) beforehand. */
#ifndef REGARD_FLASH_H
#define REGARD_FLASH_H

#include "variants.h"

#include <stdint.h>

/* Tiles have so many rows and columns: a row of one is a word of bits, a bit for each column, 1 where the pair
 * exists. */
enum { BLOCK = 64 };

/* The forward pass takes so many blocks of rows at once: each block of keys is packed once for them. */
enum { MOST_BLOCKS = 8 };

/* Entries of the query, key, value, output and its gradient, (batch, heads, length, dim), are of the `dtype`
 * (typed_rows.h); all else is float32. Strides are in entries, of batch, head and row; the last axis is
 * contiguous. */
struct rows {
    const void *data;
    int64_t batch, head, row;
};

struct reductions;

/* Numbers of rows or of columns, float32 (2, batch, heads, length): two terms that add up to each, and the strides of
 * batch, head and the second term; data is null for none. Their gradient is (batch, heads, length), 0 before, or null. */
struct call_sums {
    const float *data;
    int64_t batch, head, terms;
    float *gradient;
};

/* A number of each row, or column, for each distance: (batch, heads, length, count), with the strides of the first three;
 * data is null for none. `columns` has the one of `count` that each diagonal has, (rows + columns - 1), which is that of
 * the diagonal before or the next one in the same direction. The gradient is (batch, heads, length, count), 0 before, or null. */
struct call_table {
    const float *data;
    int64_t batch, head, row, count;
    const int32_t *columns;
    float *gradient;
};

/* A vector of each row that is multiplied with one of each diagonal: queries (batch, heads, rows, dim), times log2(e), with
 * the strides of the first two, and vectors (heads, MARGIN + diagonals + MARGIN, dim), both padded with zeros to whole
 * blocks of rows, and `dim` to whole pairs of vectors; `turned` are the vectors as columns, (heads, dim, length). Gradients
 * are (batch, heads, as these), those of vectors times log2(e), 0 before, or null. data is null for none. */
enum { MARGIN = BLOCK };
struct call_vectors {
    const float *queries, *vectors, *turned;
    int64_t query_batch, query_head, vector_head, dim, length;
    float *grad_queries, *grad_vectors;
};

/* row_sums[i] - column_sums[j] + query_table[i][its column of j - i] + key_table[j][likewise] +
 * queries[i] . vectors[the diagonal of j - i]; the sums times log2(e). */
struct call_bias {
    struct call_sums row_sums, column_sums;
    struct call_table query_table, key_table;
    struct call_vectors vectors;
};

struct flash {
    int64_t next_unit, unit_count; /* how many units of work some thread has taken, and how many there are */
    int64_t failed;       /* whether there was no memory */
    int64_t nonfinite;    /* forward and backward: whether some number that was written is not finite */
    int64_t batches, heads, group, rows, columns, dim, value_dim, dtype;
    int64_t row_blocks; /* forward, weights and reductions: blocks of rows that are taken at once */
    int64_t key_parts;  /* backward: parts that the blocks of columns are cut in, each a unit with its own grad_query */
    int64_t unit_batches; /* backward: batches in a unit, whose rows alternate in memory where they are several */
    float scale, softcap; /* softcap: 0 for none */
    struct rows query, key, value;
    const int64_t *first, *runs; /* runs of a block of rows: numbers first[block] to first[block + 1]. A run has three
                                    numbers: its first column, the column after its last one, and the first of its
                                    tiles among those with bits, or -1 where all pairs exist */
    const uint64_t *bits;        /* (batch, heads, tiles, BLOCK); the strides of the first two in words */
    int64_t bits_batch, bits_head;
    const float *relative_bias; /* (heads, rows + columns - 1), times log2(e), or null; the stride of the first */
    int64_t relative_bias_head;
    const float *sigmoid_bias; /* (heads), times log2(e); null for softmax */
    const int32_t *row_hashes; /* (batch, heads, rows), or null: no weights are dropped; see dropout_mask */
    const int32_t *column_hashes; /* (columns) */
    int64_t threshold;
    float keep_probability;
    int64_t accumulate;  /* results and gradients are added to what is there; forward: merged by the log-sum-exp */
    struct rows result;  /* forward: (batch, heads, rows, value_dim), float32 if accumulate */
    struct rows lse;     /* the log-sum-exp, float32 (batch, heads, rows), in other passes than the forward one it is
                            read; backward: +infinity for rows that take no part */
    struct rows output, grad_output; /* backward */
    const float *grad_lse;           /* (batch, heads, rows), or null for 0 */
    struct rows grad_query;          /* (batch, heads, rows, dim), which is added to */
    int64_t grad_query_part;         /* stride of the parts, whose gradients are to be added up */
    struct rows grad_key, grad_value; /* (batch, key heads, columns, dim or value_dim) */
    float *grad_relative_bias;                /* (batch, heads, parts, rows + columns - 1), or null; 0 before */
    struct rows keep; /* weights, where first is null: bytes (batch, heads, rows, columns), 0 where there is no
                                   pair; or null */
    struct rows weights,
        entropy_terms; /* weights: float32 (batch, heads, rows, columns), to be written; the latter, weight times
                                   its logarithm to the base 2, or null */
    const struct reductions *reductions; /* reductions: see reductions.h */
    const struct call_bias *call_bias;   /* forward and backward, of one part of the keys: or null */
    int64_t tile_columns;   /* columns of a tile: BLOCK, or of landmark attention as many as are whole blocks of keys */
    int64_t landmark_size;  /* forward and backward: keys of a block with its landmark (landmarks.h); 0 for none */
    int64_t landmark_shift; /* the position of the first row, that of the first key being 0 */
};

#endif
