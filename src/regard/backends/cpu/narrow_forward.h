/* Dot-product attention of rows whose keys lie side by side and are few, forward: the softmax of a row is taken
 * once. */
#ifndef REGARD_NARROW_FORWARD_H
#define REGARD_NARROW_FORWARD_H

#include "narrow.h"

/* Some blocks of rows of one head; head: -1 for none. */
struct unit {
    int64_t batch, head, row, count;
};

/* The memory of a thread: the keys and values of some blocks of rows, and what a group of queries needs. */
struct narrow {
    float *packed_keys, *packed_values; /* [columns][padded dim or value dim] */
    const float *keys, *values;         /* the packed ones, or where they are in the tensors */
    float *query;                       /* [padded dim][QUERIES], scaled */
    float *weights; /* [columns][QUERIES]: products, scores, and at last the weights, not divided by their sum */
    float *output;  /* [QUERIES][padded value dim] */
    float *bias;    /* [columns + QUERIES]: the relative bias of a group, from its last column to its first one */
    lanes check;    /* see check_finite */
    struct unit unit;
    int64_t column, most_columns; /* the unit's first column, and for how many there is memory */
    struct ahead ahead;
};

/* Products become scores: through the softcap, with the relative bias, -infinity where there is no pair; and `limit`,
 * the largest ones. */
INLINE void finish_group(const struct flash *problem, const struct narrow *narrow, const struct span *span,
                         const struct group *group, lanes *limit) {
    int64_t block_row = group->row % BLOCK, begin = group->columns.begin, end = group->columns.end;
    for (int64_t column = span->column; column < end; column += BLOCK) {
        const uint64_t *words = span->words[(column - span->column) / BLOCK];
        int32_t halves[2][QUERIES] ALIGNED;
        split_words(words, block_row, halves);
        for (int64_t j = column < begin ? begin : column; j < min_int(column + BLOCK, end); j++) {
            int bit = (int)(j - column);
            for (int v = 0; v < VECTORS; v++) {
                float *target = narrow->weights + (j - begin) * QUERIES + v * LANES;
                lanes score = apply_softcap(problem, load(target), 0);
                if (problem->relative_bias) score += load(narrow->bias + (end - 1 - j) + v * LANES);
                if (words) score = select_where(load_bits(halves[bit / 32] + v * LANES), bit % 32, score, -INFINITY);
                limit[v] = max_lanes(limit[v], score);
                store(target, score);
            }
        }
    }
}

/* Scores become powers of 2, of which some are dropped; returns their sums, dropped ones included. */
INLINE void exponentiate_group(const struct flash *problem, struct narrow *narrow, const struct group *group,
                               const lanes *shift, lanes *total) {
    int32_t row_hashes[QUERIES] ALIGNED;
    for (int r = 0; r < QUERIES; r++)
        row_hashes[r] = row_hash_at(problem, narrow->unit.batch, narrow->unit.head, group->row + r);
    for (int64_t j = 0; j < group_width(group); j++) {
        if (j % 4 == 0) load_rows_ahead(&narrow->ahead, 1);
        for (int v = 0; v < VECTORS; v++) {
            float *target = narrow->weights + j * QUERIES + v * LANES;
            lanes power = exp2_lanes(load(target) - shift[v]);
            total[v] += power;
            if (problem->row_hashes) {
                int32_t column_hash = problem->column_hashes[group->columns.begin + j];
                power = zero_unless(dropout_mask(problem, load_bits(row_hashes + v * LANES) + column_hash), power);
            }
            store(target, power);
        }
    }
}

/* Writes the log-sum-exps; `share` and `rest` are the factors of the output and of the result that it is
 * merged with. */
INLINE void finish_rows(const struct flash *problem, const struct narrow *narrow, const struct group *group,
                        const lanes *maximum, const lanes *total, const float *before, float *share, float *rest) {
    float sums[QUERIES], limits[QUERIES];
    for (int v = 0; v < VECTORS; v++) store(sums + v * LANES, total[v]), store(limits + v * LANES, maximum[v]);
    for (int64_t r = 0; r < group->count; r++) {
        share[r] = sums[r] == 0.0f ? 0.0f : 1.0f / (sums[r] * problem->keep_probability);
        rest[r] = before[r] * share[r] * problem->keep_probability;
        *row_number(&problem->lse, narrow->unit.batch, narrow->unit.head, group->row + r) =
            log_sum(limits[r], sums[r]);
    }
}

/* Writes the output, or adds it to the result that it is merged with. */
INLINE void write_group(const struct flash *problem, struct narrow *narrow, const struct group *group,
                        const float *share, const float *rest, const int dtype) {
    int64_t padded = padded_dim(problem->value_dim);
    lanes check = {0}; /* in a register, while rows are written */
    for (int64_t r = 0; r < group->count; r++) {
        void *row = (void *)head_rows(&problem->result, narrow->unit.batch, narrow->unit.head, group->row + r,
                                      dtype);
        for (int64_t a = 0; a < problem->value_dim; a += LANES) {
            lanes output = load(narrow->output + r * padded + a) * share[r];
            if (rest[r] != 0.0f) output += load_entries(row, a, problem->value_dim, dtype, 0) * rest[r];
            check_finite(&check, output);
            store_entries(row, a, problem->value_dim, dtype, output);
        }
    }
    narrow->check += check;
}

/* The log-sum-exps of the results that are merged with, as maxima with sums of 1; where there are none, -infinity
 * and 0. */
INLINE void resume_group(const struct flash *problem, const struct narrow *narrow, const struct group *group,
                         float *maximum, float *weight) {
    for (int64_t r = 0; r < QUERIES; r++) {
        float lse = -INFINITY;
        if (problem->accumulate && r < group->count)
            lse = *row_number(&problem->lse, narrow->unit.batch, narrow->unit.head, group->row + r);
        maximum[r] = lse * LOG2_E, weight[r] = lse == -INFINITY ? 0.0f : 1.0f;
    }
}

/* The softmax of a group's products; see finish_rows. */
INLINE void group_softmax(const struct flash *problem, struct narrow *narrow, const struct span *span,
                          const struct group *group, float *share, float *rest) {
    float before[QUERIES] ALIGNED, weight[QUERIES] ALIGNED;
    lanes maximum[VECTORS], shift[VECTORS], total[VECTORS];
    resume_group(problem, narrow, group, before, weight);
    for (int v = 0; v < VECTORS; v++) maximum[v] = load(before + v * LANES);
    if (problem->relative_bias) load_bias(problem, narrow->unit.head, group, narrow->bias);
    finish_group(problem, narrow, span, group, maximum);
    for (int v = 0; v < VECTORS; v++) {
        bits none = maximum[v] == -INFINITY;
        shift[v] = (lanes)(~none & (bits)maximum[v]);
        total[v] = load(weight + v * LANES) * exp2_lanes(load(before + v * LANES) - shift[v]);
        store(weight + v * LANES, total[v]);
    }
    exponentiate_group(problem, narrow, group, shift, total);
    finish_rows(problem, narrow, group, maximum, total, weight, share, rest);
}

/* A group of rows with all its keys. */
APART void process_group(const struct flash *problem, struct narrow *narrow, const struct span *span,
                         const struct group *group, int dtype) {
    int64_t padded = padded_dim(problem->dim), value_padded = padded_dim(problem->value_dim),
            width = group_width(group), offset = group->columns.begin - narrow->column;
    float share[QUERIES] = {0}, rest[QUERIES] = {0};
    pack_transposed(head_rows(&problem->query, narrow->unit.batch, narrow->unit.head, group->row, dtype),
                    problem->query.row, group->count, problem->dim, query_factor(problem), narrow->query, QUERIES,
                    dtype);
    for (int64_t j = 0; j < width; j += SUMS)
        store_product(&narrow->ahead, (struct factor){narrow->keys + (offset + j) * padded, padded, 1},
                      (struct vectors){narrow->query, QUERIES, 0, problem->dim}, narrow->weights + j * QUERIES, QUERIES);
    group_softmax(problem, narrow, span, group, share, rest);
    for (int64_t r = 0; r < group->count; r += GROUP) {
        struct extent columns = span_extent(span, group->row % BLOCK + r, GROUP);
        for (int64_t a = 0; a < value_padded; a += PAIR) {
            load_rows_ahead(&narrow->ahead, 2);
            add_product((struct factor){narrow->weights - group->columns.begin * QUERIES + r, 1, QUERIES},
                        (struct vectors){narrow->values - narrow->column * value_padded + a, value_padded,
                                         columns.begin, columns.end},
                        narrow->output + r * value_padded + a, value_padded, 0);
        }
    }
    BY_DTYPE(dtype, write_group(problem, narrow, group, share, rest, DTYPE));
}

/* The columns of a unit's rows; 0 if any block of them has no span, or there is no memory for all. */
INLINE int find_columns(const struct flash *problem, const struct narrow *narrow, const struct unit *unit,
                        int64_t *begin, int64_t *end) {
    *begin = INT64_MAX, *end = 0;
    for (int64_t row = 0; row < unit->count; row += BLOCK) {
        struct span span;
        if (!find_span(problem, unit->batch, unit->head, (unit->row + row) / BLOCK, &span)) return 0;
        if (span.column == span.end) continue;
        *begin = min_int(*begin, span.column), *end = *end > span.end ? *end : span.end;
    }
    *begin = min_int(*begin, *end);
    return *end - *begin <= narrow->most_columns;
}

/* Starts loading what the first block of some rows reads and writes, but keys and values before a column. */
INLINE void start_ahead(const struct flash *problem, struct narrow *narrow, const struct unit *unit, int64_t column,
                        int dtype) {
    struct span span;
    narrow->ahead.at = narrow->ahead.count = 0;
    if (unit->head < 0 || unit->count <= 0 ||
        !find_span(problem, unit->batch, unit->head, unit->row / BLOCK, &span))
        return;
    int64_t begin = span.column > column ? span.column : column, keys = span.end > begin ? span.end - begin : 0,
            key_head = unit->head / problem->group, rows = min_int(unit->count, BLOCK), size = entry_bytes(dtype);
    const struct rows *read[] = {&problem->key, &problem->value, &problem->query, &problem->result};
    for (int i = 0; i < 4; i++)
        narrow->ahead.stream[i] = (struct stream){
            head_rows(read[i], unit->batch, i < 2 ? key_head : unit->head, i < 2 ? begin : unit->row, dtype),
            read[i]->row * size, i < 2 ? keys : rows, (i % 2 ? problem->value_dim : problem->dim) * size};
    narrow->ahead.count = 4;
}

/* Keys or values of a unit: where they are packed; or where they are, if packed ones are no different. */
INLINE const float *unit_columns(const struct narrow *narrow, const struct rows *rows, int64_t key_head, int64_t dim,
                                 int64_t after, float *packed, int dtype) {
    if (dtype != FLOAT32 || rows->row != padded_dim(dim) || after < SUMS) return packed; /* SUMS more may be read */
    return head_rows(rows, narrow->unit.batch, key_head, narrow->column, 0);
}

/* Packs keys or values from a column on, unless they are used where they are. */
INLINE void pack_columns(const struct narrow *narrow, const struct rows *rows, int64_t key_head, int64_t dim,
                         int64_t begin, int64_t end, const float *used, float *packed, int dtype) {
    for (int64_t column = begin; used == packed && column < end; column += BLOCK)
        pack_rows(head_rows(rows, narrow->unit.batch, key_head, column, dtype), rows->row,
                  min_int(end - column, BLOCK), dim, 1.0f, packed + (column - narrow->column) * padded_dim(dim),
                  dtype);
}

/* Some blocks of rows, if the tiles of each lie side by side and are few; returns 0 if they do not. `next`: the unit
 * after this one. */
INLINE int process_narrow(const struct flash *problem, struct narrow *narrow, const struct unit *unit,
                          const struct unit *next, int dtype) {
    if (problem->sigmoid_bias || problem->call_bias || problem->landmark_size) return 0;
    if (in_pairs(dtype)) return 0; /* products of pairs are faster tile by tile, from windows of 16 on */
    int64_t end, key_head = unit->head / problem->group;
    if (!find_columns(problem, narrow, unit, &narrow->column, &end)) return 0;
    int64_t after = problem->columns - end, packed = narrow->column;
    narrow->unit = *unit;
    narrow->keys = unit_columns(narrow, &problem->key, key_head, problem->dim, after, narrow->packed_keys, dtype);
    narrow->values = unit_columns(narrow, &problem->value, key_head, problem->value_dim, after, narrow->packed_values,
                                  dtype);
    for (int64_t first = 0; first < unit->count; first += BLOCK) {
        struct span span;
        find_span(problem, unit->batch, unit->head, (unit->row + first) / BLOCK, &span);
        pack_columns(narrow, &problem->key, key_head, problem->dim, packed, span.end, narrow->keys,
                     narrow->packed_keys, dtype);
        pack_columns(narrow, &problem->value, key_head, problem->value_dim, packed, span.end, narrow->values,
                     narrow->packed_values, dtype);
        packed = packed > span.end ? packed : span.end;
        struct unit rest = {unit->batch, unit->head, unit->row + first + BLOCK, unit->count - first - BLOCK};
        start_ahead(problem, narrow, rest.count > 0 ? &rest : next, rest.count > 0 ? packed : 0, dtype);
        for (int64_t r = 0; r < BLOCK && first + r < unit->count; r += QUERIES) {
            struct group group = {unit->row + first + r, min_int(unit->count - first - r, QUERIES),
                                  span_extent(&span, r, QUERIES)};
            if (group.columns.begin >= group.columns.end) group.columns.begin = group.columns.end = span.column;
            process_group(problem, narrow, &span, &group, dtype);
        }
    }
    return 1;
}

/* How many floats a unit of so many rows needs. */
INLINE int64_t narrow_floats(const struct flash *problem, int64_t rows) {
    int64_t padded = padded_dim(problem->dim), value_padded = padded_dim(problem->value_dim);
    return (rows + NARROW + BLOCK) * (padded + value_padded) + (padded + value_padded + 2 * NARROW) * QUERIES +
           2 * NARROW + 6 * 16;
}

INLINE struct narrow take_narrow(const struct flash *problem, int64_t rows, float **memory) {
    int64_t padded = padded_dim(problem->dim), value_padded = padded_dim(problem->value_dim);
    struct narrow narrow = {.most_columns = rows + NARROW};
    narrow.packed_keys = take_floats(memory, (rows + NARROW + BLOCK) * padded);
    narrow.packed_values = take_floats(memory, (rows + NARROW + BLOCK) * value_padded);
    narrow.query = take_floats(memory, padded * QUERIES), narrow.output = take_floats(memory, value_padded * QUERIES);
    narrow.weights = take_floats(memory, 2 * NARROW * QUERIES);
    narrow.bias = take_floats(memory, 2 * NARROW);
    return narrow;
}

#endif
