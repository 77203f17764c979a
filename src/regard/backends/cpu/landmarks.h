/* Landmark attention (Mohtashami and Jaggi 2023, arXiv 2305.16300): scores of a row whose ordinary softmax has the weights
 * of its two softmaxes, and their gradients. A tile consists of whole blocks of `landmark_size` keys, of which the last is
 * the landmark; or blocks are wider than a tile, of which one then has columns of two blocks at most. Such a block is read
 * before its first tile is computed: what its softmax sums up is known only behind its last one. */
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

/* Blocks wider than a tile. Of the one that is being read, for each row: the largest score but the landmark's, the sum of
 * the powers of 2 of differences to it, the landmark's score, and backward the sum of those powers times grad_weight.
 * share, of the last two blocks that were read: what is added to the scores of keys. mean, backward: what their grad_weight
 * less delta is on average over the block. That of block n is at n % 2. */
struct wide_blocks {
    float *limit, *sum, *gate, *moment, *share[2], *mean[2];
    int64_t number; /* the last one that was read */
};

enum { WIDE_ARRAYS = 8 };

INLINE int has_wide_blocks(const struct flash *problem) { return problem->landmark_size > BLOCK; }

INLINE int64_t wide_floats(const struct flash *problem, int64_t rows) {
    return has_wide_blocks(problem) ? WIDE_ARRAYS * (rows + 16) : 0;
}

INLINE struct wide_blocks take_wide_blocks(const struct flash *problem, int64_t rows, float **memory) {
    struct wide_blocks wide = {.number = -1};
    if (!has_wide_blocks(problem)) return wide;
    wide.limit = take_floats(memory, rows), wide.sum = take_floats(memory, rows), wide.gate = take_floats(memory, rows);
    wide.moment = take_floats(memory, rows);
    for (int at = 0; at < 2; at++)
        wide.share[at] = take_floats(memory, rows), wide.mean[at] = take_floats(memory, rows);
    return wide;
}

INLINE void start_wide_block(struct wide_blocks *wide, int64_t rows) {
    for (int64_t row = 0; row < rows; row++)
        wide->limit[row] = wide->gate[row] = -INFINITY, wide->sum[row] = wide->moment[row] = 0.0f;
}

/* Reads the scores of a row in a tile, and backward their grad_weights, into what is known of the block, which begins at
 * `first`, in columns of the tile. */
INLINE void read_wide_row(struct wide_blocks *wide, int64_t size, int64_t first, int64_t count, int64_t row,
                          const float *scores, const float *grad_weights) {
    int64_t begin = first < 0 ? 0 : first, end = min_int(first + size - 1, count);
    if (first + size - 1 < count) wide->gate[row] = scores[first + size - 1];
    lanes limit = broadcast(wide->limit[row]), sum = {0}, moment = {0};
    for (int64_t j = begin; j < end; j += LANES) limit = max_lanes(limit, load_scores(scores + j, end - j));
    float largest = max_of_lanes(limit);
    if (largest == -INFINITY) return;
    for (int64_t j = begin; j < end; j += LANES) {
        lanes power = exp2_lanes(load_scores(scores + j, end - j) - largest);
        sum += power;
        if (grad_weights) moment += power * load_partial(grad_weights + j, end - j);
    }
    float rescale = exp2_lanes(broadcast(wide->limit[row] - largest))[0];
    wide->limit[row] = largest, wide->sum[row] = wide->sum[row] * rescale + sum_lanes(sum);
    wide->moment[row] = wide->moment[row] * rescale + sum_lanes(moment);
}

/* The shares of a block that has been read, and backward its means. */
INLINE void finish_wide_block(struct wide_blocks *wide, int64_t rows, const float *delta) {
    float *share = wide->share[wide->number % 2], *mean = wide->mean[wide->number % 2];
    for (int64_t row = 0; row < rows; row++) {
        int seen = wide->gate[row] != -INFINITY && wide->limit[row] != -INFINITY;
        float log = log_lanes(broadcast(seen ? wide->sum[row] : 1.0f))[0] * LOG2_E;
        share[row] = seen ? wide->gate[row] - wide->limit[row] - log : -INFINITY;
        if (delta) mean[row] = seen ? wide->moment[row] / wide->sum[row] - delta[row] : 0.0f;
    }
}

/* `weigh_blocks` of a tile whose first column is `column`. */
INLINE void weigh_wide_blocks(const struct wide_blocks *wide, int64_t size, int64_t own, int64_t column, int64_t row,
                              int64_t count, float *scores) {
    for (int64_t number = column / size, first = number * size - column; first < count; number++, first += size) {
        int64_t end = min_int(first + size - 1, count);
        float share = first == own ? 0.0f : wide->share[number % 2][row];
        for (int64_t j = first < 0 ? 0 : first; j < end; j += LANES)
            store_partial(scores + j, load_partial(scores + j, end - j) + share, end - j);
        if (first + size - 1 < count) scores[first + size - 1] = -INFINITY;
    }
}

/* `return_to_landmarks` of such a tile; gate: the weight that the landmark in it has of its row, if there is one. */
INLINE void return_to_wide_landmarks(const struct wide_blocks *wide, int64_t size, int64_t own, int64_t column, int64_t row,
                                     int64_t count, float gate, const float *weights, float *gradients) {
    for (int64_t number = column / size, first = number * size - column; first < count; number++, first += size) {
        if (first == own) continue;
        int64_t end = min_int(first + size - 1, count);
        float mean = wide->mean[number % 2][row];
        for (int64_t j = first < 0 ? 0 : first; j < end; j += LANES)
            store_partial(gradients + j, load_partial(gradients + j, end - j) - load_partial(weights + j, end - j) * mean,
                          end - j);
        if (first + size - 1 < count)
            gradients[first + size - 1] = wide->share[number % 2][row] == -INFINITY ? 0.0f : gate * mean;
    }
}

#endif
