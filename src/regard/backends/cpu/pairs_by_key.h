/* The pairs of neighbouring lists in the order of their keys, where each query of each head has a list of its own: the
 * queries that name a key then follow one another, so that it is read once for them, and its gradients written once. */
#ifndef REGARD_PAIRS_BY_KEY_H
#define REGARD_PAIRS_BY_KEY_H

#include "listed_rows.h"

/* A tile is of so many queries, or of so many entries of their lists if these are fewer; its pairs are worked on in parts
 * of PAIRS_AT_ONCE. Entries are sorted exactly where there are BUCKETS blocks of keys or fewer. */
enum { ROW_BITS = 6, TILE_ROWS = 1 << ROW_BITS, TILE_ENTRIES = 1 << 15, PAIRS_AT_ONCE = 256, BUCKETS = 1 << 14 };

/* An entry of a list is one number, so that sorting moves one: from the highest bits on that of its block, that of its
 * query in the tile, and its place in the list. */
enum { PLACE_BITS = 32 - ROW_BITS };

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
 * bucket of blocks has, then where its next one goes. taken, sorted: the entries of the lists, as they come and in the
 * order of their buckets. part: some pairs. */
struct pair_scratch {
    int64_t buckets, row_numbers;
    int shift;
    uint32_t lists, *last, *bucket;
    uint64_t *taken, *sorted;
    struct {
        int32_t *key, *row, *place;
    } part;
};

INLINE int64_t rows_of_tile(const struct gathered *problem) {
    return least(TILE_ROWS, most(TILE_ENTRIES / most(problem->length, 1), 1));
}

/* Lays out memory, or tells with null how many bytes that are. */
INLINE int64_t pair_scratch(const struct gathered *problem, char *memory, struct pair_scratch *scratch) {
    const int64_t entries = rows_of_tile(problem) * problem->length + 1;
    int64_t bytes = 0;
    scratch->shift = 0;
    while (problem->blocks >> scratch->shift > BUCKETS) scratch->shift++;
    scratch->buckets = (problem->blocks >> scratch->shift) + 1;
    MEMORY_OF(last, uint32_t, problem->blocks + 1);
    MEMORY_OF(bucket, uint32_t, scratch->buckets);
    MEMORY_OF(taken, uint64_t, entries);
    MEMORY_OF(sorted, uint64_t, entries);
    MEMORY_OF(part.key, int32_t, PAIRS_AT_ONCE + LANES);
    MEMORY_OF(part.row, int32_t, PAIRS_AT_ONCE + LANES);
    MEMORY_OF(part.place, int32_t, PAIRS_AT_ONCE + LANES);
    return bytes;
}

/* The entries of a list that are blocks of keys that its query sees, each once, after the `count` of the lists before; how
 * many there are then. No branch depends on what is listed. */
INLINE int64_t take_entries(const struct gathered *problem, struct pair_scratch *scratch, const int32_t *indices,
                            int64_t row, const int64_t span[2], int64_t count) {
    const int64_t none = problem->blocks, length = problem->length;
    const struct blocks in_span = blocks_of_span(problem, span[0], span[1]);
    const uint32_t number = ++scratch->lists;
    const int shift = scratch->shift;
    uint32_t *last = scratch->last, *bucket = scratch->bucket;
    uint64_t *entry = scratch->taken, place = (uint64_t)row << PLACE_BITS;
    last[none] = number;
    for (int64_t t = 0; t < length; t++, place++) {
        const int64_t block = table_number(problem, in_span, indices[t]);
        const uint32_t is_new = last[block] != number;
        last[block] = number;
        bucket[block >> shift] += is_new;
        entry[count] = (uint64_t)block << 32 | place;
        count += is_new;
    }
    return count;
}

/* Takes the lists of a tile, and sorts what they name; how many entries that are. */
INLINE int64_t take_tile(const struct gathered *problem, struct pair_scratch *scratch, const struct tile *tile) {
    const int32_t *indices = indices_of(problem, tile->batch, tile->head, tile->first);
    int64_t count = 0, span[2];
    memset(scratch->bucket, 0, (size_t)scratch->buckets * sizeof(uint32_t));
    for (int64_t row = 0; row < tile->rows; row++) {
        span_of_row(problem, tile->batch, tile->first + row, span);
        count = take_entries(problem, scratch, indices + row * problem->length, row, span, count);
    }
    uint32_t *bucket = scratch->bucket, before = 0;
    for (int64_t b = 0; b < scratch->buckets; b++) {
        const uint32_t own = bucket[b];
        bucket[b] = before;
        before += own;
    }
    const uint64_t *taken = scratch->taken;
    uint64_t *sorted = scratch->sorted;
    const int shift = 32 + scratch->shift;
    for (int64_t t = 0; t < count; t++) sorted[bucket[taken[t] >> shift]++] = taken[t];
    return count;
}

/* What is done with some pairs of a tile. */
typedef void work_on_pairs(const struct gathered *, void *, const struct tile *, const struct pairs *);

INLINE int32_t row_of_entry(uint64_t entry) { return (int32_t)(entry >> PLACE_BITS & (TILE_ROWS - 1)); }

INLINE int32_t place_of_entry(uint64_t entry) { return (int32_t)(entry & ((1u << PLACE_BITS) - 1)); }

/* All pairs of a tile, PAIRS_AT_ONCE of them at a time. */
INLINE void work_on_tile(const struct gathered *problem, struct pair_scratch *scratch, const struct tile *tile, void *with,
                         work_on_pairs *work) {
    const int64_t entries = take_tile(problem, scratch, tile), columns = problem->columns;
    const int32_t start = (int32_t)(problem->block * columns - problem->first), numbers = (int32_t)scratch->row_numbers;
    const uint64_t *sorted = scratch->sorted;
    int32_t *key = scratch->part.key, *row = scratch->part.row, *place = scratch->part.place;
    struct pairs some = {key, row, place, 0};
    if (columns == 1) { /* the entries are the pairs */
        for (int64_t begin = 0; begin < entries; begin += PAIRS_AT_ONCE) {
            some.count = least(PAIRS_AT_ONCE, entries - begin);
            for (int64_t t = 0; t < some.count; t++) {
                const uint64_t entry = sorted[begin + t];
                key[t] = (int32_t)(entry >> 32) + start;
                row[t] = row_of_entry(entry) * numbers;
                place[t] = place_of_entry(entry);
            }
            work(problem, with, tile, &some);
        }
        return;
    }
    for (int64_t begin = 0, end; begin < entries; begin = end) {
        const int64_t block = (int64_t)(sorted[begin] >> 32), first = block * columns + start;
        for (end = begin; end < entries && (int64_t)(sorted[end] >> 32) == block;) end++;
        for (int64_t c = 0; c < columns; c++)
            for (int64_t t = begin; t < end; t++) {
                int64_t span[2];
                span_of_row(problem, tile->batch, tile->first + row_of_entry(sorted[t]), span);
                if (first + c < span[0] || first + c >= span[1]) continue;
                key[some.count] = (int32_t)(first + c);
                row[some.count] = row_of_entry(sorted[t]) * numbers;
                place[some.count++] = (int32_t)(place_of_entry(sorted[t]) * columns + c);
                if (some.count < PAIRS_AT_ONCE) continue;
                work(problem, with, tile, &some);
                some.count = 0;
            }
    }
    if (some.count) work(problem, with, tile, &some);
}

#endif
