/* Rows whose keys lie side by side and are few: what the forward and the backward pass share.
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

/* What the next block of rows reads and writes, loaded a few rows at a time while the one before is computed: in long
 * strides the processor does not load it by itself, and all at once it would have to be waited for. */
enum { MOST_STREAMS = 8 };
struct ahead {
    struct stream stream[MOST_STREAMS];
    int at, count;
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
    while (count-- && ahead->at < ahead->count) {
        struct stream *stream = ahead->stream + ahead->at;
        if (stream->left-- > 0)
            for (int64_t byte = 0; byte < stream->bytes; byte += LINE) fetch_line(stream->row + byte);
        else
            ahead->at++;
        stream->row += stream->stride;
    }
}

/* into[r] = left[r] . right, SUMS rows. */
INLINE void store_product(struct ahead *ahead, const struct factor left, const struct vectors right, float *into,
                          const int stride) {
    lanes sum[SUMS][VECTORS] = {{{0}}};
    for (int64_t k = right.begin; k < right.end; k += STEPS) {
        load_rows_ahead(ahead, 2);
        accumulate_lanes(left, (struct vectors){right.data, right.stride, k, min_int(k + STEPS, right.end)}, sum);
    }
    UNROLL for (int r = 0; r < SUMS; r++)
        UNROLL for (int v = 0; v < VECTORS; v++) store(into + r * stride + v * LANES, sum[r][v]);
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

/* The index in the relative bias of a group's first row and last column. */
INLINE int64_t last_diagonal(const struct flash *problem, const struct group *group) {
    return problem->rows - 1 - group->row + group->columns.end - 1;
}

/* The relative bias of a group, from its last column to its first one, in the order of its rows. */
INLINE void load_bias(const struct flash *problem, int64_t head, const struct group *group, float *target) {
    const float *relative_bias = problem->relative_bias + head * problem->relative_bias_head;
    int64_t last = last_diagonal(problem, group);
    for (int64_t i = 0; i < group_width(group) + QUERIES; i++) /* rows of padding may lie before the first number */
        target[i] = relative_bias[last - i > 0 ? last - i : 0];
}

/* The bits of a group of rows of a tile, one number for each, the lower and the upper half; none where all exist. */
INLINE void split_words(const uint64_t *words, int64_t row, int32_t halves[2][QUERIES]) {
    for (int r = 0; words && r < QUERIES; r++)
        halves[0][r] = (int32_t)words[row + r], halves[1][r] = (int32_t)(words[row + r] >> 32);
}

#endif
