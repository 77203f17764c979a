/* The weights themselves, from the log-sum-exp of their rows: weight(i, j) = exp(score(i, j) - lse[i]). They are written
 * for the tiles of a mask alone, into zeros; or, where there are no tiles, for all pairs, and 0 where `keep` says so. */
#include "blocks.h"

/* What a thread keeps of some rows and a block of keys. */
struct panel {
    float *query, *keys; /* [rows][padded dim], scaled; [dim][BLOCK] */
    int64_t batch, head, begin, count, blocks;
};

INLINE float *place_of(const struct rows *rows, const struct panel *at, int64_t row, int64_t column) {
    return (float *)rows_of(rows, at->batch, at->head, row, 0) + column;
}

/* The bytes of up to LANES pairs, as lanes that are all ones where the pair exists. */
INLINE bits exist(const uint8_t *keep, int64_t count) {
    typedef uint8_t bytes __attribute__((vector_size(LANES)));
    bytes some = {0};
    memcpy(&some, keep, count >= LANES ? sizeof(some) : (size_t)count);
    return __builtin_convertvector(some, bits) != 0;
}

/* A row of products becomes weights, where pairs of its tile exist; nothing is touched for a row that takes no part. */
INLINE void write_in_tile(const struct flash *of, const struct panel *at, int64_t row, int64_t column,
                          const struct extent extent, uint64_t word, const float *products) {
    const float *line = line_of(of, at->head, row, column);
    float lse = LOG2_E * of->lse[(at->batch * of->heads + at->head) * of->rows + row];
    float *weights = place_of(&of->weights, at, row, column);
    if (lse == INFINITY) return;
    for (int64_t j = low_of(extent); j < extent.to; j += LANES) {
        lanes exponent = capped(of, load(products + j), 0);
        if (line) exponent += load_some(line + j, extent.to - j);
        lanes weight = power_of_two(exponent - lse);
        if (extent.partial) weight = where_bits(word, j, weight, 0.0f);
        store_some(weights + j, weight, extent.to - j);
    }
}

/* A row of products becomes weights, of all pairs. */
INLINE void write_weights(const struct flash *of, const struct panel *at, int64_t row, int64_t column, int64_t count,
                          const float *products) {
    const uint8_t *keep = of->keep.at ? (const uint8_t *)of->keep.at + at->batch * of->keep.batch +
                                            at->head * of->keep.head + row * of->keep.row + column
                                      : 0;
    float lse = LOG2_E * of->lse[(at->batch * of->heads + at->head) * of->rows + row];
    float none = lse != lse ? lse : 0.0f; /* all of a row that attends to NaN is NaN */
    float *weights = place_of(&of->weights, at, row, column);
    float *terms = of->terms.at ? place_of(&of->terms, at, row, column) : 0;
    for (int64_t j = 0; j < count; j += LANES) {
        lanes exponent = capped(of, load(products + j), 0) - lse;
        lanes weight = power_of_two(exponent), term = weight * larger(every(-127.0f), exponent);
        if (keep) {
            bits exists = exist(keep + j, count - j);
            weight = where(exists, weight) + none, term = where(exists, term) + none;
        }
        store_some(weights + j, weight, count - j);
        if (terms) store_some(terms + j, term, count - j);
    }
}

/* A block of rows with one block of keys; `words` has the bits of the tile, or is null where all its pairs exist. */
INLINE void whole_tile(const struct flash *of, const struct panel *at, int64_t first, int64_t column,
                       const uint64_t *words) {
    int64_t padded = whole_pairs(of->dim), count = smaller(of->columns - column, BLOCK);
    for (int64_t row = first; row < first + BLOCK && row < at->count; row += GROUP) {
        const uint64_t *own = words ? words + row - first : 0;
        struct extent extent = extent_of(own, count);
        float products[GROUP * BLOCK] ALIGNED;
        struct factor query = {at->query + row * padded, padded, 1};
        for (int64_t j = low_of(extent); j < extent.to; j += PAIR)
            product(query, (struct vectors){at->keys + j, BLOCK, 0, of->dim}, products + j, BLOCK, 0);
        for (int r = 0; r < GROUP && row + r < at->count; r++)
            if (of->first)
                write_in_tile(of, at, at->begin + row + r, column, extent, word_of(own, r, count), products + r * BLOCK);
            else
                write_weights(of, at, at->begin + row + r, column, count, products + r * BLOCK);
    }
}

INLINE void whole_panel(const struct flash *of, struct panel *at, const int narrow) {
    int64_t padded = whole_pairs(of->dim);
    struct cursor cursors[MOST_BLOCKS];
    for (int64_t b = 0; b < at->blocks; b++) {
        if (of->first) cursors[b] = beginning_of(of, at->begin / BLOCK + b);
        lay_rows(rows_of(&of->query, at->batch, at->head, at->begin + b * BLOCK, narrow), of->query.row,
                 smaller(at->count - b * BLOCK, BLOCK), of->dim, query_factor(of), at->query + b * BLOCK * padded, narrow);
    }
    for (int64_t column = 0; column < of->columns; column += BLOCK) {
        int laid = 0;
        for (int64_t b = 0; b < at->blocks; b++) {
            if (of->first && cursors[b].column != column) continue;
            if (!laid)
                lay_columns(rows_of(&of->key, at->batch, at->head / of->group, column, narrow), of->key.row,
                            smaller(of->columns - column, BLOCK), of->dim, at->keys, narrow);
            laid = 1;
            int64_t tile = of->first ? next_tile(of, cursors + b) : -1;
            whole_tile(of, at, b * BLOCK, column, words_of(of, at->batch, at->head, tile));
        }
    }
}

/* Takes some rows of one head after another, as long as any are left: for as many threads at once as like. */
void EXPORTED(regard_flash_weights)(struct flash *of) {
    int64_t rows = of->segment * BLOCK, padded = whole_pairs(of->dim), segments = (of->rows + rows - 1) / rows, unit;
    int64_t floats = (rows + BLOCK) * padded + 2 * 16;
    float *room = aligned_alloc(64, (size_t)(floats * 4 + 63) / 64 * 64), *left = room;
    if (!room) {
        of->failed = 1;
        return;
    }
    struct panel at = {.query = taken_off(&left, rows * padded), .keys = taken_off(&left, padded * BLOCK)};
    while ((unit = __atomic_fetch_add(&of->taken, 1, __ATOMIC_RELAXED)) < of->units) {
        int64_t head = unit / segments;
        at.batch = head / of->heads, at.head = head % of->heads, at.begin = unit % segments * rows;
        at.count = smaller(of->rows - at.begin, rows), at.blocks = (at.count + BLOCK - 1) / BLOCK;
        if (of->narrow)
            whole_panel(of, &at, 1);
        else
            whole_panel(of, &at, 0);
    }
    free(room);
}
