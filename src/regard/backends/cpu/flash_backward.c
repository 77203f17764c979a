/* The gradients of dot-product attention: a block of keys with the blocks of rows that attend to it, column of tiles
 * after column, so that the gradients of keys and values are summed up where they are; or, where rows have few keys,
 * block of rows after block. */
#include "call_bias.h"
#include "landmarks.h"
#include "narrow_backward.h"

/* The state of a thread for one key head. */
struct gradient {
    float *delta;                  /* [query heads][rows]: sum of grad_output output less grad_lse */
    float *lse, *lse_rest;         /* likewise: see in_base_2 */
    struct cursor *cursors;        /* [blocks of rows] */
    float *key_columns, *key_rows; /* of the block of keys: [terms][BLOCK], and [terms of rows][padded dim] */
    float *value_columns;          /* [terms][BLOCK] */
    float *grad_key, *grad_value;  /* [BLOCK][padded dim or value dim] */
    float *query, *grad_output;    /* of the block of rows, as left factors: [BLOCK][padded terms] */
    float *query_rows, *grad_output_rows; /* and as right ones: [terms of rows][padded dim]; of floats, the same */
    float *grad_query;             /* of a group of rows: [GROUP][padded dim] */
    float *weights, *grad_scores;  /* of the tile: [BLOCK][BLOCK]; in pairs, of a row and the next one, every other row */
    float *bias, *grad_bias;       /* of the tile, [BLOCK][BLOCK]: see call_bias.h; the latter is null where it is what
                                      grad_scores has */
    struct wide_blocks wide;       /* of landmark attention: [query heads][rows] */
    lanes check;                   /* see check_finite */
    int64_t batch, key_head, part;
};

/* A tile: its query head and position, the number of its columns, its pairs, and the range of rows that has any. */
struct tile {
    int64_t head, row, column, count, begin, end;
    const uint64_t *words;
    uint64_t columns_used; /* the columns that any row has pairs in */
};

INLINE int64_t padded_rows(const struct flash *problem) { return (problem->rows + BLOCK - 1) / BLOCK * BLOCK; }

/* The part of a per-row array that belongs to a query head. */
INLINE float *head_values(const struct flash *problem, const struct gradient *state, int64_t head, float *values) {
    return values + (head - state->key_head * problem->group) * padded_rows(problem);
}

/* The index of this thread's partial sum of a query head's relative bias. */
INLINE int64_t partial_sum_index(const struct flash *problem, const struct gradient *state, int64_t head) {
    return (state->batch * problem->heads + head) * problem->key_parts + state->part;
}

/* Where the gradient of a row's relative bias is summed, or null. */
INLINE float *row_bias_gradient(const struct flash *problem, const struct gradient *state, int64_t head, int64_t row,
                                int64_t column) {
    if (!problem->grad_relative_bias || row >= problem->rows) return 0;
    return problem->grad_relative_bias +
           partial_sum_index(problem, state, head) * (problem->rows + problem->columns - 1) +
           diagonal_index(problem, row, column);
}

/* The factor of products with packed gradients of the output: floats have it there. */
INLINE float output_factor(const struct flash *problem, const int paired) {
    return paired ? 1.0f / problem->keep_probability : 1.0f;
}

/* Sets what a row has outside of some columns to 0. */
INLINE void zero_beyond(int64_t low, int64_t high, float *weights, float *grad_scores) {
    for (int64_t j = 0; j < BLOCK; j = j + LANES == low ? high : j + LANES) {
        if (j >= low && j < high) continue;
        store(weights + j, broadcast(0.0f));
        store(grad_scores + j, broadcast(0.0f));
    }
}

/* The dropout mask of a row from a column on. */
INLINE bits dropout_at(const struct flash *problem, int64_t column, int32_t row_hash) {
    return dropout_mask(problem, load_bits(problem->column_hashes + column) + row_hash);
}

/* The weights of a row, and the gradients of its scores: weight (grad_weight - delta), or of a sigmoid weight (1 - weight)
 * grad_weight. */
INLINE void tile_row_gradient(const struct flash *problem, const struct gradient *state, const struct tile *tile,
                              int64_t r, const struct extent extent, const int paired, const int sigmoid) {
    const float product_factor = score_factor(problem, paired), weight_factor = output_factor(problem, paired);
    float *weights = state->weights + r * BLOCK, *grad_scores = state->grad_scores + r * BLOCK;
    int64_t row = tile->row + r, low = aligned_begin(extent), high = aligned_end(extent);
    /* Of rows of padding nothing was filled in: a NaN there would be summed up, times 0, for the keys. */
    const float *relative_bias = row_bias(problem, tile->head, row, tile->column);
    if (problem->call_bias) relative_bias = row < problem->rows ? state->bias + r * BLOCK : 0;
    float *relative_bias_target = problem->call_bias
                                      ? (state->grad_bias ? state->grad_bias + r * BLOCK : 0)
                                      : row_bias_gradient(problem, state, tile->head, row, tile->column);
    float lse = head_values(problem, state, tile->head, state->lse)[row],
          lse_rest = head_values(problem, state, tile->head, state->lse_rest)[row],
          delta = head_values(problem, state, tile->head, state->delta)[row];
    uint64_t word = row_word(tile->words, (int)r, tile->count);
    int32_t row_hash = row_hash_at(problem, state->batch, tile->head, row);
    const float bias = sigmoid ? problem->sigmoid_bias[tile->head] : 0.0f;
    const lanes takes_part = broadcast(lse == INFINITY ? 0.0f : 1.0f);
    for (int64_t j = low; j < high; j += LANES) {
        lanes slope = broadcast(1.0f), score = apply_softcap(problem, load(weights + j) * product_factor, &slope);
        if (relative_bias && j < extent.end) score += load_partial(relative_bias + j, extent.end - j);
        if (extent.partial) score = select_bits(word, j, score, -INFINITY);
        lanes complement, weight = sigmoid ? sigmoid_lanes(score + bias, &complement) * takes_part
                                           : exp2_lanes(less_log_sum(score, broadcast(lse), broadcast(lse_rest)));
        lanes dropped = weight, grad_weight = load(grad_scores + j) * weight_factor; /* see row_group_gradient */
        if (problem->row_hashes) {
            bits mask = dropout_at(problem, tile->column + j, row_hash);
            dropped = zero_unless(mask, dropped), grad_weight = zero_unless(mask, grad_weight);
        }
        lanes gradient = sigmoid ? weight * complement * grad_weight : weight * (grad_weight - delta);
        if (extent.partial) gradient = select_bits(word, j, gradient, 0.0f);
        if (relative_bias_target && j < extent.end)
            store_partial(relative_bias_target + j, load_partial(relative_bias_target + j, extent.end - j) + gradient,
                          extent.end - j);
        store(weights + j, dropped);
        store(grad_scores + j, gradient * slope);
    }
    zero_beyond(low, high, weights, grad_scores);
}

/* The same of landmark attention, with the gradients of the scores before they are those of landmarks.h. */
INLINE void landmark_row_gradient(const struct flash *problem, const struct gradient *state, const struct tile *tile,
                                  int64_t r, const struct extent extent, const int paired) {
    const float product_factor = score_factor(problem, paired), weight_factor = output_factor(problem, paired);
    float *weights = state->weights + r * BLOCK, *grad_scores = state->grad_scores + r * BLOCK;
    int64_t row = tile->row + r, own = own_block(problem, row, tile->column), end = aligned_end(extent);
    float lse = head_values(problem, state, tile->head, state->lse)[row],
          lse_rest = head_values(problem, state, tile->head, state->lse_rest)[row],
          delta = head_values(problem, state, tile->head, state->delta)[row];
    uint64_t word = row_word(tile->words, (int)r, tile->count);
    int32_t row_hash = row_hash_at(problem, state->batch, tile->head, row);
    for (int64_t j = 0; j < end; j += LANES) {
        lanes score = load(weights + j) * product_factor;
        store(weights + j, extent.partial ? select_bits(word, j, score, -INFINITY) : score);
    }
    int64_t size = problem->landmark_size, at = row + (tile->head - state->key_head * problem->group) * padded_rows(problem),
            landmark = (tile->column / size + 1) * size - 1 - tile->column;
    const int wide = has_wide_blocks(problem);
    float gate = 0.0f;
    if (wide && landmark < tile->count)
        gate = exp2_lanes(less_log_sum(broadcast(weights[landmark]), broadcast(lse), broadcast(lse_rest)))[0];
    if (wide)
        weigh_wide_blocks(&state->wide, size, own, tile->column, at, tile->count, weights);
    else
        weigh_blocks(size, own, tile->count, weights);
    for (int64_t j = 0; j < end; j += LANES) {
        lanes weight = exp2_lanes(less_log_sum(load(weights + j), broadcast(lse), broadcast(lse_rest))),
              grad_weight = load(grad_scores + j) * weight_factor;
        if (problem->row_hashes) grad_weight = zero_unless(dropout_at(problem, tile->column + j, row_hash), grad_weight);
        lanes gradient = weight * (grad_weight - delta);
        store(weights + j, weight);
        store(grad_scores + j, extent.partial ? select_bits(word, j, gradient, 0.0f) : gradient);
    }
    if (wide)
        return_to_wide_landmarks(&state->wide, size, own, tile->column, at, tile->count, gate, weights, grad_scores);
    else
        return_to_landmarks(size, own, tile->count, weights, grad_scores);
    for (int64_t j = 0; problem->row_hashes && j < end; j += LANES)
        store(weights + j, zero_unless(dropout_at(problem, tile->column + j, row_hash), load(weights + j)));
    zero_beyond(0, end, weights, grad_scores);
}

/* Weights and gradients of scores of a group of rows become pairs: of a row and the next one, in place of the former,
 * for sums over rows; and of neighbours in a row, for the sum over keys, which are returned in `terms`. */
INLINE void pair_group(float *weights, float *grad_scores, float *terms) {
    for (int r = 0; r < GROUP; r += 2, weights += 2 * BLOCK, grad_scores += 2 * BLOCK)
        for (int j = 0; j < BLOCK; j += LANES) {
            lanes own = load(grad_scores + j), next = load(grad_scores + BLOCK + j);
            store_pairs((uint16_t *)(terms + r * BLOCK) + j, own);
            store_pairs((uint16_t *)(terms + (r + 1) * BLOCK) + j, next);
            store(grad_scores + j, round_to_pairs(own, next));
            store(weights + j, round_to_pairs(load(weights + j), load(weights + BLOCK + j)));
        }
}

INLINE void row_group_gradient(const struct flash *problem, struct gradient *shared, const struct tile *tile, int64_t r,
                               const struct extent extent, const int paired, const enum weighing weighing) {
    const struct gradient copy = *shared, *state = &copy; /* in registers: what is stored elsewhere cannot change it */
    int64_t padded = padded_dim(problem->dim), terms = padded_terms(problem->dim, paired),
            value_terms = padded_terms(problem->value_dim, paired);
    struct factor query = {state->query + r * terms, terms, 1},
                  grad_output = {state->grad_output + r * value_terms, value_terms, 1};
    float pairs[GROUP * BLOCK] ALIGNED, *own = state->grad_scores + r * BLOCK;
    for (int64_t j = aligned_begin(extent); j < aligned_end(extent); j += PAIR) {
        int64_t target = r * BLOCK + j;
        add_terms(query, (struct vectors){state->key_columns + j, BLOCK, 0, term_count(problem->dim, paired)},
                  state->weights + target, BLOCK, 0, paired);
        add_terms(grad_output, (struct vectors){state->value_columns + j, BLOCK, 0, term_count(problem->value_dim, paired)},
                  state->grad_scores + target, BLOCK, 0, paired);
    }
    for (int64_t i = 0; i < GROUP; i++)
        if (weighing == BY_LANDMARKS)
            landmark_row_gradient(problem, state, tile, r + i, extent, paired);
        else
            tile_row_gradient(problem, state, tile, r + i, extent, paired, weighing == BY_SIGMOID);
    if (paired) pair_group(state->weights + r * BLOCK, own, pairs);
    struct factor grad_scores = {paired ? pairs : own, BLOCK, 1};
    int64_t first = paired ? extent.begin / 2 : extent.begin, last = term_count(extent.end, paired);
    const float factor = paired ? problem->scale : 1.0f; /* floats have it in the keys */
    for (int64_t a = 0; a < padded; a += PAIR)
        add_terms(grad_scores, (struct vectors){state->key_rows + a, padded, first, last}, state->grad_query + a, padded,
                  0, paired);
    lanes check = {0}; /* in a register, while rows are written */
    const float *gradient = state->grad_query;
    for (int64_t i = 0; i < GROUP && tile->row + r + i < problem->rows; i++, gradient += padded) {
        float *target = row_number(&problem->grad_query, state->batch, tile->head, tile->row + r + i) +
                        state->part * problem->grad_query_part;
        for (int64_t a = 0; a < problem->dim; a += LANES) {
            lanes sum = load_partial(target + a, problem->dim - a) + load(gradient + a) * factor;
            check_finite(&check, sum);
            store_partial(target + a, sum, problem->dim - a);
        }
    }
    shared->check += check;
}

#define ROW_GROUP \
    (const struct flash *problem, struct gradient *state, const struct tile *tile, int64_t r, const struct extent extent)
APART void row_group_of_floats ROW_GROUP { row_group_gradient(problem, state, tile, r, extent, 0, BY_SOFTMAX); }
APART void row_group_of_pairs ROW_GROUP { row_group_gradient(problem, state, tile, r, extent, 1, BY_SOFTMAX); }
APART void sigmoid_of_floats ROW_GROUP { row_group_gradient(problem, state, tile, r, extent, 0, BY_SIGMOID); }
APART void sigmoid_of_pairs ROW_GROUP { row_group_gradient(problem, state, tile, r, extent, 1, BY_SIGMOID); }
APART void landmarks_of_floats ROW_GROUP { row_group_gradient(problem, state, tile, r, extent, 0, BY_LANDMARKS); }
APART void landmarks_of_pairs ROW_GROUP { row_group_gradient(problem, state, tile, r, extent, 1, BY_LANDMARKS); }

/* The function for a group of rows. */
static void(*row_group(const struct flash *problem, int dtype)) ROW_GROUP {
    if (problem->landmark_size) return in_pairs(dtype) ? landmarks_of_pairs : landmarks_of_floats;
    if (problem->sigmoid_bias) return in_pairs(dtype) ? sigmoid_of_pairs : sigmoid_of_floats;
    return in_pairs(dtype) ? row_group_of_pairs : row_group_of_floats;
}

/* Key and value gradients of a tile: products over its rows. */
INLINE void column_gradients(const struct flash *problem, struct gradient *state, const struct tile *tile,
                             const int paired) {
    static const float whole[GROUP] = {1, 1, 1, 1, 1, 1, 1, 1};
    int64_t padded = padded_dim(problem->dim), value_padded = padded_dim(problem->value_dim);
    int64_t step = paired ? 2 * BLOCK : BLOCK, first = term_count(tile->begin, paired),
            last = term_count(tile->end, paired); /* whole groups of rows */
    for (int64_t j = 0; j < tile->count; j += GROUP) {
        if (!(tile->columns_used >> j & 0xff)) continue;
        struct factor weights = {state->weights + j, 1, step}, grad_scores = {state->grad_scores + j, 1, step};
        for (int64_t a = 0; a < value_padded; a += PAIR)
            add_terms(weights, (struct vectors){state->grad_output_rows + a, value_padded, first, last},
                      state->grad_value + j * value_padded + a, value_padded, whole, paired);
        for (int64_t a = 0; a < padded; a += PAIR)
            add_terms(grad_scores, (struct vectors){state->query_rows + a, padded, first, last},
                      state->grad_key + j * padded + a, padded, whole, paired);
    }
}

#define TILE (const struct flash *problem, struct gradient *state, const struct tile *tile)
APART void columns_of_floats TILE { column_gradients(problem, state, tile, 0); }
APART void columns_of_pairs TILE { column_gradients(problem, state, tile, 1); }

/* Packs a block of rows as left and as right factor; floats are both at once. */
INLINE void pack_both(const void *rows, int64_t stride, int64_t count, int64_t dim, float factor, float *terms,
                      float *terms_of_rows, int dtype) {
    pack_row_terms(rows, stride, count, dim, factor, terms, dtype, in_pairs(dtype));
    if (in_pairs(dtype)) pack_rows_as_terms(rows, stride, count, dim, factor, terms_of_rows, dtype, 1);
}

INLINE void process_tile(const struct flash *problem, struct gradient *state, struct tile *tile,
                         int dtype) {
    int64_t count = min_int(problem->rows - tile->row, BLOCK);
    pack_both(head_rows(&problem->query, state->batch, tile->head, tile->row, dtype), problem->query.row, count,
              problem->dim, query_factor(problem), state->query, state->query_rows, dtype);
    pack_both(head_rows(&problem->grad_output, state->batch, tile->head, tile->row, dtype), problem->grad_output.row,
              count, problem->value_dim, 1.0f / problem->keep_probability, state->grad_output, state->grad_output_rows,
              dtype);
    int64_t next = tile->row + BLOCK, ahead = min_int(problem->rows - next, BLOCK);
    load_ahead(&problem->query, state->batch, tile->head, next, ahead, problem->dim, dtype);
    load_ahead(&problem->grad_output, state->batch, tile->head, next, ahead, problem->value_dim, dtype);
    load_ahead(&problem->grad_query, state->batch, tile->head, next, ahead, problem->dim, 0);
    tile->begin = BLOCK, tile->end = 0, tile->columns_used = 0;
    struct place place = {state->batch, tile->head, tile->row, tile->column, count, tile->count};
    if (problem->call_bias) {
        fill_call_bias(problem, &place, state->bias);
        load_call_bias_ahead(problem, &place);
        if (state->grad_bias) memset(state->grad_bias, 0, BLOCK * BLOCK * sizeof(float));
    }
    for (int64_t r = 0; r < count; r += GROUP) {
        struct extent extent = tile_extent(tile->words ? tile->words + r : 0, tile->count);
        if (extent.begin < extent.end) {
            if (problem->landmark_size) extent = whole_tile(tile->words, tile->count);
            row_group(problem, dtype)(problem, state, tile, r, extent);
            for (int i = 0; i < GROUP; i++) tile->columns_used |= row_word(tile->words, (int)r + i, tile->count);
            tile->begin = min_int(tile->begin, r), tile->end = r + GROUP;
        } else {
            memset(state->weights + r * BLOCK, 0, GROUP * BLOCK * sizeof(float));
            memset(state->grad_scores + r * BLOCK, 0, GROUP * BLOCK * sizeof(float));
        }
    }
    if (!tile->columns_used) return;
    if (problem->call_bias)
        add_call_bias_gradient(problem, &place, state->grad_bias ? state->grad_bias : state->grad_scores,
                               state->bias + BLOCK * BLOCK);
    (in_pairs(dtype) ? columns_of_pairs : columns_of_floats)(problem, state, tile);
}

/* Before the first tile: delta and lse of a query head's rows. Rows of padding take no part. */
INLINE void prepare_head(const struct flash *problem, struct gradient *state, int64_t head, int dtype) {
    int64_t first = (state->batch * problem->heads + head) * problem->rows;
    float *delta_to = head_values(problem, state, head, state->delta),
          *lse_to = head_values(problem, state, head, state->lse),
          *lse_rest_to = head_values(problem, state, head, state->lse_rest);
    for (int64_t row = 0; row < padded_rows(problem); row++) {
        delta_to[row] = 0.0f, lse_to[row] = INFINITY, lse_rest_to[row] = 0.0f;
        if (row >= problem->rows) continue;
        const void *output = head_rows(&problem->output, state->batch, head, row, dtype);
        const void *grad_output = head_rows(&problem->grad_output, state->batch, head, row, dtype);
        float product = dot_entries(output, grad_output, problem->value_dim, dtype);
        delta_to[row] = product - (problem->grad_lse ? problem->grad_lse[first + row] : 0.0f);
        lse_to[row] = in_base_2(*row_number(&problem->lse, state->batch, head, row), lse_rest_to + row);
    }
}

/* Reads the scores and grad_weights of a group of rows in a tile into what is known of the block of landmark attention. */
INLINE void read_row_group(const struct flash *problem, struct gradient *state, const struct tile *tile, int64_t r,
                           const struct extent extent, const int paired) {
    int64_t terms = padded_terms(problem->dim, paired), value_terms = padded_terms(problem->value_dim, paired),
            first = state->wide.number * problem->landmark_size - tile->column,
            head_row = (tile->head - state->key_head * problem->group) * padded_rows(problem) + tile->row + r;
    struct factor query = {state->query + r * terms, terms, 1},
                  grad_output = {state->grad_output + r * value_terms, value_terms, 1};
    for (int64_t j = 0; j < aligned_end(extent); j += PAIR) {
        add_terms(query, (struct vectors){state->key_columns + j, BLOCK, 0, term_count(problem->dim, paired)},
                  state->weights + j, BLOCK, 0, paired);
        add_terms(grad_output, (struct vectors){state->value_columns + j, BLOCK, 0, term_count(problem->value_dim, paired)},
                  state->grad_scores + j, BLOCK, 0, paired);
    }
    for (int64_t i = 0; i < GROUP; i++) {
        float *scores = state->weights + i * BLOCK, *grad_weights = state->grad_scores + i * BLOCK;
        uint64_t word = row_word(tile->words, (int)(r + i), tile->count);
        int32_t row_hash = row_hash_at(problem, state->batch, tile->head, tile->row + r + i);
        for (int64_t j = 0; j < aligned_end(extent); j += LANES) {
            lanes score = load(scores + j) * score_factor(problem, paired),
                  grad_weight = load(grad_weights + j) * output_factor(problem, paired);
            if (problem->row_hashes) grad_weight = zero_unless(dropout_at(problem, tile->column + j, row_hash), grad_weight);
            store(scores + j, extent.partial ? select_bits(word, j, score, -INFINITY) : score);
            store(grad_weights + j, grad_weight);
        }
        read_wide_row(&state->wide, problem->landmark_size, first, tile->count, head_row + i, scores, grad_weights);
    }
}
APART void read_floats ROW_GROUP { read_row_group(problem, state, tile, r, extent, 0); }
APART void read_pairs ROW_GROUP { read_row_group(problem, state, tile, r, extent, 1); }

/* Reads a tile of a block of landmark attention. */
INLINE void read_wide_tile(const struct flash *problem, struct gradient *state, const struct tile *tile, int dtype) {
    int64_t count = min_int(problem->rows - tile->row, BLOCK);
    pack_row_terms(head_rows(&problem->query, state->batch, tile->head, tile->row, dtype), problem->query.row, count,
                   problem->dim, query_factor(problem), state->query, dtype, in_pairs(dtype));
    pack_row_terms(head_rows(&problem->grad_output, state->batch, tile->head, tile->row, dtype), problem->grad_output.row,
                   count, problem->value_dim, 1.0f / problem->keep_probability, state->grad_output, dtype,
                   in_pairs(dtype));
    for (int64_t r = 0; r < count; r += GROUP) {
        struct extent extent = tile_extent(tile->words ? tile->words + r : 0, tile->count);
        if (extent.begin < extent.end)
            (in_pairs(dtype) ? read_pairs : read_floats)(problem, state, tile, r, whole_tile(tile->words, tile->count));
    }
}

/* Reads the blocks of landmark attention that begin in a tile, all of their tiles each. */
static void read_wide_blocks(const struct flash *problem, struct gradient *state, int64_t column, int dtype) {
    int64_t size = problem->landmark_size, width = problem->tile_columns, rows = padded_rows(problem) * problem->group,
            last = (column + columns_from(problem, column) - 1) / size;
    if (state->wide.number < column / size - 1) state->wide.number = column / size - 1; /* of another part of the keys */
    while (state->wide.number < last) {
        int64_t begin = ++state->wide.number * size, end = min_int(begin + size, problem->columns);
        start_wide_block(&state->wide, rows);
        for (int64_t at = begin / width * width; at < end; at += width) {
            int64_t count = columns_from(problem, at);
            pack_transposed_terms(head_rows(&problem->key, state->batch, state->key_head, at, dtype), problem->key.row,
                                  count, problem->dim, 1.0f, state->key_columns, BLOCK, dtype, in_pairs(dtype));
            pack_transposed_terms(head_rows(&problem->value, state->batch, state->key_head, at, dtype), problem->value.row,
                                  count, problem->value_dim, 1.0f, state->value_columns, BLOCK, dtype, in_pairs(dtype));
            for (int64_t b = 0; b < padded_rows(problem) / BLOCK; b++) {
                struct cursor cursor = first_tile(problem, b);
                while (cursor.column < at) next_tile(problem, &cursor);
                if (cursor.column != at) continue;
                int64_t number = next_tile(problem, &cursor);
                for (int64_t h = 0; h < problem->group; h++) {
                    struct tile tile = {.head = state->key_head * problem->group + h, .row = b * BLOCK, .column = at};
                    tile.count = count, tile.words = tile_words(problem, state->batch, tile.head, number);
                    read_wide_tile(problem, state, &tile, dtype);
                }
            }
        }
        finish_wide_block(&state->wide, rows, state->delta);
    }
}

/* A block of keys with all the blocks of rows that attend to it. */
INLINE void process_key_block(const struct flash *problem, struct gradient *state, int64_t column,
                              int dtype) {
    int64_t count = columns_from(problem, column), padded = padded_dim(problem->dim),
            blocks = padded_rows(problem) / BLOCK;
    int64_t value_padded = padded_dim(problem->value_dim);
    if (has_wide_blocks(problem)) read_wide_blocks(problem, state, column, dtype);
    const void *key = head_rows(&problem->key, state->batch, state->key_head, column, dtype);
    const void *value = head_rows(&problem->value, state->batch, state->key_head, column, dtype);
    pack_transposed_terms(key, problem->key.row, count, problem->dim, 1.0f, state->key_columns, BLOCK, dtype,
                          in_pairs(dtype));
    pack_rows_as_terms(key, problem->key.row, count, problem->dim, problem->scale, state->key_rows, dtype,
                       in_pairs(dtype));
    pack_transposed_terms(value, problem->value.row, count, problem->value_dim, 1.0f, state->value_columns, BLOCK, dtype,
                          in_pairs(dtype));
    int64_t next = column + count, ahead = columns_from(problem, next);
    load_ahead(&problem->key, state->batch, state->key_head, next, ahead, problem->dim, dtype);
    load_ahead(&problem->value, state->batch, state->key_head, next, ahead, problem->value_dim, dtype);
    load_ahead(&problem->grad_key, state->batch, state->key_head, column, count, problem->dim, 0);
    load_ahead(&problem->grad_value, state->batch, state->key_head, column, count, problem->value_dim, 0);
    memset(state->grad_key, 0, (size_t)(BLOCK * padded) * sizeof(float));
    memset(state->grad_value, 0, (size_t)(BLOCK * value_padded) * sizeof(float));
    for (int64_t b = 0; b < blocks; b++) {
        if (state->cursors[b].column != column) continue;
        int64_t number = next_tile(problem, state->cursors + b);
        for (int64_t head = state->key_head * problem->group; head < (state->key_head + 1) * problem->group; head++) {
            struct tile tile = {.head = head, .row = b * BLOCK, .column = column, .count = count};
            tile.words = tile_words(problem, state->batch, head, number);
            process_tile(problem, state, &tile, dtype);
        }
    }
    store_gradient(&state->check, state->grad_key, count, problem->dim,
                   in_pairs(dtype) ? problem->scale : key_gradient_factor(problem),
                   row_number(&problem->grad_key, state->batch, state->key_head, column), problem->grad_key.row,
                   problem->accumulate);
    store_gradient(&state->check, state->grad_value, count, problem->value_dim, output_factor(problem, in_pairs(dtype)),
                   row_number(&problem->grad_value, state->batch, state->key_head, column), problem->grad_value.row,
                   problem->accumulate);
}

/* One part of the keys of one head, column of tiles after column. */
INLINE void process_key_range(const struct flash *problem, struct gradient *state, const struct key_range *range,
                              int dtype) {
    state->batch = range->batch, state->key_head = range->key_head, state->part = range->part, state->wide.number = -1;
    for (int64_t head = state->key_head * problem->group; head < (state->key_head + 1) * problem->group; head++) {
        prepare_head(problem, state, head, dtype);
        store_zeros(problem, problem->rows, problem->dim, query_gradient(problem, range, head, 0),
                    problem->grad_query.row);
    }
    for (int64_t b = 0; b < padded_rows(problem) / BLOCK; b++) {
        state->cursors[b] = first_tile(problem, b);
        while (state->cursors[b].column < range->begin) next_tile(problem, state->cursors + b);
    }
    for (int64_t column = range->begin; column < range->end; column += problem->tile_columns)
        process_key_block(problem, state, column, dtype);
}

/* The range of keys of a unit of work, in the first of its batches; and how many batches it has. */
INLINE struct key_range unit_range(const struct flash *problem, int64_t unit, int64_t *batches) {
    int64_t width = problem->tile_columns, blocks = (problem->columns + width - 1) / width, parts = problem->key_parts,
            part = unit % parts,
            key_heads = problem->heads / problem->group, batch = unit / parts / key_heads * problem->unit_batches;
    *batches = min_int(problem->batches - batch, problem->unit_batches);
    return (struct key_range){batch, unit / parts % key_heads, part, blocks * part / parts * width,
                              min_int(blocks * (part + 1) / parts * width, problem->columns)};
}

INLINE void process_unit(const struct flash *problem, struct band *band, struct gradient *state, int64_t unit,
                         int dtype) {
    int64_t batches;
    struct key_range range = unit_range(problem, unit, &batches);
    if (process_bands(problem, band, &range, batches, dtype)) return;
    for (; batches > 0; batches--, range.batch++) process_key_range(problem, state, &range, dtype);
}

/* Takes one part of one key head after another while any is left; any number of threads may call it at once. */
void EXPORTED(regard_flash_backward)(struct flash *problem) {
    LEAVE_UNLESS(problem->dtype == BFLOAT16, regard_flash_backward, problem);
    int64_t rows = padded_rows(problem) * problem->group, padded = padded_dim(problem->dim),
            value_padded = padded_dim(problem->value_dim);
    int64_t floats = 3 * rows + BLOCK * (5 * padded + 4 * value_padded) + GROUP * padded + 2 * BLOCK * BLOCK + 14 * 16;
    floats += band_floats(problem) + wide_floats(problem, rows) + (problem->call_bias ? TILE_FLOATS + BLOCK * BLOCK : 0);
    float *memory = aligned_memory(floats * 4), *free_memory = memory;
    struct cursor *cursors = malloc((size_t)(padded_rows(problem) / BLOCK + 1) * sizeof(struct cursor));
    struct gradient state = {.cursors = cursors};
    if (!memory || !cursors)
        problem->failed = 1;
    else {
        state.delta = take_floats(&free_memory, rows), state.lse = take_floats(&free_memory, rows);
        state.lse_rest = take_floats(&free_memory, rows);
        state.key_columns = take_floats(&free_memory, padded * BLOCK);
        state.key_rows = take_floats(&free_memory, padded * BLOCK);
        state.value_columns = take_floats(&free_memory, value_padded * BLOCK);
        state.grad_key = take_floats(&free_memory, padded * BLOCK);
        state.grad_value = take_floats(&free_memory, value_padded * BLOCK);
        state.query = take_floats(&free_memory, padded * BLOCK);
        state.grad_output = take_floats(&free_memory, value_padded * BLOCK);
        state.query_rows = state.query, state.grad_output_rows = state.grad_output;
        if (in_pairs((int)problem->dtype)) {
            state.query_rows = take_floats(&free_memory, padded * BLOCK);
            state.grad_output_rows = take_floats(&free_memory, value_padded * BLOCK);
        }
        state.grad_query = take_floats(&free_memory, GROUP * padded);
        state.weights = take_floats(&free_memory, BLOCK * BLOCK);
        state.grad_scores = take_floats(&free_memory, BLOCK * BLOCK);
        if (problem->call_bias) {
            state.bias = take_floats(&free_memory, TILE_FLOATS);
            if (problem->softcap != 0.0f || in_pairs((int)problem->dtype))
                state.grad_bias = take_floats(&free_memory, BLOCK * BLOCK);
        }
        state.wide = take_wide_blocks(problem, rows, &free_memory);
        struct band band = take_band(problem, &free_memory);
        int64_t unit;
        while ((unit = __atomic_fetch_add(&problem->next_unit, 1, __ATOMIC_RELAXED)) < problem->unit_count)
            process_unit(problem, &band, &state, unit, (int)problem->dtype);
        finish_check(problem, state.check + band.check);
    }
    free_aligned(memory);
    free(cursors);
}
