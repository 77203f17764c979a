/* Attention by additive scores, backward: the gradient of a tile's scores, and of the values.
 *
 *   weight = exp(score - lse),    used = weight dropout_mask / keep_probability
 *   value[j] += sum over i of used upstream[i]
 *   score = used (upstream[i] . value[j]) - weight (upstream[i] . output[i] - lse_gradient[i])
 */
#include "additive_scores.h"
#include "tile.h"

/* A group of rows of one head. */
struct group {
    int64_t head, key_head, first, count; /* first: the row of the problem */
    float delta[GROUP];                   /* upstream . output - lse_gradient */
};

/* What a thread lays out: the values of the tile, and the gradients of the output of a group of rows, both ways. */
struct backward_state {
    float *values;        /* [strips of the tile][padded terms][STRIP] */
    float *upstream;      /* [GROUP][padded terms] */
    float *upstream_rows; /* [terms of GROUP rows][padded dim] */
};

INLINE const void *upstream_row(const struct additive_backward *work, const struct group *group, int64_t r,
                                const int dtype) {
    return row_at(work->upstream, 1, group->head * work->upstream_head + (group->first + r) * work->upstream_row,
                  dtype);
}

INLINE void pack_values(const struct additive_backward *work, struct backward_state *state, int64_t key_head,
                        const int dtype) {
    int64_t terms = padded_terms(work->value_dim, in_pairs(dtype)), begin = work->tile->column_begin / STRIP;
    for (int64_t strip = begin; strip * STRIP < work->tile->column_end; strip++) {
        int64_t first = strip * STRIP;
        pack_transposed_terms(row_at(work->value, 1, key_head * work->value_head + first * work->value_row, dtype),
                              work->value_row, min_int(work->scores->columns - first, STRIP), work->value_dim, 1.0f,
                              state->values + (strip - begin) * terms * STRIP, STRIP, dtype, in_pairs(dtype));
    }
}

INLINE void start_group(const struct additive_backward *work, struct backward_state *state, struct group *group,
                        const int dtype) {
    const int paired = in_pairs(dtype);
    int64_t dim = work->value_dim, terms = padded_terms(dim, paired), padded = padded_dim(dim);
    for (int64_t r = 0; r < GROUP; r++) {
        const void *upstream = upstream_row(work, group, r, dtype);
        for (int64_t a = 0; a < terms; a += LANES)
            store(state->upstream + r * terms + a, r < group->count ? load_terms(upstream, a, dim, 1.0f, dtype, 0, paired)
                                                                    : broadcast(0.0f));
        if (r >= group->count) continue;
        int64_t row = group->first + r;
        const void *output = row_at(work->output, 1, group->head * work->output_head + row * work->output_row, dtype);
        group->delta[r] = dot_entries(upstream, output, dim, dtype) -
                          work->lse_gradient[group->head * work->scores->rows + row];
    }
    if (!paired) return;
    for (int64_t term = 0; term < GROUP / 2; term++)
        for (int64_t a = 0; a < padded; a += LANES) {
            lanes pair = {0};
            if (2 * term < group->count)
                pair = pair_rows(upstream_row(work, group, 0, dtype), term, work->upstream_row, group->count, a, dim, 0);
            store(state->upstream_rows + term * padded + a, pair);
        }
}

/* The weights of a row with `count` keys of a strip, 0 in the rest of it, and the slopes of the softcap; whether any
 * pair exists. */
INLINE int row_weights(const struct additive_backward *work, const struct group *group, int64_t r, int64_t column,
                       int64_t count, float *weights, float *slopes) {
    const struct additive *scores = work->scores;
    int64_t row = group->first + r, skipped = column % STRIP, end = skipped + count;
    const float *bias = pair_numbers(&work->bias, group->head, row - work->tile->row_begin,
                                     column - work->tile->column_begin);
    if (bias && !any_pair_exists(bias, count)) return 0;
    strip_scores(scores, group->head, row, column, count, weights + skipped);
    if (work->softcap != 0.0f)
        for (int64_t j = 0; j < end; j += LANES) {
            lanes tangents = tanh_lanes(load(weights + j) / work->softcap);
            store(weights + j, work->softcap * tangents);
            store(slopes + j, 1.0f - tangents * tangents);
        }
    if (bias)
        for (int64_t j = 0; j < count; j++) weights[skipped + j] += bias[j];
    for (int64_t j = 0; j < skipped; j++) weights[j] = -INFINITY;
    for (int64_t j = end; j % LANES; j++) weights[j] = -INFINITY;
    float lse = work->lse[group->head * scores->rows + row];
    for (int64_t j = 0; j < end; j += LANES) store(weights + j, exp2_lanes((load(weights + j) - lse) * LOG2_E));
    return 1;
}

/* Weights and products become what the values are summed with, and the gradient of the scores. */
INLINE void finish_row(const struct additive_backward *work, const struct group *group, int64_t r, int64_t column,
                       int64_t count, float *weights, float *products, const float *slopes) {
    int64_t row = group->first + r - work->tile->row_begin, from = column - work->tile->column_begin;
    int64_t skipped = column % STRIP, target = group->head * work->tile->pairs_head + row * work->tile->pairs_row + from;
    const float *dropout_mask = pair_numbers(&work->dropout_mask, group->head, row, from);
    float kept[STRIP] ALIGNED = {0}, share = 1.0f / work->keep_probability;
    if (dropout_mask) memcpy(kept + skipped, dropout_mask, (size_t)count * sizeof(float));
    for (int64_t j = 0; j < skipped + count; j += LANES) {
        lanes weight = load(weights + j), used = weight * share;
        if (dropout_mask) used *= load(kept + j);
        store(products + j, used * load(products + j) - weight * group->delta[r]);
        store(weights + j, used);
    }
    if (work->bias_gradient) memcpy(work->bias_gradient + target, products + skipped, (size_t)count * sizeof(float));
    if (work->softcap != 0.0f)
        for (int64_t j = 0; j < skipped + count; j += LANES)
            store(products + j, load(products + j) * load(slopes + j));
    memcpy(work->tile->pairs + target, products + skipped, (size_t)count * sizeof(float));
}

/* Adds a group's part of the gradient of the values of a strip, of its keys before `end`. */
INLINE void add_value_gradient(const struct additive_backward *work, const struct backward_state *state,
                               const struct group *group, int64_t strip, int64_t end, const float *used,
                               const int paired) {
    int64_t padded = padded_dim(work->value_dim);
    float pairs[GROUP / 2 * STRIP] ALIGNED, ones[GROUP];
    for (int r = 0; r < GROUP; r++) ones[r] = 1.0f;
    for (int64_t j = 0; paired && j < GROUP / 2 * STRIP; j += LANES) {
        const float *even = used + j / STRIP * 2 * STRIP + j % STRIP;
        store(pairs + j, round_to_pairs(load(even), load(even + STRIP)));
    }
    int64_t strips = key_strip_count(work->scores);
    float *into = work->value_gradient + (group->key_head * strips + strip) * STRIP * work->value_padded;
    for (int64_t j = 0; j < end; j += GROUP)
        for (int64_t a = 0; a < padded; a += PAIR)
            add_terms((struct factor){(paired ? pairs : used) + j, 1, STRIP},
                      (struct vectors){(paired ? state->upstream_rows : state->upstream) + a, padded, 0,
                                       term_count(GROUP, paired)},
                      into + j * work->value_padded + a, work->value_padded, ones, paired);
}

INLINE void process_group(const struct additive_backward *work, struct backward_state *state, struct group *group,
                          const int dtype) {
    const int paired = in_pairs(dtype);
    int64_t terms = padded_terms(work->value_dim, paired), begin = work->tile->column_begin / STRIP;
    start_group(work, state, group, dtype);
    for (int64_t strip = begin; strip * STRIP < work->tile->column_end; strip++) {
        int64_t column = strip * STRIP < work->tile->column_begin ? work->tile->column_begin : strip * STRIP;
        int64_t count = min_int((strip + 1) * STRIP, work->tile->column_end) - column, end = column % STRIP + count;
        float weights[GROUP * STRIP] ALIGNED = {0}, products[GROUP * STRIP] ALIGNED = {0}, slopes[GROUP * STRIP] ALIGNED;
        int any = 0;
        for (int64_t r = 0; r < group->count; r++)
            if (row_weights(work, group, r, column, count, weights + r * STRIP, slopes + r * STRIP))
                any = 1;
            else /* in reach of all that is read below */
                memset(slopes + r * STRIP, 0, STRIP * sizeof(float));
        if (any)
            for (int64_t j = 0; j < end; j += PAIR)
                add_terms((struct factor){state->upstream, terms, 1},
                          (struct vectors){state->values + (strip - begin) * terms * STRIP + j, STRIP, 0,
                                           term_count(work->value_dim, paired)},
                          products + j, STRIP, 0, paired);
        for (int64_t r = 0; r < group->count; r++)
            finish_row(work, group, r, column, count, weights + r * STRIP, products + r * STRIP, slopes + r * STRIP);
        if (any) add_value_gradient(work, state, group, strip, end, weights, paired);
    }
}

/* The part of the tile from `begin` to `end` - 1, the values of one key head after another. */
void EXPORTED(regard_additive_tile_gradients)(struct additive_backward *work) {
    LEAVE_UNLESS(work->scores->dtype == BFLOAT16, regard_additive_tile_gradients, work);
    const struct tile *tile = work->tile;
    int64_t rows = tile->row_end - tile->row_begin, padded = padded_dim(work->value_dim), group_size = GROUP;
    int64_t strips = (tile->column_end + STRIP - 1) / STRIP - tile->column_begin / STRIP;
    int64_t floats = strips * padded * STRIP + 2 * GROUP * padded + 3 * 16;
    float *room = aligned_memory(floats * 4), *left = room;
    if (!room) {
        work->failed = 1;
        return;
    }
    struct backward_state state = {.values = take_floats(&left, strips * padded * STRIP)};
    state.upstream = take_floats(&left, GROUP * padded), state.upstream_rows = take_floats(&left, GROUP * padded);
    for (int64_t begin = tile->begin, packed = -1; begin < tile->end;) {
        struct group group = {.head = begin / rows, .first = tile->row_begin + begin % rows};
        group.key_head = group.head / (work->scores->heads / work->scores->key_heads);
        if (group.key_head != packed) BY_DTYPE(work->scores->dtype, pack_values(work, &state, group.key_head, DTYPE));
        packed = group.key_head;
        group.count = min_int(min_int(group_size, tile->end - begin), rows - begin % rows);
        BY_DTYPE(work->scores->dtype, process_group(work, &state, &group, DTYPE));
        begin += group.count;
    }
    free_aligned(room);
}
