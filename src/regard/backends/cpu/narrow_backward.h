/* The gradients of dot-product attention of rows whose keys lie side by side and are few: one block of rows after
 * another, each of which is read and written once, while a window of keys, values and their gradients moves along. */
#ifndef REGARD_NARROW_BACKWARD_H
#define REGARD_NARROW_BACKWARD_H

#include "narrow.h"

/* The keys of one head that a unit of work has, and its part of the sums that each part has of its own. */
struct key_range {
    int64_t batch, key_head, part, begin, end;
};

/* The columns of a window: more than those of a block of rows, so that it is seldom moved. */
enum { WINDOW = NARROW + 2 * BLOCK };

/* Rows of a batch that are taken before those of the next one, where they alternate: so few that the addresses of their
 * pages are still known to the processor. */
enum { STRIP = 4 * BLOCK };

/* The groups of columns of a block of rows. */
enum { COLUMN_GROUPS = NARROW / GROUP };

/* The memory of a thread. */
struct band {
    float *packed_keys, *packed_values;    /* of the window: [WINDOW + SUMS][padded dim or value dim] */
    float *grad_key, *grad_value;          /* likewise, the sums over all rows so far */
    const float *keys, *values;            /* of a block of rows: from its first column on, packed or in the tensors */
    float *query, *grad_output;            /* of a block of rows: query scaled, [BLOCK][padded] */
    float *query_lanes, *grad_output_lanes; /* of a group of queries, [dim or value dim][QUERIES] */
    float *lse, *lse_rest;                 /* [BLOCK]: see in_base_2 */
    float *delta;                          /* [BLOCK]: sum of grad_output output less grad_lse */
    float *weights, *grad_scores;          /* [columns][BLOCK]; at first the products of rows with keys and values */
    float *grad_query;                     /* of a group of rows, [GROUP][padded dim] */
    float *bias, *grad_bias; /* [columns + QUERIES]: of a group of queries, from its last column to its first one */
    int64_t column, most_columns;                 /* the window's first column, and how many it has room for */
    int64_t filled, key_end, value_end, finished; /* columns that have sums, are packed, and whose sums are written */
    int64_t begun; /* columns before this one have sums of other rows, which are written already */
    lanes check; /* see check_finite */
    struct ahead ahead;
};

/* Writes the gradients of some rows, or adds them to what is there. */
APART void store_gradient(lanes *check, const float *gradient, int64_t count, int64_t dim, float factor, float *target,
                          int64_t stride, int64_t accumulate) {
    int64_t padded = padded_dim(dim);
    lanes found = {0}; /* in a register, while rows are written */
    for (int64_t i = 0; i < count; i++)
        for (int64_t a = 0; a < dim; a += LANES) {
            lanes before = accumulate ? load_partial(target + i * stride + a, dim - a) : broadcast(0.0f);
            lanes written = before + load(gradient + i * padded + a) * factor;
            check_finite(&found, written);
            store_partial(target + i * stride + a, written, dim - a);
        }
    *check += found;
}

/* Writes zeros where rows have no gradient and none is there. */
INLINE void store_zeros(const struct flash *problem, int64_t count, int64_t dim, float *target, int64_t stride) {
    if (problem->accumulate) return;
    for (int64_t i = 0; i < count; i++) memset(target + i * stride, 0, (size_t)dim * sizeof(float));
}

INLINE float *query_gradient(const struct flash *problem, const struct key_range *range, int64_t head, int64_t row) {
    return row_number(&problem->grad_query, range->batch, head, row) + range->part * problem->grad_query_part;
}

/* The tiles of a block of rows within a range of keys; 0 if they are not side by side, or too many. */
INLINE int find_range_span(const struct flash *problem, const struct key_range *range, int64_t head, int64_t row,
                           struct span *span) {
    if (!find_span(problem, range->batch, head, row / BLOCK, span)) return 0;
    int64_t before = (range->begin - span->column) / BLOCK;
    if (before > 0 && span->column < span->end) {
        for (int64_t tile = before; tile < NARROW / BLOCK; tile++) span->words[tile - before] = span->words[tile];
        span->column = range->begin;
    }
    span->end = min_int(span->end, range->end);
    if (span->column >= span->end) span->column = span->end = range->begin;
    return 1;
}

/* Whether all blocks of rows have few keys, side by side, which begin and end no earlier than those of the rows
 * before; and the most columns of one. */
INLINE int is_band(const struct flash *problem, const struct key_range *range, int64_t *widest) {
    struct span span, last = {.column = 0, .end = 0};
    *widest = 0;
    for (int64_t row = 0; row < problem->rows; row += BLOCK) {
        if (!find_range_span(problem, range, range->key_head * problem->group, row, &span)) return 0;
        if (span.column == span.end) continue;
        if (span.column < last.column || span.end < last.end) return 0;
        if (span.end - span.column > *widest) *widest = span.end - span.column;
        last = span;
    }
    return 1;
}

/* The column after the last one that some rows, or those before, attend to. */
INLINE int64_t last_column(const struct flash *problem, const struct key_range *range, int64_t row, int64_t end,
                           int64_t last) {
    struct span span;
    for (; row < end; row += BLOCK)
        if (find_range_span(problem, range, range->key_head * problem->group, row, &span) && span.column < span.end)
            last = span.end;
    return last;
}

/* Writes the sums over some columns of the window, or adds them. */
INLINE void store_columns(const struct flash *problem, struct band *band, const struct key_range *range,
                          int64_t begin, int64_t end, int64_t accumulate) {
    int64_t at = begin - band->column;
    store_gradient(&band->check, band->grad_key + at * padded_dim(problem->dim), end - begin, problem->dim,
                   key_gradient_factor(problem), row_number(&problem->grad_key, range->batch, range->key_head, begin),
                   problem->grad_key.row, accumulate);
    store_gradient(&band->check, band->grad_value + at * padded_dim(problem->value_dim), end - begin, problem->value_dim, 1.0f,
                   row_number(&problem->grad_value, range->batch, range->key_head, begin), problem->grad_value.row,
                   accumulate);
}

/* Writes the gradients of keys and values before a column: the window's sums, and zeros where it has none. */
APART void finish_columns(const struct flash *problem, struct band *band, const struct key_range *range, int64_t end) {
    int64_t filled = min_int(band->filled, end), begun = min_int(band->begun, filled);
    if (band->finished < begun) store_columns(problem, band, range, band->finished, begun, 1);
    if (band->finished > begun) begun = band->finished;
    store_columns(problem, band, range, begun, filled, problem->accumulate);
    int64_t zeros = band->begun > filled ? band->begun : filled;
    if (zeros < band->finished) zeros = band->finished;
    store_zeros(problem, end - zeros, problem->dim,
                row_number(&problem->grad_key, range->batch, range->key_head, zeros), problem->grad_key.row);
    store_zeros(problem, end - zeros, problem->value_dim,
                row_number(&problem->grad_value, range->batch, range->key_head, zeros), problem->grad_value.row);
    band->finished = end;
}

/* Moves what the window has of some columns to its front. */
INLINE void move_columns(float *window, int64_t from, int64_t count, int64_t padded) {
    memmove(window, window + from * padded, (size_t)(count * padded) * sizeof(float));
}

/* Moves the window to a block of rows: sums over columns before it are written, those of new columns are 0. */
INLINE void move_window(const struct flash *problem, struct band *band, const struct key_range *range,
                        const struct span *span) {
    int64_t padded = padded_dim(problem->dim), value_padded = padded_dim(problem->value_dim);
    finish_columns(problem, band, range, span->column);
    if (span->end - band->column > band->most_columns) {
        int64_t from = span->column - band->column, count = band->filled - span->column;
        if (count > 0) {
            move_columns(band->packed_keys, from, count, padded), move_columns(band->grad_key, from, count, padded);
            move_columns(band->packed_values, from, count, value_padded);
            move_columns(band->grad_value, from, count, value_padded);
        }
        band->column = span->column;
    }
    int64_t begin = band->filled > span->column ? band->filled : span->column, count = span->end - begin;
    if (count <= 0) return;
    memset(band->grad_key + (begin - band->column) * padded, 0, (size_t)(count * padded) * sizeof(float));
    memset(band->grad_value + (begin - band->column) * value_padded, 0, (size_t)(count * value_padded) * sizeof(float));
    band->filled = span->end;
}

/* The keys or values of a block of rows: where they are, if packed ones are no different; otherwise packed from the
 * column on where that ended. */
INLINE const float *span_columns(const struct flash *problem, const struct band *band, const struct key_range *range,
                                 const struct span *span, const struct rows *rows, int64_t dim, float *packed,
                                 int64_t *packed_end, int dtype) {
    int64_t padded = padded_dim(dim);
    if (dtype == FLOAT32 && rows->row == padded && span->end + SUMS <= problem->columns) /* SUMS more may be read */
        return head_rows(rows, range->batch, range->key_head, span->column, 0);
    int64_t column = *packed_end > span->column ? *packed_end : span->column;
    for (; column < span->end; column += BLOCK)
        pack_rows(head_rows(rows, range->batch, range->key_head, column, dtype), rows->row,
                  min_int(span->end - column, BLOCK), dim, 1.0f, packed + (column - band->column) * padded,
                  dtype);
    *packed_end = span->end;
    return packed + (span->column - band->column) * padded;
}

/* Packs a block of rows; rows of padding take no part. */
INLINE void load_block(const struct flash *problem, struct band *band, const struct key_range *range, int64_t head,
                       int64_t row, int64_t count, int dtype) {
    int64_t first = (range->batch * problem->heads + head) * problem->rows + row;
    const void *output = head_rows(&problem->output, range->batch, head, row, dtype);
    const void *grad_output = head_rows(&problem->grad_output, range->batch, head, row, dtype);
    pack_rows(head_rows(&problem->query, range->batch, head, row, dtype), problem->query.row, count, problem->dim,
              query_factor(problem), band->query, dtype);
    pack_rows(grad_output, problem->grad_output.row, count, problem->value_dim, 1.0f / problem->keep_probability,
              band->grad_output, dtype);
    for (int64_t i = 0; i < BLOCK; i++) {
        band->delta[i] = 0.0f, band->lse[i] = INFINITY, band->lse_rest[i] = 0.0f;
        if (i >= count) continue;
        float product = dot_entries(row_at(output, i, problem->output.row, dtype),
                                    row_at(grad_output, i, problem->grad_output.row, dtype), problem->value_dim, dtype);
        band->delta[i] = product - (problem->grad_lse ? problem->grad_lse[first + i] : 0.0f);
        band->lse[i] = in_base_2(*row_number(&problem->lse, range->batch, head, row + i), band->lse_rest + i);
    }
}

/* Adds the gradients of a group's relative bias to those of its part. */
INLINE void store_bias_gradient(const struct flash *problem, const struct band *band, const struct key_range *range,
                                int64_t head, const struct group *group) {
    int64_t sums = (range->batch * problem->heads + head) * problem->key_parts + range->part;
    float *target = problem->grad_relative_bias + sums * (problem->rows + problem->columns - 1);
    int64_t last = last_diagonal(problem, group);
    for (int64_t i = 0; i < min_int(group_width(group) + QUERIES, last + 1); i++) target[last - i] += band->grad_bias[i];
}

/* Products of a group of queries with one key and its value become the weight and the gradient of the score. */
INLINE void pair_gradients(const struct flash *problem, const struct band *band, const bits *row_hashes,
                           const struct group *group, int64_t column, const int32_t *halves, int bit, float *weights,
                           float *grad_scores, int64_t r) {
    for (int v = 0; v < VECTORS; v++) {
        int64_t lane = v * LANES, diagonal = group->columns.end - 1 - column + lane;
        lanes slope = broadcast(1.0f), score = apply_softcap(problem, load(weights + lane), &slope);
        if (problem->relative_bias) score += load(band->bias + diagonal);
        if (halves) score = select_where(load_bits(halves + lane), bit, score, -INFINITY);
        lanes weight = exp2_lanes(less_log_sum(score, load(band->lse + r + lane), load(band->lse_rest + r + lane)));
        lanes dropped = weight, grad_weight = load(grad_scores + lane);
        if (problem->row_hashes) {
            bits mask = dropout_mask(problem, row_hashes[v] + problem->column_hashes[column]);
            dropped = zero_unless(mask, dropped), grad_weight = zero_unless(mask, grad_weight);
        }
        lanes gradient = weight * (grad_weight - load(band->delta + r + lane));
        if (halves) gradient = select_where(load_bits(halves + lane), bit, gradient, 0.0f);
        if (problem->grad_relative_bias)
            store(band->grad_bias + diagonal, load(band->grad_bias + diagonal) + gradient);
        store(weights + lane, dropped);
        store(grad_scores + lane, gradient * slope);
    }
}

/* The weights and the gradients of the scores of a group of queries with their keys; row r of the block is its first. */
INLINE void group_gradients(const struct flash *problem, struct band *band, const struct key_range *range, int64_t head,
                            const struct span *span, const struct group *group, int64_t r) {
    int32_t hashes[QUERIES] ALIGNED, halves[2][QUERIES] ALIGNED;
    bits row_hashes[VECTORS];
    for (int i = 0; i < QUERIES; i++) hashes[i] = row_hash_at(problem, range->batch, head, group->row + i);
    for (int v = 0; v < VECTORS; v++) row_hashes[v] = load_bits(hashes + v * LANES);
    if (problem->relative_bias) load_bias(problem, head, group, band->bias);
    if (problem->grad_relative_bias)
        memset(band->grad_bias, 0, (size_t)(group_width(group) + QUERIES) * sizeof(float));
    for (int64_t column = span->column; column < group->columns.end; column += BLOCK) {
        const uint64_t *words = span->words[(column - span->column) / BLOCK];
        int64_t begin = column < group->columns.begin ? group->columns.begin : column;
        split_words(words, r, halves);
        for (int64_t j = begin; j < min_int(column + BLOCK, group->columns.end); j++) {
            int bit = (int)(j - column);
            int64_t place = (j - span->column) * BLOCK + r;
            if (j % 2 == 0) load_rows_ahead(&band->ahead, 1);
            pair_gradients(problem, band, row_hashes, group, j, words ? halves[bit / 32] : 0, bit % 32,
                           band->weights + place, band->grad_scores + place, r);
        }
    }
    if (problem->grad_relative_bias) store_bias_gradient(problem, band, range, head, group);
}

/* Zeros between two columns of a block of rows, of a group of queries. */
INLINE void clear_columns(struct band *band, int64_t begin, int64_t end, int64_t r) {
    for (int64_t j = begin; j < end; j++)
        for (int v = 0; v < VECTORS; v++) {
            store(band->weights + j * BLOCK + r + v * LANES, broadcast(0.0f));
            store(band->grad_scores + j * BLOCK + r + v * LANES, broadcast(0.0f));
        }
}

/* A group of queries with all its keys. */
APART void process_queries(const struct flash *problem, struct band *shared, const struct key_range *range, int64_t head,
                           const struct span *span, int64_t row, int64_t r) {
    struct band own = *shared, *band = &own; /* in registers: what is stored elsewhere cannot change it */
    int64_t padded = padded_dim(problem->dim), value_padded = padded_dim(problem->value_dim);
    struct group group = {row + r, QUERIES, span_extent(span, r, QUERIES)};
    int64_t begin = group.columns.begin - span->column, end = group.columns.end - span->column;
    if (begin >= end) {
        clear_columns(band, 0, span->end - span->column + GROUP, r);
        return;
    }
    pack_transposed(band->query + r * padded, padded, QUERIES, problem->dim, 1.0f, band->query_lanes, QUERIES, 0);
    pack_transposed(band->grad_output + r * value_padded, value_padded, QUERIES, problem->value_dim, 1.0f,
                    band->grad_output_lanes, QUERIES, 0);
    for (int64_t j = begin; j < end; j += SUMS) {
        store_product(&band->ahead, (struct factor){band->keys + j * padded, padded, 1},
                      (struct vectors){band->query_lanes, QUERIES, 0, problem->dim}, band->weights + j * BLOCK + r,
                      BLOCK);
        store_product(&band->ahead, (struct factor){band->values + j * value_padded, value_padded, 1},
                      (struct vectors){band->grad_output_lanes, QUERIES, 0, problem->value_dim},
                      band->grad_scores + j * BLOCK + r, BLOCK);
    }
    group_gradients(problem, band, range, head, span, &group, r);
    clear_columns(band, 0, begin, r);
    clear_columns(band, end, span->end - span->column + GROUP, r);
    shared->ahead = own.ahead;
}

/* The gradients of a block of queries: products over their keys. */
APART void query_gradients(const struct flash *problem, struct band *band, const struct key_range *range, int64_t head,
                           const struct span *span, int64_t row, int64_t count) {
    int64_t padded = padded_dim(problem->dim);
    for (int64_t r = 0; r < count; r += GROUP) {
        struct extent columns = span_extent(span, r, GROUP);
        int64_t begin = columns.begin - span->column, end = columns.end - span->column;
        for (int64_t a = 0; a < padded; a += PAIR)
            add_product((struct factor){band->grad_scores + r, 1, BLOCK},
                        (struct vectors){band->keys + a, padded, begin < end ? begin : end, end}, band->grad_query + a,
                        padded, 0);
        store_gradient(&band->check, band->grad_query, min_int(count - r, GROUP), problem->dim, problem->scale,
                       query_gradient(problem, range, head, row + r), problem->grad_query.row, problem->accumulate);
    }
}

/* For each group of columns the rows of a block that have pairs in it: from begin to end. */
struct row_extents {
    int64_t begin[COLUMN_GROUPS], end[COLUMN_GROUPS];
};

/* The bytes of a word that are not 0: their highest bits. */
INLINE uint64_t nonzero_bytes(uint64_t word) {
    const uint64_t low = 0x7f7f7f7f7f7f7f7f;
    return (((word & low) + low) | word) & ~low;
}

INLINE void find_row_extents(const struct span *span, int64_t count, struct row_extents *extents) {
    for (int64_t tile = 0; tile < (span->end - span->column + BLOCK - 1) / BLOCK; tile++) {
        const uint64_t *words = span->words[tile];
        int64_t *begin = extents->begin + tile * (BLOCK / GROUP), *end = extents->end + tile * (BLOCK / GROUP);
        for (int i = 0; i < BLOCK / GROUP; i++) begin[i] = 0, end[i] = words ? 0 : count;
        if (!words) continue;
        uint64_t found = 0, found_last = 0;
        for (int64_t r = 0; r < count; r++) {
            uint64_t some = nonzero_bytes(words[r]) & ~found, last = nonzero_bytes(words[count - 1 - r]) & ~found_last;
            for (found |= some; some; some &= some - 1) begin[__builtin_ctzll(some) / 8] = r;
            for (found_last |= last; last; last &= last - 1) end[__builtin_ctzll(last) / 8] = count - r;
        }
    }
}

/* Adds the gradients of the keys and values of a block of rows: products over its rows. */
APART void key_gradients(const struct flash *problem, struct band *band, const struct span *span, int64_t count) {
    static const float whole[GROUP] = {1, 1, 1, 1, 1, 1, 1, 1};
    int64_t padded = padded_dim(problem->dim), value_padded = padded_dim(problem->value_dim);
    int64_t first = span->column - band->column;
    struct row_extents extents;
    find_row_extents(span, count, &extents);
    for (int64_t j = 0; j < span->end - span->column; j += GROUP) {
        int64_t begin = extents.begin[j / GROUP], end = extents.end[j / GROUP];
        if (begin >= end) continue;
        struct factor weights = {band->weights + j * BLOCK, BLOCK, 1};
        struct factor scores = {band->grad_scores + j * BLOCK, BLOCK, 1};
        for (int64_t a = 0; a < value_padded; a += PAIR)
            add_product(weights, (struct vectors){band->grad_output + a, value_padded, begin, end},
                        band->grad_value + (first + j) * value_padded + a, value_padded, whole);
        load_rows_ahead(&band->ahead, 1);
        for (int64_t a = 0; a < padded; a += PAIR)
            add_product(scores, (struct vectors){band->query + a, padded, begin, end},
                        band->grad_key + (first + j) * padded + a, padded, whole);
        load_rows_ahead(&band->ahead, 1);
    }
}

/* Some rows of a tensor whose entries have so many bytes. */
INLINE struct stream rows_stream(const struct rows *rows, int64_t batch, int64_t head, int64_t row, int64_t end,
                                 int64_t dim, int64_t size) {
    const char *first = (const char *)rows->data + (batch * rows->batch + head * rows->head + row * rows->row) * size;
    return (struct stream){first, rows->row * size, end - row, dim * size};
}

/* Starts loading what the next block of rows reads and writes; the columns of `last` are there. */
INLINE void start_block_ahead(const struct flash *problem, struct band *band, const struct key_range *range,
                              int64_t head, int64_t row, const struct span *last, const struct span *next,
                              int dtype) {
    int64_t batch = range->batch, key_head = range->key_head, size = entry_bytes(dtype), dim = problem->dim,
            value_dim = problem->value_dim, end = min_int(problem->rows, row + BLOCK);
    int64_t fresh = next->column > last->end ? next->column : last->end;
    struct stream *stream = band->ahead.stream;
    band->ahead.at = band->ahead.count = 0;
    if (row >= end || next->column == next->end) return;
    stream[0] = rows_stream(&problem->query, batch, head, row, end, dim, size);
    stream[1] = rows_stream(&problem->output, batch, head, row, end, value_dim, size);
    stream[2] = rows_stream(&problem->grad_output, batch, head, row, end, value_dim, size);
    stream[3] = rows_stream(&problem->grad_query, batch, head, row, end, dim, 4);
    stream[4] = rows_stream(&problem->key, batch, key_head, fresh, next->end, dim, size);
    stream[5] = rows_stream(&problem->value, batch, key_head, fresh, next->end, value_dim, size);
    stream[6] = rows_stream(&problem->grad_key, batch, key_head, last->column, next->column, dim, 4);
    stream[7] = rows_stream(&problem->grad_value, batch, key_head, last->column, next->column, value_dim, 4);
    band->ahead.count = 8;
}

/* A block of rows of one head with all its keys. */
INLINE void process_block(const struct flash *problem, struct band *band, const struct key_range *range, int64_t head,
                          const struct span *span, int64_t row, int dtype) {
    int64_t count = min_int(problem->rows - row, BLOCK);
    load_block(problem, band, range, head, row, count, dtype);
    for (int64_t r = 0; r < BLOCK; r += QUERIES) process_queries(problem, band, range, head, span, row, r);
    query_gradients(problem, band, range, head, span, row, count);
    key_gradients(problem, band, span, count);
}

/* Some blocks of rows of one batch, and after them what the window has: sums over columns before `begun` are added to
 * those that are written already. */
INLINE void process_rows(const struct flash *problem, struct band *band, const struct key_range *range, int64_t row,
                         int64_t end, int64_t begun, int dtype) {
    int64_t head = range->key_head * problem->group, heads = head + problem->group;
    int started = 0;
    band->begun = begun;
    for (; row < end; row += BLOCK) {
        struct span span, next = {0};
        find_range_span(problem, range, head, row, &span);
        if (span.column == span.end) {
            for (int64_t h = head; h < heads; h++)
                store_zeros(problem, min_int(problem->rows - row, BLOCK), problem->dim,
                            query_gradient(problem, range, h, row), problem->grad_query.row);
            continue;
        }
        if (!started++) { /* zeros in columns between the last ones and these */
            band->column = band->filled = begun, band->finished = min_int(begun, span.column);
            finish_columns(problem, band, range, span.column);
            band->column = band->filled = band->key_end = band->value_end = span.column;
        }
        move_window(problem, band, range, &span);
        band->keys = span_columns(problem, band, range, &span, &problem->key, problem->dim, band->packed_keys,
                                  &band->key_end, dtype);
        band->values = span_columns(problem, band, range, &span, &problem->value, problem->value_dim,
                                    band->packed_values, &band->value_end, dtype);
        for (int64_t h = head; h < heads; h++) {
            if (h > head) find_range_span(problem, range, h, row, &span);
            int64_t next_row = h + 1 < heads ? row : row + BLOCK;
            if (next_row < end) find_range_span(problem, range, head, next_row, &next);
            start_block_ahead(problem, band, range, h + 1 < heads ? h + 1 : head, next_row, &span, &next, dtype);
            process_block(problem, band, range, h, &span, row, dtype);
        }
    }
    if (started) finish_columns(problem, band, range, band->filled);
}

/* A range of keys of one head in some batches, if the rows that attend to it are a band; returns 0 if they are not.
 * Where rows of batches alternate in memory, all batches take some rows before the next ones. */
INLINE int process_bands(const struct flash *problem, struct band *band, const struct key_range *first,
                         int64_t batches, int dtype) {
    int64_t widest, begun = first->begin, rows = batches > 1 ? STRIP : problem->rows;
    if (problem->sigmoid_bias || problem->call_bias || problem->landmark_size) return 0;
    if (in_pairs(dtype)) return 0; /* products of pairs are faster tile by tile, from windows of 16 on */
    if (!is_band(problem, first, &widest)) return 0;
    band->most_columns = min_int(widest + 2 * BLOCK, WINDOW);
    struct key_range range = *first;
    for (int64_t row = 0; row < problem->rows; row += rows) {
        for (range.batch = first->batch; range.batch < first->batch + batches; range.batch++)
            process_rows(problem, band, &range, row, min_int(row + rows, problem->rows), begun, dtype);
        begun = last_column(problem, first, row, min_int(row + rows, problem->rows), begun);
    }
    for (range.batch = first->batch; range.batch < first->batch + batches; range.batch++) {
        band->column = band->filled = band->finished = band->begun = begun;
        finish_columns(problem, band, &range, range.end);
    }
    return 1;
}

/* How many floats a thread needs. */
INLINE int64_t band_floats(const struct flash *problem) {
    int64_t both = padded_dim(problem->dim) + padded_dim(problem->value_dim);
    return 2 * (WINDOW + BLOCK) * both + (BLOCK + QUERIES) * both + GROUP * padded_dim(problem->dim) + 3 * BLOCK +
           2 * (NARROW + BLOCK) * BLOCK + 2 * (NARROW + QUERIES) + 16 * 16;
}

INLINE struct band take_band(const struct flash *problem, float **memory) {
    int64_t padded = padded_dim(problem->dim), value_padded = padded_dim(problem->value_dim);
    struct band band = {.packed_keys = take_floats(memory, (WINDOW + BLOCK) * padded)};
    band.packed_values = take_floats(memory, (WINDOW + BLOCK) * value_padded);
    band.grad_key = take_floats(memory, (WINDOW + BLOCK) * padded);
    band.grad_value = take_floats(memory, (WINDOW + BLOCK) * value_padded);
    band.query = take_floats(memory, BLOCK * padded), band.grad_output = take_floats(memory, BLOCK * value_padded);
    band.query_lanes = take_floats(memory, QUERIES * padded);
    band.grad_output_lanes = take_floats(memory, QUERIES * value_padded);
    band.lse = take_floats(memory, BLOCK), band.lse_rest = take_floats(memory, BLOCK);
    band.delta = take_floats(memory, BLOCK);
    band.weights = take_floats(memory, (NARROW + BLOCK) * BLOCK);
    band.grad_scores = take_floats(memory, (NARROW + BLOCK) * BLOCK);
    band.grad_query = take_floats(memory, GROUP * padded);
    band.bias = take_floats(memory, NARROW + QUERIES), band.grad_bias = take_floats(memory, NARROW + QUERIES);
    return band;
}

#endif
