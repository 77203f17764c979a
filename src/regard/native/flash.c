/* Dot-product attention, forward: some blocks of rows with the blocks of keys that their mask leaves, each packed
 * once. */
#include "narrow_forward.h"

/* The state of a thread for some blocks of rows. */
struct forward_state {
    float *query;   /* [rows][padded dim], scaled */
    float *output;  /* [rows][padded value dim], in units of 2^maximum */
    float *total;   /* [rows][LANES], the sums of weights, lane by lane */
    float *maximum; /* [rows] */
    float *keys;    /* [dim][BLOCK] */
    float *values;  /* [BLOCK][padded value dim] */
    lanes check;    /* see check_finite */
    int64_t batch, head, begin, count, blocks;
};

INLINE float max_of_lanes(lanes vector) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)vector);
#else
    float maximum = vector[0];
    for (int lane = 1; lane < LANES; lane++) maximum = vector[lane] > maximum ? vector[lane] : maximum;
    return maximum;
#endif
}

/* Products become scores: through the softcap, with the relative bias, -infinity where there is no pair. */
INLINE float finish_scores(const struct flash *problem, const struct extent extent, uint64_t word,
                           const float *relative_bias, float *row) {
    lanes limit = broadcast(-INFINITY);
    for (int64_t j = aligned_begin(extent); j < aligned_end(extent); j += LANES) {
        lanes score = apply_softcap(problem, load(row + j), 0);
        if (relative_bias && j < extent.end) score += load_partial(relative_bias + j, extent.end - j);
        if (extent.partial) score = select_bits(word, j, score, -INFINITY);
        store(row + j, score);
        limit = max_lanes(limit, score);
    }
    return max_of_lanes(limit);
}

/* A group of rows with one block of keys: the online softmax. */
INLINE void process_row_group(const struct flash *problem, struct forward_state *state, int64_t row, int64_t column,
                              const uint64_t *words, const struct extent extent) {
    int64_t padded = padded_dim(problem->dim), value_padded = padded_dim(problem->value_dim);
    int64_t low = aligned_begin(extent), high = aligned_end(extent), count = min_int(problem->columns - column, BLOCK);
    /* One buffer for the products, the scores and at last the weights, not divided by their sum. */
    float tile[GROUP * BLOCK] ALIGNED, rescale[(int)LANES < (int)GROUP ? GROUP : LANES] ALIGNED = {0}, shift[GROUP];
    struct factor query = {state->query + row * padded, padded, 1}, weight = {tile, BLOCK, 1};
    for (int64_t j = low; j < high; j += PAIR)
        add_product(query, (struct vectors){state->keys + j, BLOCK, 0, problem->dim}, tile + j, BLOCK, 0);
    for (int r = 0; r < GROUP; r++) {
        const float *relative_bias = row_bias(problem, state->head, state->begin + row + r, column);
        float before = state->maximum[row + r];
        float now = finish_scores(problem, extent, row_word(words, r, count), relative_bias, tile + r * BLOCK);
        now = now > before ? now : before;
        shift[r] = now == -INFINITY ? 0.0f : now;
        rescale[r] = before - shift[r];
        state->maximum[row + r] = now;
    }
    for (int r = 0; r < GROUP; r += LANES) store(rescale + r, exp2_lanes(load(rescale + r)));
    for (int r = 0; r < GROUP; r++) {
        lanes sum = {0}; /* of this block alone: a sum over many keys is rounded once per block */
        int32_t row_hash = row_hash_at(problem, state->batch, state->head, state->begin + row + r);
        for (int64_t j = low; j < high; j += LANES) {
            lanes power = exp2_lanes(load(tile + r * BLOCK + j) - shift[r]);
            sum += power;
            if (problem->row_hashes) {
                bits hashes = load_bits(problem->column_hashes + column + j) + row_hash;
                power = zero_unless(dropout_mask(problem, hashes), power);
            }
            store(tile + r * BLOCK + j, power);
        }
        store(state->total + (row + r) * LANES, load(state->total + (row + r) * LANES) * rescale[r] + sum);
    }
    float *output = state->output + row * value_padded;
    for (int64_t a = 0; a < value_padded; a += PAIR)
        add_product(weight, (struct vectors){state->values + a, value_padded, extent.begin, extent.end}, output + a,
                value_padded, rescale);
}

/* A result that is merged with: as if its weights had been computed before, with a sum of 1 in units of its lse. */
INLINE void resume_rows(const struct flash *problem, struct forward_state *state) {
    int64_t padded = padded_dim(problem->value_dim);
    for (int64_t row = 0; row < state->count; row++) {
        float lse = *row_number(&problem->lse, state->batch, state->head, state->begin + row);
        if (lse == -INFINITY) continue;
        const void *result = head_rows(&problem->result, state->batch, state->head, state->begin + row, 0);
        state->maximum[row] = lse * LOG2_E, state->total[row * LANES] = 1.0f;
        for (int64_t a = 0; a < problem->value_dim; a += LANES)
            store(state->output + row * padded + a,
                  load_entries(result, a, problem->value_dim, 0, 0) * problem->keep_probability);
    }
}

INLINE void start_rows(const struct flash *problem, struct forward_state *state, const int dtype) {
    int64_t padded = padded_dim(problem->dim), all = state->blocks * BLOCK;
    const void *query = head_rows(&problem->query, state->batch, state->head, state->begin, dtype);
    for (int64_t row = 0; row < all; row += BLOCK)
        pack_rows(row_at(query, row, problem->query.row, dtype), problem->query.row,
                  min_int(state->count - row, BLOCK), problem->dim, query_factor(problem), state->query + row * padded,
                  dtype);
    memset(state->output, 0, (size_t)(all * padded_dim(problem->value_dim)) * sizeof(float));
    memset(state->total, 0, (size_t)(all * LANES) * sizeof(float));
    for (int64_t row = 0; row < all; row++) state->maximum[row] = -INFINITY;
    if (problem->accumulate) resume_rows(problem, state);
}

INLINE void write_rows(const struct flash *problem, struct forward_state *state, const int dtype) {
    int64_t padded = padded_dim(problem->value_dim);
    lanes check = {0}; /* in a register, while rows are written */
    for (int64_t row = 0; row < state->count; row++) {
        float total = sum_lanes(load(state->total + row * LANES)),
              share = total == 0.0f ? 0.0f : 1.0f / (total * problem->keep_probability);
        void *target =
            (void *)head_rows(&problem->result, state->batch, state->head, state->begin + row, dtype);
        *row_number(&problem->lse, state->batch, state->head, state->begin + row) =
            total == 0.0f ? -INFINITY : LN_2 * state->maximum[row] + logf(total);
        for (int64_t a = 0; a < problem->value_dim; a += LANES) {
            lanes output = load(state->output + row * padded + a) * share;
            check_finite(&check, output);
            store_entries(target, a, problem->value_dim, dtype, output);
        }
    }
    state->check += check;
}

INLINE void process_row_blocks(const struct flash *problem, struct forward_state *state, const int dtype) {
    struct cursor cursors[MOST_BLOCKS];
    start_rows(problem, state, dtype);
    load_ahead(&problem->result, state->batch, state->head, state->begin, state->count, problem->value_dim,
               dtype);
    for (int64_t b = 0; b < state->blocks; b++) cursors[b] = first_tile(problem, state->begin / BLOCK + b);
    for (;;) {
        int64_t column = INT64_MAX;
        for (int64_t b = 0; b < state->blocks; b++) column = min_int(column, cursors[b].column);
        if (column == INT64_MAX) break;
        int64_t count = min_int(problem->columns - column, BLOCK), key_head = state->head / problem->group;
        pack_transposed(head_rows(&problem->key, state->batch, key_head, column, dtype), problem->key.row, count,
                        problem->dim, 1.0f, state->keys, BLOCK, dtype);
        pack_rows(head_rows(&problem->value, state->batch, key_head, column, dtype), problem->value.row, count,
                  problem->value_dim, 1.0f, state->values, dtype);
        int64_t ahead = min_int(problem->columns - column - BLOCK, BLOCK);
        load_ahead(&problem->key, state->batch, key_head, column + BLOCK, ahead, problem->dim, dtype);
        load_ahead(&problem->value, state->batch, key_head, column + BLOCK, ahead, problem->value_dim, dtype);
        for (int64_t b = 0; b < state->blocks; b++) {
            if (cursors[b].column != column) continue;
            const uint64_t *words = tile_words(problem, state->batch, state->head, next_tile(problem, cursors + b));
            for (int64_t row = 0; row < BLOCK && b * BLOCK + row < state->count; row += GROUP) {
                struct extent extent = tile_extent(words ? words + row : 0, count);
                if (extent.begin < extent.end)
                    process_row_group(problem, state, b * BLOCK + row, column, words ? words + row : 0, extent);
            }
        }
    }
    write_rows(problem, state, dtype);
}

/* The next unit of work; its head is -1 if none is left. Where rows of batches alternate in memory, so do the units. */
INLINE struct unit take_unit(struct flash *problem) {
    int64_t number = __atomic_fetch_add(&problem->next_unit, 1, __ATOMIC_RELAXED), rows = problem->row_blocks * BLOCK;
    if (number >= problem->unit_count) return (struct unit){.head = -1};
    int64_t units = (problem->rows + rows - 1) / rows, batches = problem->unit_count / (units * problem->heads);
    struct unit unit = {number / units / problem->heads, number / units % problem->heads, number % units * rows, 0};
    if (problem->query.batch < problem->query.row)
        unit = (struct unit){number % batches, number / batches / units, number / batches % units * rows, 0};
    unit.count = min_int(problem->rows - unit.row, rows);
    return unit;
}

/* Takes some blocks of rows of one head after another while any is left; any number of threads may call it at once. */
void EXPORTED(regard_flash)(struct flash *problem) {
    int64_t rows = problem->row_blocks * BLOCK, padded = padded_dim(problem->dim),
            value_padded = padded_dim(problem->value_dim);
    int64_t floats = (rows + BLOCK) * (padded + value_padded) + rows * (LANES + 1) + 6 * 16;
    floats += narrow_floats(problem, rows);
    float *memory = aligned_alloc(64, (size_t)(floats * 4 + 63) / 64 * 64), *free_memory = memory;
    if (!memory) {
        problem->failed = 1;
        return;
    }
    struct forward_state state = {.query = take_floats(&free_memory, rows * padded),
                                  .output = take_floats(&free_memory, rows * value_padded)};
    state.total = take_floats(&free_memory, rows * LANES), state.maximum = take_floats(&free_memory, rows);
    state.keys = take_floats(&free_memory, padded * BLOCK);
    state.values = take_floats(&free_memory, BLOCK * value_padded);
    struct narrow narrow = take_narrow(problem, rows, &free_memory);
    for (struct unit unit = take_unit(problem), next; unit.head >= 0; unit = next) {
        next = take_unit(problem);
        state.batch = unit.batch, state.head = unit.head, state.begin = unit.row, state.count = unit.count;
        state.blocks = (state.count + BLOCK - 1) / BLOCK;
        BY_DTYPE(problem->dtype, if (!process_narrow(problem, &narrow, &unit, &next, DTYPE))
                                     process_row_blocks(problem, &state, DTYPE));
    }
    finish_check(problem, state.check + narrow.check);
    free(memory);
}
