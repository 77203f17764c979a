/* The pairs of neighbouring lists in the order of their keys, where each query of each head has a list of its own: the
 * queries that name a key then follow one another, so that it is read once for them, and its gradients written once. */
#ifndef REGARD_PAIRS_BY_KEY_H
#define REGARD_PAIRS_BY_KEY_H

#include "listed_rows.h"

/* A tile is of so many queries, or of so many entries of their lists if these are fewer; its pairs are worked on in parts
 * of PAIRS_AT_ONCE. Entries are sorted exactly where there are BUCKETS blocks of keys or fewer. */
enum { TILE_ROWS = 64, TILE_ENTRIES = 1 << 15, PAIRS_AT_ONCE = 256, BUCKETS = 1 << 14 };

/* The queries of a tile, from `first` on. */
struct tile {
    int64_t batch, head, first, rows;
};

/* Some pairs: the number of the key, the query's number in the tile times `row_numbers`, and the place in its list. What
 * follows them, up to whole vectors, is of pairs too. */
struct pairs {
    const int32_t *key, *row, *place;
    int64_t count;
};

/* last: of each block the number of the list that named it last, and of all that is none. bucket: how many entries a
 * bucket of blocks has, then where its next one goes. begin, block, at: of each list where its entries begin, their blocks
 * and places. sorted: those of all lists. part: some pairs, of blocks of several keys. */
struct pair_scratch {
    int64_t buckets, row_numbers;
    int shift;
    uint32_t lists, *last, *bucket;
    int32_t *begin, *block, *at;
    struct {
        int32_t *key, *row, *place;
    } sorted, part;
};

INLINE int64_t rows_of_tile(const struct gathered *problem) {
    return least(TILE_ROWS, most(TILE_ENTRIES / most(problem->length, 1), 1));
}

/* Lays out memory, or tells with null how many bytes that are. */
INLINE int64_t pair_scratch(const struct gathered *problem, char *memory, struct pair_scratch *scratch) {
    const int64_t entries = rows_of_tile(problem) * problem->length + LANES;
    int64_t bytes = 0;
    scratch->shift = 0;
    while (problem->blocks >> scratch->shift > BUCKETS) scratch->shift++;
    scratch->buckets = (problem->blocks >> scratch->shift) + 1;
    MEMORY_OF(last, uint32_t, problem->blocks + 1);
    MEMORY_OF(bucket, uint32_t, scratch->buckets);
    MEMORY_OF(begin, int32_t, rows_of_tile(problem) + 1);
    MEMORY_OF(block, int32_t, entries);
    MEMORY_OF(at, int32_t, entries);
    MEMORY_OF(sorted.key, int32_t, entries);
    MEMORY_OF(sorted.row, int32_t, entries);
    MEMORY_OF(sorted.place, int32_t, entries);
    MEMORY_OF(part.key, int32_t, PAIRS_AT_ONCE + LANES);
    MEMORY_OF(part.row, int32_t, PAIRS_AT_ONCE + LANES);
    MEMORY_OF(part.place, int32_t, PAIRS_AT_ONCE + LANES);
    return bytes;
}

/* The keys that a query sees: from the first number to the one before the second. */
INLINE void span_of(const struct gathered *problem, const struct tile *tile, int64_t row, int64_t span[2]) {
    span[0] = 0, span[1] = problem->keys;
    if (!problem->spans) return;
    const int32_t *own = problem->spans + tile->batch * problem->span_batch + 2 * (tile->first + row);
    span[0] = own[0], span[1] = own[1];
}

/* The entries of a list that are blocks of keys that its query sees, each once, after the `count` of the lists before; how
 * many there are then. No branch depends on what is listed. */
INLINE int64_t take_entries(const struct gathered *problem, struct pair_scratch *scratch, const int32_t *indices,
                            const int64_t span[2], int64_t count) {
    const int64_t none = problem->blocks, length = problem->length;
    const struct blocks in_span = blocks_of_span(problem, span[0], span[1]);
    const uint32_t number = ++scratch->lists;
    uint32_t *last = scratch->last, *bucket = scratch->bucket;
    int32_t *block = scratch->block, *at = scratch->at;
    const int shift = scratch->shift;
    last[none] = number;
    for (int64_t t = 0; t < length; t++) {
        const int64_t taken = table_number(problem, in_span, indices[t]);
        const uint32_t is_new = last[taken] != number;
        last[taken] = number;
        bucket[taken >> shift] += is_new;
        block[count] = (int32_t)taken;
        at[count] = (int32_t)t;
        count += is_new;
    }
    return count;
}

/* Takes the lists of a tile, and sorts what they name; how many entries that are. */
INLINE int64_t take_tile(const struct gathered *problem, struct pair_scratch *scratch, const struct tile *tile) {
    const int32_t *indices = problem->indices + tile->batch * problem->index_batch + tile->head * problem->index_head;
    int64_t count = 0, span[2];
    memset(scratch->bucket, 0, (size_t)scratch->buckets * sizeof(uint32_t));
    for (int64_t row = 0; row < tile->rows; row++) {
        scratch->begin[row] = (int32_t)count;
        span_of(problem, tile, row, span);
        count = take_entries(problem, scratch, indices + (tile->first + row) * problem->length, span, count);
    }
    scratch->begin[tile->rows] = (int32_t)count;
    uint32_t before = 0;
    for (int64_t b = 0; b < scratch->buckets; b++) {
        const uint32_t own = scratch->bucket[b];
        scratch->bucket[b] = before;
        before += own;
    }
    const int32_t columns = (int32_t)problem->columns, *block = scratch->block, *at = scratch->at;
    const int32_t start = (int32_t)(problem->block * problem->columns - problem->first);
    int32_t *sorted_key = scratch->sorted.key, *sorted_row = scratch->sorted.row, *place = scratch->sorted.place;
    uint32_t *bucket = scratch->bucket;
    const int shift = scratch->shift;
    for (int64_t row = 0; row < tile->rows; row++) {
        const int32_t own = (int32_t)(row * scratch->row_numbers);
        for (int64_t t = scratch->begin[row], end = scratch->begin[row + 1]; t < end; t++) {
            const uint32_t to = bucket[block[t] >> shift]++;
            sorted_key[to] = block[t] * columns + start;
            sorted_row[to] = own;
            place[to] = at[t];
        }
    }
    return count;
}

/* What is done with some pairs of a tile. */
typedef void work_on_pairs(const struct gathered *, void *, const struct tile *, const struct pairs *);

/* All pairs of a tile, PAIRS_AT_ONCE of them at a time. */
INLINE void work_on_tile(const struct gathered *problem, struct pair_scratch *scratch, const struct tile *tile, void *with,
                         work_on_pairs *work) {
    const int64_t entries = take_tile(problem, scratch, tile), columns = problem->columns;
    const int32_t *key = scratch->sorted.key, *row = scratch->sorted.row, *place = scratch->sorted.place;
    if (columns == 1) { /* the entries are the pairs */
        for (int64_t t = 0; t < entries; t += PAIRS_AT_ONCE) {
            const struct pairs some = {key + t, row + t, place + t, least(PAIRS_AT_ONCE, entries - t)};
            work(problem, with, tile, &some);
        }
        return;
    }
    struct pairs some = {scratch->part.key, scratch->part.row, scratch->part.place, 0};
    for (int64_t begin = 0, end; begin < entries; begin = end) {
        for (end = begin; end < entries && key[end] == key[begin];) end++;
        for (int64_t c = 0; c < columns; c++)
            for (int64_t t = begin; t < end; t++) {
                int64_t span[2];
                span_of(problem, tile, row[t] / scratch->row_numbers, span);
                if (key[t] + c < span[0] || key[t] + c >= span[1]) continue;
                scratch->part.key[some.count] = (int32_t)(key[t] + c);
                scratch->part.row[some.count] = row[t];
                scratch->part.place[some.count++] = (int32_t)(place[t] * columns + c);
                if (some.count < PAIRS_AT_ONCE) continue;
                work(problem, with, tile, &some);
                some.count = 0;
            }
    }
    if (some.count) work(problem, with, tile, &some);
}

#endif
