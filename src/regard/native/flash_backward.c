/* The gradients of dot-product attention: a block of keys meets the blocks of rows that attend to it, column of tiles
 * after column, so that the gradients of keys and values are summed up where they are. */
#include "blocks.h"

/* What a thread keeps of the key head that it is at. */
struct gradient {
    float *delta, *lse;            /* [query heads][rows]: sum of grad_output output less grad_lse; lse times log2(e) */
    struct cursor *cursors;        /* [blocks of rows] */
    float *key_columns, *key_rows; /* of the block of keys: [dim][BLOCK], and [BLOCK][padded dim] times the scale */
    float *value_columns;          /* [value dim][BLOCK] */
    float *grad_key, *grad_value;  /* [BLOCK][padded dim or value dim] */
    float *query, *above;          /* of the block of rows: scaled query and grad_output, [BLOCK][padded] */
    float *grad_query;             /* of a group of rows: [GROUP][padded dim] */
    float *weights, *grad_scores;  /* of the tile: [BLOCK][BLOCK] */
    int64_t batch, shared, part;   /* shared: the key head */
};

/* Of a tile: its query head and place, how many columns there are, its pairs, and from which row to which it has any. */
struct tile {
    int64_t head, row, column, count, from, to;
    const uint64_t *words;
    uint64_t some; /* the columns that any row has pairs in */
};

INLINE int64_t all_rows(const struct flash *of) { return (of->rows + BLOCK - 1) / BLOCK * BLOCK; }

/* What is kept of the rows of a query head. */
INLINE float *of_head(const struct flash *of, const struct gradient *at, int64_t head, float *kept) {
    return kept + (head - at->shared * of->group) * all_rows(of);
}

/* Which of the sums over the parts is this thread's own. */
INLINE int64_t sum_of_head(const struct flash *of, const struct gradient *at, int64_t head) {
    return (at->batch * of->heads + head) * of->segment + at->part;
}

/* Where the gradients of what is added to a row's scores are summed up. */
INLINE float *line_gradient(const struct flash *of, const struct gradient *at, int64_t head, int64_t row, int64_t column) {
    if (!of->grad_line || row >= of->rows) return 0;
    return of->grad_line + sum_of_head(of, at, head) * (of->rows + of->columns - 1) + on_line(of, row, column);
}

/* The weights of a row, and the gradients of its scores: weight (grad_weight - delta). */
INLINE void row_of_tile(const struct flash *of, const struct gradient *at, const struct tile *tile, int64_t r,
                        const struct extent extent) {
    float *weights = at->weights + r * BLOCK, *scores = at->grad_scores + r * BLOCK;
    int64_t row = tile->row + r, low = low_of(extent), high = high_of(extent);
    const float *line = line_of(of, tile->head, row, tile->column);
    float *line_to = line_gradient(of, at, tile->head, row, tile->column);
    float lse = of_head(of, at, tile->head, at->lse)[row], delta = of_head(of, at, tile->head, at->delta)[row];
    uint64_t word = word_of(tile->words, (int)r, tile->count);
    int32_t noise = noise_of(of, at->batch, tile->head, row);
    for (int64_t j = low; j < high; j += LANES) {
        lanes slope = every(1.0f), score = capped(of, load(weights + j), &slope);
        if (line && j < extent.to) score += load_some(line + j, extent.to - j);
        if (extent.partial) score = where_bits(word, j, score, -INFINITY);
        lanes weight = power_of_two(score - lse);
        lanes used = weight, asked = load(scores + j);
        if (of->row_noise) {
            bits kept = kept_of(of, noise, tile->column + j);
            used = where(kept, used), asked = where(kept, asked);
        }
        lanes gradient = weight * (asked - delta);
        if (extent.partial) gradient = where_bits(word, j, gradient, 0.0f);
        if (line_to && j < extent.to)
            store_some(line_to + j, load_some(line_to + j, extent.to - j) + gradient, extent.to - j);
        store(weights + j, used);
        store(scores + j, gradient * slope);
    }
    for (int64_t j = 0; j < BLOCK; j = j + LANES == low ? high : j + LANES) {
        if (j >= low && j < high) continue;
        store(weights + j, every(0.0f));
        store(scores + j, every(0.0f));
    }
}

INLINE void group_of_tile(const struct flash *of, struct gradient *at, struct tile *tile, int64_t r,
                          const struct extent extent) {
    int64_t padded = whole_pairs(of->dim), value_padded = whole_pairs(of->value_dim);
    struct factor query = {at->query + r * padded, padded, 1}, above = {at->above + r * value_padded, value_padded, 1};
    for (int64_t j = low_of(extent); j < high_of(extent); j += PAIR) {
        int64_t to = r * BLOCK + j;
        product(query, (struct vectors){at->key_columns + j, BLOCK, 0, of->dim}, at->weights + to, BLOCK, 0);
        product(above, (struct vectors){at->value_columns + j, BLOCK, 0, of->value_dim}, at->grad_scores + to, BLOCK, 0);
    }
    for (int64_t i = 0; i < GROUP; i++) row_of_tile(of, at, tile, r + i, extent);
    struct factor scores = {at->grad_scores + r * BLOCK, BLOCK, 1};
    for (int64_t a = 0; a < padded; a += PAIR)
        product(scores, (struct vectors){at->key_rows + a, padded, extent.from, extent.to}, at->grad_query + a, padded, 0);
    for (int64_t i = 0; i < GROUP && tile->row + r + i < of->rows; i++) {
        float *to = of->grad_query + (sum_of_head(of, at, tile->head) * of->rows + tile->row + r + i) * of->dim;
        for (int64_t a = 0; a < of->dim; a += LANES)
            store_some(to + a, load_some(to + a, of->dim - a) + load(at->grad_query + i * padded + a), of->dim - a);
    }
}

/* Key and value gradients of a tile: products over its rows. */
INLINE void columns_of_tile(const struct flash *of, struct gradient *at, const struct tile *tile) {
    static const float whole[GROUP] = {1, 1, 1, 1, 1, 1, 1, 1};
    int64_t padded = whole_pairs(of->dim), value_padded = whole_pairs(of->value_dim);
    for (int64_t j = 0; j < tile->count; j += GROUP) {
        if (!(tile->some >> j & 0xff)) continue;
        struct factor weights = {at->weights + j, 1, BLOCK}, scores = {at->grad_scores + j, 1, BLOCK};
        for (int64_t a = 0; a < value_padded; a += PAIR)
            product(weights, (struct vectors){at->above + a, value_padded, tile->from, tile->to},
                    at->grad_value + j * value_padded + a, value_padded, whole);
        for (int64_t a = 0; a < padded; a += PAIR)
            product(scores, (struct vectors){at->query + a, padded, tile->from, tile->to},
                    at->grad_key + j * padded + a, padded, whole);
    }
}

INLINE void whole_tile(const struct flash *of, struct gradient *at, struct tile *tile, const int narrow) {
    int64_t count = smaller(of->rows - tile->row, BLOCK);
    lay_rows(rows_of(&of->query, at->batch, tile->head, tile->row, narrow), of->query.row, count, of->dim,
             query_factor(of), at->query, narrow);
    lay_rows(rows_of(&of->grad_output, at->batch, tile->head, tile->row, narrow), of->grad_output.row, count,
             of->value_dim, 1.0f / of->kept_share, at->above, narrow);
    tile->from = BLOCK, tile->to = 0, tile->some = 0;
    for (int64_t r = 0; r < count; r += GROUP) {
        struct extent extent = extent_of(tile->words ? tile->words + r : 0, tile->count);
        if (extent.from < extent.to) {
            group_of_tile(of, at, tile, r, extent);
            for (int i = 0; i < GROUP; i++) tile->some |= word_of(tile->words, (int)r + i, tile->count);
            tile->from = smaller(tile->from, r), tile->to = r + GROUP;
        } else {
            memset(at->weights + r * BLOCK, 0, GROUP * BLOCK * sizeof(float));
            memset(at->grad_scores + r * BLOCK, 0, GROUP * BLOCK * sizeof(float));
        }
    }
    if (tile->some) columns_of_tile(of, at, tile);
}

/* Before the first tile: delta and lse of a query head's rows. Rows of padding take no part. */
INLINE void begin_head(const struct flash *of, struct gradient *at, int64_t head, const int narrow) {
    int64_t first = (at->batch * of->heads + head) * of->rows;
    float *delta_to = of_head(of, at, head, at->delta), *lse_to = of_head(of, at, head, at->lse);
    for (int64_t row = 0; row < all_rows(of); row++) {
        delta_to[row] = 0.0f, lse_to[row] = INFINITY;
        if (row >= of->rows) continue;
        const void *output = rows_of(&of->output, at->batch, head, row, narrow);
        const void *above = rows_of(&of->grad_output, at->batch, head, row, narrow);
        lanes sum = {0};
        for (int64_t a = 0; a < of->value_dim; a += LANES)
            sum += entries(output, a, of->value_dim, narrow, 0) * entries(above, a, of->value_dim, narrow, 0);
        delta_to[row] = sum_of(sum) - (of->grad_lse ? of->grad_lse[first + row] : 0.0f);
        lse_to[row] = of->lse[first + row] * LOG2_E;
    }
}

INLINE void write_gradient(const float *from, int64_t count, int64_t dim, float factor, float *to) {
    int64_t padded = whole_pairs(dim);
    for (int64_t i = 0; i < count; i++)
        for (int64_t a = 0; a < dim; a += LANES)
            store_some(to + i * dim + a, load(from + i * padded + a) * factor, dim - a);
}

/* A block of keys with all the blocks of rows that attend to it. */
INLINE void block_of_keys(const struct flash *of, struct gradient *at, int64_t column, const int narrow) {
    int64_t count = smaller(of->columns - column, BLOCK), padded = whole_pairs(of->dim), blocks = all_rows(of) / BLOCK;
    int64_t value_padded = whole_pairs(of->value_dim), first = (at->batch * (of->heads / of->group) + at->shared) * of->columns + column;
    const void *key = rows_of(&of->key, at->batch, at->shared, column, narrow);
    const void *value = rows_of(&of->value, at->batch, at->shared, column, narrow);
    lay_columns(key, of->key.row, count, of->dim, at->key_columns, narrow);
    lay_rows(key, of->key.row, count, of->dim, of->scale, at->key_rows, narrow);
    lay_columns(value, of->value.row, count, of->value_dim, at->value_columns, narrow);
    memset(at->grad_key, 0, (size_t)(BLOCK * padded) * sizeof(float));
    memset(at->grad_value, 0, (size_t)(BLOCK * value_padded) * sizeof(float));
    for (int64_t b = 0; b < blocks; b++) {
        if (at->cursors[b].column != column) continue;
        int64_t number = next_tile(of, at->cursors + b);
        for (int64_t head = at->shared * of->group; head < (at->shared + 1) * of->group; head++) {
            struct tile tile = {.head = head, .row = b * BLOCK, .column = column, .count = count};
            tile.words = words_of(of, at->batch, head, number);
            whole_tile(of, at, &tile, narrow);
        }
    }
    write_gradient(at->grad_key, count, of->dim, key_gradient_factor(of), of->grad_key + first * of->dim);
    write_gradient(at->grad_value, count, of->value_dim, 1.0f, of->grad_value + first * of->value_dim);
}

/* One part of the keys of one head. */
INLINE void part_of_keys(const struct flash *of, struct gradient *at, const int narrow) {
    int64_t blocks = (of->columns + BLOCK - 1) / BLOCK;
    int64_t from = blocks * at->part / of->segment * BLOCK, to = smaller(blocks * (at->part + 1) / of->segment * BLOCK, of->columns);
    for (int64_t head = at->shared * of->group; head < (at->shared + 1) * of->group; head++)
        begin_head(of, at, head, narrow);
    for (int64_t b = 0; b < all_rows(of) / BLOCK; b++) {
        at->cursors[b] = beginning_of(of, b);
        while (at->cursors[b].column < from) next_tile(of, at->cursors + b);
    }
    for (int64_t column = from; column < to; column += BLOCK) block_of_keys(of, at, column, narrow);
}

/* Takes one part of one key head after another, as long as any is left: for as many threads at once as like. */
void EXPORTED(regard_flash_backward)(struct flash *of) {
    int64_t rows = all_rows(of) * of->group, padded = whole_pairs(of->dim), value_padded = whole_pairs(of->value_dim);
    int64_t floats = 2 * rows + BLOCK * (4 * padded + 3 * value_padded) + GROUP * padded + 2 * BLOCK * BLOCK + 12 * 16;
    float *room = aligned_alloc(64, (size_t)(floats * 4 + 63) / 64 * 64), *left = room;
    struct cursor *cursors = malloc((size_t)(all_rows(of) / BLOCK + 1) * sizeof(struct cursor));
    struct gradient at = {.cursors = cursors};
    if (!room || !cursors)
        of->failed = 1;
    else {
        at.delta = taken_off(&left, rows), at.lse = taken_off(&left, rows);
        at.key_columns = taken_off(&left, padded * BLOCK), at.key_rows = taken_off(&left, padded * BLOCK);
        at.value_columns = taken_off(&left, value_padded * BLOCK);
        at.grad_key = taken_off(&left, padded * BLOCK), at.grad_value = taken_off(&left, value_padded * BLOCK);
        at.query = taken_off(&left, padded * BLOCK), at.above = taken_off(&left, value_padded * BLOCK);
        at.grad_query = taken_off(&left, GROUP * padded);
        at.weights = taken_off(&left, BLOCK * BLOCK), at.grad_scores = taken_off(&left, BLOCK * BLOCK);
        int64_t unit, shared = of->heads / of->group;
        while ((unit = __atomic_fetch_add(&of->taken, 1, __ATOMIC_RELAXED)) < of->units) {
            at.part = unit % of->segment, at.shared = unit / of->segment % shared, at.batch = unit / of->segment / shared;
            if (of->narrow)
                part_of_keys(of, &at, 1);
            else
                part_of_keys(of, &at, 0);
        }
    }
    free(room);
    free(cursors);
}
