/* The structure that Python and C share for attention with a threshold in each row: sparsemax and entmax-1.5.
 *
 * weight(i, j) = max(score(i, j) - threshold[i], 0), or the square of that, with the threshold[i] for which row i sums to
 * 1; the output is as in flash.h, whose lse are the thresholds here. The scale and the relative bias there are such that
 * scores are those of attention times alpha - 1.
 *
 * Source: Peters et al. 2019 (arXiv 1905.05702). A threshold of some of the keys is at most that of all of them, so keys
 * below it never get weight: one pass over the keys leaves few, of which the threshold is found. */
#ifndef REGARD_THRESHOLD_H
#define REGARD_THRESHOLD_H

#include "flash.h"

struct threshold {
    struct flash tiles;
    int64_t squared;   /* whether weights are squares: entmax-1.5 */
    int64_t row_parts; /* backward: parts that the blocks of rows are cut in, each with grad_key and grad_value of its own */
    int64_t grad_key_part, grad_value_part; /* their strides */
    float score_scale; /* backward: the scale of attention's own scores */
};

#endif
