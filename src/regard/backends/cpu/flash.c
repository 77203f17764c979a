/* Dot-product attention, forward: some blocks of rows with the blocks of keys that their mask leaves, each packed
 * once. */
#include "call_bias.h"
#include "landmarks.h"
#include "narrow_forward.h"

/* The state of a thread for some blocks of rows. */
struct forward_state {
    float *query;   /* [rows][padded terms]; floats are scaled, pairs are not (see score_factor) */
    float *output;  /* [rows][padded value dim], in units of 2^maximum */
    float *total;   /* [rows][LANES], the sums of weights, lane by lane */
    float *maximum; /* [rows] */
    float *keys;    /* [terms][BLOCK] */
    float *values;  /* [terms of rows][padded value dim] */
    float *bias;    /* of a tile, [BLOCK][BLOCK], with memory behind it: see call_bias.h */
    struct wide_blocks wide; /* of landmark attention, for each row */
    lanes check;    /* see check_finite */
    int64_t batch, head, begin, count, blocks;
};

/* The largest lane of each of GROUP vectors. */
INLINE void max_of_each(const lanes vector[GROUP], float maximum[GROUP]) {
#if defined(__AVX512F__)
    /* Halves, quarters and so on are compared, those of two vectors at once: eight vectors, four, two and one. */
    __m256 half[GROUP], four[4], two[2];
    UNROLL for (int r = 0; r < GROUP; r++)
        half[r] = _mm256_max_ps(_mm512_castps512_ps256((__m512)vector[r]),
                                _mm256_castpd_ps(_mm512_extractf64x4_pd((__m512d)vector[r], 1)));
    UNROLL for (int r = 0; r < 4; r++)
        four[r] = _mm256_max_ps(_mm256_permute2f128_ps(half[r], half[r + 4], 0x20),
                                _mm256_permute2f128_ps(half[r], half[r + 4], 0x31));
    UNROLL for (int r = 0; r < 2; r++)
        two[r] = _mm256_max_ps(_mm256_unpacklo_ps(four[r], four[r + 2]), _mm256_unpackhi_ps(four[r], four[r + 2]));
    _mm256_storeu_ps(maximum, _mm256_max_ps(_mm256_unpacklo_ps(two[0], two[1]), _mm256_unpackhi_ps(two[0], two[1])));
#else
    for (int r = 0; r < GROUP; r++) {
        maximum[r] = vector[r][0];
        for (int lane = 1; lane < LANES; lane++)
            maximum[r] = vector[r][lane] > maximum[r] ? vector[r][lane] : maximum[r];
    }
#endif
}

/* Products become scores: through the softcap, with the relative bias, -infinity where there is no pair. */
INLINE lanes finish_scores(const struct flash *problem, const struct extent extent, uint64_t word,
                           const float *relative_bias, float *row, const int paired) {
    lanes limit = broadcast(-INFINITY);
    if (problem->softcap == 0.0f && !relative_bias && !extent.partial) { /* the most frequent case needs no tests */
        for (int64_t j = 0; j < BLOCK; j += LANES) {
            lanes score = load(row + j) * score_factor(problem, paired);
            if (paired) store(row + j, score);
            limit = max_lanes(limit, score);
        }
        return limit;
    }
    for (int64_t j = aligned_begin(extent); j < aligned_end(extent); j += LANES) {
        lanes score = apply_softcap(problem, load(row + j) * score_factor(problem, paired), 0);
        if (relative_bias && j < extent.end) score += load_partial(relative_bias + j, extent.end - j);
        if (extent.partial) score = select_bits(word, j, score, -INFINITY);
        store(row + j, score);
        limit = max_lanes(limit, score);
    }
    return limit;
}

/* Raises the maxima of a group of rows to those of its scores. shift: what is to be subtracted from scores, which is 0
 * where no pair exists yet; rescale: the factor of what was summed before. */
INLINE void raise_maxima(const lanes limit[GROUP], float *maximum, float shift[GROUP], float rescale[GROUP]) {
    float own[GROUP] ALIGNED;
    max_of_each(limit, own);
    for (int r = 0; r < GROUP; r += LANES) {
        lanes before = load_partial(maximum + r, GROUP - r), now = max_lanes(before, load_partial(own + r, GROUP - r));
        lanes less = (lanes)((bits)now & (now != -INFINITY));
        store_partial(maximum + r, now, GROUP - r);
        store_partial(shift + r, less, GROUP - r);
        store_partial(rescale + r, exp2_lanes(before - less), GROUP - r);
    }
}

/* The weights of a row, from its scores in place, dropped where dropout says so; returns their sum before that. */
INLINE lanes finish_weights(const struct flash *problem, const struct forward_state *state, int64_t row, int64_t column,
                            float *tile, int64_t low, int64_t high, float shift, const int paired, const int sigmoid) {
    lanes sum = {0}, complement;
    int32_t row_hash = row_hash_at(problem, state->batch, state->head, state->begin + row);
    for (int64_t j = low; j < high; j += LANES) {
        lanes score = load(tile + j) - shift,
              power = sigmoid ? sigmoid_lanes(score, &complement) : exp2_lanes(score);
        sum += power;
        if (problem->row_hashes) {
            bits hashes = load_bits(problem->column_hashes + column + j) + row_hash;
            power = zero_unless(dropout_mask(problem, hashes), power);
        }
        store_terms(tile, j, power, paired);
    }
    return sum;
}

/* The scores of a row become those of landmark attention; returns the largest, lane by lane. */
INLINE lanes weigh_row(const struct flash *problem, const struct forward_state *state, int64_t row, int64_t column,
                       int64_t count, float *scores) {
    lanes limit = broadcast(-INFINITY);
    int64_t size = problem->landmark_size, own = own_block(problem, state->begin + row, column);
    if (has_wide_blocks(problem))
        weigh_wide_blocks(&state->wide, size, own, column, row, count, scores);
    else
        weigh_blocks(size, own, count, scores);
    for (int64_t j = 0; j < count; j += LANES) limit = max_lanes(limit, load(scores + j));
    return limit;
}

/* A group of rows with one block of keys: the online softmax, or weights of each score alone. */
INLINE void process_row_group(const struct flash *problem, struct forward_state *state, int64_t row, int64_t column,
                              const uint64_t *words, const struct extent extent, const int paired,
                              const enum weighing weighing) {
    int64_t padded = padded_terms(problem->dim, paired), value_padded = padded_dim(problem->value_dim);
    int64_t low = aligned_begin(extent), high = aligned_end(extent), count = columns_from(problem, column);
    /* One buffer for the products, the scores and at last the weights, not divided by their sum, as terms. */
    float tile[GROUP * BLOCK] ALIGNED, rescale[GROUP] ALIGNED, shift[GROUP] ALIGNED;
    lanes limit[GROUP];
    struct factor query = {state->query + row * padded, padded, 1}, weight = {tile, BLOCK, 1};
    for (int64_t j = low; j < high; j += PAIR)
        add_terms(query, (struct vectors){state->keys + j, BLOCK, 0, term_count(problem->dim, paired)}, tile + j, BLOCK,
                  0, paired);
    for (int r = 0; r < GROUP; r++) {
        const float *relative_bias = problem->call_bias
                                         ? state->bias + (row % BLOCK + r) * BLOCK
                                         : row_bias(problem, state->head, state->begin + row + r, column);
        limit[r] = finish_scores(problem, extent, row_word(words, r, count), relative_bias, tile + r * BLOCK, paired);
        if (weighing == BY_LANDMARKS) limit[r] = weigh_row(problem, state, row + r, column, count, tile + r * BLOCK);
    }
    if (weighing == BY_SIGMOID)
        for (int r = 0; r < GROUP; r++) shift[r] = -problem->sigmoid_bias[state->head], rescale[r] = 1.0f;
    else
        raise_maxima(limit, state->maximum + row, shift, rescale);
    for (int r = 0; r < GROUP; r++) { /* sums of this block alone: one over many keys is rounded once per block */
        lanes sum = finish_weights(problem, state, row + r, column, tile + r * BLOCK, low, high, shift[r], paired,
                                   weighing == BY_SIGMOID);
        store(state->total + (row + r) * LANES, load(state->total + (row + r) * LANES) * rescale[r] + sum);
    }
    float *output = state->output + row * value_padded;
    int64_t first = paired ? extent.begin / 2 : extent.begin, last = term_count(extent.end, paired);
    for (int64_t a = 0; a < value_padded; a += PAIR)
        add_terms(weight, (struct vectors){state->values + a, value_padded, first, last}, output + a, value_padded,
                  rescale, paired);
}

#define ROW_GROUP \
    (const struct flash *problem, struct forward_state *state, int64_t row, int64_t column, const uint64_t *words, \
     const struct extent extent)
APART void row_group_of_floats ROW_GROUP { process_row_group(problem, state, row, column, words, extent, 0, BY_SOFTMAX); }
APART void row_group_of_pairs ROW_GROUP { process_row_group(problem, state, row, column, words, extent, 1, BY_SOFTMAX); }
APART void sigmoid_of_floats ROW_GROUP { process_row_group(problem, state, row, column, words, extent, 0, BY_SIGMOID); }
APART void sigmoid_of_pairs ROW_GROUP { process_row_group(problem, state, row, column, words, extent, 1, BY_SIGMOID); }
APART void landmarks_of_floats ROW_GROUP { process_row_group(problem, state, row, column, words, extent, 0, BY_LANDMARKS); }
APART void landmarks_of_pairs ROW_GROUP { process_row_group(problem, state, row, column, words, extent, 1, BY_LANDMARKS); }

/* The function for a group of rows. */
static void(*row_group(const struct flash *problem, int dtype)) ROW_GROUP {
    if (problem->landmark_size) return in_pairs(dtype) ? landmarks_of_pairs : landmarks_of_floats;
    if (problem->sigmoid_bias) return in_pairs(dtype) ? sigmoid_of_pairs : sigmoid_of_floats;
    return in_pairs(dtype) ? row_group_of_pairs : row_group_of_floats;
}

/* Reads the scores of a group of rows in a tile into what is known of the block of landmark attention. */
INLINE void read_row_group(const struct flash *problem, struct forward_state *state, int64_t row, int64_t column,
                           const uint64_t *words, const struct extent extent, const int paired) {
    int64_t padded = padded_terms(problem->dim, paired), count = columns_from(problem, column),
            first = state->wide.number * problem->landmark_size - column;
    float tile[GROUP * BLOCK] ALIGNED;
    struct factor query = {state->query + row * padded, padded, 1};
    for (int64_t j = 0; j < aligned_end(extent); j += PAIR)
        add_terms(query, (struct vectors){state->keys + j, BLOCK, 0, term_count(problem->dim, paired)}, tile + j, BLOCK,
                  0, paired);
    for (int r = 0; r < GROUP; r++) {
        finish_scores(problem, extent, row_word(words, r, count), 0, tile + r * BLOCK, paired);
        read_wide_row(&state->wide, problem->landmark_size, first, count, row + r, tile + r * BLOCK, 0);
    }
}
APART void read_floats ROW_GROUP { read_row_group(problem, state, row, column, words, extent, 0); }
APART void read_pairs ROW_GROUP { read_row_group(problem, state, row, column, words, extent, 1); }

/* Reads the blocks of landmark attention that begin in a tile, all of their tiles each. */
static void read_wide_blocks(const struct flash *problem, struct forward_state *state, int64_t column, int dtype) {
    int64_t size = problem->landmark_size, width = problem->tile_columns, key_head = state->head / problem->group,
            last = (column + columns_from(problem, column) - 1) / size;
    if (state->wide.number < column / size - 1) state->wide.number = column / size - 1; /* the mask left them out */
    while (state->wide.number < last) {
        int64_t begin = ++state->wide.number * size, end = min_int(begin + size, problem->columns);
        start_wide_block(&state->wide, state->blocks * BLOCK);
        for (int64_t at = begin / width * width; at < end; at += width) {
            int64_t count = columns_from(problem, at);
            pack_transposed_terms(head_rows(&problem->key, state->batch, key_head, at, dtype), problem->key.row, count,
                                  problem->dim, 1.0f, state->keys, BLOCK, dtype, in_pairs(dtype));
            for (int64_t b = 0; b < state->blocks; b++) {
                struct cursor cursor = first_tile(problem, state->begin / BLOCK + b);
                while (cursor.column < at) next_tile(problem, &cursor);
                if (cursor.column != at) continue;
                const uint64_t *words = tile_words(problem, state->batch, state->head, next_tile(problem, &cursor));
                for (int64_t row = 0; row < BLOCK && b * BLOCK + row < state->count; row += GROUP) {
                    struct extent extent = tile_extent(words ? words + row : 0, count);
                    if (extent.begin < extent.end)
                        (in_pairs(dtype) ? read_pairs : read_floats)(problem, state, b * BLOCK + row, at,
                                                                     words ? words + row : 0, whole_tile(words, count));
                }
            }
        }
        finish_wide_block(&state->wide, state->blocks * BLOCK, 0);
    }
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

INLINE void start_rows(const struct flash *problem, struct forward_state *state, int dtype) {
    int64_t padded = padded_terms(problem->dim, in_pairs(dtype)), all = state->blocks * BLOCK;
    const void *query = head_rows(&problem->query, state->batch, state->head, state->begin, dtype);
    for (int64_t row = 0; row < all; row += BLOCK)
        pack_row_terms(row_at(query, row, problem->query.row, dtype), problem->query.row,
                       min_int(state->count - row, BLOCK), problem->dim, query_factor(problem),
                       state->query + row * padded, dtype, in_pairs(dtype));
    memset(state->output, 0, (size_t)(all * padded_dim(problem->value_dim)) * sizeof(float));
    memset(state->total, 0, (size_t)(all * LANES) * sizeof(float));
    for (int64_t row = 0; row < all; row++) state->maximum[row] = problem->sigmoid_bias ? 0.0f : -INFINITY;
    if (problem->accumulate) resume_rows(problem, state);
}

INLINE void write_rows(const struct flash *problem, struct forward_state *state, const int dtype) {
    int64_t padded = padded_dim(problem->value_dim);
    lanes check = {0}; /* in a register, while rows are written */
    for (int64_t row = 0; row < state->count; row++) {
        float total = sum_lanes(load(state->total + row * LANES)),
              divisor = problem->sigmoid_bias ? 1.0f : total,
              share = total == 0.0f ? 0.0f : 1.0f / (divisor * problem->keep_probability);
        void *target =
            (void *)head_rows(&problem->result, state->batch, state->head, state->begin + row, dtype);
        *row_number(&problem->lse, state->batch, state->head, state->begin + row) =
            log_sum(state->maximum[row], total);
        for (int64_t a = 0; a < problem->value_dim; a += LANES) {
            lanes output = load(state->output + row * padded + a) * share;
            check_finite(&check, output);
            store_entries(target, a, problem->value_dim, dtype, output);
        }
    }
    state->check += check;
}

APART void process_row_blocks(const struct flash *problem, struct forward_state *state, int dtype) {
    struct cursor cursors[MOST_BLOCKS];
    void(*process_group) ROW_GROUP = row_group(problem, dtype);
    start_rows(problem, state, dtype);
    load_ahead(&problem->result, state->batch, state->head, state->begin, state->count, problem->value_dim,
               dtype);
    for (int64_t b = 0; b < state->blocks; b++) cursors[b] = first_tile(problem, state->begin / BLOCK + b);
    state->wide.number = -1;
    for (;;) {
        int64_t column = INT64_MAX;
        for (int64_t b = 0; b < state->blocks; b++) column = min_int(column, cursors[b].column);
        if (column == INT64_MAX) break;
        if (has_wide_blocks(problem)) read_wide_blocks(problem, state, column, dtype);
        int64_t count = columns_from(problem, column), key_head = state->head / problem->group;
        pack_transposed_terms(head_rows(&problem->key, state->batch, key_head, column, dtype), problem->key.row, count,
                              problem->dim, 1.0f, state->keys, BLOCK, dtype, in_pairs(dtype));
        pack_rows_as_terms(head_rows(&problem->value, state->batch, key_head, column, dtype), problem->value.row,
                           count, problem->value_dim, 1.0f, state->values, dtype, in_pairs(dtype));
        int64_t next = column + count, ahead = columns_from(problem, next);
        load_ahead(&problem->key, state->batch, key_head, next, ahead, problem->dim, dtype);
        load_ahead(&problem->value, state->batch, key_head, next, ahead, problem->value_dim, dtype);
        for (int64_t b = 0; b < state->blocks; b++) {
            if (cursors[b].column != column) continue;
            const uint64_t *words = tile_words(problem, state->batch, state->head, next_tile(problem, cursors + b));
            struct place place = {state->batch, state->head, state->begin + b * BLOCK, column,
                                  min_int(state->count - b * BLOCK, BLOCK), count};
            if (problem->call_bias) fill_call_bias(problem, &place, state->bias);
            for (int64_t row = 0; row < BLOCK && b * BLOCK + row < state->count; row += GROUP) {
                struct extent extent = tile_extent(words ? words + row : 0, count);
                if (extent.begin >= extent.end) continue;
                if (problem->landmark_size) extent = whole_tile(words, count);
                process_group(problem, state, b * BLOCK + row, column, words ? words + row : 0, extent);
            }
        }
    }
    BY_DTYPE(dtype, write_rows(problem, state, DTYPE));
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
    LEAVE_UNLESS(problem->dtype == BFLOAT16, regard_flash, problem);
    int64_t rows = problem->row_blocks * BLOCK, padded = padded_dim(problem->dim),
            value_padded = padded_dim(problem->value_dim);
    int64_t floats = (rows + BLOCK) * (padded + value_padded) + rows * (LANES + 1) + 6 * 16;
    floats += narrow_floats(problem, rows) + wide_floats(problem, rows) + (problem->call_bias ? TILE_FLOATS : 0);
    float *memory = aligned_memory(floats * 4), *free_memory = memory;
    if (!memory) {
        problem->failed = 1;
        return;
    }
    struct forward_state state = {.query = take_floats(&free_memory, rows * padded),
                                  .output = take_floats(&free_memory, rows * value_padded)};
    state.total = take_floats(&free_memory, rows * LANES), state.maximum = take_floats(&free_memory, rows);
    state.keys = take_floats(&free_memory, padded * BLOCK);
    state.values = take_floats(&free_memory, BLOCK * value_padded);
    if (problem->call_bias) state.bias = take_floats(&free_memory, TILE_FLOATS);
    state.wide = take_wide_blocks(problem, rows, &free_memory);
    struct narrow narrow = take_narrow(problem, rows, &free_memory);
    const int dtype = (int)problem->dtype;
    for (struct unit unit = take_unit(problem), next; unit.head >= 0; unit = next) {
        next = take_unit(problem);
        state.batch = unit.batch, state.head = unit.head, state.begin = unit.row, state.count = unit.count;
        state.blocks = (state.count + BLOCK - 1) / BLOCK;
        if (!process_narrow(problem, &narrow, &unit, &next, dtype)) process_row_blocks(problem, &state, dtype);
    }
    finish_check(problem, state.check + narrow.check);
    free_aligned(memory);
}
