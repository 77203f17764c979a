/* A few rows against many keys, read once: scores, the online softmax, and the sum of values, chunk by chunk.
 *
 * Source: Milakov and Gimelshein 2018 (arXiv 1805.02867) for the softmax, Dao, Haziza, Massa and Sizov 2023 (flash
 * decoding) for the parts. */
#include "dots.h"
#include "rows.h"

#include <math.h>
#include <stdlib.h>

/* As many running sums as the processor has room for beside what is read. */
enum { KEYS = LANES == 16 ? 4 : 2, VECTORS = LANES == 16 ? 4 : 2, TURNS = LANES == 16 ? 4 : LANES == 8 ? 3 : 2 };

/* What the compiler makes code of its own for: keys and values in bfloat16, dims of whole groups of vectors, and how many
 * rows go at once. */
struct kind {
    int narrow, whole, rows;
};

/* Rows that are read next: they are fetched from memory while there is other work to do. None where `rows` is null. */
struct next {
    const void *rows;
    int64_t stride, entries;
};

/* Finding where a page is in memory takes as long as reading from it: it is begun so many bytes before. */
enum { PAGE = 4096, AHEAD = 32768 };

INLINE void fetch(const struct next next, int64_t number, const struct kind kind) {
    if (!next.rows) return;
    const char *bytes = row_of(next.rows, number, next.stride, kind.narrow);
    int64_t size = next.entries * (kind.narrow ? 2 : 4);
    for (int64_t at = 0; at < size; at += 64) __builtin_prefetch(bytes + at, 0, 0);
    if ((int64_t)((uintptr_t)bytes % PAGE) < size) __builtin_prefetch((const char *)((uintptr_t)bytes + AHEAD), 0, 3);
}

/* Where the lower halves of blocks stand in two vectors, for blocks of LANES, half of it, and so on to 2. */
static const bits LOWER[] = {
#if defined(__AVX512F__)
    {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23},
    {0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27},
    {0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29},
    {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30}
#elif defined(__AVX__)
    {0, 1, 2, 3, 8, 9, 10, 11},
    {0, 1, 4, 5, 8, 9, 12, 13},
    {0, 2, 4, 6, 8, 10, 12, 14}
#else
    {0, 1, 4, 5},
    {0, 2, 4, 6}
#endif
};

/* The sums over the lanes of as many vectors as there are lanes: one in each lane, in their order. Each turn adds the
 * upper halves of all blocks to the lower, and packs two vectors into one. */
INLINE lanes sums_of(lanes *vectors) {
    UNROLLED for (int turn = 0, size = LANES; turn < TURNS; turn++, size /= 2)
        UNROLLED for (int v = 0; v < size; v += 2) vectors[v / 2] =
            SHUFFLED(vectors[v], vectors[v + 1], LOWER[turn]) + SHUFFLED(vectors[v], vectors[v + 1], LOWER[turn] + size / 2);
    return vectors[0];
}

/* The scores of a group of queries with the `count` keys of a chunk: to[row][key]. */
INLINE void scores_of(const struct dots *of, const float *query, const void *key, int64_t count, float (*to)[CHUNK],
                      const struct next next, const struct kind kind) {
    int64_t dim = of->dim, padded = whole_vectors(dim);
    for (int64_t j = 0; j < count; j += KEYS) {
        lanes sum[ROWS][KEYS] = {{{0}}};
        const void *rows[KEYS];
        UNROLLED for (int i = 0; i < KEYS; i++) rows[i] =
            row_of(key, j + i < count ? j + i : count - 1, of->key_row, kind.narrow);
        for (int i = 0; i < KEYS; i++) fetch(next, j + i, kind);
        for (int64_t a = 0; a < dim; a += LANES) {
            lanes entry[KEYS];
            UNROLLED for (int i = 0; i < KEYS; i++) entry[i] = entries(rows[i], a, dim, kind.narrow, kind.whole);
            UNROLLED for (int r = 0; r < kind.rows; r++) {
                lanes own = load(query + r * padded + a);
                UNROLLED for (int i = 0; i < KEYS; i++) sum[r][i] += own * entry[i];
            }
        }
        float sums[ROWS * KEYS];
        if (kind.rows == 1)
            UNROLLED for (int i = 0; i < KEYS; i++) sums[i] = sum_of(sum[0][i]);
        else
            UNROLLED for (int at = 0; at < ROWS * KEYS; at += LANES) store(sums + at, sums_of(&sum[0][0] + at));
        UNROLLED for (int r = 0; r < kind.rows; r++) memcpy(to[r] + j, sums + r * KEYS, KEYS * sizeof(float));
    }
}

/* What is left of e^x where x may be -infinity: 0 there, and NaN where x is. */
INLINE lanes weight_of(lanes x) {
    bits none = x < -87.0f;
    return (lanes)(~none & (bits)exponential((lanes)((none & (bits)every(-87.0f)) | (~none & (bits)x))));
}

INLINE float largest_of(const float *scores, float largest) {
    for (int j = 0; j < CHUNK; j++) largest = scores[j] > largest ? scores[j] : largest;
    return largest;
}

/* One more chunk of a row's online softmax: scores become weights; what stands for the earlier chunks is scaled. */
INLINE float softmax_of(float *scores, float *largest, float *total) {
    float now = largest_of(scores, *largest), shift = now == -INFINITY ? 0.0f : now;
    float kept = *largest == -INFINITY ? 0.0f : expf(*largest - shift);
    lanes sum = {0};
    for (int j = 0; j < CHUNK; j += LANES) {
        lanes weight = weight_of(load(scores + j) - shift);
        store(scores + j, weight);
        sum += weight;
    }
    *total = *total * kept + sum_of(sum);
    *largest = now;
    return kept;
}

/* output = kept * output + weights . values, for a group of rows and the `count` values of a chunk. */
INLINE void add_values(const struct dots *of, float (*weights)[CHUNK], const float *kept, const void *value,
                       int64_t count, float *output, const struct next next, const struct kind kind) {
    int64_t dim = of->value_dim;
    for (int64_t a = 0; a < dim; a += VECTORS * LANES) {
        lanes sum[ROWS][VECTORS] = {{{0}}}; /* of this chunk alone first, so that rounding does not add up */
        for (int64_t j = 0; j < count; j++) {
            const void *row = row_of(value, j, of->value_row, kind.narrow);
            if (a == 0) fetch(next, j, kind);
            lanes entry[VECTORS];
            UNROLLED for (int v = 0; v < VECTORS; v++) entry[v] = entries(row, a + v * LANES, dim, kind.narrow, kind.whole);
            UNROLLED for (int r = 0; r < kind.rows; r++) UNROLLED for (int v = 0; v < VECTORS; v++) sum[r][v] +=
                entry[v] * weights[r][j];
        }
        UNROLLED for (int r = 0; r < kind.rows; r++) UNROLLED for (int v = 0; v < VECTORS; v++) {
            int64_t at = a + v * LANES;
            lanes earlier = entries(output + r * dim, at, dim, 0, kind.whole);
            if (at < dim) store_some(output + r * dim + at, earlier * kept[r] + sum[r][v], kind.whole ? LANES : dim - at);
        }
    }
}

INLINE void add_to_scores(const struct dots *of, const float *added, int64_t row, int64_t first, int64_t count,
                          float *scores) {
    if (added && row < of->rows)
        for (int64_t j = 0; j < count; j++) scores[j] += added[row * of->added_row + first + j];
    for (int64_t j = count; j < CHUNK; j++) scores[j] = -INFINITY;
}

/* What a thread keeps of the rows of a head, with rows of padding: the scaled query, 0 there and beyond dim, and what was
 * added up of the values. */
struct room {
    int64_t rows;
    float *query, *output;
};

INLINE void lay_query(const struct dots *of, int64_t batch, int64_t own, const struct room *at) {
    int64_t padded = whole_vectors(of->dim);
    const void *query = row_of(of->query, 1, batch * of->query_batch + own * of->query_head, of->narrow_query);
    for (int64_t r = 0; r < at->rows; r++)
        for (int64_t a = 0; a < padded; a += LANES)
            store(at->query + r * padded + a,
                  r < of->rows ? of->scale * entries(row_of(query, r, of->query_row, of->narrow_query), a, of->dim,
                                                     of->narrow_query, 0)
                               : every(0.0f));
}

/* What a part gives: sums become means. */
INLINE void finish(const struct dots *of, const struct room *at, const float *largest, const float *total,
                   float *output, float *lse) {
    for (int64_t r = 0; r < of->rows; r++) {
        float share = total[r] == 0.0f ? 0.0f : 1.0f / total[r];
        for (int64_t a = 0; a < of->value_dim; a++) output[r * of->value_dim + a] = at->output[r * of->value_dim + a] * share;
        lse[r] = total[r] == 0.0f ? -INFINITY : largest[r] + logf(total[r]);
    }
}

/* All rows of one head with one part of its keys. */
INLINE void part_of_head(const struct dots *of, const struct room *at, int64_t head, int64_t part,
                         const struct kind kind) {
    int64_t batch = head / of->heads, own = head % of->heads, padded = whole_vectors(of->dim);
    int64_t first = part * of->part, end = first + of->part < of->columns ? first + of->part : of->columns;
    const void *key = row_of(of->key, 1, batch * of->key_batch + own * of->key_head, kind.narrow);
    const void *value = row_of(of->value, 1, batch * of->value_batch + own * of->value_head, kind.narrow);
    const float *added = of->added ? of->added + batch * of->added_batch + own * of->added_head : 0;
    float largest[MOST_ROWS], total[MOST_ROWS] = {0};
    for (int64_t r = 0; r < at->rows; r++) largest[r] = -INFINITY;
    lay_query(of, batch, own, at);
    memset(at->output, 0, (size_t)(at->rows * of->value_dim) * sizeof(float));
    for (; first < end; first += CHUNK) {
        int64_t count = end - first < CHUNK ? end - first : CHUNK;
        const void *keys = row_of(key, first, of->key_row, kind.narrow), *values = row_of(value, first, of->value_row, kind.narrow);
        const void *later = end - first > CHUNK ? row_of(keys, CHUNK, of->key_row, kind.narrow) : 0;
        for (int64_t row = 0; row < at->rows; row += kind.rows) {
            float weights[ROWS][CHUNK], kept[ROWS];
            struct next value_next = {row ? 0 : values, of->value_row, of->value_dim};
            struct next key_next = {row + kind.rows < at->rows ? 0 : later, of->key_row, of->dim};
            scores_of(of, at->query + row * padded, keys, count, weights, value_next, kind);
            for (int64_t r = 0; r < kind.rows; r++) {
                add_to_scores(of, added, row + r, first, count, weights[r]);
                kept[r] = softmax_of(weights[r], largest + row + r, total + row + r);
            }
            add_values(of, weights, kept, values, count, at->output + row * of->value_dim, key_next, kind);
        }
    }
    int64_t begun = (head * of->parts + part) * of->rows;
    finish(of, at, largest, total, of->output + begun * of->value_dim, of->lse + begun);
}

INLINE void unit_of(const struct dots *of, const struct room *room, int64_t unit, const int narrow, const int whole) {
    int64_t head = unit / of->parts, part = unit % of->parts;
    if (of->rows == 1)
        part_of_head(of, room, head, part, (struct kind){narrow, whole, 1});
    else
        part_of_head(of, room, head, part, (struct kind){narrow, whole, ROWS});
}

/* Takes one part of one head after another, as long as any is left: for as many threads at once as like. */
void EXPORTED(regard_dots)(struct dots *of) {
    const int64_t group = VECTORS * LANES;
    const int whole = of->dim % group == 0 && of->value_dim % group == 0;
    int64_t rows = of->rows == 1 ? 1 : (of->rows + ROWS - 1) / ROWS * ROWS, query = rows * whole_vectors(of->dim), unit;
    float *numbers = aligned_alloc(64, (size_t)((query + rows * of->value_dim) * 4 + 64) / 64 * 64);
    if (!numbers) {
        of->failed = 1;
        return;
    }
    struct room room = {rows, numbers, numbers + query};
    while ((unit = __atomic_fetch_add(&of->taken, 1, __ATOMIC_RELAXED)) < of->units) {
        if (of->narrow && whole)
            unit_of(of, &room, unit, 1, 1);
        else if (of->narrow)
            unit_of(of, &room, unit, 1, 0);
        else if (whole)
            unit_of(of, &room, unit, 0, 1);
        else
            unit_of(of, &room, unit, 0, 0);
    }
    free(numbers);
}
