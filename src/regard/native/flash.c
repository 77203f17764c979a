/* Dot-product attention, forward: a segment of rows meets the blocks of keys that its mask leaves, each laid out once. */
#include "blocks.h"

/* What a thread keeps of the segment that it is at. */
struct segment {
    float *query;   /* [rows][padded dim], scaled */
    float *output;  /* [rows][padded value dim], in units of 2^largest */
    float *total;   /* [rows][LANES], the sums of weights, lane by lane */
    float *largest; /* [rows] */
    float *keys;    /* [dim][BLOCK] */
    float *values;  /* [BLOCK][padded value dim] */
    int64_t batch, head, begin, count, blocks;
};

INLINE float largest_of(lanes vector) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)vector);
#else
    float largest = vector[0];
    for (int lane = 1; lane < LANES; lane++) largest = vector[lane] > largest ? vector[lane] : largest;
    return largest;
#endif
}

/* Products become what the softmax is of: capped, with the line added, -infinity where there is no pair. */
INLINE float scores_of(const struct flash *of, const struct extent extent, uint64_t word, const float *line,
                       float *row) {
    lanes most = every(-INFINITY);
    for (int64_t j = low_of(extent); j < high_of(extent); j += LANES) {
        lanes score = capped(of, load(row + j), 0);
        if (line && j < extent.to) score += load_some(line + j, extent.to - j);
        if (extent.partial) score = where_bits(word, j, score, -INFINITY);
        store(row + j, score);
        most = larger(most, score);
    }
    return largest_of(most);
}

/* A group of rows with one block of keys: the online softmax. */
INLINE void group_of(const struct flash *of, struct segment *at, int64_t row, int64_t column, const uint64_t *words,
                     const struct extent extent) {
    int64_t padded = whole_pairs(of->dim), value_padded = whole_pairs(of->value_dim);
    int64_t low = low_of(extent), high = high_of(extent), count = smaller(of->columns - column, BLOCK);
    float weights[GROUP * BLOCK] ALIGNED, kept[(int)LANES < (int)GROUP ? GROUP : LANES] ALIGNED = {0}, shift[GROUP];
    struct factor query = {at->query + row * padded, padded, 1}, weight = {weights, BLOCK, 1};
    for (int64_t j = low; j < high; j += PAIR)
        product(query, (struct vectors){at->keys + j, BLOCK, 0, of->dim}, weights + j, BLOCK, 0);
    for (int r = 0; r < GROUP; r++) {
        const float *line = line_of(of, at->head, at->begin + row + r, column);
        float before = at->largest[row + r];
        float now = scores_of(of, extent, word_of(words, r, count), line, weights + r * BLOCK);
        now = now > before ? now : before;
        shift[r] = now == -INFINITY ? 0.0f : now;
        kept[r] = before - shift[r];
        at->largest[row + r] = now;
    }
    for (int r = 0; r < GROUP; r += LANES) store(kept + r, power_of_two(load(kept + r)));
    for (int r = 0; r < GROUP; r++) {
        lanes sum = {0}; /* of this block alone first: a sum over many keys is rounded once for each block */
        int32_t noise = noise_of(of, at->batch, at->head, at->begin + row + r);
        for (int64_t j = low; j < high; j += LANES) {
            lanes power = power_of_two(load(weights + r * BLOCK + j) - shift[r]);
            sum += power;
            if (of->row_noise) power = where(kept_of(of, noise, column + j), power);
            store(weights + r * BLOCK + j, power);
        }
        store(at->total + (row + r) * LANES, load(at->total + (row + r) * LANES) * kept[r] + sum);
    }
    float *output = at->output + row * value_padded;
    for (int64_t a = 0; a < value_padded; a += PAIR)
        product(weight, (struct vectors){at->values + a, value_padded, extent.from, extent.to}, output + a,
                value_padded, kept);
}

INLINE void begin_segment(const struct flash *of, struct segment *at, const int narrow) {
    int64_t padded = whole_pairs(of->dim), all = at->blocks * BLOCK;
    const void *query = rows_of(&of->query, at->batch, at->head, at->begin, narrow);
    for (int64_t row = 0; row < all; row += BLOCK)
        lay_rows(row_of(query, row, of->query.row, narrow), of->query.row, smaller(at->count - row, BLOCK), of->dim,
                 query_factor(of), at->query + row * padded, narrow);
    memset(at->output, 0, (size_t)(all * whole_pairs(of->value_dim)) * sizeof(float));
    memset(at->total, 0, (size_t)(all * LANES) * sizeof(float));
    for (int64_t row = 0; row < all; row++) at->largest[row] = -INFINITY;
}

INLINE void end_segment(const struct flash *of, const struct segment *at, const int narrow) {
    int64_t padded = whole_pairs(of->value_dim), first = (at->batch * of->heads + at->head) * of->rows + at->begin;
    for (int64_t row = 0; row < at->count; row++) {
        float total = sum_of(load(at->total + row * LANES)), share = total == 0.0f ? 0.0f : 1.0f / (total * of->kept_share);
        void *to = (void *)row_of(of->result, first + row, of->value_dim, narrow);
        of->lse[first + row] = total == 0.0f ? -INFINITY : LN_2 * at->largest[row] + logf(total);
        for (int64_t a = 0; a < of->value_dim; a += LANES)
            write_entries(to, a, of->value_dim, narrow, load(at->output + row * padded + a) * share);
    }
}

INLINE void whole_segment(const struct flash *of, struct segment *at, const int narrow) {
    struct cursor cursors[MOST_BLOCKS];
    begin_segment(of, at, narrow);
    for (int64_t b = 0; b < at->blocks; b++) cursors[b] = beginning_of(of, at->begin / BLOCK + b);
    for (;;) {
        int64_t column = INT64_MAX;
        for (int64_t b = 0; b < at->blocks; b++) column = smaller(column, cursors[b].column);
        if (column == INT64_MAX) break;
        int64_t count = smaller(of->columns - column, BLOCK), shared = at->head / of->group;
        lay_columns(rows_of(&of->key, at->batch, shared, column, narrow), of->key.row, count, of->dim, at->keys, narrow);
        lay_rows(rows_of(&of->value, at->batch, shared, column, narrow), of->value.row, count, of->value_dim, 1.0f,
                 at->values, narrow);
        for (int64_t b = 0; b < at->blocks; b++) {
            if (cursors[b].column != column) continue;
            const uint64_t *words = words_of(of, at->batch, at->head, next_tile(of, cursors + b));
            for (int64_t row = 0; row < BLOCK && b * BLOCK + row < at->count; row += GROUP) {
                struct extent extent = extent_of(words ? words + row : 0, count);
                if (extent.from < extent.to) group_of(of, at, b * BLOCK + row, column, words ? words + row : 0, extent);
            }
        }
    }
    end_segment(of, at, narrow);
}

/* Takes one segment of one head after another, as long as any is left: for as many threads at once as like. */
void EXPORTED(regard_flash)(struct flash *of) {
    int64_t rows = of->segment * BLOCK, padded = whole_pairs(of->dim), value_padded = whole_pairs(of->value_dim);
    int64_t floats = (rows + BLOCK) * (padded + value_padded) + rows * (LANES + 1) + 6 * 16, unit;
    float *room = aligned_alloc(64, (size_t)(floats * 4 + 63) / 64 * 64), *left = room;
    if (!room) {
        of->failed = 1;
        return;
    }
    struct segment at = {.query = taken_off(&left, rows * padded), .output = taken_off(&left, rows * value_padded)};
    at.total = taken_off(&left, rows * LANES), at.largest = taken_off(&left, rows);
    at.keys = taken_off(&left, padded * BLOCK), at.values = taken_off(&left, BLOCK * value_padded);
    int64_t segments = (of->rows + rows - 1) / rows;
    while ((unit = __atomic_fetch_add(&of->taken, 1, __ATOMIC_RELAXED)) < of->units) {
        int64_t head = unit / segments;
        at.batch = head / of->heads, at.head = head % of->heads, at.begin = unit % segments * rows;
        at.count = smaller(of->rows - at.begin, rows), at.blocks = (at.count + BLOCK - 1) / BLOCK;
        if (of->narrow)
            whole_segment(of, &at, 1);
        else
            whole_segment(of, &at, 0);
    }
    free(room);
}
