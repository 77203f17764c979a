/* Attention whose weights are 0 below a threshold of each row: the keys above it are found in one pass over the tiles, and
 * all that follows reads these alone. */
#include "threshold.h"
#include "tile.h"

/* The keys of a row that may have weight, and the largest threshold that is known to be none too large. */
struct kept {
    float *scores;       /* and then the roots of the weights, or the weights: see weight_of */
    int32_t *columns;    /* ascending */
    float *grad_weights; /* backward */
    int64_t count, room, most; /* most: at how many those below the threshold are left out again */
    int64_t begin, end;  /* those of a span of columns */
    int64_t whole;       /* whether all keys are kept from some column on, as nearly all are above the threshold */
    float threshold, maximum;
};

/* The state of a thread for some blocks of rows of one head. */
struct row_state {
    float *query; /* [rows][padded dim], scaled */
    float *keys;  /* [dim][BLOCK] */
    float *above; /* [rows][padded value dim]: forward the output, backward its gradient */
    float *grad_query; /* [rows][padded dim] */
    float *key_rows, *value_rows;    /* of rows with many keys, of BLOCK keys: [BLOCK][padded dim or value dim] */
    float *value_columns;            /* [value dim][BLOCK] */
    float *grad_key, *grad_value;    /* [BLOCK][padded dim or value dim] */
    float *weights, *grad_scores;    /* [BLOCK][BLOCK] */
    struct kept *kept; /* [rows] */
    lanes check;
    int64_t batch, head, begin, count, failed;
    int64_t dense; /* the columns with keys of weight, where these are so many that products of tiles are faster; else 0 */
};

/* SPAN: of columns, whose keys, values and gradients stay in the cache while all rows pass over them. */
enum { FIRST_ROOM = 256, UNCLEANED = 64, MOST_STEPS = 40, SPAN = 256, DENSE_SHARE = 6, LEAST_WHOLE = 192 };

INLINE int make_room(struct kept *kept) {
    int64_t room = kept->room ? 2 * kept->room : FIRST_ROOM;
    float *scores = realloc(kept->scores, (size_t)(room + BLOCK + LANES) * sizeof(float));
    if (scores) kept->scores = scores;
    int32_t *columns = realloc(kept->columns, (size_t)(room + BLOCK + LANES) * sizeof(int32_t));
    if (columns) kept->columns = columns;
    if (!scores || !columns) return 0;
    kept->room = room;
    return 1;
}

/* One step of Newton's method from below, for the threshold at which the norm of what scores have above it is 1, the sum,
 * or of squares the root of theirs. That is convex, so no step goes too far. Returns its length. */
INLINE float raise_threshold(struct kept *kept, const int64_t squared) {
    lanes sum = {0}, other = {0}, threshold = broadcast(kept->threshold);
    if (!kept->count) return 0.0f;
    store(kept->scores + kept->count, broadcast(-INFINITY));
    for (int64_t u = 0; u < kept->count; u += LANES) {
        lanes above = max_lanes(load(kept->scores + u) - threshold, broadcast(0.0f));
        sum += above;
        other += squared ? above * above : (lanes)((above > 0.0f) & (bits)broadcast(1.0f));
    }
    float all = sum_lanes(sum), norm = squared ? sqrtf(sum_lanes(other)) : all;
    float step = (norm - 1.0f) / (squared ? all / norm : sum_lanes(other));
    if (!(step > 0.0f)) return 0.0f; /* NaN, too, where there is none above */
    kept->threshold += step;
    return step;
}

/* A bit for each lane that is above a number. */
INLINE uint32_t lanes_above(lanes values, float least) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)values, _mm512_set1_ps(least), _CMP_GT_OQ);
#elif defined(__AVX__)
    return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps((__m256)values, _mm256_set1_ps(least), _CMP_GT_OQ));
#else
    uint32_t found = 0;
    for (int lane = 0; lane < LANES; lane++) found |= (uint32_t)(values[lane] > least) << lane;
    return found;
#endif
}

/* How many of the first `count` of ascending numbers are below a limit. */
INLINE int64_t count_below(bits ascending, int64_t count, int32_t limit) {
#if defined(__AVX512F__)
    uint32_t below = _mm512_cmplt_epi32_mask((__m512i)ascending, _mm512_set1_epi32(limit));
    return __builtin_popcount(below & (((uint32_t)1 << count) - 1));
#elif defined(__AVX2__)
    uint32_t below = (uint32_t)_mm256_movemask_ps((__m256)(ascending < limit));
    return __builtin_popcount(below & (((uint32_t)1 << count) - 1));
#else
    int64_t found = 0;
    while (found < count && ascending[found] < limit) found++;
    return found;
#endif
}

/* Appends the keys of LANES scores whose bits are set; more than these may be overwritten behind them. */
INLINE void append_lanes(struct kept *kept, lanes scores, bits columns, uint32_t found) {
#if defined(__AVX512F__)
    store(kept->scores + kept->count, (lanes)_mm512_maskz_compress_ps((__mmask16)found, (__m512)scores));
    _mm512_storeu_si512(kept->columns + kept->count, _mm512_maskz_compress_epi32((__mmask16)found, (__m512i)columns));
    kept->count += __builtin_popcount(found);
#else
    for (; found; found &= found - 1) {
        int lane = __builtin_ctz(found);
        kept->scores[kept->count] = scores[lane], kept->columns[kept->count++] = columns[lane];
    }
#endif
}

INLINE bits lane_numbers(void) {
    bits numbers;
    for (int lane = 0; lane < LANES; lane++) numbers[lane] = lane;
    return numbers;
}

/* Whether at least three quarters of some keys are kept. */
INLINE int are_nearly_all(int64_t count, int64_t all) { return 4 * count > 3 * all; }

/* Leaves out the keys that are not above a number, and again when there are twice as many; where few were left out, as
 * of nearly equal scores, four times. */
INLINE void keep_above(struct kept *kept, float least) {
    int64_t all = kept->count;
    kept->count = 0;
    for (int64_t u = 0; u < all; u += LANES) {
        uint32_t within = all - u < LANES ? ((uint32_t)1 << (all - u)) - 1 : ~(uint32_t)0;
        lanes scores = load(kept->scores + u);
        append_lanes(kept, scores, load_bits(kept->columns + u), lanes_above(scores, least) & within);
    }
    kept->whole = kept->whole && are_nearly_all(kept->count, all);
    kept->most = (are_nearly_all(kept->count, all) ? 4 : 2) * kept->count + UNCLEANED;
}

/* Adds the keys of a tile whose scores are above the threshold to those that a row keeps, or all of them. */
INLINE int append_above(struct kept *kept, const float *scores, int64_t column, const struct extent extent) {
    if (kept->count + BLOCK > kept->room && !make_room(kept)) return 0;
    for (int64_t j = aligned_begin(extent); j < extent.end; j += LANES) {
        lanes found = load(scores + j);
        bits columns = lane_numbers() + (int32_t)(column + j);
        if (kept->whole) {
            store(kept->scores + kept->count, found);
            memcpy(kept->columns + kept->count, &columns, sizeof columns);
            kept->count += min_int(extent.end - j, LANES);
        } else
            append_lanes(kept, found, columns, lanes_above(found, kept->threshold));
    }
    if (kept->count >= LEAST_WHOLE) kept->whole = are_nearly_all(kept->count, column + extent.end - kept->columns[0]);
    return 1;
}

/* Forward: the threshold rises with the keys, and those below it are left out again. */
INLINE int keep_keys(struct kept *kept, const float *scores, float maximum, int64_t column, const struct extent extent,
                     const int64_t squared) {
    if (maximum > kept->maximum) {
        kept->maximum = maximum;
        if (maximum - 1.0f > kept->threshold) kept->threshold = maximum - 1.0f;
    }
    if (!append_above(kept, scores, column, extent)) return 0;
    if (kept->count > kept->most) {
        float before = kept->threshold;
        raise_threshold(kept, squared), raise_threshold(kept, squared);
        /* A little less: sums of more keys are rounded in another way. */
        kept->threshold = kept->threshold - 1e-6f > before ? kept->threshold - 1e-6f : before;
        keep_above(kept, kept->threshold);
    }
    return 1;
}

/* Products become scores, whose largest in each lane are returned. */
INLINE lanes finish_row(const struct extent extent, uint64_t word, const float *relative_bias, float *row) {
    lanes limit = broadcast(-INFINITY);
    if (!relative_bias && !extent.partial) {
        for (int64_t j = 0; j < BLOCK; j += LANES) limit = max_lanes(limit, load(row + j));
        return limit;
    }
    for (int64_t j = aligned_begin(extent); j < aligned_end(extent); j += LANES) {
        lanes score = load(row + j);
        if (relative_bias && j < extent.end) score += load_partial(relative_bias + j, extent.end - j);
        if (extent.partial) score = select_bits(word, j, score, -INFINITY);
        store(row + j, score);
        limit = max_lanes(limit, score);
    }
    return limit;
}

INLINE float largest_lane(lanes values) {
    float apart[LANES], largest = -INFINITY;
    store(apart, values);
    for (int lane = 0; lane < LANES; lane++) largest = apart[lane] > largest ? apart[lane] : largest;
    return largest;
}

/* One tile of a block of rows. forward: whether thresholds are still to be found. */
INLINE void process_keys(const struct threshold *problem, struct row_state *state, int64_t block, int64_t column,
                         const uint64_t *words, const int forward) {
    const struct flash *tiles = &problem->tiles;
    int64_t count = min_int(tiles->columns - column, BLOCK), padded = padded_dim(tiles->dim);
    float tile[GROUP * BLOCK] ALIGNED;
    for (int64_t row = 0; row < BLOCK && block + row < state->count; row += GROUP) {
        struct extent extent = tile_extent(words ? words + row : 0, count);
        if (extent.begin >= extent.end) continue;
        int64_t low = aligned_begin(extent), high = aligned_end(extent);
        struct factor query = {state->query + (block + row) * padded, padded, 1};
        for (int64_t j = low; j < high; j += PAIR)
            add_product(query, (struct vectors){state->keys + j, BLOCK, 0, tiles->dim}, tile + j, BLOCK, 0);
        for (int64_t r = 0; r < GROUP && block + row + r < state->count; r++) {
            struct kept *kept = state->kept + block + row + r;
            const float *bias = row_bias(tiles, state->head, state->begin + block + row + r, column);
            uint64_t word = row_word(words ? words + row : 0, (int)r, count);
            float *scores = tile + r * BLOCK;
            lanes limit = finish_row(extent, word, bias, scores);
            if (!lanes_above(limit, kept->threshold)) continue;
            int kept_all = forward ? keep_keys(kept, scores, largest_lane(limit), column, extent, problem->squared)
                                   : append_above(kept, scores, column, extent);
            if (!kept_all) state->failed = 1;
        }
    }
}

/* All tiles of some blocks of rows. */
INLINE void process_tiles(const struct threshold *problem, struct row_state *state, const int forward, int dtype) {
    const struct flash *tiles = &problem->tiles;
    struct cursor cursors[MOST_BLOCKS];
    int64_t blocks = (state->count + BLOCK - 1) / BLOCK, padded = padded_dim(tiles->dim);
    const void *query = head_rows(&tiles->query, state->batch, state->head, state->begin, dtype);
    for (int64_t b = 0; b < blocks; b++) {
        cursors[b] = first_tile(tiles, state->begin / BLOCK + b);
        pack_rows(row_at(query, b * BLOCK, tiles->query.row, dtype), tiles->query.row,
                  min_int(state->count - b * BLOCK, BLOCK), tiles->dim, query_factor(tiles),
                  state->query + b * BLOCK * padded, dtype);
    }
    for (;;) {
        int64_t column = INT64_MAX;
        for (int64_t b = 0; b < blocks; b++) column = min_int(column, cursors[b].column);
        if (column == INT64_MAX) return;
        int64_t count = min_int(tiles->columns - column, BLOCK), key_head = state->head / tiles->group;
        pack_transposed(head_rows(&tiles->key, state->batch, key_head, column, dtype), tiles->key.row, count, tiles->dim,
                        1.0f, state->keys, BLOCK, dtype);
        for (int64_t b = 0; b < blocks; b++) {
            if (cursors[b].column != column) continue;
            const uint64_t *words = tile_words(tiles, state->batch, state->head, next_tile(tiles, cursors + b));
            process_keys(problem, state, b * BLOCK, column, words, forward);
        }
    }
}

INLINE int is_dropped(const struct flash *tiles, int32_t row_hash, int32_t column) {
    return !dropout_mask(tiles, (bits){0} + (row_hash + tiles->column_hashes[column]))[0];
}

/* The weight of what `finish_kept` leaves of a score, which is its root where weights are squares. */
INLINE float weight_of(float share, const int64_t squared) { return squared ? share * share : share; }

/* The power 2 - alpha of a weight, by which its score's gradient is that of the weight, less their mean. */
INLINE float slope_of(float share, const int64_t squared) { return squared ? share : share > 0.0f ? 1.0f : 0.0f; }

/* The scores of a row become weights, or `as_roots` their roots where weights are squares; after one more step of
 * `raise_threshold`, of a length that the threshold's rounding loses. */
INLINE void finish_kept(struct kept *kept, const int64_t squared, const int as_roots) {
    lanes sum = {0}, other = {0}, threshold = broadcast(kept->threshold);
    if (!kept->whole) keep_above(kept, kept->threshold);
    kept->begin = kept->end = 0;
    if (!kept->count) return;
    store(kept->scores + kept->count, threshold);
    for (int64_t u = 0; u < kept->count; u += LANES) {
        lanes above = max_lanes(load(kept->scores + u) - threshold, broadcast(0.0f));
        store(kept->scores + u, above);
        sum += above;
        other += squared ? above * above : (lanes)((above > 0.0f) & (bits)broadcast(1.0f));
    }
    float all = sum_lanes(sum), norm = squared ? sqrtf(sum_lanes(other)) : all;
    float rest = (norm - 1.0f) / (squared ? all / norm : sum_lanes(other));
    for (int64_t u = 0; u < kept->count; u += LANES) {
        lanes above = load(kept->scores + u), root = max_lanes(above - rest, broadcast(0.0f));
        root = (lanes)((above > 0.0f) & (bits)root);
        store(kept->scores + u, squared && !as_roots ? root * root : root);
    }
}

/* The columns up to the last key with weight of some rows, where there are so many that tiles are faster; else 0. */
INLINE int64_t dense_columns(const struct row_state *state) {
    int64_t keys = 0, last = 0;
    for (int64_t row = 0; row < state->count; row++) {
        const struct kept *kept = state->kept + row;
        keys += kept->count;
        if (kept->count && kept->columns[kept->count - 1] >= last) last = kept->columns[kept->count - 1] + 1;
    }
    return keys * DENSE_SHARE > state->count * last ? last : 0;
}

/* Moves on to the keys of a row in the next span of columns; whether there are any. */
INLINE int next_span(struct kept *kept, int64_t end) {
    int64_t more = LANES;
    for (kept->begin = kept->end; more == LANES && kept->end < kept->count; kept->end += more) {
        int64_t left = min_int(kept->count - kept->end, LANES);
        more = count_below(load_bits(kept->columns + kept->end), left, (int32_t)end);
    }
    return kept->begin < kept->end;
}

/* Whether the keys of a span are neighbours. */
INLINE int are_neighbours(const struct kept *kept) {
    return kept->begin < kept->end && kept->columns[kept->end - 1] - kept->columns[kept->begin] == kept->end - kept->begin - 1;
}

/* The threshold and the weights of a row, those that dropout leaves; 0 or NaN where a score is infinite. */
INLINE void find_weights(const struct threshold *problem, struct row_state *state, int64_t row) {
    const struct flash *tiles = &problem->tiles;
    struct kept *kept = state->kept + row;
    for (int step = 0; step < MOST_STEPS && raise_threshold(kept, problem->squared) > 3e-6f; step++) continue;
    *row_number(&tiles->lse, state->batch, state->head, state->begin + row) =
        kept->maximum == -INFINITY ? -INFINITY : kept->threshold;
    finish_kept(kept, problem->squared, 0);
    int32_t row_hash = row_hash_at(tiles, state->batch, state->head, state->begin + row);
    for (int64_t u = 0; tiles->row_hashes && u < kept->count; u++)
        kept->scores[u] *= is_dropped(tiles, row_hash, kept->columns[u]) ? 0.0f : 1.0f / tiles->keep_probability;
}

/* Adds the values of the keys of a row in a span to its output. */
INLINE void add_values(const struct threshold *problem, struct row_state *state, int64_t row, const void *values,
                       const int dtype) {
    enum { AT_A_TIME = 4 };
    const struct flash *tiles = &problem->tiles;
    struct kept *kept = state->kept + row;
    float *target = state->above + row * padded_dim(tiles->value_dim);
    for (int64_t a = 0; a < tiles->value_dim; a += AT_A_TIME * LANES) {
        lanes sum[AT_A_TIME] = {{0}};
        for (int64_t u = kept->begin; u < kept->end; u++) {
            const void *value = row_at(values, kept->columns[u], tiles->value.row, dtype);
            UNROLL for (int v = 0; v < AT_A_TIME; v++)
                sum[v] += kept->scores[u] * load_entries(value, a + v * LANES, tiles->value_dim, dtype, 0);
        }
        for (int v = 0; v < AT_A_TIME && a + v * LANES < tiles->value_dim; v++)
            store(target + a + v * LANES, load(target + a + v * LANES) + sum[v]);
    }
}

static const float ONES[GROUP] = {1, 1, 1, 1, 1, 1, 1, 1};

/* The same of all rows and BLOCK keys, by products of tiles. */
APART void add_tiles_of_values(const struct threshold *problem, struct row_state *state, int64_t column,
                               const void *values, int dtype) {
    const struct flash *tiles = &problem->tiles;
    int64_t padded = padded_dim(tiles->value_dim);
    pack_rows(row_at(values, column, tiles->value.row, dtype), tiles->value.row, min_int(tiles->columns - column, BLOCK),
              tiles->value_dim, 1.0f, state->value_rows, dtype);
    for (int64_t first = 0; first < state->count; first += GROUP) {
        float weights[GROUP * BLOCK] ALIGNED = {0};
        for (int64_t row = first; row < min_int(first + GROUP, state->count); row++) {
            struct kept *kept = state->kept + row;
            float *own = weights + (row - first) * BLOCK;
            next_span(kept, column + BLOCK);
            if (are_neighbours(kept))
                memcpy(own + kept->columns[kept->begin] - column, kept->scores + kept->begin,
                       (size_t)(kept->end - kept->begin) * sizeof(float));
            else
                for (int64_t u = kept->begin; u < kept->end; u++) own[kept->columns[u] - column] = kept->scores[u];
        }
        for (int64_t a = 0; a < padded; a += PAIR)
            add_product((struct factor){weights, BLOCK, 1}, (struct vectors){state->value_rows + a, padded, 0, BLOCK},
                        state->above + first * padded + a, padded, ONES);
    }
}

/* The output of all rows: span after span of the columns, sums over the keys with weight. */
INLINE void write_rows(const struct threshold *problem, struct row_state *state, const int dtype) {
    const struct flash *tiles = &problem->tiles;
    int64_t padded = padded_dim(tiles->value_dim);
    const void *values = head_rows(&tiles->value, state->batch, state->head / tiles->group, 0, dtype);
    memset(state->above, 0, (size_t)(state->count * padded) * sizeof(float));
    for (int64_t row = 0; row < state->count; row++) find_weights(problem, state, row);
    state->dense = dense_columns(state);
    for (int64_t column = 0; column < state->dense; column += BLOCK)
        add_tiles_of_values(problem, state, column, values, dtype);
    for (int64_t end = SPAN; !state->dense && end < tiles->columns + SPAN; end += SPAN)
        for (int64_t row = 0; row < state->count; row++)
            if (next_span(state->kept + row, end)) add_values(problem, state, row, values, dtype);
    for (int64_t row = 0; row < state->count; row++) {
        void *target = (void *)head_rows(&tiles->result, state->batch, state->head, state->begin + row, dtype);
        lanes infinite = broadcast(state->kept[row].maximum == INFINITY ? NAN : 0.0f);
        for (int64_t a = 0; a < tiles->value_dim; a += LANES) {
            lanes output = load(state->above + row * padded + a) + infinite;
            check_finite(&state->check, output);
            store_entries(target, a, tiles->value_dim, dtype, output);
        }
    }
}

TABLE_BY_DTYPE(write_rows_of, (const struct threshold *problem, struct row_state *state),
               write_rows(problem, state, DTYPE))

/* target += factor * source, of `dim` floats. */
INLINE void add_scaled(float *target, const float *source, float factor, int64_t dim) {
    int64_t a = 0;
    for (; a + LANES <= dim; a += LANES) store(target + a, load(target + a) + factor * load(source + a));
    if (a < dim) store_partial(target + a, load_partial(target + a, dim - a) + factor * load(source + a), dim - a);
}

/* grad_weight of the keys of a row in a span: products of the output's gradient and values. */
INLINE void weight_gradients(const struct threshold *problem, struct row_state *state, int64_t row, const void *values,
                             const int dtype) {
    const struct flash *tiles = &problem->tiles;
    struct kept *kept = state->kept + row;
    const float *above = state->above + row * padded_dim(tiles->value_dim);
    int32_t row_hash = row_hash_at(tiles, state->batch, state->head, state->begin + row);
    for (int64_t u = kept->begin; u < kept->end; u++) {
        const void *value = row_at(values, kept->columns[u], tiles->value.row, dtype);
        lanes sum = {0};
        for (int64_t a = 0; a < tiles->value_dim; a += LANES)
            sum += load(above + a) * load_entries(value, a, tiles->value_dim, dtype, 0);
        kept->grad_weights[u] = tiles->row_hashes && is_dropped(tiles, row_hash, kept->columns[u]) ? 0.0f : sum_lanes(sum);
    }
}

/* The same of all rows and BLOCK keys, by products of tiles. */
APART void tiles_of_weight_gradients(const struct threshold *problem, struct row_state *state, int64_t column,
                                     const void *values, int dtype) {
    const struct flash *tiles = &problem->tiles;
    int64_t padded = padded_dim(tiles->value_dim);
    pack_transposed(row_at(values, column, tiles->value.row, dtype), tiles->value.row,
                    min_int(tiles->columns - column, BLOCK), tiles->value_dim, 1.0f, state->value_columns, BLOCK, dtype);
    for (int64_t first = 0; first < state->count; first += GROUP) {
        float products[GROUP * BLOCK] ALIGNED;
        for (int64_t j = 0; j < BLOCK; j += PAIR)
            add_product((struct factor){state->above + first * padded, padded, 1},
                        (struct vectors){state->value_columns + j, BLOCK, 0, tiles->value_dim}, products + j, BLOCK, 0);
        for (int64_t row = first; row < min_int(first + GROUP, state->count); row++) {
            struct kept *kept = state->kept + row;
            int32_t row_hash = row_hash_at(tiles, state->batch, state->head, state->begin + row);
            const float *own = products + (row - first) * BLOCK;
            next_span(kept, column + BLOCK);
            if (are_neighbours(kept))
                memcpy(kept->grad_weights + kept->begin, own + kept->columns[kept->begin] - column,
                       (size_t)(kept->end - kept->begin) * sizeof(float));
            else
                for (int64_t u = kept->begin; u < kept->end; u++) kept->grad_weights[u] = own[kept->columns[u] - column];
            for (int64_t u = kept->begin; tiles->row_hashes && u < kept->end; u++)
                if (is_dropped(tiles, row_hash, kept->columns[u])) kept->grad_weights[u] = 0.0f;
        }
    }
}

/* grad_weight becomes grad_score = t (grad_weight - sum of t grad_weight / sum of t). */
APART void score_gradients(const struct threshold *problem, struct kept *kept) {
    lanes products = {0}, slopes = {0};
    kept->begin = kept->end = 0;
    if (!kept->count) return;
    store(kept->scores + kept->count, broadcast(0.0f)), store(kept->grad_weights + kept->count, broadcast(0.0f));
    for (int64_t u = 0; u < kept->count; u += LANES) {
        lanes gradient = load(kept->grad_weights + u), slope = load(kept->scores + u);
        if (!problem->squared) slope = (lanes)((slope > 0.0f) & (bits)broadcast(1.0f));
        products += slope * gradient, slopes += slope;
    }
    float all = sum_lanes(slopes), mean = all > 0.0f ? sum_lanes(products) / all : 0.0f;
    for (int64_t u = 0; u < kept->count; u++)
        kept->grad_weights[u] = slope_of(kept->scores[u], problem->squared) * (kept->grad_weights[u] - mean);
}

/* Where a part of the rows adds up the gradients of a key head. */
struct targets {
    float *keys, *values, *line; /* line: of the relative bias, from the diagonal of the first row's first column on */
    const void *key;
};

INLINE void add_row_gradients(const struct threshold *problem, struct row_state *state, int64_t row,
                              const struct targets *into, const int dtype) {
    const struct flash *tiles = &problem->tiles;
    struct kept *kept = state->kept + row;
    int64_t padded = padded_dim(tiles->dim);
    const float *query = state->query + row * padded, *above = state->above + row * padded_dim(tiles->value_dim);
    float *grad_query = state->grad_query + row * padded,
          per_query = query_factor(tiles) == 0.0f ? 0.0f : problem->score_scale / query_factor(tiles);
    float *line = into->line ? into->line + diagonal_index(tiles, state->begin + row, 0) : 0;
    int32_t row_hash = row_hash_at(tiles, state->batch, state->head, state->begin + row);
    for (int64_t u = kept->begin; u < kept->end; u++) {
        int64_t column = kept->columns[u];
        float grad = kept->grad_weights[u];
        if (line) line[column] += grad;
        const void *key = row_at(into->key, column, tiles->key.row, dtype);
        for (int64_t a = 0; a < tiles->dim; a += LANES)
            store(grad_query + a, load(grad_query + a) + grad * load_entries(key, a, tiles->dim, dtype, 0));
        add_scaled(into->keys + column * tiles->grad_key.row, query, grad * per_query, tiles->dim);
        if (!tiles->row_hashes || !is_dropped(tiles, row_hash, kept->columns[u]))
            add_scaled(into->values + column * tiles->grad_value.row, above, weight_of(kept->scores[u], problem->squared),
                       tiles->value_dim);
    }
}

/* The weights and the gradients of scores of a block of rows with BLOCK keys, as tiles. */
INLINE void spread_tiles(const struct threshold *problem, struct row_state *state, int64_t first, int64_t column,
                         const struct targets *into) {
    const struct flash *tiles = &problem->tiles;
    memset(state->weights, 0, BLOCK * BLOCK * sizeof(float));
    memset(state->grad_scores, 0, BLOCK * BLOCK * sizeof(float));
    for (int64_t row = first; row < min_int(first + BLOCK, state->count); row++) {
        struct kept *kept = state->kept + row;
        float *line = into->line ? into->line + diagonal_index(tiles, state->begin + row, 0) : 0;
        int32_t row_hash = row_hash_at(tiles, state->batch, state->head, state->begin + row);
        float *grad_scores = state->grad_scores + (row - first) * BLOCK - column,
              *weights = state->weights + (row - first) * BLOCK - column;
        next_span(kept, column + BLOCK);
        if (are_neighbours(kept)) {
            int64_t at = kept->columns[kept->begin], count = kept->end - kept->begin;
            const float *roots = kept->scores + kept->begin;
            memcpy(grad_scores + at, kept->grad_weights + kept->begin, (size_t)count * sizeof(float));
            for (int64_t u = 0; u < count; u++) weights[at + u] = weight_of(roots[u], problem->squared);
        } else
            for (int64_t u = kept->begin; u < kept->end; u++) {
                grad_scores[kept->columns[u]] = kept->grad_weights[u];
                weights[kept->columns[u]] = weight_of(kept->scores[u], problem->squared);
            }
        for (int64_t u = kept->begin; tiles->row_hashes && u < kept->end; u++)
            if (is_dropped(tiles, row_hash, kept->columns[u])) weights[kept->columns[u]] = 0.0f;
        for (int64_t u = kept->begin; line && u < kept->end; u++) line[kept->columns[u]] += kept->grad_weights[u];
    }
}

/* What `add_row_gradients` adds, of all rows and BLOCK keys, by products of tiles. */
APART void add_tiles_of_gradients(const struct threshold *problem, struct row_state *state, int64_t column,
                                  const struct targets *into, int dtype) {
    const struct flash *tiles = &problem->tiles;
    int64_t padded = padded_dim(tiles->dim), value_padded = padded_dim(tiles->value_dim),
            count = min_int(tiles->columns - column, BLOCK);
    float per_query = query_factor(tiles) == 0.0f ? 0.0f : problem->score_scale / query_factor(tiles);
    pack_rows(row_at(into->key, column, tiles->key.row, dtype), tiles->key.row, count, tiles->dim, 1.0f, state->key_rows,
              dtype);
    memset(state->grad_key, 0, (size_t)(BLOCK * padded) * sizeof(float));
    memset(state->grad_value, 0, (size_t)(BLOCK * value_padded) * sizeof(float));
    for (int64_t first = 0; first < state->count; first += BLOCK) {
        spread_tiles(problem, state, first, column, into);
        for (int64_t r = 0; r < BLOCK; r += GROUP) {
            for (int64_t a = 0; a < padded; a += PAIR)
                add_product((struct factor){state->grad_scores + r * BLOCK, BLOCK, 1},
                            (struct vectors){state->key_rows + a, padded, 0, BLOCK},
                            state->grad_query + (first + r) * padded + a, padded, ONES);
            for (int64_t a = 0; a < padded; a += PAIR)
                add_product((struct factor){state->grad_scores + r, 1, BLOCK},
                            (struct vectors){state->query + first * padded + a, padded, 0, BLOCK},
                            state->grad_key + r * padded + a, padded, ONES);
            for (int64_t a = 0; a < value_padded; a += PAIR)
                add_product((struct factor){state->weights + r, 1, BLOCK},
                            (struct vectors){state->above + first * value_padded + a, value_padded, 0, BLOCK},
                            state->grad_value + r * value_padded + a, value_padded, ONES);
        }
    }
    for (int64_t j = 0; j < count; j++) {
        add_scaled(into->keys + (column + j) * tiles->grad_key.row, state->grad_key + j * padded, per_query, tiles->dim);
        add_scaled(into->values + (column + j) * tiles->grad_value.row, state->grad_value + j * value_padded, 1.0f,
                   tiles->value_dim);
    }
}

/* The rows of whole blocks. */
INLINE int64_t rows_of(const struct row_state *state) { return (state->count + BLOCK - 1) / BLOCK * BLOCK; }

/* Prepares rows for their gradients: the weights, memory for those of each, the gradient of the output. */
APART void start_gradients(const struct threshold *problem, struct row_state *state, int dtype) {
    const struct flash *tiles = &problem->tiles;
    int64_t padded = padded_dim(tiles->value_dim);
    const void *above = head_rows(&tiles->grad_output, state->batch, state->head, state->begin, dtype);
    for (int64_t first = 0; first < state->count; first += BLOCK)
        pack_rows(row_at(above, first, tiles->grad_output.row, dtype), tiles->grad_output.row,
                  min_int(state->count - first, BLOCK), tiles->value_dim, 1.0f / tiles->keep_probability,
                  state->above + first * padded, dtype);
    memset(state->grad_query, 0, (size_t)(rows_of(state) * padded_dim(tiles->dim)) * sizeof(float));
    for (int64_t row = 0; row < state->count; row++) {
        struct kept *kept = state->kept + row;
        finish_kept(kept, problem->squared, 1);
        float *grad_weights = realloc(kept->grad_weights, (size_t)(kept->count + LANES) * sizeof(float));
        if (grad_weights)
            kept->grad_weights = grad_weights;
        else
            kept->count = 0, state->failed = 1;
    }
}

/* The gradients that some rows give and get through the keys with weight, span after span of the columns. */
INLINE void rows_gradients(const struct threshold *problem, struct row_state *state, int64_t part, const int dtype) {
    const struct flash *tiles = &problem->tiles;
    int64_t key_head = state->head / tiles->group, padded = padded_dim(tiles->dim);
    const void *values = head_rows(&tiles->value, state->batch, key_head, 0, dtype);
    struct targets into = {row_number(&tiles->grad_key, state->batch, key_head, 0) + part * problem->grad_key_part,
                           row_number(&tiles->grad_value, state->batch, key_head, 0) + part * problem->grad_value_part,
                           0, head_rows(&tiles->key, state->batch, key_head, 0, dtype)};
    if (tiles->grad_relative_bias)
        into.line = tiles->grad_relative_bias +
                    ((state->batch * tiles->heads + state->head) * problem->row_parts + part) *
                        (tiles->rows + tiles->columns - 1);
    start_gradients(problem, state, dtype);
    state->dense = dense_columns(state);
    for (int64_t column = 0; column < state->dense; column += BLOCK)
        tiles_of_weight_gradients(problem, state, column, values, dtype);
    for (int64_t end = SPAN; !state->dense && end < tiles->columns + SPAN; end += SPAN)
        for (int64_t row = 0; row < state->count; row++)
            if (next_span(state->kept + row, end)) weight_gradients(problem, state, row, values, dtype);
    for (int64_t row = 0; row < state->count; row++) score_gradients(problem, state->kept + row);
    for (int64_t column = 0; column < state->dense; column += BLOCK)
        add_tiles_of_gradients(problem, state, column, &into, dtype);
    for (int64_t end = SPAN; !state->dense && end < tiles->columns + SPAN; end += SPAN)
        for (int64_t row = 0; row < state->count; row++)
            if (next_span(state->kept + row, end)) add_row_gradients(problem, state, row, &into, dtype);
    for (int64_t row = 0; row < state->count; row++)
        add_scaled(row_number(&tiles->grad_query, state->batch, state->head, state->begin + row),
                   state->grad_query + row * padded, problem->score_scale, tiles->dim);
}

TABLE_BY_DTYPE(rows_gradients_of, (const struct threshold *problem, struct row_state *state, int64_t part),
               rows_gradients(problem, state, part, DTYPE))

INLINE void forget_rows(struct row_state *state) {
    for (int64_t row = 0; row < state->count; row++) {
        struct kept *kept = state->kept + row;
        kept->count = kept->whole = 0, kept->most = UNCLEANED, kept->threshold = kept->maximum = -INFINITY;
    }
}

/* Memory for blocks of rows; what it could not get is null. */
INLINE struct row_state take_state(const struct flash *tiles, int64_t rows) {
    int64_t padded = padded_dim(tiles->dim), value_padded = padded_dim(tiles->value_dim);
    int64_t floats = (2 * rows + 3 * BLOCK) * padded + (rows + 3 * BLOCK) * value_padded + 2 * BLOCK * BLOCK + 12 * 16;
    float *memory = aligned_memory(floats * 4);
    struct row_state state = {.query = memory, .kept = calloc((size_t)rows, sizeof(struct kept)), .check = {0}};
    if (!memory) return state;
    take_floats(&memory, rows * padded);
    state.keys = take_floats(&memory, BLOCK * padded), state.above = take_floats(&memory, rows * value_padded);
    state.grad_query = take_floats(&memory, rows * padded), state.key_rows = take_floats(&memory, BLOCK * padded);
    state.value_rows = take_floats(&memory, BLOCK * value_padded);
    state.value_columns = take_floats(&memory, BLOCK * value_padded);
    state.grad_key = take_floats(&memory, BLOCK * padded), state.grad_value = take_floats(&memory, BLOCK * value_padded);
    state.weights = take_floats(&memory, BLOCK * BLOCK), state.grad_scores = take_floats(&memory, BLOCK * BLOCK);
    return state;
}

INLINE int has_memory(const struct row_state *state) { return state->query && state->kept; }

INLINE void finish_state(struct flash *tiles, struct row_state *state, int64_t rows) {
    if (!has_memory(state) || state->failed) tiles->failed = 1;
    for (int64_t row = 0; state->kept && row < rows; row++)
        free(state->kept[row].scores), free(state->kept[row].columns), free(state->kept[row].grad_weights);
    finish_check(tiles, state->check);
    free_aligned(state->query), free(state->kept);
}

/* Takes some blocks of rows of one head after another while any is left; any number of threads may call it at once. */
void EXPORTED(regard_threshold)(struct threshold *problem) {
    struct flash *tiles = &problem->tiles;
    const int dtype = (int)tiles->dtype;
    int64_t rows = tiles->row_blocks * BLOCK, units = (tiles->rows + rows - 1) / rows, number;
    struct row_state state = take_state(tiles, rows);
    while (has_memory(&state) &&
           (number = __atomic_fetch_add(&tiles->next_unit, 1, __ATOMIC_RELAXED)) < tiles->unit_count) {
        state.batch = number / units / tiles->heads, state.head = number / units % tiles->heads;
        state.begin = number % units * rows, state.count = min_int(tiles->rows - state.begin, rows);
        forget_rows(&state);
        process_tiles(problem, &state, 1, dtype);
        write_rows_of[dtype](problem, &state);
    }
    finish_state(tiles, &state, rows);
}

/* The gradients of one part of the rows of all query heads of a key head, which are added to; their numbers are read for
 * NaN by the caller. */
void EXPORTED(regard_threshold_backward)(struct threshold *problem) {
    struct flash *tiles = &problem->tiles;
    const int dtype = (int)tiles->dtype;
    int64_t rows = tiles->row_blocks * BLOCK, units = (tiles->rows + rows - 1) / rows, parts = problem->row_parts,
            key_heads = tiles->heads / tiles->group, number;
    struct row_state state = take_state(tiles, rows);
    while (has_memory(&state) &&
           (number = __atomic_fetch_add(&tiles->next_unit, 1, __ATOMIC_RELAXED)) < tiles->unit_count) {
        int64_t part = number % parts, key_head = number / parts % key_heads;
        state.batch = number / parts / key_heads;
        for (int64_t head = key_head * tiles->group; head < (key_head + 1) * tiles->group; head++)
            for (int64_t unit = units * part / parts; unit < units * (part + 1) / parts; unit++) {
                state.head = head, state.begin = unit * rows, state.count = min_int(tiles->rows - state.begin, rows);
                forget_rows(&state);
                for (int64_t row = 0; row < state.count; row++)
                    state.kept[row].threshold = *row_number(&tiles->lse, state.batch, head, state.begin + row);
                process_tiles(problem, &state, 0, dtype);
                rows_gradients_of[dtype](problem, &state, part);
            }
    }
    finish_state(tiles, &state, rows);
}
