/* Talking heads: attention whose scores and weights are mixed over the heads, tile by tile. */
#include "mixed_heads.h"
#include "tile.h"

/* Numbers of GROUP rows and a block of columns, of one head: those of all heads lie one after another. DOTS: heads whose
 * products are summed in registers at once. */
enum { TILE = GROUP * BLOCK, DOTS = LANES == 16 ? 4 : 2 };

/* What the first pass computes of a block of rows is kept for the second one up to so many bytes; more is computed again,
 * as fast as it would come from memory. */
enum { MOST_KEPT = 1 << 25 };

/* Lower than any logit that is not masked. */
static const float LOWEST = -1e30f;

static const float ONES[GROUP] = {1, 1, 1, 1, 1, 1, 1, 1};

/* The state of a thread for a block of rows of all heads. */
struct block_state {
    float *memory;
    float *scores, *logits, *grad_mixed, *grad_weights; /* [padded heads][TILE] */
    float *output;                     /* forward: [heads][BLOCK][padded value dim] */
    float *tile_grads, *tile_weights;  /* backward: gradients of scores, and mixed weights: [heads][BLOCK][BLOCK] */
    float *first_sums, *second_sums;   /* lanes of each row: [heads][BLOCK][LANES]; forward the maximum and the sum of
                                          powers, backward the sum of weights and that of weights times gradients */
    float *shift, *rest;               /* what is taken off a logit, [heads][BLOCK]; rest: backward, see in_base_2 */
    float *factor, *mean;              /* of a weight, and the mean of gradients: [heads][BLOCK] */
    float *products_before, *products_after; /* backward: [padded heads][padded heads][LANES] */
    float *kept;                       /* [tiles][groups][1 or 2][padded heads][TILE], or null: forward logits, backward
                                          scores and gradients of mixed weights */
    uint64_t words[BLOCK];             /* the pairs of a tile that all heads have */
    int64_t batch, begin, count;       /* the rows */
    int64_t column, columns, tile;     /* the tile's columns, and its number in the block of rows */
    int partial;                       /* whether some of its pairs do not exist */
    lanes check;
};

INLINE int64_t whole_blocks(int64_t length) { return (length + BLOCK - 1) / BLOCK; }

/* Where the packed rows or blocks of a head begin. */
INLINE int64_t packed_at(int64_t batch, int64_t heads, int64_t head, int64_t length, int64_t width) {
    return (batch * heads + head) * whole_blocks(length) * BLOCK * width;
}

INLINE int64_t key_heads_of(const struct flash *tiles) { return tiles->heads / tiles->group; }

/* into[o] = sum over heads h of matrix[o][h] from[h]; transposed: matrix[h][o]. */
APART void mix(const struct mixed_heads *problem, const float *matrix, int transposed, const float *from, float *into) {
    int64_t padded = problem->padded_heads, row = transposed ? 1 : padded, step = transposed ? padded : 1;
    for (int64_t head = 0; head < padded; head += GROUP)
        for (int64_t at = 0; at < TILE; at += PAIR)
            add_product((struct factor){matrix + head * row, row, step},
                        (struct vectors){from + at, TILE, 0, problem->tiles.heads}, into + head * TILE + at, TILE, 0);
}

/* sums[g][h] += left[g] . right[h], lane by lane. */
APART void add_products_of_heads(const struct mixed_heads *problem, const float *left, const float *right, float *sums) {
    int64_t padded = problem->padded_heads;
    for (int64_t g = 0; g < padded; g += DOTS)
        for (int64_t h = 0; h < padded; h += DOTS) {
            lanes sum[DOTS][DOTS] = {{{0}}};
            for (int64_t at = 0; at < TILE; at += LANES)
                UNROLL for (int a = 0; a < DOTS; a++) {
                    lanes own = load(left + (g + a) * TILE + at);
                    UNROLL for (int b = 0; b < DOTS; b++) sum[a][b] += own * load(right + (h + b) * TILE + at);
                }
            for (int a = 0; a < DOTS; a++)
                for (int b = 0; b < DOTS; b++) {
                    float *into = sums + ((g + a) * padded + h + b) * LANES;
                    store(into, load(into) + sum[a][b]);
                }
        }
}

/* Products of GROUP rows with the columns of a tile, for all heads: left (batch, heads, padded rows, padded width), right
 * (batch, key heads, blocks, width, BLOCK). */
INLINE void products_of_heads(const struct mixed_heads *problem, const struct block_state *state, int64_t group,
                              const float *left, int64_t padded, const float *right, int64_t width, float *into) {
    const struct flash *tiles = &problem->tiles;
        for (int64_t head = 0; head < tiles->heads; head++) {
        const float *rows = left + packed_at(state->batch, tiles->heads, head, tiles->rows, padded) +
                            (state->begin + group) * padded;
        const float *columns = right +
                               packed_at(state->batch, key_heads_of(tiles), head / tiles->group, tiles->columns, width) +
                               state->column * width;
        for (int64_t j = 0; j < BLOCK; j += PAIR)
            add_product((struct factor){rows, padded, 1}, (struct vectors){columns + j, BLOCK, 0, width},
                        into + head * TILE + j, BLOCK, 0);
    }
}

/* Loads the block of some packed rows of a key head at a column into the second cache. */
INLINE void fetch_block(const struct mixed_heads *problem, int64_t slot, int64_t head, const float *rows, int64_t width,
                        int64_t column) {
    const struct flash *tiles = &problem->tiles;
    if (head >= tiles->heads || head % tiles->group || column >= tiles->columns) return;
    const float *block = rows + column * width +
                         packed_at(slot, key_heads_of(tiles), head / tiles->group, tiles->columns, width);
    for (int64_t at = 0; at < BLOCK * width; at += LINE / 4) fetch_line(block + at);
}

/* The same of those heads that fall to a group of rows, so that all are loaded while a tile is computed. */
INLINE void fetch_share(const struct mixed_heads *problem, const struct block_state *state, int64_t group,
                        const float *rows, int64_t width, int64_t column) {
    for (int64_t head = group / GROUP; head < problem->tiles.heads; head += BLOCK / GROUP)
        fetch_block(problem, state->batch, head, rows, width, column);
}

/* The number of a row, from 0 in the block, with that of its head. */
INLINE int64_t row_of(int64_t head, int64_t group, int r) { return head * BLOCK + group + r; }

/* The bits of a row of a tile. */
INLINE uint64_t pairs_of(const struct block_state *state, int64_t group, int r) {
    return row_word(state->partial ? state->words + group : 0, r, state->columns);
}

/* The scores of GROUP rows. */
INLINE void find_scores(const struct mixed_heads *problem, struct block_state *state, int64_t group) {
    const struct flash *tiles = &problem->tiles;
    products_of_heads(problem, state, group, problem->query, problem->padded_dim, problem->key_columns, tiles->dim,
                      state->scores);
    if (tiles->relative_bias)
        for (int64_t head = 0; head < tiles->heads; head++)
            for (int r = 0; r < GROUP; r++) {
                const float *bias = row_bias(tiles, head, state->begin + group + r, state->column);
                float *row = state->scores + head * TILE + r * BLOCK;
                for (int64_t j = 0; j < state->columns; j += LANES)
                    store(row + j, load(row + j) + load_partial(bias + j, state->columns - j));
            }
}

/* The logits of GROUP rows from their scores, -infinity where there is no pair. */
INLINE void find_logits(const struct mixed_heads *problem, struct block_state *state, int64_t group) {
    const struct flash *tiles = &problem->tiles;
    float *logits = state->logits;
    if (problem->before)
        mix(problem, problem->before, 0, state->scores, logits);
    else
        memcpy(logits, state->scores, (size_t)(tiles->heads * TILE) * sizeof(float));
    if (state->partial || state->columns < BLOCK)
        for (int r = 0; r < GROUP; r++) {
            uint64_t word = pairs_of(state, group, r);
            if (!~word) continue;
            for (int64_t head = 0; head < tiles->heads; head++)
                for (int64_t j = 0; j < BLOCK; j += LANES) {
                    float *at = logits + head * TILE + r * BLOCK + j;
                    store(at, select_bits(word, j, load(at), -INFINITY));
                }
        }
}

/* Sets what dropout drops of mixed numbers to 0. */
INLINE void drop(const struct mixed_heads *problem, const struct block_state *state, int64_t group, float *mixed) {
    const struct flash *tiles = &problem->tiles;
    if (!tiles->row_hashes) return;
    for (int64_t head = 0; head < tiles->heads; head++)
        for (int r = 0; r < GROUP; r++) {
            int32_t row_hash = row_hash_at(tiles, state->batch, head, state->begin + group + r);
            for (int64_t j = 0; j < state->columns; j += LANES) {
                float *at = mixed + head * TILE + r * BLOCK + j;
                bits kept = dropout_mask(tiles, row_hash + load_bits(tiles->column_hashes + state->column + j));
                store(at, zero_unless(kept, load(at)));
            }
        }
}

/* Whether any row of a group has a pair in the tile. */
INLINE int has_pairs(const struct block_state *state, int64_t group) {
    uint64_t some = 0;
    for (int r = 0; r < GROUP; r++) some |= pairs_of(state, group, r);
    return some != 0;
}

/* Moves on to the next tile of a block of rows, with the pairs that all heads have. Returns whether there is one. */
INLINE int take_tile(const struct flash *tiles, struct block_state *state, struct cursor *cursor) {
    if (cursor->column == INT64_MAX) return 0;
    state->tile++;
    state->column = cursor->column, state->columns = min_int(tiles->columns - cursor->column, BLOCK);
    int64_t tile = next_tile(tiles, cursor);
    state->partial = tile >= 0;
    for (int64_t head = 0; tile >= 0 && head < (tiles->bits_head ? tiles->heads : 1); head++) {
        const uint64_t *words = tile_words(tiles, state->batch, head, tile);
        for (int row = 0; row < BLOCK; row++) state->words[row] = head ? state->words[row] & words[row] : words[row];
    }
    return 1;
}

/* Forward: the running maximum of each lane of the rows, and the sum of powers relative to it. */
INLINE void add_powers(const struct flash *tiles, struct block_state *state, int64_t group, const float *logits) {
    for (int64_t head = 0; head < tiles->heads; head++)
        for (int r = 0; r < GROUP; r++) {
            const float *row = logits + head * TILE + r * BLOCK;
            float *largest = state->first_sums + row_of(head, group, r) * LANES;
            float *total = state->second_sums + row_of(head, group, r) * LANES;
            lanes before = load(largest), maximum = before;
            for (int64_t j = 0; j < BLOCK; j += LANES) maximum = max_lanes(maximum, load(row + j));
            lanes sum = load(total) * exp2_lanes(before - maximum);
            for (int64_t j = 0; j < BLOCK; j += LANES) sum += exp2_lanes(load(row + j) - maximum);
            store(largest, maximum), store(total, sum);
        }
}

/* Forward: the maximum and the sum of each row from those of its lanes; writes the log-sum-exp. */
INLINE void finish_powers(const struct flash *tiles, struct block_state *state) {
    for (int64_t head = 0; head < tiles->heads; head++)
        for (int64_t row = 0; row < state->count; row++) {
            int64_t at = head * BLOCK + row;
            lanes largest = load(state->first_sums + at * LANES);
            float maximum = max_of_lanes(largest);
            float total = sum_lanes(load(state->second_sums + at * LANES) * exp2_lanes(largest - maximum));
            state->shift[at] = maximum;
            state->factor[at] = total == 0.0f ? 0.0f : 1.0f / total;
            *row_number(&tiles->lse, state->batch, head, state->begin + row) = log_sum(maximum, total);
        }
}

/* Logits become weights. sums: whether they are relative to log-sum-exps, else to maxima. */
INLINE void weigh(const struct flash *tiles, const struct block_state *state, int64_t group, float *logits,
                  const int sums) {
    for (int64_t head = 0; head < tiles->heads; head++)
        for (int r = 0; r < GROUP; r++) {
            float *row = logits + head * TILE + r * BLOCK;
            int64_t at = row_of(head, group, r);
            lanes shift = broadcast(state->shift[at]), rest = broadcast(state->rest[at]);
            for (int64_t j = 0; j < BLOCK; j += LANES) {
                lanes power = sums ? less_log_sum(load(row + j), shift, rest) : load(row + j) - shift;
                store(row + j, exp2_lanes(power) * state->factor[at]);
            }
        }
}

/* Forward: the output of GROUP rows gets the values of a tile. */
INLINE void add_values(const struct mixed_heads *problem, struct block_state *state, int64_t group, float *weights) {
    const struct flash *tiles = &problem->tiles;
    int64_t padded = problem->padded_value_dim;
    float *mixed = weights;
    if (problem->after) mix(problem, problem->after, 0, weights, mixed = state->scores);
    drop(problem, state, group, mixed);
    for (int64_t head = 0; head < tiles->heads; head++) {
        const float *values = problem->value_rows + state->column * padded +
                              packed_at(state->batch, key_heads_of(tiles), head / tiles->group, tiles->columns, padded);
        for (int64_t a = 0; a < padded; a += PAIR)
            add_product((struct factor){mixed + head * TILE, BLOCK, 1}, (struct vectors){values + a, padded, 0, BLOCK},
                        state->output + (head * BLOCK + group) * padded + a, padded, ONES);
    }
}

INLINE void write_rows(const struct mixed_heads *problem, struct block_state *state, const int dtype) {
    const struct flash *tiles = &problem->tiles;
    int64_t padded = problem->padded_value_dim;
    for (int64_t head = 0; head < tiles->heads; head++)
        for (int64_t row = 0; row < state->count; row++) {
            void *target = (void *)head_rows(&tiles->result, state->batch, head, state->begin + row, dtype);
            for (int64_t a = 0; a < tiles->value_dim; a += LANES) {
                lanes output = load(state->output + (head * BLOCK + row) * padded + a) / tiles->keep_probability;
                check_finite(&state->check, output);
                store_entries(target, a, tiles->value_dim, dtype, output);
            }
        }
}

TABLE_BY_DTYPE(write_rows_of, (const struct mixed_heads *problem, struct block_state *state),
               write_rows(problem, state, DTYPE))

INLINE void fill(float *numbers, int64_t count, float value) {
    for (int64_t i = 0; i < count; i++) numbers[i] = value;
}

/* Where numbers of a group of rows are kept between the passes; null where they are not. */
INLINE float *kept_of(const struct mixed_heads *problem, const struct block_state *state, int64_t group, int numbers) {
    int64_t slot = state->tile * (BLOCK / GROUP) + group / GROUP;
    return state->kept ? state->kept + slot * numbers * problem->padded_heads * TILE : 0;
}

INLINE void forward_group(const struct mixed_heads *problem, struct block_state *state, int64_t group, int pass) {
    float *kept = kept_of(problem, state, group, 1);
    if (kept) state->logits = kept;
    if (!pass || !kept) find_scores(problem, state, group), find_logits(problem, state, group);
    if (!pass) {
        add_powers(&problem->tiles, state, group, state->logits);
    } else {
        weigh(&problem->tiles, state, group, state->logits, 0);
        add_values(problem, state, group, state->logits);
    }
}

INLINE void forward_block(const struct mixed_heads *problem, struct block_state *state) {
    const struct flash *tiles = &problem->tiles;
    int64_t rows = tiles->heads * BLOCK;
    fill(state->first_sums, rows * LANES, LOWEST), fill(state->second_sums, rows * LANES, 0.0f);
    fill(state->output, rows * problem->padded_value_dim, 0.0f);
    for (int pass = 0; pass < 2; pass++) {
        struct cursor cursor = first_tile(tiles, state->begin / BLOCK);
        state->tile = -1;
        while (take_tile(tiles, state, &cursor))
            for (int64_t group = 0; group < state->count; group += GROUP) {
                if (!pass || !state->kept)
                    fetch_share(problem, state, group, problem->key_columns, tiles->dim, cursor.column);
                if (pass) fetch_share(problem, state, group, problem->value_rows, problem->padded_value_dim, cursor.column);
                if (has_pairs(state, group)) forward_group(problem, state, group, pass);
            }
        if (!pass) finish_powers(tiles, state);
    }
    write_rows_of[tiles->dtype](problem, state);
}

/* Backward: the log-sum-exps of a block of rows, +infinity for those of padding. */
INLINE void read_sums(const struct flash *tiles, struct block_state *state) {
    for (int64_t head = 0; head < tiles->heads; head++)
        for (int64_t row = 0; row < BLOCK; row++) {
            int64_t at = head * BLOCK + row;
            float lse = row < state->count ? *row_number(&tiles->lse, state->batch, head, state->begin + row) : INFINITY;
            state->shift[at] = in_base_2(lse == -INFINITY ? INFINITY : lse, state->rest + at);
            state->factor[at] = 1.0f;
        }
}

/* Backward: the scores of GROUP rows, and the gradients of their mixed weights, where dropout leaves them. */
INLINE void find_products(const struct mixed_heads *problem, struct block_state *state, int64_t group) {
    find_scores(problem, state, group);
    products_of_heads(problem, state, group, problem->grad_output, problem->padded_value_dim, problem->value_columns,
                      problem->tiles.value_dim, state->grad_mixed);
    drop(problem, state, group, state->grad_mixed);
}

/* Backward: the weights of GROUP rows, in the place of their logits, and the gradients of these, in grad_weights. */
INLINE void find_gradients(const struct mixed_heads *problem, struct block_state *state, int64_t group, int pass) {
    const struct flash *tiles = &problem->tiles;
    float *kept = kept_of(problem, state, group, 2);
    if (kept) state->scores = kept, state->grad_mixed = kept + problem->padded_heads * TILE;
    if (!pass || !kept) find_products(problem, state, group);
    find_logits(problem, state, group);
    weigh(tiles, state, group, state->logits, 1);
    if (problem->after)
        mix(problem, problem->after, 1, state->grad_mixed, state->grad_weights);
    else
        memcpy(state->grad_weights, state->grad_mixed, (size_t)(tiles->heads * TILE) * sizeof(float));
}

/* Backward, first pass: the sums of weights, which rounding the log-sum-exp takes away from 1, and of weights times their
 * gradients. */
INLINE void add_means(const struct flash *tiles, struct block_state *state, int64_t group, const float *weights) {
    for (int64_t head = 0; head < tiles->heads; head++)
        for (int r = 0; r < GROUP; r++) {
            int64_t at = row_of(head, group, r) * LANES, own = head * TILE + r * BLOCK;
            lanes total = load(state->first_sums + at), product = load(state->second_sums + at);
            for (int64_t j = 0; j < BLOCK; j += LANES) {
                lanes weight = load(weights + own + j);
                total += weight, product += weight * load(state->grad_weights + own + j);
            }
            store(state->first_sums + at, total), store(state->second_sums + at, product);
        }
}

INLINE void finish_means(const struct flash *tiles, struct block_state *state) {
    for (int64_t at = 0; at < tiles->heads * BLOCK; at++) {
        float total = sum_lanes(load(state->first_sums + at * LANES));
        state->factor[at] = total > 0.0f ? 1.0f / total : total * 0.0f;
        state->mean[at] = sum_lanes(load(state->second_sums + at * LANES)) * state->factor[at];
    }
}

/* Backward, second pass: what GROUP rows add to the gradients of the matrices; the gradients of their scores, and their
 * mixed weights, are stored with those of the other rows of the tile. */
INLINE void differentiate_group(const struct mixed_heads *problem, struct block_state *state, int64_t group) {
    const struct flash *tiles = &problem->tiles;
    float *weights = state->logits, *gradients = state->grad_weights;
    find_gradients(problem, state, group, 1);
    if (problem->after) add_products_of_heads(problem, state->grad_mixed, weights, state->products_after);
    for (int64_t head = 0; head < tiles->heads; head++)
        for (int r = 0; r < GROUP; r++) {
            lanes mean = broadcast(state->mean[row_of(head, group, r)]);
            for (int64_t j = 0; j < BLOCK; j += LANES) {
                int64_t at = head * TILE + r * BLOCK + j;
                store(gradients + at, (load(gradients + at) - mean) * load(weights + at));
            }
        }
    float *of_scores = gradients, *mixed = weights;
    if (problem->after) mix(problem, problem->after, 0, weights, mixed = state->grad_mixed);
    drop(problem, state, group, mixed);
    for (int64_t head = 0; head < tiles->heads; head++)
        memcpy(state->tile_weights + (head * BLOCK + group) * BLOCK, mixed + head * TILE, TILE * sizeof(float));
    if (problem->before) {
        add_products_of_heads(problem, gradients, state->scores, state->products_before);
        mix(problem, problem->before, 1, gradients, of_scores = state->logits);
    }
    for (int64_t head = 0; head < tiles->heads; head++)
        memcpy(state->tile_grads + (head * BLOCK + group) * BLOCK, of_scores + head * TILE, TILE * sizeof(float));
}

INLINE void clear_group(const struct flash *tiles, struct block_state *state, int64_t group) {
    for (int64_t head = 0; head < tiles->heads; head++) {
        memset(state->tile_weights + (head * BLOCK + group) * BLOCK, 0, TILE * sizeof(float));
        memset(state->tile_grads + (head * BLOCK + group) * BLOCK, 0, TILE * sizeof(float));
    }
}

/* into += left . right of BLOCK rows and columns each, right (BLOCK, padded width); transposed: left's transpose. */
INLINE void add_block(const float *left, int transposed, const float *right, int64_t padded, float *into) {
    for (int64_t row = 0; row < BLOCK; row += GROUP)
        for (int64_t a = 0; a < padded; a += PAIR)
            add_product(transposed ? (struct factor){left + row, 1, BLOCK} : (struct factor){left + row * BLOCK, BLOCK, 1},
                        (struct vectors){right + a, padded, 0, BLOCK}, into + row * padded + a, padded, ONES);
}

/* What the rows of a tile add to the gradients of query, key, value and bias. */
INLINE void add_tile_gradients(const struct mixed_heads *problem, const struct block_state *state, int64_t part) {
    const struct flash *tiles = &problem->tiles;
    int64_t padded = problem->padded_dim, value_padded = problem->padded_value_dim;
    int64_t key_heads = key_heads_of(tiles), slot = part * tiles->batches + state->batch;
    for (int64_t head = 0; head < tiles->heads; head++) {
        const float *gradients = state->tile_grads + head * BLOCK * BLOCK;
        int64_t key_head = head / tiles->group;
        fetch_block(problem, state->batch, head + 1, problem->key_rows, padded, state->column);
        fetch_block(problem, slot, head + 1, problem->grad_key, padded, state->column);
        fetch_block(problem, slot, head + 1, problem->grad_value, value_padded, state->column);
        int64_t own = packed_at(state->batch, tiles->heads, head, tiles->rows, padded) + state->begin * padded;
        int64_t above = packed_at(state->batch, tiles->heads, head, tiles->rows, value_padded) +
                        state->begin * value_padded;
        add_block(gradients, 0,
                  problem->key_rows + packed_at(state->batch, key_heads, key_head, tiles->columns, padded) +
                      state->column * padded,
                  padded, problem->grad_query + own);
        add_block(gradients, 1, problem->query + own, padded,
                  problem->grad_key + packed_at(slot, key_heads, key_head, tiles->columns, padded) +
                      state->column * padded);
        add_block(state->tile_weights + head * BLOCK * BLOCK, 1, problem->grad_output + above, value_padded,
                  problem->grad_value + packed_at(slot, key_heads, key_head, tiles->columns, value_padded) +
                      state->column * value_padded);
        if (!tiles->grad_relative_bias) continue;
        float *line = tiles->grad_relative_bias +
                      ((state->batch * tiles->heads + head) * problem->row_parts + part) *
                          (tiles->rows + tiles->columns - 1);
        for (int64_t row = 0; row < state->count; row++) {
            float *target = line + diagonal_index(tiles, state->begin + row, state->column);
            for (int64_t j = 0; j < state->columns; j += LANES) {
                int64_t left = state->columns - j;
                store_partial(target + j, load_partial(target + j, left) + load(gradients + row * BLOCK + j), left);
            }
        }
    }
}

INLINE void backward_block(const struct mixed_heads *problem, struct block_state *state, int64_t part) {
    const struct flash *tiles = &problem->tiles;
    int64_t rows = tiles->heads * BLOCK;
    fill(state->first_sums, rows * LANES, 0.0f), fill(state->second_sums, rows * LANES, 0.0f);
    read_sums(tiles, state);
    for (int pass = 0; pass < 2; pass++) {
        struct cursor cursor = first_tile(tiles, state->begin / BLOCK);
        state->tile = -1;
        while (take_tile(tiles, state, &cursor)) {
            for (int64_t group = 0; group < BLOCK; group += GROUP) {
                if (!pass || !state->kept) {
                    fetch_share(problem, state, group, problem->key_columns, tiles->dim, cursor.column);
                    fetch_share(problem, state, group, problem->value_columns, tiles->value_dim, cursor.column);
                }
                int some = group < state->count && has_pairs(state, group);
                if (pass && !some) clear_group(tiles, state, group);
                if (!some) continue;
                if (pass) {
                    differentiate_group(problem, state, group);
                } else {
                    find_gradients(problem, state, group, 0);
                    add_means(tiles, state, group, state->logits);
                }
            }
            if (pass) add_tile_gradients(problem, state, part);
        }
        if (!pass) finish_means(tiles, state);
    }
}

/* The most tiles of a block of rows. */
INLINE int64_t most_tiles(const struct flash *tiles) {
    int64_t most = 0;
    for (int64_t block = 0; block < whole_blocks(tiles->rows); block++) {
        int64_t count = 0;
        for (int64_t run = tiles->first[block]; run < tiles->first[block + 1]; run++)
            count += whole_blocks(tiles->runs[3 * run + 1] - tiles->runs[3 * run]);
        most = count > most ? count : most;
    }
    return most;
}

/* Memory for a block of rows; null where there is none. numbers: those of a score that are kept between the passes. */
INLINE struct block_state take_state(const struct mixed_heads *problem, int numbers) {
    const struct flash *tiles = &problem->tiles;
    int64_t heads = tiles->heads, padded = problem->padded_heads, rows = heads * BLOCK;
    int64_t sizes[] = {padded * TILE, rows * problem->padded_value_dim, rows * BLOCK, rows * LANES, rows,
                       padded * padded * LANES};
    int64_t floats = 4 * sizes[0] + sizes[1] + 2 * sizes[2] + 2 * sizes[3] + 4 * sizes[4] + 2 * sizes[5] + 15 * 16;
    struct block_state state = {.memory = aligned_memory(floats * 4)};
    float *memory = state.memory;
    if (!memory) return state;
    int64_t kept = most_tiles(tiles) * numbers * padded * BLOCK * BLOCK * (int64_t)sizeof(float);
    if (kept && kept <= MOST_KEPT) state.kept = aligned_memory(kept);
    memset(memory, 0, (size_t)floats * 4);
    state.scores = take_floats(&memory, sizes[0]), state.logits = take_floats(&memory, sizes[0]);
    state.grad_mixed = take_floats(&memory, sizes[0]), state.grad_weights = take_floats(&memory, sizes[0]);
    state.output = take_floats(&memory, sizes[1]);
    state.tile_grads = take_floats(&memory, sizes[2]), state.tile_weights = take_floats(&memory, sizes[2]);
    state.first_sums = take_floats(&memory, sizes[3]), state.second_sums = take_floats(&memory, sizes[3]);
    state.shift = take_floats(&memory, sizes[4]), state.rest = take_floats(&memory, sizes[4]);
    state.factor = take_floats(&memory, sizes[4]), state.mean = take_floats(&memory, sizes[4]);
    state.products_before = take_floats(&memory, sizes[5]), state.products_after = take_floats(&memory, sizes[5]);
    return state;
}

INLINE void finish_state(struct flash *tiles, struct block_state *state) {
    if (!state->memory) tiles->failed = 1;
    finish_check(tiles, state->check);
    free_aligned(state->memory), free_aligned(state->kept);
}

INLINE void take_rows(const struct flash *tiles, struct block_state *state, int64_t block) {
    state->begin = block * BLOCK, state->count = min_int(tiles->rows - state->begin, BLOCK);
}

/* Takes a block of rows of all heads after another while any is left; any number of threads may call it at once. */
void EXPORTED(regard_mixed_heads)(struct mixed_heads *problem) {
    struct flash *tiles = &problem->tiles;
    int64_t blocks = whole_blocks(tiles->rows), number;
    struct block_state state = take_state(problem, 1);
    while (state.memory && (number = __atomic_fetch_add(&tiles->next_unit, 1, __ATOMIC_RELAXED)) < tiles->unit_count) {
        state.batch = number / blocks;
        take_rows(tiles, &state, number % blocks);
        forward_block(problem, &state);
    }
    finish_state(tiles, &state);
}

/* Adds the products of a part, which are in lanes, to the gradient of a matrix. */
INLINE void write_products(const struct mixed_heads *problem, const struct block_state *state, int64_t part,
                           float *sums, float *into) {
    int64_t numbers = problem->padded_heads * problem->padded_heads;
    float *target = into + (part * problem->tiles.batches + state->batch) * numbers;
    for (int64_t i = 0; i < numbers; i++) target[i] = sum_lanes(load(sums + i * LANES));
    memset(sums, 0, (size_t)(numbers * LANES) * sizeof(float));
}

/* The gradients of one part of the rows of all heads, which are added to; their numbers are read for NaN by the caller. */
void EXPORTED(regard_mixed_heads_backward)(struct mixed_heads *problem) {
    struct flash *tiles = &problem->tiles;
    int64_t blocks = whole_blocks(tiles->rows), parts = problem->row_parts, number;
    struct block_state state = take_state(problem, 2);
    while (state.memory && (number = __atomic_fetch_add(&tiles->next_unit, 1, __ATOMIC_RELAXED)) < tiles->unit_count) {
        int64_t part = number % parts;
        state.batch = number / parts;
        for (int64_t block = part; block < blocks; block += parts) { /* later ones have more keys under a causal mask */
            take_rows(tiles, &state, block);
            backward_block(problem, &state, part);
        }
        if (problem->before) write_products(problem, &state, part, state.products_before, problem->grad_before);
        if (problem->after) write_products(problem, &state, part, state.products_after, problem->grad_after);
    }
    finish_state(tiles, &state);
}
