/* Reductions of the weights of a few rows and a block of keys: the functions of the table in reductions.h, and the
 * state of the thread that adds them up. */
#ifndef REGARD_REDUCE_TILE_H
#define REGARD_REDUCE_TILE_H

#include "reductions.h"
#include "tile.h"
#include "topk.h"

/* The positions of a row and of the keys of a block; without positions `keys` is null. */
struct positions {
    float query;
    const float *keys;
};

/* The functions of the table: the contributions of LANES weights, each 2^exponent, of one row. */
INLINE lanes term_weight(lanes weight, lanes exponent) {
    (void)exponent;
    return weight;
}

INLINE lanes term_weight_log2_weight(lanes weight, lanes exponent) {
    return weight *
           max_lanes(broadcast(-127.0f), exponent); /* the weight is 0 from there on: 0 times -infinity is NaN */
}

/* Those that read positions; the first of the lanes is column j of the block. */
INLINE lanes term_weight_distance(lanes weight, lanes exponent, const struct positions positions, int64_t j) {
    (void)exponent;
    return weight * absolute(load(positions.keys + j) - positions.query);
}

/* All of them with one signature. A term without positions cannot read any: its function does not take them. */
typedef lanes contribution_function(lanes weight, lanes exponent, const struct positions positions, int64_t j);

#define CONTRIBUTION(name)                                                                                            \
    INLINE lanes contribution_##name(lanes weight, lanes exponent, const struct positions positions, int64_t j) {     \
        (void)positions, (void)j;                                                                                     \
        return term_##name(weight, exponent);                                                                         \
    }
#define POSITION_CONTRIBUTION(name)                                                                                   \
    INLINE lanes contribution_##name(lanes weight, lanes exponent, const struct positions positions, int64_t j) {     \
        return term_##name(weight, exponent, positions, j);                                                           \
    }
TERMS(CONTRIBUTION, POSITION_CONTRIBUTION)

/* What a thread needs for consecutive blocks of rows. */
struct reduction_state {
    float *query;                    /* [rows][padded terms]; floats are scaled, pairs are not (see score_factor) */
    float *keys;                     /* [terms][BLOCK] */
    float *shift;                    /* [rows], the log-sum-exp to the base 2 */
    float *row_sums[TERM_COUNT];     /* [rows][LANES], or null */
    float *column_sums[TERM_COUNT];  /* [BLOCK], of the columns of a tile over the rows since the last cut; or null */
    float *column_maxima;            /* likewise */
    struct topk_rows *topks;         /* [topk_count] */
    float *bins;                     /* [bins][LANES], of the distances of a tile: from first_bin to last_bin */
    int64_t first_bin, last_bin;
    int64_t batch, head, pair, strip, begin, count, blocks;
    uint64_t active[MOST_BLOCKS]; /* a bit for each row: whether its log-sum-exp is finite */
    int needs_weights;            /* whether anything but the largest weights is wanted */
    int has_columns;              /* whether column sums or maxima are wanted */
    int pending;                  /* whether there is anything in column_sums and column_maxima */
};

/* GROUP rows with one block of keys. */
struct row_group {
    int64_t row, column, low, high; /* the columns from low to below high, of the block */
    float *exponents, *weights;     /* [GROUP][BLOCK] */
};

INLINE float *take_zeros(float **memory, int64_t floats) {
    float *taken = take_floats(memory, floats);
    memset(taken, 0, (size_t)floats * sizeof(float));
    return taken;
}

/* The floats that a thread needs, at least. */
INLINE int64_t state_floats(const struct flash *problem) {
    const struct reductions *reductions = problem->reductions;
    int64_t rows = problem->row_blocks * BLOCK, padded = padded_dim(problem->dim);
    int64_t floats = (rows + BLOCK) * padded + rows + TERM_COUNT * (rows * LANES + BLOCK) + BLOCK;
    if (reductions->distances) floats += reductions->distances->bins * LANES;
    floats += reductions->topk_count * (int64_t)(sizeof(struct topk_rows) / sizeof(float));
    for (int64_t t = 0; t < reductions->topk_count; t++) floats += 2 * rows * round_up_to_lanes(reductions->topks[t].k);
    return floats + 16 * (2 * TERM_COUNT + 6 + 2 * reductions->topk_count);
}

INLINE struct reduction_state allocate_state(const struct flash *problem, float *memory) {
    const struct reductions *reductions = problem->reductions;
    int64_t rows = problem->row_blocks * BLOCK, padded = padded_dim(problem->dim);
    struct reduction_state state = {.query = take_floats(&memory, rows * padded)};
    state.keys = take_floats(&memory, padded * BLOCK), state.shift = take_floats(&memory, rows);
    for (int64_t m = 0; m < reductions->map_count; m++) {
        const struct cell_map *map = reductions->maps + m;
        state.has_columns = 1;
        if (!map->sums && !state.column_maxima) state.column_maxima = take_zeros(&memory, BLOCK);
        if (map->sums && !state.column_sums[map->term]) state.column_sums[map->term] = take_zeros(&memory, BLOCK);
    }
    for (int t = 0; t < TERM_COUNT; t++) {
        if (reductions->row_sums[t]) state.row_sums[t] = take_zeros(&memory, rows * LANES), state.needs_weights = 1;
        if (!reductions->column_sums[t]) continue;
        state.has_columns = 1;
        if (!state.column_sums[t]) state.column_sums[t] = take_zeros(&memory, BLOCK);
    }
    if (reductions->distances) state.bins = take_zeros(&memory, reductions->distances->bins * LANES);
    state.needs_weights |= state.has_columns || reductions->distances;
    int64_t floats = reductions->topk_count * (int64_t)(sizeof(struct topk_rows) / sizeof(float));
    state.topks = (struct topk_rows *)take_floats(&memory, floats);
    for (int64_t t = 0; t < reductions->topk_count; t++) {
        int64_t count = round_up_to_lanes(reductions->topks[t].k);
        float *exponents = take_floats(&memory, rows * count);
        state.topks[t] = (struct topk_rows){exponents, (int32_t *)take_floats(&memory, rows * count), count};
    }
    return state;
}

INLINE struct positions row_positions(const struct reductions *reductions, const struct reduction_state *state,
                                      const struct row_group *group, int r) {
    if (!reductions->query_positions) return (struct positions){0.0f, 0};
    return (struct positions){reductions->query_positions[state->begin + group->row + r],
                              reductions->key_positions + group->column};
}

/* Adds a group's terms up along its rows, lane by lane. */
INLINE void add_to_row_sums(const struct reductions *reductions, const struct reduction_state *state,
                            const struct row_group *group, float *sums, contribution_function *contribution) {
    UNROLL for (int r = 0; r < GROUP; r++) {
        struct positions positions = row_positions(reductions, state, group, r);
        const float *weights = group->weights + r * BLOCK, *exponents = group->exponents + r * BLOCK;
        lanes sum = load(sums + (group->row + r) * LANES);
        for (int64_t j = group->low; j < group->high; j += LANES)
            sum += contribution(load(weights + j), load(exponents + j), positions, j);
        store(sums + (group->row + r) * LANES, sum);
    }
}

/* Adds the terms of some rows of a group up along its columns. */
INLINE void add_to_column_sums(const struct reductions *reductions, const struct reduction_state *state,
                               const struct row_group *group, int first, int end, float *sums,
                               contribution_function *contribution) {
    for (int64_t j = group->low; j < group->high; j += LANES) {
        lanes sum = load(sums + j);
        for (int r = first; r < end; r++) {
            struct positions positions = row_positions(reductions, state, group, r);
            const float *weights = group->weights + r * BLOCK, *exponents = group->exponents + r * BLOCK;
            sum += contribution(load(weights + j), load(exponents + j), positions, j);
        }
        store(sums + j, sum);
    }
}

INLINE void add_to_column_maxima(const struct row_group *group, int first, int end, float *maxima) {
    for (int64_t j = group->low; j < group->high; j += LANES) {
        lanes maximum = load(maxima + j);
        for (int r = first; r < end; r++) maximum = max_lanes(maximum, load(group->weights + r * BLOCK + j));
        store(maxima + j, maximum);
    }
}

#define ROW_SUM_CASE(name)                                                                     \
    case TERM_##name:                                                                          \
        add_to_row_sums(reductions, state, group, state->row_sums[t], contribution_##name);    \
        break;
#define COLUMN_SUM_CASE(name)                                                                                     \
    case TERM_##name:                                                                                             \
        if (end - first == GROUP)                                                                                 \
            add_to_column_sums(reductions, state, group, 0, GROUP, state->column_sums[t], contribution_##name);   \
        else                                                                                                      \
            add_to_column_sums(reductions, state, group, first, end, state->column_sums[t], contribution_##name); \
        break;

/* All sums over rows that are wanted. */
INLINE void add_rows(const struct reductions *reductions, struct reduction_state *state,
                     const struct row_group *group) {
    for (int t = 0; t < TERM_COUNT; t++)
        if (state->row_sums[t]) switch (t) { TERMS(ROW_SUM_CASE, ROW_SUM_CASE) }
}

/* All sums and maxima over columns that are wanted, of the rows from `first` to below `end` of a group. */
INLINE void add_columns(const struct reductions *reductions, struct reduction_state *state,
                        const struct row_group *group, int first, int end) {
    for (int t = 0; t < TERM_COUNT; t++)
        if (state->column_sums[t]) switch (t) { TERMS(COLUMN_SUM_CASE, COLUMN_SUM_CASE) }
    if (state->column_maxima) add_to_column_maxima(group, first, end, state->column_maxima);
    state->pending = 1;
}

/* Adds the weights of one row up by their distances. */
INLINE void add_to_histogram(const struct reductions *reductions, struct reduction_state *state,
                             const struct row_group *group, int r) {
    const struct distances *distances = reductions->distances;
    struct positions positions = row_positions(reductions, state, group, r);
    const float *weights = group->weights + r * BLOCK;
    if (state->first_bin == state->last_bin) {
        lanes sum = load(state->bins + state->first_bin * LANES);
        for (int64_t j = group->low; j < group->high; j += LANES) sum += load(weights + j);
        store(state->bins + state->first_bin * LANES, sum);
        return;
    }
    for (int64_t j = group->low; j < group->high; j += LANES) {
        lanes weight = load(weights + j), distance = absolute(load(positions.keys + j) - positions.query);
        for (int64_t b = state->first_bin; b <= state->last_bin; b++) {
            bits inside = (distance >= distances->edges[b]) & (distance < distances->edges[b + 1]);
            store(state->bins + b * LANES, load(state->bins + b * LANES) + zero_unless(inside, weight));
        }
    }
}

#endif
