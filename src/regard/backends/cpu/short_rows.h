/* Whole rows of scores with other normalizers than softmax, one row at a time; each as in short.h. */
#ifndef REGARD_SHORT_ROWS_H
#define REGARD_SHORT_ROWS_H

#include "short.h"
#include "tile.h"

#include <float.h>

/* Newton's method takes about five. */
enum { MOST_STEPS = 40 };

/* The keys of a row, or of some rows together. */
struct key_span {
    int64_t first, last;
};

/* The lanes from a column on that are in a span, and `otherwise` in the others. */
INLINE lanes select_span(const struct key_span span, int64_t column, lanes values, float otherwise) {
    const bits lane = {0, 1, 2, 3,
#if defined(__AVX__)
                       4, 5, 6, 7,
#endif
#if defined(__AVX512F__)
                       8, 9, 10, 11, 12, 13, 14, 15,
#endif
    };
    if (column >= span.first && column + LANES <= span.last) return values;
    bits index = lane + (int32_t)column, inside = (index >= (int32_t)span.first) & (index < (int32_t)span.last);
    return (lanes)((inside & (bits)values) | (~inside & (bits)broadcast(otherwise)));
}

/* Columns of some rows that are computed together, a row of them, and its own keys among them. */
struct score_row {
    float *scores;
    struct key_span all, own;
};

/* What scores are multiplied by where a normalizer reads them: log2(e) for powers of 2, or alpha - 1 of a threshold. */
INLINE float kept_factor(int64_t normalizer) {
    if (normalizer == ENTMAX) return 0.5f;
    return normalizer == SOFTMAX || normalizer == SIGMOID ? (float)LOG2_E : 1.0f;
}

/* 1 / (1 + exp(-x)), and `complement`, 1 less that, without cancellation. power: exp(-|x|). */
INLINE lanes logistic_lanes(lanes x, lanes *complement, lanes *power) {
    *power = exp_or_zero(-absolute(x));
    lanes share = 1.0f / (*power + 1.0f), other = *power * share;
    bits negative = x < 0.0f;
    *complement = (lanes)((negative & (bits)share) | (~negative & (bits)other));
    return (lanes)((negative & (bits)other) | (~negative & (bits)share));
}

/* Scores outside of the row's own span become -infinity. Returns the largest, -infinity of a row without keys. */
INLINE float hide_others(const struct score_row *row) {
    lanes most = broadcast(-INFINITY);
    for (int64_t j = row->all.first; j < row->all.last; j += LANES) {
        lanes own = select_span(row->own, j, load(row->scores + j), -INFINITY);
        store(row->scores + j, own);
        most = max_lanes(most, own);
    }
    return max_of_lanes(most);
}

/* Scores become terms of weights. Returns the sum of the weights. */
INLINE float sigmoid_row(const struct score_row *row, float shift, const int paired) {
    lanes sum = {0};
    for (int64_t j = row->all.first; j < row->all.last; j += LANES) {
        lanes rest, weight = sigmoid_lanes(load(row->scores + j) + shift, &rest);
        weight = select_span(row->own, j, weight, 0.0f);
        sum += weight;
        store_terms(row->scores, j, weight, paired);
    }
    return sum_lanes(sum);
}

/* Scores become weights, and their gradients in place of those of the weights. */
INLINE void sigmoid_gradients(const struct score_row *row, float *gradients, float shift) {
    for (int64_t j = row->all.first; j < row->all.last; j += LANES) {
        lanes rest, weight = sigmoid_lanes(load(row->scores + j) + shift, &rest);
        weight = select_span(row->own, j, weight, 0.0f);
        store(row->scores + j, weight);
        store(gradients + j, weight * rest * load(gradients + j));
    }
}

/* The threshold of a row, less its largest score: `norm` is that of what scores have above it, of weights or of their
 * roots, and Newton's method finds where it is 1. It falls with the threshold, and is convex, so that no step from below
 * goes too far; where all scores are the same, it is a line. rest: the last step, which the threshold's rounding loses. */
INLINE float find_threshold(const struct score_row *row, float largest, float *rest, const int squared) {
    float threshold = -1.0f;
    *rest = 0.0f;
    for (int step = 0; step < MOST_STEPS; step++) {
        lanes sum = {0}, other = {0};
        for (int64_t j = row->all.first; j < row->all.last; j += LANES) {
            lanes above = max_lanes(load(row->scores + j) - largest - threshold, broadcast(0.0f));
            sum += above;
            other += squared ? above * above : (lanes)((above > 0.0f) & (bits)broadcast(1.0f));
        }
        float all = sum_lanes(sum), norm = squared ? sqrtf(sum_lanes(other)) : all;
        float slope = squared ? all / norm : sum_lanes(other), length = (norm - 1.0f) / slope;
        if (!(length > 1e-6f)) {
            if (length > -1e-6f) *rest = length; /* and not NaN */
            break;
        }
        threshold += length;
    }
    return threshold;
}

/* Scores become what they have above their threshold, 0 for other keys and outside of the span. Returns the threshold,
 * -infinity of a row without keys. */
INLINE float above_threshold(const struct score_row *row, const int squared) {
    float largest = hide_others(row);
    int empty = largest == -INFINITY;
    float rest = 0.0f, threshold = empty ? 0.0f : find_threshold(row, largest, &rest, squared), least = empty ? 0.0f : largest;
    for (int64_t j = row->all.first; j < row->all.last; j += LANES)
        store(row->scores + j, max_lanes(load(row->scores + j) - least - threshold - rest, broadcast(0.0f)));
    return empty ? -INFINITY : least + threshold;
}

/* Scores of at least 0 become terms of weights, themselves or their squares, up to their sum, which is returned. */
INLINE float power_row(const struct score_row *row, const int squared, const int paired) {
    lanes sum = {0};
    for (int64_t j = row->all.first; j < row->all.last; j += LANES) {
        lanes score = load(row->scores + j), weight = squared ? score * score : score;
        sum += weight;
        store_terms(row->scores, j, weight, paired);
    }
    return sum_lanes(sum);
}

/* Scores become terms of weights, up to their sum, which is returned. */
INLINE float threshold_row(const struct score_row *row, float *threshold, const int squared, const int paired) {
    *threshold = above_threshold(row, squared);
    return power_row(row, squared, paired);
}

/* Scores become weights, and their gradients in place of those of the weights: t (gradient - mean) with the mean of the
 * gradients by t, the weight's root, or 1 where weights are no squares and this one is not 0. */
INLINE void threshold_gradients(const struct score_row *row, float *gradients, const int squared) {
    lanes sum = {0}, slopes = {0}, products = {0};
    above_threshold(row, squared);
    for (int64_t j = row->all.first; j < row->all.last; j += LANES) {
        lanes above = load(row->scores + j), slope = squared ? above : (lanes)((above > 0.0f) & (bits)broadcast(1.0f));
        sum += squared ? above * above : above;
        slopes += slope, products += slope * load(gradients + j);
    }
    float total = sum_lanes(sum), all = sum_lanes(slopes), share = total > 0.0f ? 1.0f / total : 0.0f,
          mean = all > 0.0f ? sum_lanes(products) / all : 0.0f, factor = squared ? sqrtf(share) : 1.0f;
    for (int64_t j = row->all.first; j < row->all.last; j += LANES) {
        lanes above = load(row->scores + j), slope = squared ? above : (lanes)((above > 0.0f) & (bits)broadcast(1.0f));
        store(row->scores + j, (squared ? above * above : above) * share);
        store(gradients + j, slope * factor * (load(gradients + j) - mean));
    }
}

/* Scores become max(score, 0) over a power of 2 near the largest of them, which is returned; 1 where there is none. */
INLINE float positive_parts(const struct score_row *row) {
    float largest = hide_others(row);
    union {
        float number;
        uint32_t bits;
    } unit = {!(largest > 0.0f) ? 1.0f : largest < 4.0f * FLT_MIN ? 4.0f * FLT_MIN : largest};
    if (unit.number < INFINITY) unit.bits &= 0x7f800000u;
    for (int64_t j = row->all.first; j < row->all.last; j += LANES)
        store(row->scores + j, max_lanes(load(row->scores + j), broadcast(0.0f)) * (1.0f / unit.number));
    return unit.number;
}

/* Scores become terms of powers of positive scores, up to their sum, which is returned; number: its factor's log2. */
INLINE float relu_row(const struct score_row *row, float *number, const int squared, const int paired) {
    *number = (squared ? 2.0f : 1.0f) * log2f(positive_parts(row));
    return power_row(row, squared, paired);
}

/* Scores become weights, and their gradients in place of those of the weights: of the power, less the mean by weight. */
INLINE void relu_gradients(const struct score_row *row, float *gradients, float grad_lse, const int squared) {
    lanes sum = {0}, products = {0};
    float unit = positive_parts(row);
    for (int64_t j = row->all.first; j < row->all.last; j += LANES) {
        lanes positive = load(row->scores + j), weight = squared ? positive * positive : positive;
        sum += weight, products += weight * load(gradients + j);
    }
    float total = sum_lanes(sum), divisor = total > 0.0f ? total : INFINITY, less = sum_lanes(products) / divisor - grad_lse;
    for (int64_t j = row->all.first; j < row->all.last; j += LANES) {
        lanes positive = load(row->scores + j), one = (lanes)((positive > 0.0f) & (bits)broadcast(1.0f));
        store(row->scores + j, (squared ? positive * positive : positive) / divisor);
        store(gradients + j, (squared ? 2.0f * positive : one) * (load(gradients + j) - less) / (divisor * unit));
    }
}

/* (exp(score) - 1) / exp(unit) for a unit of at least 0, exact for scores near 0; 0 of -infinity. less: exp(-unit). */
INLINE lanes less_one(lanes score, float unit, float less) {
    lanes far = exp_or_zero(score - unit) - less, close = expm1_plus(0.0f, score) * less;
    bits near = absolute(score) < 0.34f, exists = score != -INFINITY;
    return (lanes)(exists & ((near & (bits)close) | (~near & (bits)far)));
}

/* The unit of a row for less_one: its largest score, or 0. */
INLINE float softpick_unit(const struct score_row *row, float *less) {
    float largest = hide_others(row), unit = largest > 0.0f ? largest : 0.0f;
    *less = exp_or_zero(broadcast(-unit))[0];
    return unit;
}

/* Scores become terms of weights, up to the sum that divides them, which is returned; number: its factor's log2. */
INLINE float softpick_row(const struct score_row *row, float *number, const int paired) {
    lanes sum = {0};
    float less, unit = softpick_unit(row, &less);
    *number = unit * (float)LOG2_E;
    for (int64_t j = row->all.first; j < row->all.last; j += LANES) {
        lanes power = less_one(load(row->scores + j), unit, less);
        sum += absolute(power);
        store_terms(row->scores, j, max_lanes(power, broadcast(0.0f)), paired);
    }
    return sum_lanes(sum);
}

/* Scores become weights, and their gradients in place of those of the weights. */
INLINE void softpick_gradients(const struct score_row *row, float *gradients, float grad_lse) {
    lanes sum = {0}, products = {0};
    float less, unit = softpick_unit(row, &less);
    for (int64_t j = row->all.first; j < row->all.last; j += LANES) {
        lanes power = less_one(load(row->scores + j), unit, less);
        sum += absolute(power), products += max_lanes(power, broadcast(0.0f)) * load(gradients + j);
    }
    float total = sum_lanes(sum), share = total > 0.0f ? 1.0f / total : 0.0f,
          delta = sum_lanes(products) * share - grad_lse;
    for (int64_t j = row->all.first; j < row->all.last; j += LANES) {
        lanes score = load(row->scores + j), power = less_one(score, unit, less);
        lanes slope = exp_or_zero(score - unit) * share; /* of the power */
        bits above = score > 0.0f, below = score < 0.0f;
        lanes own = (lanes)((above & (bits)(load(gradients + j) - delta)) | (below & (bits)broadcast(delta)));
        store(row->scores + j, max_lanes(power, broadcast(0.0f)) * share);
        store(gradients + j, own * slope);
    }
}

/* Scores become weights: the share of each key of what later ones leave. shares: those, with room for whole vectors;
 * left: if not null, the logarithm of what all leave, -infinity of a row without keys. */
INLINE void break_sticks(const struct score_row *row, float *shares, float *left) {
    float rests[LONGEST + LANES], largest = hide_others(row);
    lanes sum = {0};
    double rest = 1.0; /* as errors of a product of hundreds add up */
    int64_t j = row->all.first;
    for (; j < row->all.last; j += LANES) {
        lanes other, power, score = load(row->scores + j), share = logistic_lanes(score, &other, &power);
        store(shares + j, share), store(rests + j, other);
        if (left) sum += log_lanes(1.0f + power) + max_lanes(score, broadcast(0.0f));
    }
    while (j-- > row->all.first) row->scores[j] = (float)(shares[j] * rest), rest *= rests[j];
    if (left) *left = largest == -INFINITY ? -INFINITY : -sum_lanes(sum);
}

/* Scores become terms of weights, whose sum is returned; left: as of break_sticks. */
INLINE float stick_row(const struct score_row *row, float *left, const int paired) {
    float shares[LONGEST + LANES];
    lanes sum = {0};
    break_sticks(row, shares, left);
    for (int64_t j = row->all.first; j < row->all.last; j += LANES) {
        lanes weight = load(row->scores + j);
        sum += weight;
        store_terms(row->scores, j, weight, paired);
    }
    return sum_lanes(sum);
}

/* Scores become weights, and their gradients in place of those of the weights: a key that takes more leaves less for
 * those before it. */
INLINE void stick_gradients(const struct score_row *row, float *gradients) {
    float shares[LONGEST + LANES];
    double sum = 0.0;
    break_sticks(row, shares, 0);
    for (int64_t j = row->all.first; j < row->all.last; j++) {
        double own = (double)row->scores[j] * gradients[j];
        sum += own;
        gradients[j] = (float)(own - shares[j] * sum);
    }
    for (int64_t j = row->all.last; j % LANES; j++) gradients[j] = 0.0f;
}

/* Numbers in the order of the floats whose bits they are. */
INLINE bits ordered(lanes values) { return (bits)values ^ (((bits)values >> 31) & 0x7fffffff); }

/* How many scores are at least some number, in that order. */
INLINE int64_t count_from(const struct score_row *row, int32_t least) {
    bits count = {0};
    int64_t total = 0;
    for (int64_t j = row->all.first; j < row->all.last; j += LANES) count -= ordered(load(row->scores + j)) >= least;
    for (int i = 0; i < LANES; i++) total += count[i];
    return total;
}

/* All scores but the most largest become -infinity; of equal ones the first stay. Returns the largest, 0 where all are
 * -infinity. */
INLINE float keep_largest(const struct score_row *row, int64_t most) {
    float largest = hide_others(row);
    if (largest == -INFINITY) return 0.0f;
    if (most >= row->own.last - row->own.first) return largest;
    uint32_t least = 0; /* the largest number that so many scores reach, bit by bit from above; 1 << 31 stands for 0 */
    for (int bit = 31; bit >= 0; bit--) {
        uint32_t more = least | (uint32_t)1 << bit;
        if (count_from(row, (int32_t)(more ^ 0x80000000u)) >= most) least = more;
    }
    int32_t smallest = (int32_t)(least ^ 0x80000000u);
    int64_t spare = count_from(row, smallest) - most;
    for (int64_t j = row->all.first; j < row->all.last; j += LANES) {
        lanes score = load(row->scores + j);
        bits stays = ordered(score) >= smallest;
        store(row->scores + j, (lanes)((stays & (bits)score) | (~stays & (bits)broadcast(-INFINITY))));
    }
    for (int64_t j = row->own.last - 1; spare > 0 && j >= row->own.first; j--)
        if (ordered(broadcast(row->scores[j]))[0] == smallest) row->scores[j] = -INFINITY, spare--;
    return largest;
}

/* Scores become terms of exp(score - maximum) of the largest, up to their sum, which is returned; number: its factor's
 * log2. */
INLINE float largest_row(const struct score_row *row, int64_t most, float *number, const int paired) {
    lanes sum = {0};
    float maximum = keep_largest(row, most);
    *number = maximum * (float)LOG2_E;
    for (int64_t j = row->all.first; j < row->all.last; j += LANES) {
        lanes weight = exp_or_zero(load(row->scores + j) - maximum);
        sum += weight;
        store_terms(row->scores, j, weight, paired);
    }
    return sum_lanes(sum);
}

/* Scores become weights, and their gradients in place of those of the weights. */
INLINE void largest_gradients(const struct score_row *row, float *gradients, int64_t most) {
    lanes sum = {0}, products = {0};
    float maximum = keep_largest(row, most);
    for (int64_t j = row->all.first; j < row->all.last; j += LANES) {
        lanes weight = exp_or_zero(load(row->scores + j) - maximum);
        sum += weight, products += weight * load(gradients + j);
        store(row->scores + j, weight);
    }
    float total = sum_lanes(sum), divisor = total > 0.0f ? total : INFINITY, mean = sum_lanes(products) / divisor;
    lanes rest = {0}; /* of the mean, which its rounding loses */
    for (int64_t j = row->all.first; j < row->all.last; j += LANES)
        rest += load(row->scores + j) * (load(gradients + j) - mean);
    float less = sum_lanes(rest) / divisor;
    for (int64_t j = row->all.first; j < row->all.last; j += LANES) {
        lanes weight = load(row->scores + j) / divisor;
        store(row->scores + j, weight);
        store(gradients + j, weight * (load(gradients + j) - mean - less));
    }
}

/* The first of a row's own columns that has a number; -1 where none has. */
INLINE int64_t column_of(const struct score_row *row, float number) {
    for (int64_t j = row->own.first; j < row->own.last; j++)
        if (row->scores[j] == number) return j;
    return -1;
}

/* All numbers of a row become 0, and that of one column 1; below 0: of none. */
INLINE void mark_column(const struct score_row *row, int64_t column) {
    for (int64_t j = row->all.first; j < row->all.last; j += LANES) store(row->scores + j, broadcast(0.0f));
    if (column >= 0) row->scores[column] = 1.0f;
}

/* Scores become terms of weights, whose sum is returned; number: log2 of the sum of all exp(score). */
INLINE float hard_row(const struct score_row *row, float *number, const int paired) {
    lanes sum = {0};
    float largest = hide_others(row);
    if (largest - largest != 0.0f) largest = 0.0f; /* a row without keys, or NaN */
    int64_t column = column_of(row, largest);
    for (int64_t j = row->all.first; j < row->all.last; j += LANES)
        sum += exp_or_zero(load(row->scores + j) - largest);
    float total = sum_lanes(sum);
    *number = (largest + logf(total)) * (float)LOG2_E;
    mark_column(row, total > 0.0f ? column : -1);
    for (int64_t j = row->all.first; paired && j < row->all.last; j += LANES)
        store_terms(row->scores, j, load(row->scores + j), paired);
    return total > 0.0f ? 1.0f : total; /* NaN stays */
}

/* Scores become weights, and the gradients of weights those that softmax would have. */
INLINE void hard_gradients(const struct score_row *row, float *gradients) {
    float largest = hide_others(row);
    int64_t column = largest == -INFINITY ? -1 : column_of(row, largest); /* a row without keys has no weight */
    largest_gradients(row, gradients, row->own.last - row->own.first);
    mark_column(row, column);
}

/* Scores become terms of weights, whose sum is returned; number: the threshold, what is left, or log2 of a factor of the
 * sum, 0 where there is none. */
INLINE float normalize_row(const struct short_attention *problem, const struct score_row *row, float *number,
                           const int paired) {
    *number = 0.0f;
    switch (problem->normalizer) {
    case SIGMOID: return sigmoid_row(row, (float)(problem->shift * LOG2_E), paired);
    case ENTMAX: return threshold_row(row, number, 1, paired);
    case SPARSEMAX: return threshold_row(row, number, 0, paired);
    case RELU: return problem->shift > 1.0 ? relu_row(row, number, 1, paired) : relu_row(row, number, 0, paired);
    case SOFTPICK: return softpick_row(row, number, paired);
    case STICKS: return stick_row(row, problem->lse ? number : 0, paired);
    case HARD: return hard_row(row, number, paired);
    default: return largest_row(row, (int64_t)problem->shift, number, paired);
    }
}

/* Scores become weights, and their gradients in place of those of the weights; 0 of a row that takes no part. grad_lse:
 * of a logarithm of the sum that divides powers. */
INLINE void row_gradients(const struct short_attention *problem, const struct score_row *row, float *gradients,
                          float grad_lse, int takes_part) {
    if (!takes_part) {
        for (int64_t j = row->all.first; j < row->all.last; j += LANES)
            store(row->scores + j, broadcast(0.0f)), store(gradients + j, broadcast(0.0f));
        return;
    }
    switch (problem->normalizer) {
    case SIGMOID: sigmoid_gradients(row, gradients, (float)(problem->shift * LOG2_E)); break;
    case ENTMAX: threshold_gradients(row, gradients, 1); break;
    case SPARSEMAX: threshold_gradients(row, gradients, 0); break;
    case RELU:
        if (problem->shift > 1.0)
            relu_gradients(row, gradients, grad_lse, 1);
        else
            relu_gradients(row, gradients, grad_lse, 0);
        break;
    case SOFTPICK: softpick_gradients(row, gradients, grad_lse); break;
    case STICKS: stick_gradients(row, gradients); break;
    case HARD: hard_gradients(row, gradients); break;
    default: largest_gradients(row, gradients, (int64_t)problem->shift);
    }
}

#endif
