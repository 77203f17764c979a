/* The weights themselves, from the log-sum-exp of their rows: weight(i, j) = exp(score(i, j) - lse[i]). They are
 * written for the tiles of a mask alone, into zeros; or, where there are no tiles, for all pairs, and 0 where `keep`
 * says so. */
#include "tile.h"

/* The state of a thread for some rows and a block of keys. */
struct row_block_state {
    float *query, *keys; /* [rows][padded terms], floats scaled and pairs not (see score_factor); [terms][BLOCK] */
    int64_t batch, head, begin, count, blocks;
};

INLINE float *row_pointer(const struct rows *rows, const struct row_block_state *state, int64_t row, int64_t column) {
    return (float *)head_rows(rows, state->batch, state->head, row, 0) + column;
}

/* A row of products becomes weights, where pairs of its tile exist; a row with lse +infinity is not touched. */
INLINE void write_tile_row(const struct flash *problem, const struct row_block_state *state, int64_t row,
                           int64_t column, const struct extent extent, uint64_t word, const float *products,
                           const int paired) {
    const float *relative_bias = row_bias(problem, state->head, row, column);
    float lse = LOG2_E * *row_number(&problem->lse, state->batch, state->head, row);
    float *weights = row_pointer(&problem->weights, state, row, column);
    if (lse == INFINITY) return;
    for (int64_t j = aligned_begin(extent); j < extent.end; j += LANES) {
        lanes exponent = apply_softcap(problem, load(products + j) * score_factor(problem, paired), 0);
        if (relative_bias) exponent += load_partial(relative_bias + j, extent.end - j);
        lanes weight = exp2_lanes(exponent - lse);
        if (extent.partial) weight = select_bits(word, j, weight, 0.0f);
        store_partial(weights + j, weight, extent.end - j);
    }
}

/* A row of products becomes weights, of all pairs. */
INLINE void write_full_row(const struct flash *problem, const struct row_block_state *state, int64_t row,
                           int64_t column, int64_t count, const float *products, const int paired) {
    const uint8_t *keep = problem->keep.data
                              ? (const uint8_t *)problem->keep.data + state->batch * problem->keep.batch +
                                    state->head * problem->keep.head + row * problem->keep.row + column
                              : 0;
    float lse = LOG2_E * *row_number(&problem->lse, state->batch, state->head, row);
    float none = lse != lse ? lse : 0.0f; /* all of a row that attends to NaN is NaN */
    float *weights = row_pointer(&problem->weights, state, row, column);
    float *entropy_terms = problem->entropy_terms.data ? row_pointer(&problem->entropy_terms, state, row, column) : 0;
    for (int64_t j = 0; j < count; j += LANES) {
        lanes exponent = apply_softcap(problem, load(products + j) * score_factor(problem, paired), 0) - lse;
        lanes weight = exp2_lanes(exponent), entropy_term = weight * max_lanes(broadcast(-127.0f), exponent);
        if (keep) {
            bits exists = pairs_exist(keep + j, count - j);
            weight = zero_unless(exists, weight) + none, entropy_term = zero_unless(exists, entropy_term) + none;
        }
        store_partial(weights + j, weight, count - j);
        if (entropy_terms) store_partial(entropy_terms + j, entropy_term, count - j);
    }
}

/* A block of rows with one block of keys; `words` has the bits of the tile, or is null where all its pairs exist. */
INLINE void process_tile(const struct flash *problem, const struct row_block_state *state, int64_t first,
                         int64_t column, const uint64_t *words, const int paired) {
    int64_t padded = padded_terms(problem->dim, paired), count = min_int(problem->columns - column, BLOCK);
    for (int64_t row = first; row < first + BLOCK && row < state->count; row += GROUP) {
        const uint64_t *own = words ? words + row - first : 0;
        struct extent extent = tile_extent(own, count);
        float products[GROUP * BLOCK] ALIGNED;
        struct factor query = {state->query + row * padded, padded, 1};
        for (int64_t j = aligned_begin(extent); j < extent.end; j += PAIR)
            add_terms(query, (struct vectors){state->keys + j, BLOCK, 0, term_count(problem->dim, paired)}, products + j,
                      BLOCK, 0, paired);
        for (int r = 0; r < GROUP && row + r < state->count; r++)
            if (problem->first)
                write_tile_row(problem, state, state->begin + row + r, column, extent, row_word(own, r, count),
                               products + r * BLOCK, paired);
            else
                write_full_row(problem, state, state->begin + row + r, column, count, products + r * BLOCK,
                               paired);
    }
}

INLINE void weigh_row_blocks(const struct flash *problem, struct row_block_state *state, const int dtype) {
    int64_t padded = padded_terms(problem->dim, in_pairs(dtype));
    struct cursor cursors[MOST_BLOCKS];
    for (int64_t b = 0; b < state->blocks; b++) {
        if (problem->first) cursors[b] = first_tile(problem, state->begin / BLOCK + b);
        pack_row_terms(head_rows(&problem->query, state->batch, state->head, state->begin + b * BLOCK, dtype),
                       problem->query.row, min_int(state->count - b * BLOCK, BLOCK), problem->dim,
                       query_factor(problem), state->query + b * BLOCK * padded, dtype, in_pairs(dtype));
    }
    for (int64_t column = 0; column < problem->columns; column += BLOCK) {
        int packed = 0;
        for (int64_t b = 0; b < state->blocks; b++) {
            if (problem->first && cursors[b].column != column) continue;
            if (!packed)
                pack_transposed_terms(
                    head_rows(&problem->key, state->batch, state->head / problem->group, column, dtype),
                    problem->key.row, min_int(problem->columns - column, BLOCK), problem->dim, 1.0f, state->keys,
                    BLOCK, dtype, in_pairs(dtype));
            packed = 1;
            int64_t tile = problem->first ? next_tile(problem, cursors + b) : -1;
            process_tile(problem, state, b * BLOCK, column, tile_words(problem, state->batch, state->head, tile),
                         in_pairs(dtype));
        }
    }
}

/* Takes some rows of one head after another while any are left; any number of threads may call it at once. */
void EXPORTED(regard_flash_weights)(struct flash *problem) {
    LEAVE_UNLESS(problem->dtype == BFLOAT16, regard_flash_weights, problem);
    int64_t rows = problem->row_blocks * BLOCK, padded = padded_dim(problem->dim),
            units_of_head = (problem->rows + rows - 1) / rows, unit;
    int64_t floats = (rows + BLOCK) * padded + 2 * 16;
    float *memory = aligned_memory(floats * 4), *free_memory = memory;
    if (!memory) {
        problem->failed = 1;
        return;
    }
    struct row_block_state state = {.query = take_floats(&free_memory, rows * padded),
                                    .keys = take_floats(&free_memory, padded * BLOCK)};
    while ((unit = __atomic_fetch_add(&problem->next_unit, 1, __ATOMIC_RELAXED)) < problem->unit_count) {
        int64_t head = unit / units_of_head;
        state.batch = head / problem->heads, state.head = head % problem->heads;
        state.begin = unit % units_of_head * rows;
        state.count = min_int(problem->rows - state.begin, rows), state.blocks = (state.count + BLOCK - 1) / BLOCK;
        BY_DTYPE(problem->dtype, weigh_row_blocks(problem, &state, DTYPE));
    }
    free_aligned(memory);
}
