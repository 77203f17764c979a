/* The structure that Python and C share for attention over so few keys that all scores of a row are there at once.
 *
 * output[i] = sum over j of weight(i, j) value[j], over the keys first <= j < last of a row's span that `keep` has. Of
 * the scores s = scale query[i] . key[j] + bias[i][j], whose first term is p or, with a softcap c, c tanh(p / c),
 * weight(i, j) is
 *
 *     SOFTMAX     exp(s - lse[i]), with the lse[i] for which row i sums to 1
 *     SIGMOID     1 / (1 + exp(-s - shift)); lse[i] is the logarithm of their sum
 *     SPARSEMAX   max(s - lse[i], 0), with the lse[i], a threshold, for which row i sums to 1
 *     ENTMAX      max(s / 2 - lse[i], 0)^2, likewise: entmax-1.5
 *     RELU        max(s, 0)^shift exp(-lse[i]), with the lse[i] for which row i sums to 1, if any s is above 0
 *     SOFTPICK    max(exp(s) - 1, 0) exp(-lse[i]), with the logarithm lse[i] of the sum of |exp(s) - 1|
 *     STICKS      1 / (1 + exp(-s)) times the product of 1 / (1 + exp(s)) of all later keys; lse[i] is the logarithm of
 *                 the product of those of all keys
 *     LARGEST     exp(s - lse[i]) of the `shift` largest s, with the lse[i] for which row i sums to 1, else 0
 *     HARD        1 of the largest s, else 0, with the lse[i] and the gradients of SOFTMAX */
#ifndef REGARD_SHORT_H
#define REGARD_SHORT_H

#include "flash.h"

/* From this magnitude on, float32 rounds a log-sum-exp by more than the weights computed from it may be off. */
#define COARSE 16384.0f

/* The most keys: the scores of some rows, and the keys and values of a head, fit into a core's cache. */
enum { LONGEST = 512, LOG2_LONGEST = 9 };

enum { SOFTMAX, SIGMOID, SPARSEMAX, ENTMAX, RELU, SOFTPICK, STICKS, LARGEST, HARD };

struct short_attention {
    int64_t next_unit, unit_count; /* how many units of work some thread has taken, and how many there are. A unit is a
                                      part of the rows of a key head in some batches, one batch after another */
    int64_t row_parts;             /* parts of the rows of a head */
    int64_t unit_batches;          /* batches of a unit */
    int64_t failed;                /* whether there was no memory */
    int64_t nonfinite;             /* whether some number that was written is not finite */
    int64_t coarse;                /* whether a log-sum-exp that was computed may be COARSE or more */
    int64_t overflow;              /* whether a row has a bias alone that is finite, and not in units of log2(e) */
    int64_t batches, heads, group, rows, columns, dim, value_dim, dtype;
    const int32_t *spans; /* (batch, rows, 2): the first key of a row and the one after its last; null: all keys */
    int64_t spans_batch;  /* stride in numbers, 0 for spans that all batches share */
    struct rows query, key, value; /* (batch, heads or key heads, length, dim) of the dtype; strides in entries */
    struct rows output, grad_output, grad_query, grad_key, grad_value; /* likewise; backward the first may be null. Of
                                      several parts of rows, each has the last two of its own, in float32 */
    int64_t grad_key_part, grad_value_part; /* strides of the parts */
    struct rows bias; /* float32 (batch, heads, rows, columns), or null. By distance, the row stride is -1 */
    struct rows keep; /* bytes (batch, heads, rows, columns), 0 where there is no pair; or null */
    struct rows grad_bias; /* float32 (units of a head, heads, rows, columns), added to; or null */
    float *lse; /* (batch, heads, rows), contiguous; null: of these keys, forward not written, backward computed anew */
    const float *grad_lse;                                            /* (batch, heads, rows), or null for 0 */
    int64_t normalizer;
    double scale, shift;
    double softcap;      /* of scores before the bias; 0: none */
    const float *sinks;  /* (heads): of SOFTMAX one more score in each row, without a value; or null */
    float *grad_sinks;   /* (batch, heads, rows), contiguous, of the sink in each row, where lse is null; or null */
    int64_t landmark_size, landmark_shift; /* as in flash.h, of SOFTMAX without a bias */
};

#endif
