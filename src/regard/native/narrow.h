/* Dot-product attention, forward, of rows whose keys lie side by side and are few: the softmax of a row is taken once.
 *
 * Queries are in lanes: the scores of a group of queries are [keys][queries], so that keys and values are read row by
 * row, maxima and sums are taken lane by lane, and a group of queries has few keys beyond those of each of them. */
#ifndef REGARD_NARROW_H
#define REGARD_NARROW_H

#include "tile.h"

/* A group of queries with so many keys, or entries of values, at once: as many sums as there are registers for. */
enum { VECTORS = LANES == 16 ? 1 : 2, QUERIES = VECTORS * LANES, SUMS = LANES == 16 ? 16 : 4 };

/* The most columns from the first tile of a block of rows to its last one. */
enum { NARROW = 5 * BLOCK };

/* After so many terms of a product some rows are loaded ahead: no more than the processor can wait for at once. */
enum { STEPS = 16 };

/* The next row of a tensor that will be read or written, the distance to the one after it, how many are left, and how
 * long they are; in bytes. */
struct stream {
    const char *row;
    int64_t stride, left, bytes;
};

/* The keys, values, queries and results of the next block of rows, loaded a few rows at a time while the one before is
 * computed: in long strides the processor does not load them by itself, and all at once they would have to be waited
 * for. */
enum { STREAMS = 4 };
struct ahead {
    struct stream stream[STREAMS];
    int at;
};

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
    struct unit unit;
    int64_t column, most_columns; /* the unit's first column, and for how many there is memory */
    struct ahead ahead;
};

/* The tiles of a block of rows: from `column` on, side by side. */
struct span {
    int64_t column, end;
    const uint64_t *words[NARROW / BLOCK]; /* null where all pairs exist */
};

/* sum[r] += sum over k of left[r][k] right[k]: SUMS rows, VECTORS vectors of columns. Their addresses are in
 * two halves, so that there are registers for them. */
INLINE void accumulate_lanes(const struct factor left, const struct vectors right, lanes (*sum)[VECTORS]) {
    enum { HALF = SUMS / 2 };
    const float *entry = left.data + right.begin * left.step, *vector = right.data + right.begin * right.stride;
    const float *other = entry + HALF * left.stride;
    for (int64_t k = right.begin; k < right.end; k++) {
        lanes own[VECTORS];
        UNROLL for (int v = 0; v < VECTORS; v++) own[v] = load(vector + v * LANES);
        UNROLL for (int r = 0; r < HALF; r++) {
            UNROLL for (int v = 0; v < VECTORS; v++) {
                sum[r][v] += broadcast(entry[r * left.stride]) * own[v];
                sum[HALF + r][v] += broadcast(other[r * left.stride]) * own[v];
            }
        }
        entry += left.step, other += left.step, vector += right.stride;
    }
}

/* Loads at most `count` rows of those that are read or written next. */
INLINE void load_rows_ahead(struct ahead *ahead, int count) {
    while (count-- && ahead->at < STREAMS) {
        struct stream *stream = ahead->stream + ahead->at;
        if (stream->left-- > 0)
            for (int64_t byte = 0; byte < stream->bytes; byte += 64) __builtin_prefetch(stream->row + byte, 0, 2);
        else
            ahead->at++;
        stream->row += stream->stride;
    }
}

/* into[r] = left[r] . right, SUMS rows. */
INLINE void store_product(struct ahead *ahead, const struct factor left, const struct vectors right, float *into) {
    lanes sum[SUMS][VECTORS] = {{{0}}};
    for (int64_t k = right.begin; k < right.end; k += STEPS) {
        load_rows_ahead(ahead, 2);
        accumulate_lanes(left, (struct vectors){right.data, right.stride, k, min_int(k + STEPS, right.end)}, sum);
    }
    UNROLL for (int r = 0; r < SUMS; r++)
        UNROLL for (int v = 0; v < VECTORS; v++) store(into + r * QUERIES + v * LANES, sum[r][v]);
}

/* The lanes whose numbers have a bit set, and `otherwise` in the others. */
INLINE lanes select_where(bits numbers, int bit, lanes values, float otherwise) {
#if defined(__AVX512F__)
    __mmask16 set = _mm512_test_epi32_mask((__m512i)numbers, _mm512_set1_epi32((int32_t)((uint32_t)1 << bit)));
    return (lanes)_mm512_mask_blend_ps(set, _mm512_set1_ps(otherwise), (__m512)values);
#else
    bits set = (numbers & (int32_t)((uint32_t)1 << bit)) != 0;
    return (lanes)((set & (bits)values) | (~set & (bits)broadcast(otherwise)));
#endif
}

/* The tiles of a block of rows; 0 if they are not side by side, or too many. */
INLINE int find_span(const struct flash *problem, int64_t batch, int64_t head, int64_t block, struct span *span) {
    struct cursor cursor = first_tile(problem, block);
    span->column = span->end = cursor.column == INT64_MAX ? 0 : cursor.column;
    while (cursor.column != INT64_MAX) {
        if (cursor.column != span->end || span->end - span->column == NARROW) return 0;
        int64_t tile = (span->end - span->column) / BLOCK;
        span->end += BLOCK;
        span->words[tile] = tile_words(problem, batch, head, next_tile(problem, &cursor));
    }
    span->end = min_int(span->end, problem->columns);
    return 1;
}

/* The columns in which a group of rows has pairs. */
INLINE struct extent span_extent(const struct span *span, int64_t row, const int count) {
    struct extent extent = {0, span->end, span->column};
    for (int64_t column = span->column; column < span->end; column += BLOCK) {
        const uint64_t *words = span->words[(column - span->column) / BLOCK];
        uint64_t some = words ? 0 : ~(uint64_t)0;
        if (words)
            for (int r = 0; r < count; r++) some |= words[row + r];
        if (!some) continue;
        extent.begin = min_int(extent.begin, column + __builtin_ctzll(some));
        extent.end = min_int(column + BLOCK - __builtin_clzll(some), span->end);
    }
    return extent;
}

/* A group of queries: its first row, how many there are, and the columns in which they have pairs. */
struct group {
    int64_t row, count;
    struct extent columns;
};

INLINE int64_t group_width(const struct group *group) { return group->columns.end - group->columns.begin; }

/* The relative bias of a group, from its last column to its first one, in the order of its rows. */
INLINE void load_bias(const struct flash *problem, const struct narrow *narrow, const struct group *group) {
    const float *relative_bias = problem->relative_bias + narrow->unit.head * problem->relative_bias_head;
    int64_t last = problem->rows - 1 - group->row + group->columns.end - 1;
    for (int64_t i = 0; i < group_width(group) + QUERIES; i++) /* rows of padding may lie before the first number */
        narrow->bias[i] = relative_bias[last - i > 0 ? last - i : 0];
}

/* Products become scores: through the softcap, with the relative bias, -infinity where there is no pair; and `limit`,
 * the largest ones. */
INLINE void finish_group(const struct flash *problem, const struct narrow *narrow, const struct span *span,
                         const struct group *group, lanes *limit) {
    int64_t block_row = group->row % BLOCK, begin = group->columns.begin, end = group->columns.end;
    for (int64_t column = span->column; column < end; column += BLOCK) {
        const uint64_t *words = span->words[(column - span->column) / BLOCK];
        int32_t halves[2][QUERIES] ALIGNED;
        for (int r = 0; words && r < QUERIES; r++) {
            uint64_t word = words[block_row + r];
            halves[0][r] = (int32_t)word, halves[1][r] = (int32_t)(word >> 32);
        }
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
            sums[r] == 0.0f ? -INFINITY : LN_2 * limits[r] + logf(sums[r]);
    }
}

/* Writes the output, or adds it to the result that it is merged with. */
INLINE void write_group(const struct flash *problem, const struct narrow *narrow, const struct group *group,
                        const float *share, const float *rest, const int is_bfloat16) {
    int64_t padded = padded_dim(problem->value_dim);
    for (int64_t r = 0; r < group->count; r++) {
        void *row = (void *)head_rows(&problem->result, narrow->unit.batch, narrow->unit.head, group->row + r,
                                      is_bfloat16);
        for (int64_t a = 0; a < problem->value_dim; a += LANES) {
            lanes output = load(narrow->output + r * padded + a) * share[r];
            if (rest[r] != 0.0f) output += load_entries(row, a, problem->value_dim, is_bfloat16, 0) * rest[r];
            store_entries(row, a, problem->value_dim, is_bfloat16, output);
        }
    }
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
    if (problem->relative_bias) load_bias(problem, narrow, group);
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
INLINE void process_group(const struct flash *problem, struct narrow *narrow, const struct span *span,
                          const struct group *group, const int is_bfloat16) {
    int64_t padded = padded_dim(problem->dim), value_padded = padded_dim(problem->value_dim),
            width = group_width(group), offset = group->columns.begin - narrow->column;
    float share[QUERIES] = {0}, rest[QUERIES] = {0};
    pack_transposed(head_rows(&problem->query, narrow->unit.batch, narrow->unit.head, group->row, is_bfloat16),
                    problem->query.row, group->count, problem->dim, query_factor(problem), narrow->query, QUERIES,
                    is_bfloat16);
    for (int64_t j = 0; j < width; j += SUMS)
        store_product(&narrow->ahead, (struct factor){narrow->keys + (offset + j) * padded, padded, 1},
                      (struct vectors){narrow->query, QUERIES, 0, problem->dim}, narrow->weights + j * QUERIES);
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
    write_group(problem, narrow, group, share, rest, is_bfloat16);
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
                        const int is_bfloat16) {
    struct span span;
    narrow->ahead.at = STREAMS;
    if (unit->head < 0 || unit->count <= 0 ||
        !find_span(problem, unit->batch, unit->head, unit->row / BLOCK, &span))
        return;
    int64_t begin = span.column > column ? span.column : column, keys = span.end > begin ? span.end - begin : 0,
            key_head = unit->head / problem->group, rows = min_int(unit->count, BLOCK), size = is_bfloat16 ? 2 : 4;
    const struct rows *read[STREAMS] = {&problem->key, &problem->value, &problem->query, &problem->result};
    for (int i = 0; i < STREAMS; i++)
        narrow->ahead.stream[i] = (struct stream){
            head_rows(read[i], unit->batch, i < 2 ? key_head : unit->head, i < 2 ? begin : unit->row, is_bfloat16),
            read[i]->row * size, i < 2 ? keys : rows, (i % 2 ? problem->value_dim : problem->dim) * size};
    narrow->ahead.at = 0;
}

/* Keys or values of a unit: where they are packed; or where they are, if packed ones are no different. */
INLINE const float *unit_columns(const struct narrow *narrow, const struct rows *rows, int64_t key_head, int64_t dim,
                                 int64_t after, float *packed, const int is_bfloat16) {
    if (is_bfloat16 || rows->row != padded_dim(dim) || after < SUMS) return packed; /* SUMS more may be read */
    return head_rows(rows, narrow->unit.batch, key_head, narrow->column, 0);
}

/* Packs keys or values from a column on, unless they are used where they are. */
INLINE void pack_columns(const struct narrow *narrow, const struct rows *rows, int64_t key_head, int64_t dim,
                         int64_t begin, int64_t end, const float *used, float *packed, const int is_bfloat16) {
    for (int64_t column = begin; used == packed && column < end; column += BLOCK)
        pack_rows(head_rows(rows, narrow->unit.batch, key_head, column, is_bfloat16), rows->row,
                  min_int(end - column, BLOCK), dim, 1.0f, packed + (column - narrow->column) * padded_dim(dim),
                  is_bfloat16);
}

/* Some blocks of rows, if the tiles of each lie side by side and are few; returns 0 if they do not. `next`: the unit
 * after this one. */
INLINE int process_narrow(const struct flash *problem, struct narrow *narrow, const struct unit *unit,
                          const struct unit *next, const int is_bfloat16) {
    int64_t end, key_head = unit->head / problem->group;
    if (!find_columns(problem, narrow, unit, &narrow->column, &end)) return 0;
    int64_t after = problem->columns - end, packed = narrow->column;
    narrow->unit = *unit;
    narrow->keys = unit_columns(narrow, &problem->key, key_head, problem->dim, after, narrow->packed_keys, is_bfloat16);
    narrow->values = unit_columns(narrow, &problem->value, key_head, problem->value_dim, after, narrow->packed_values,
                                  is_bfloat16);
    for (int64_t first = 0; first < unit->count; first += BLOCK) {
        struct span span;
        find_span(problem, unit->batch, unit->head, (unit->row + first) / BLOCK, &span);
        pack_columns(narrow, &problem->key, key_head, problem->dim, packed, span.end, narrow->keys,
                     narrow->packed_keys, is_bfloat16);
        pack_columns(narrow, &problem->value, key_head, problem->value_dim, packed, span.end, narrow->values,
                     narrow->packed_values, is_bfloat16);
        packed = packed > span.end ? packed : span.end;
        struct unit rest = {unit->batch, unit->head, unit->row + first + BLOCK, unit->count - first - BLOCK};
        start_ahead(problem, narrow, rest.count > 0 ? &rest : next, rest.count > 0 ? packed : 0, is_bfloat16);
        for (int64_t r = 0; r < BLOCK && first + r < unit->count; r += QUERIES) {
            struct group group = {unit->row + first + r, min_int(unit->count - first - r, QUERIES),
                                  span_extent(&span, r, QUERIES)};
            if (group.columns.begin >= group.columns.end) group.columns.begin = group.columns.end = narrow->column;
            process_group(problem, narrow, &span, &group, is_bfloat16);
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
