/* What one thread works on of the reductions of the weights: some blocks of rows, and a block of keys at a time. */
#ifndef REGARD_PANEL_H
#define REGARD_PANEL_H

#include "blocks.h"
#include "leading.h"
#include "reductions.h"

/* What a thread keeps of the rows that it is at. */
struct panel {
    float *query;          /* [rows][padded dim], scaled */
    float *keys;           /* [dim][BLOCK] */
    float *shift;          /* [rows], the log-sum-exp to the base 2 */
    float *terms;          /* [rows][LANES] */
    float *sums, *largest; /* [BLOCK], of the columns of a tile, over the rows since the last cut */
    struct leading *leading; /* [tops] */
    float *mass, *moments;   /* [rows][LANES] */
    float *binned;           /* [bins][LANES], of the distances of a tile: those from nearest to farthest */
    int64_t nearest, farthest;
    int64_t batch, head, pair, strip, begin, count, blocks;
    uint64_t alive[MOST_BLOCKS]; /* a bit for each row: whether it takes part */
    int some;                    /* whether anything is in sums and largest */
};

/* A thread's memory, in floats. */
INLINE int64_t room_for(const struct flash *of) {
    const struct reductions *into = of->reductions;
    int64_t rows = of->segment * BLOCK, padded = whole_pairs(of->dim);
    int64_t floats = (rows + BLOCK) * padded + rows * (3 * LANES + 1) + 2 * BLOCK + 10 * 16;
    if (into->reach) floats += into->reach->bins * LANES;
    floats += into->tops * (int64_t)(sizeof(struct leading) / sizeof(float));
    for (int64_t t = 0; t < into->tops; t++) floats += 2 * rows * whole_vectors(into->top[t].most);
    return floats;
}

INLINE struct panel panel_in(const struct flash *of, float *left) {
    const struct reductions *into = of->reductions;
    int64_t rows = of->segment * BLOCK, padded = whole_pairs(of->dim);
    struct panel at = {.query = taken_off(&left, rows * padded), .keys = taken_off(&left, padded * BLOCK)};
    at.shift = taken_off(&left, rows), at.terms = taken_off(&left, rows * LANES);
    at.sums = taken_off(&left, BLOCK), at.largest = taken_off(&left, BLOCK);
    memset(at.sums, 0, BLOCK * sizeof(float)), memset(at.largest, 0, BLOCK * sizeof(float));
    at.mass = taken_off(&left, rows * LANES), at.moments = taken_off(&left, rows * LANES);
    if (into->reach) {
        at.binned = taken_off(&left, into->reach->bins * LANES);
        memset(at.binned, 0, (size_t)(into->reach->bins * LANES) * sizeof(float));
    }
    at.leading = (struct leading *)taken_off(&left, into->tops * (int64_t)(sizeof(struct leading) / sizeof(float)));
    for (int64_t t = 0; t < into->tops; t++) {
        int64_t count = whole_vectors(into->top[t].most);
        float *exponents = taken_off(&left, rows * count);
        at.leading[t] = (struct leading){exponents, (int32_t *)taken_off(&left, rows * count), count};
    }
    return at;
}

/* `count` rows of products become weights, and are added up along rows and columns. */
INLINE void weigh(struct panel *at, int64_t row, const float *products, const uint64_t *words, int64_t low,
                  int64_t high, const int count, const int partial) {
    lanes terms[AT_ONCE];
    UNROLLED for (int r = 0; r < count; r++) terms[r] = load(at->terms + (row + r) * LANES);
    for (int64_t j = low; j < high; j += LANES) {
        lanes sum = load(at->sums + j), most = load(at->largest + j);
        UNROLLED for (int r = 0; r < count; r++) {
            lanes exponent = load(products + r * BLOCK + j) - at->shift[row + r];
            if (partial) exponent = where_bits(words[r], j, exponent, -INFINITY);
            lanes weight = power_of_two(exponent);
            terms[r] += weight * larger(every(-127.0f), exponent);
            sum += weight, most = larger(most, weight);
        }
        store(at->sums + j, sum), store(at->largest + j, most);
    }
    UNROLLED for (int r = 0; r < count; r++) store(at->terms + (row + r) * LANES, terms[r]);
    at->some = 1;
}

/* One row of products becomes weights, which are added up by how far they reach. */
INLINE void weigh_distances(const struct reach *reach, struct panel *at, int64_t row, int64_t column,
                            const float *products, uint64_t word, int64_t low, int64_t high) {
    float query = reach->queries[at->begin + row];
    lanes mass = every(0.0f), moments = every(0.0f);
    for (int64_t j = low; j < high; j += LANES) {
        lanes weight = power_of_two(where_bits(word, j, load(products + j) - at->shift[row], -INFINITY));
        lanes distance = magnitude(load(reach->keys + column + j) - query);
        mass += weight, moments += weight * distance;
        if (at->nearest == at->farthest) continue;
        for (int64_t b = at->nearest; b <= at->farthest; b++) {
            bits inside = (distance >= reach->edges[b]) & (distance < reach->edges[b + 1]);
            store(at->binned + b * LANES, load(at->binned + b * LANES) + where(inside, weight));
        }
    }
    float *binned = at->binned + at->nearest * LANES;
    if (at->nearest == at->farthest) store(binned, load(binned) + mass);
    store(at->mass + row * LANES, load(at->mass + row * LANES) + mass);
    store(at->moments + row * LANES, load(at->moments + row * LANES) + moments);
}

#endif
