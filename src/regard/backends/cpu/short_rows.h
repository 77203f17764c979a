/* Whole rows of scores with other normalizers than softmax, one row at a time; each as in short.h. */
#ifndef REGARD_SHORT_ROWS_H
#define REGARD_SHORT_ROWS_H

#include "short.h"
#include "tile.h"

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
    lanes most = broadcast(-INFINITY);
    for (int64_t j = row->all.first; j < row->all.last; j += LANES) {
        lanes own = select_span(row->own, j, load(row->scores + j), -INFINITY);
        store(row->scores + j, own);
        most = max_lanes(most, own);
    }
    float largest = max_of_lanes(most);
    int empty = largest == -INFINITY;
    float rest = 0.0f, threshold = empty ? 0.0f : find_threshold(row, largest, &rest, squared), least = empty ? 0.0f : largest;
    for (int64_t j = row->all.first; j < row->all.last; j += LANES)
        store(row->scores + j, max_lanes(load(row->scores + j) - least - threshold - rest, broadcast(0.0f)));
    return empty ? -INFINITY : least + threshold;
}

/* Scores become terms of weights, up to their sum, which is returned. */
INLINE float threshold_row(const struct score_row *row, float *threshold, const int squared, const int paired) {
    lanes sum = {0};
    *threshold = above_threshold(row, squared);
    for (int64_t j = row->all.first; j < row->all.last; j += LANES) {
        lanes above = load(row->scores + j), weight = squared ? above * above : above;
        sum += weight;
        store_terms(row->scores, j, weight, paired);
    }
    return sum_lanes(sum);
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

/* Scores become terms of weights, whose sum is returned; number: the threshold, or 0 where there is none. */
INLINE float normalize_row(const struct short_attention *problem, const struct score_row *row, float *number,
                           const int paired) {
    *number = 0.0f;
    if (problem->normalizer == SIGMOID) return sigmoid_row(row, (float)(problem->shift * LOG2_E), paired);
    if (problem->normalizer == ENTMAX) return threshold_row(row, number, 1, paired);
    return threshold_row(row, number, 0, paired);
}

/* Scores become weights, and their gradients in place of those of the weights; 0 of a row that takes no part. */
INLINE void row_gradients(const struct short_attention *problem, const struct score_row *row, float *gradients,
                          int takes_part) {
    if (!takes_part)
        for (int64_t j = row->all.first; j < row->all.last; j += LANES)
            store(row->scores + j, broadcast(0.0f)), store(gradients + j, broadcast(0.0f));
    else if (problem->normalizer == SIGMOID)
        sigmoid_gradients(row, gradients, (float)(problem->shift * LOG2_E));
    else if (problem->normalizer == ENTMAX)
        threshold_gradients(row, gradients, 1);
    else
        threshold_gradients(row, gradients, 0);
}

#endif
