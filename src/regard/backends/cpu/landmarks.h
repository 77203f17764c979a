/* Landmark attention (Mohtashami and Jaggi 2023, arXiv 2305.16300): scores of a row whose ordinary softmax has the weights
 * of its two softmaxes, and their gradients. A tile consists of whole blocks of `landmark_size` keys, of which the last is
 * the landmark. */
#ifndef REGARD_LANDMARKS_H
#define REGARD_LANDMARKS_H

#include "tile.h"

enum { MOST_IN_TILE = BLOCK / 2 };

/* The column where the block of a position begins. */
INLINE int64_t block_of(int64_t position, int64_t size) {
    int64_t in_block = position % size;
    return position - (in_block < 0 ? in_block + size : in_block);
}

/* Where a row's own block begins, in columns from that of a tile on; it may lie outside. */
INLINE int64_t own_block(const struct flash *problem, int64_t row, int64_t column) {
    return block_of(row + problem->landmark_shift, problem->landmark_size) - column;
}

/* Loads the first `count` lanes; the others are -infinity. */
INLINE lanes load_scores(const float *source, int64_t count) {
    if (count >= LANES) return load(source);
    lanes value = broadcast(-INFINITY);
#if defined(__AVX512F__)
    return (lanes)_mm512_mask_loadu_ps((__m512)value, (__mmask16)((1u << count) - 1), source);
#endif
    memcpy(&value, source, (size_t)count * sizeof(float));
    return value;
}

/* Of each block of a row the largest score but the landmark's, and the sum of the powers of 2 of differences to it, which is
 * 1 where there is no other key. */
INLINE void sum_blocks(int64_t size, int64_t count, const float *scores, float *largest, float *sums) {
    for (int64_t first = 0; first < count; first += size, largest++, sums++) {
        int64_t keys = min_int(size - 1, count - first);
        lanes limit = broadcast(-INFINITY), total = {0};
        for (int64_t j = 0; j < keys; j += LANES) limit = max_lanes(limit, load_scores(scores + first + j, keys - j));
        *largest = max_of_lanes(limit), *sums = 1.0f;
        if (*largest == -INFINITY) continue;
        for (int64_t j = 0; j < keys; j += LANES) total += exp2_lanes(load_scores(scores + first + j, keys - j) - *largest);
        *sums = sum_lanes(total);
    }
}

/* The same of blocks of fewer keys than a vector has: a lane for each block. */
INLINE void sum_small_blocks(int64_t size, int64_t count, const float *scores, float *largest, float *sums) {
    float turned[2 * BLOCK] ALIGNED;
    int64_t blocks = (count + size - 1) / size, width = round_up_to_lanes(blocks);
    for (int64_t at = 0; at < (size - 1) * width; at += LANES) store(turned + at, broadcast(-INFINITY));
    for (int64_t b = 0; b < blocks; b++)
        for (int64_t j = 0; j < min_int(size - 1, count - b * size); j++) turned[j * width + b] = scores[b * size + j];
    for (int64_t b = 0; b < blocks; b += LANES) {
        lanes limit = broadcast(-INFINITY), total = {0};
        for (int64_t j = 0; j < size - 1; j++) limit = max_lanes(limit, load(turned + j * width + b));
        bits none = limit == -INFINITY;
        lanes less = zero_unless(~none, limit);
        for (int64_t j = 0; j < size - 1; j++) total += exp2_lanes(load(turned + j * width + b) - less);
        store(largest + b, limit);
        store(sums + b, total + (lanes)(none & (bits)broadcast(1.0f)));
    }
}

/* Replaces the scores of a row in a tile of `count` columns. Those of another block than its own, which begins at `own`,
 * get the score of the block's landmark less the log-sum-exp of its other keys; -infinity where one of these is. Landmarks
 * get -infinity. */
INLINE void weigh_blocks(int64_t size, int64_t own, int64_t count, float *scores) {
    float shares[MOST_IN_TILE + LANES], sums[MOST_IN_TILE + LANES];
    int64_t blocks = (count + size - 1) / size;
    if (size <= LANES / 2)
        sum_small_blocks(size, count, scores, shares, sums);
    else
        sum_blocks(size, count, scores, shares, sums);
    for (int64_t b = 0; b < blocks; b++) {
        float gate = b * size + size <= count ? scores[b * size + size - 1] : -INFINITY;
        shares[b] = gate == -INFINITY || shares[b] == -INFINITY ? -INFINITY : gate - shares[b];
    }
    for (int64_t b = 0; b < blocks; b += LANES) store(shares + b, load(shares + b) - log_lanes(load(sums + b)) * LOG2_E);
    if (own >= 0 && own < count) shares[own / size] = 0.0f;
    for (int64_t b = 0; b < blocks; b++) {
        float *block = scores + b * size;
        int64_t keys = min_int(size - 1, count - b * size);
        for (int64_t j = 0; j < keys; j += LANES)
            store_partial(block + j, load_partial(block + j, keys - j) + shares[b], keys - j);
        if (b * size + keys < count) block[keys] = -INFINITY;
    }
}

/* The sum of the gradients of some neighbours, and that of their weights. */
INLINE float sum_both(const float *gradients, const float *weights, int64_t count, float *total) {
    float sum = *total = 0.0f;
    if (count < LANES / 2) {
        for (int64_t j = 0; j < count; j++) sum += gradients[j], *total += weights[j];
        return sum;
    }
    lanes sums = {0}, totals = {0};
    for (int64_t j = 0; j < count; j += LANES) {
        sums += load_partial(gradients + j, count - j);
        totals += load_partial(weights + j, count - j);
    }
    *total = sum_lanes(totals);
    return sum_lanes(sums);
}

/* From the gradients of those scores, weight (grad_weight - delta), those of the scores before: a block's landmark gets
 * the sum over its other keys, and each of these loses its part of it, as weights within the block are. */
INLINE void return_to_landmarks(int64_t size, int64_t own, int64_t count, const float *weights, float *gradients) {
    for (int64_t first = 0; first < count; first += size) {
        int64_t keys = min_int(size - 1, count - first);
        if (first == own) continue;
        float total, sum = sum_both(gradients + first, weights + first, keys, &total),
                     mean = total == 0.0f ? 0.0f : sum / total;
        for (int64_t j = first; j < first + keys; j += LANES) {
            lanes before = load_partial(gradients + j, first + keys - j);
            store_partial(gradients + j, before - load_partial(weights + j, first + keys - j) * mean, first + keys - j);
        }
        if (first + keys < count) gradients[first + keys] = sum;
    }
}

#endif
