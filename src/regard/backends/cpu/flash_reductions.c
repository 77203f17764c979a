/* Reductions of the weights exp(score(i, j) - lse[i]): each weight is computed once, for all reductions. */
#include "reduce_tile.h"

/* Sums of a row are in float32, lane by lane, for this many blocks of keys, and then added to a float64. */
enum { BLOCKS_IN_FLOAT32 = 16 };

/* The largest weights of a group's rows. Most rows have none among them in a tile: one comparison tells. */
INLINE void update_topk(const struct reductions *reductions, const struct reduction_state *state,
                        const struct row_group *group) {
    for (int r = 0; r < GROUP && group->row + r < state->count; r++) {
        const float *exponents = group->exponents + r * BLOCK;
        lanes maximum = broadcast(-INFINITY);
        for (int64_t j = group->low; j < group->high; j += LANES) maximum = max_lanes(maximum, load(exponents + j));
        for (int64_t t = 0; t < reductions->topk_count; t++) {
            struct topk_rows row = topk_row(state->topks + t, group->row + r);
            int64_t k = reductions->topks[t].k;
            if (lanes_above(maximum, row.exponents[k - 1]))
                insert_row(row, k, exponents, group->low, group->high, group->column);
        }
    }
}

INLINE float sum_range(const float *entries, int64_t begin, int64_t end) {
    lanes sum = broadcast(0.0f);
    for (; begin + LANES <= end; begin += LANES) sum += load(entries + begin);
    float total = sum_lanes(sum);
    for (; begin < end; begin++) total += entries[begin];
    return total;
}

INLINE float max_range(const float *entries, int64_t begin, int64_t end) {
    float maximum = entries[begin];
    for (; begin < end; begin++) maximum = entries[begin] > maximum ? entries[begin] : maximum;
    return maximum;
}

/* Adds the columns of some rows of a tile, all of one cell of rows, to their cells. */
INLINE void flush_cells(const struct flash *problem, const struct reduction_state *state, const struct cell_map *map,
                        int64_t row, int64_t column) {
    int64_t strips = problem->reductions->strips, cell = map->row_cells[row];
    if (cell < 0) return;
    int continued = cell == map->continued[state->strip];
    int64_t first = (continued ? state->pair * strips + state->strip : state->pair * map->height + cell) * map->width;
    double *sums = continued ? map->continued_sums : map->sums;
    float *maxima = continued ? map->continued_maxima : map->maxima;
    for (int64_t p = map->first_pieces[column / BLOCK]; p < map->first_pieces[column / BLOCK + 1]; p++) {
        const int32_t *piece = map->pieces + 3 * p;
        if (map->sums) {
            sums[first + piece[2]] += (double)sum_range(state->column_sums[map->term], piece[0], piece[1]);
        } else {
            float maximum = max_range(state->column_maxima, piece[0], piece[1]), *target = maxima + first + piece[2];
            *target = maximum > *target ? maximum : *target;
        }
    }
}

/* Adds what the columns of a tile have summed since the last cut to the results; `row` is the last of those rows. */
static void flush_columns(const struct flash *problem, struct reduction_state *state, int64_t row, int64_t column) {
    const struct reductions *reductions = problem->reductions;
    if (!state->pending) return;
    for (int64_t m = 0; m < reductions->map_count; m++) flush_cells(problem, state, reductions->maps + m, row, column);
    for (int t = 0; t < TERM_COUNT; t++) {
        if (!state->column_sums[t]) continue;
        if (reductions->column_sums[t]) {
            int64_t first = (state->pair * reductions->strips + state->strip) * problem->columns + column;
            double *target = reductions->column_sums[t] + first;
            for (int64_t j = 0; j < min_int(problem->columns - column, BLOCK); j++)
                target[j] += (double)state->column_sums[t][j];
        }
        memset(state->column_sums[t], 0, BLOCK * sizeof(float));
    }
    if (state->column_maxima) memset(state->column_maxima, 0, BLOCK * sizeof(float));
    state->pending = 0;
}

/* Products become exponents: scaled, capped, with the bias, less the log-sum-exp; -infinity where there is no pair. */
INLINE void finish_exponents(const struct flash *problem, const struct reduction_state *state,
                             const struct row_group *group, const uint64_t *words, const int partial) {
    int64_t count = min_int(problem->columns - group->column, BLOCK);
    const float factor = score_factor(problem, in_pairs((int)problem->dtype));
    const int raw = problem->softcap == 0.0f && !problem->relative_bias;
    for (int r = 0; r < GROUP; r++) {
        const float *bias = row_bias(problem, state->head, state->begin + group->row + r, group->column);
        float *exponents = group->exponents + r * BLOCK, shift = state->shift[group->row + r];
        for (int64_t j = group->low; j < group->high; j += LANES) {
            lanes score = load(exponents + j) * factor;
            if (!raw) score = apply_softcap(problem, score, 0);
            if (bias && j < count) score += load_partial(bias + j, count - j);
            lanes exponent = score - shift;
            if (partial) exponent = select_bits(words[r], j, exponent, -INFINITY);
            store(exponents + j, exponent);
            if (state->needs_weights) store(group->weights + r * BLOCK + j, exp2_lanes(exponent));
        }
    }
}

/* Sums and maxima of a group's columns; cuts: a bit for each of its rows after which they are added to the results. */
INLINE void reduce_columns(const struct flash *problem, struct reduction_state *state, const struct row_group *group,
                           uint32_t cuts) {
    const int rows = (int)min_int(state->count - group->row, GROUP);
    for (int first = 0, end; first < rows; first = end) {
        uint32_t later = cuts >> first;
        end = later ? first + __builtin_ctz(later) + 1 : rows;
        add_columns(problem->reductions, state, group, first, end);
        if (later) flush_columns(problem, state, state->begin + group->row + end - 1, group->column);
    }
}

/* The products of a group of rows with one block of keys. */
INLINE void group_products(const struct flash *problem, const struct reduction_state *state,
                           const struct row_group *group, const int paired) {
    int64_t padded = padded_terms(problem->dim, paired);
    struct factor query = {state->query + group->row * padded, padded, 1};
    for (int64_t j = group->low; j < group->high; j += PAIR)
        add_terms(query, (struct vectors){state->keys + j, BLOCK, 0, term_count(problem->dim, paired)},
                  group->exponents + j, BLOCK, 0, paired);
}

/* A group of rows with one block of keys. */
static void reduce_row_group(const struct flash *problem, struct reduction_state *state, int64_t row, int64_t column,
                              const uint64_t *words, const struct extent extent, uint32_t cuts) {
    const struct reductions *reductions = problem->reductions;
    float exponents[GROUP * BLOCK] ALIGNED, weights[GROUP * BLOCK] ALIGNED;
    struct row_group group = {row, column, aligned_begin(extent), aligned_end(extent), exponents, weights};
    if (in_pairs((int)problem->dtype))
        group_products(problem, state, &group, 1);
    else
        group_products(problem, state, &group, 0);
    if (extent.partial)
        finish_exponents(problem, state, &group, words, 1);
    else
        finish_exponents(problem, state, &group, words, 0);
    if (reductions->topk_count) update_topk(reductions, state, &group);
    if (reductions->distances)
        for (int r = 0; r < GROUP && row + r < state->count; r++)
            add_to_histogram(reductions, state, &group, r);
    add_rows(reductions, state, &group);
    if (state->has_columns) reduce_columns(problem, state, &group, cuts);
}

/* Finds the bins that the distances of a tile lie in. */
INLINE void start_bins(const struct distances *distances, struct reduction_state *state, int64_t block,
                       int64_t column) {
    const float *rows = distances->row_ranges + 2 * (state->begin / BLOCK + block);
    const float *columns = distances->column_ranges + 2 * (column / BLOCK), *edges = distances->edges;
    float after = rows[0] - columns[1], before = columns[0] - rows[1];
    float near = after > before ? after : before;
    float far = rows[1] - columns[0] > columns[1] - rows[0] ? rows[1] - columns[0] : columns[1] - rows[0];
    for (state->first_bin = 0; edges[state->first_bin + 1] <= near; state->first_bin++);
    for (state->last_bin = state->first_bin; edges[state->last_bin + 1] <= far; state->last_bin++);
}

/* Adds a tile's sums by distance to the results. */
INLINE void flush_bins(const struct distances *distances, const struct reduction_state *state, int64_t strips) {
    double *target = distances->histogram + (state->pair * strips + state->strip) * distances->bins;
    for (int64_t b = state->first_bin; b <= state->last_bin; b++) {
        target[b] += (double)sum_lanes(load(state->bins + b * LANES));
        store(state->bins + b * LANES, broadcast(0.0f));
    }
}

/* A block of rows with one block of keys. */
INLINE void process_tile(const struct flash *problem, struct reduction_state *state, int64_t block, int64_t column,
                         const uint64_t *words) {
    int64_t first = block * BLOCK, count = min_int(problem->columns - column, BLOCK);
    uint64_t all = count < BLOCK ? ((uint64_t)1 << count) - 1 : ~(uint64_t)0;
    uint64_t cuts = problem->reductions->cuts[state->begin / BLOCK + block];
    const struct distances *distances = problem->reductions->distances;
    if (distances) start_bins(distances, state, block, column);
    for (int64_t row = 0; row < BLOCK && first + row < state->count; row += GROUP) {
        uint64_t group_words[GROUP], any = 0, common = ~(uint64_t)0;
        for (int r = 0; r < GROUP; r++) {
            group_words[r] = state->active[block] >> (row + r) & 1 ? (words ? words[row + r] & all : all) : 0;
            any |= group_words[r], common &= group_words[r];
        }
        uint32_t group_cuts = cuts >> row & ((1u << GROUP) - 1);
        if (!any) {
            if (group_cuts)
                flush_columns(problem, state, state->begin + first + row + __builtin_ctz(group_cuts), column);
            continue;
        }
        struct extent extent = {common != ~(uint64_t)0, __builtin_ctzll(any), BLOCK - __builtin_clzll(any)};
        reduce_row_group(problem, state, first + row, column, group_words, extent, group_cuts);
    }
    if (distances) flush_bins(distances, state, problem->reductions->strips);
}

/* Adds the rows' sums to the results. */
static void flush_rows(const struct flash *problem, const struct reduction_state *state) {
    for (int t = 0; t < TERM_COUNT; t++) {
        if (!state->row_sums[t]) continue;
        double *target = problem->reductions->row_sums[t] + state->pair * problem->rows + state->begin;
        for (int64_t row = 0; row < state->count; row++)
            target[row] += (double)sum_lanes(load(state->row_sums[t] + row * LANES));
        memset(state->row_sums[t], 0, (size_t)(state->blocks * BLOCK * LANES) * sizeof(float));
    }
}

static void start_rows(const struct flash *problem, struct reduction_state *state) {
    int64_t padded = padded_terms(problem->dim, in_pairs((int)problem->dtype));
    memset(state->active, 0, sizeof(state->active));
    memset(state->shift, 0, (size_t)(state->blocks * BLOCK) * sizeof(float));
    for (int64_t row = 0; row < state->count; row++) {
        float lse = *row_number(&problem->lse, state->batch, state->head, state->begin + row);
        if (lse - lse != 0.0f) continue; /* it attends to nothing, or to NaN */
        state->shift[row] = LOG2_E * lse;
        state->active[row / BLOCK] |= (uint64_t)1 << row % BLOCK;
    }
    for (int64_t row = 0; row < state->blocks * BLOCK; row += BLOCK) {
        int64_t count = min_int(state->count - row, BLOCK), first = state->begin + row;
        const void *query = head_rows(&problem->query, state->batch, state->head, first, (int)problem->dtype);
        float factor = query_factor(problem), *target = state->query + row * padded;
        BY_DTYPE(problem->dtype, pack_row_terms(query, problem->query.row, count, problem->dim, factor, target, DTYPE,
                                                in_pairs(DTYPE)));
    }
    for (int64_t t = 0; t < problem->reductions->topk_count; t++)
        for (int64_t n = 0; n < state->count * state->topks[t].count; n++)
            state->topks[t].exponents[n] = -127.0f, state->topks[t].columns[n] = -1; /* smaller ones have weight 0 */
}

static void finish_rows(const struct flash *problem, const struct reduction_state *state) {
    flush_rows(problem, state);
    for (int64_t t = 0; t < problem->reductions->topk_count; t++) {
        const struct topk *topk = problem->reductions->topks + t;
        for (int64_t row = 0; row < state->count; row++) {
            struct topk_rows found = topk_row(state->topks + t, row);
            int64_t first = (state->pair * problem->rows + state->begin + row) * topk->k;
            for (int64_t n = 0; n < topk->k; n += LANES)
                store_partial(topk->weights + first + n, exp2_lanes(load(found.exponents + n)), topk->k - n);
            for (int64_t n = 0; n < topk->k; n++) topk->columns[first + n] = found.columns[n];
        }
    }
}

/* Some blocks of rows with all keys that their mask leaves: each block of keys is packed once. */
static void reduce_row_blocks(const struct flash *problem, struct reduction_state *state) {
    struct cursor cursors[MOST_BLOCKS];
    start_rows(problem, state);
    for (int64_t b = 0; b < state->blocks; b++) cursors[b] = first_tile(problem, state->begin / BLOCK + b);
    for (int64_t visited = 1;; visited++) {
        int64_t column = INT64_MAX, key_head = state->head / problem->group;
        for (int64_t b = 0; b < state->blocks; b++) column = min_int(column, cursors[b].column);
        if (column == INT64_MAX) break;
        int64_t count = min_int(problem->columns - column, BLOCK);
        const void *keys = head_rows(&problem->key, state->batch, key_head, column, (int)problem->dtype);
        BY_DTYPE(problem->dtype,
                 pack_transposed_terms(keys, problem->key.row, count, problem->dim, 1.0f, state->keys, BLOCK, DTYPE,
                                       in_pairs(DTYPE)));
        for (int64_t b = 0; b < state->blocks; b++) {
            if (cursors[b].column != column) continue;
            int64_t tile = next_tile(problem, cursors + b);
            process_tile(problem, state, b, column, tile_words(problem, state->batch, state->head, tile));
        }
        if (visited % BLOCKS_IN_FLOAT32 == 0) flush_rows(problem, state);
    }
    finish_rows(problem, state);
}

/* Takes one strip of one head after another while any is left; any number of threads may call it at once. */
void EXPORTED(regard_flash_reductions)(struct flash *problem) {
    LEAVE_UNLESS(problem->dtype == BFLOAT16, regard_flash_reductions, problem);
    const int64_t *strip_blocks = problem->reductions->strip_blocks, strips = problem->reductions->strips;
    float *memory = aligned_memory(state_floats(problem) * 4);
    if (!memory) {
        problem->failed = 1;
        return;
    }
    struct reduction_state state = allocate_state(problem, memory);
    int64_t unit;
    while ((unit = __atomic_fetch_add(&problem->next_unit, 1, __ATOMIC_RELAXED)) < problem->unit_count) {
        state.pair = unit / strips, state.strip = unit % strips;
        state.batch = state.pair / problem->heads, state.head = state.pair % problem->heads;
        int64_t end = strip_blocks[state.strip + 1];
        for (int64_t block = strip_blocks[state.strip]; block < end; block += problem->row_blocks) {
            state.blocks = min_int(problem->row_blocks, end - block), state.begin = block * BLOCK;
            state.count = min_int(problem->rows - state.begin, state.blocks * BLOCK);
            reduce_row_blocks(problem, &state);
        }
    }
    free_aligned(memory);
}
