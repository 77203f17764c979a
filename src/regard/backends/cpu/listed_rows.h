/* The rows of a list against its keys, which are read where they lie: what both passes do.
 *
 * Of a piece of a list ROWS rows are computed at a time, half as many, or one. */
#ifndef REGARD_LISTED_ROWS_H
#define REGARD_LISTED_ROWS_H

#include "gathered.h"
#include "prefetch.h"
#include "aligned_memory.h"
#include "transpose.h"
#include "typed_rows.h"

#include <math.h>

/* So many rows, or half as many, are multiplied by a key that is read once; VECTORS of each are summed at once, so that
 * all sums stay in registers. PART_VECTORS: those of a single row. */
enum { ROWS = LANES / 2, VECTORS = 2, PART_VECTORS = 4 };

/* The dim of most models' heads, for which products have code of their own: without a loop over columns the addresses of
 * all rows that are multiplied at once stay in registers. */
enum { USUAL_DIM = 64 };

/* Keys are fetched so many before they are read, as they lie anywhere, where those of a head are more bytes than are near
 * to the processor for certain, and where several rows are computed: a single one is so little work between two reads
 * that the processor foresees them. */
enum { AHEAD = 16, NEAR = 1 << 18 };

/* Constants that the compiler specialises the products and sums for: the dtype, and how many rows there are. All else is
 * compiled once. */
struct kind {
    int dtype, rows;
};

/* The memory of a thread. `width`: the keys of a list, rounded up to whole vectors. */
struct gather_scratch {
    int64_t width, count;
    int is_far; /* whether keys are fetched before they are read */
    int32_t *key, *place; /* the keys of a list, and their places in it */
    uint8_t *seen;        /* whether a block has been listed, for each; and 1, for all that is none */
    float *query, *above; /* (ROWS, dim) and (ROWS, value_dim), padded */
    float *weights, *slopes, *bends; /* (ROWS, width) */
    float *sums;                     /* (ROWS, the larger dim), padded */
    float maximum[ROWS], total[ROWS]; /* of the scores of a row, and the sum of its weights */
};

/* Where a row stands; `query` is -1 for a row of padding. */
struct row_place {
    int64_t batch, head, query;
};

INLINE int64_t in_vectors(int64_t bytes) { return (bytes + 63) / 64 * 64; }

#define MEMORY_OF(name, type, number) \
    scratch->name = (type *)(memory + bytes), bytes += in_vectors((number) * (int64_t)sizeof(type))

/* Lays out the memory of a thread, or tells with null how many bytes it needs. */
INLINE int64_t gather_scratch(const struct gathered *problem, char *memory, struct gather_scratch *scratch) {
    int64_t width = round_up_to_lanes(problem->length * problem->columns) + LANES + AHEAD, bytes = 0;
    int64_t dim = round_up_to_lanes(problem->dim), value_dim = round_up_to_lanes(problem->value_dim);
    scratch->width = width;
    MEMORY_OF(key, int32_t, width);
    MEMORY_OF(place, int32_t, width);
    MEMORY_OF(seen, uint8_t, problem->blocks + 1);
    MEMORY_OF(query, float, ROWS * dim);
    MEMORY_OF(above, float, ROWS * value_dim);
    MEMORY_OF(weights, float, ROWS * width);
    MEMORY_OF(slopes, float, ROWS * width);
    MEMORY_OF(bends, float, ROWS * width);
    MEMORY_OF(sums, float, ROWS * (dim > value_dim ? dim : value_dim));
    return bytes;
}

/* The memory for so many lists; those after the first have all but the table of blocks for themselves. */
INLINE char *new_gather_scratch(const struct gathered *problem, struct gather_scratch *scratch, int64_t lists) {
    const int64_t bytes = gather_scratch(problem, 0, scratch);
    char *memory = aligned_memory(lists * bytes);
    if (!memory) return 0;
    const int64_t bytes_of_keys = problem->keys * (problem->dim + problem->value_dim) * entry_bytes((int)problem->dtype);
    for (int64_t i = 0; i < lists; i++) {
        gather_scratch(problem, memory + i * bytes, scratch + i);
        scratch[i].seen = scratch->seen;
        scratch[i].is_far = bytes_of_keys > NEAR;
    }
    memset(scratch->seen, 0, (size_t)problem->blocks);
    scratch->seen[problem->blocks] = 1;
    return memory;
}

INLINE int64_t least(int64_t one, int64_t other) { return one < other ? one : other; }

INLINE int64_t most(int64_t one, int64_t other) { return one > other ? one : other; }

/* number / divisor, rounded down. */
INLINE int64_t floor_of(int64_t number, int64_t divisor) { return number / divisor - (number % divisor < 0); }

/* Blocks from `first` on, as many as `count`, by their numbers in a table of all blocks. */
struct blocks {
    int64_t first;
    uint64_t count;
};

/* The blocks of which a row that sees the keys from `start` to `stop` - 1 sees some. */
INLINE struct blocks blocks_of_span(const struct gathered *problem, int64_t start, int64_t stop) {
    const int64_t columns = problem->columns, low = problem->block;
    const int64_t begin = most(floor_of(start + problem->first, columns) - low, most(0, -low));
    const int64_t end = least(floor_of(stop - 1 + problem->first, columns) + 1 - low, problem->blocks);
    return (struct blocks){begin, stop > start && end > begin ? (uint64_t)(end - begin) : 0};
}

/* The number of a block that is listed in the table of blocks; that after the last for one that is not seen. */
INLINE int64_t table_number(const struct gathered *problem, struct blocks seen, int32_t listed) {
    const int64_t own = listed - problem->block;
    return (uint64_t)(own - seen.first) < seen.count ? own : problem->blocks;
}

/* The keys of a list from `start` to `stop` - 1, each once, with their places; after them the last of them again. No
 * branch depends on what is listed. */
INLINE void take_list(const struct gathered *problem, struct gather_scratch *scratch, const int32_t *indices, int64_t start,
                      int64_t stop) {
    const int64_t length = problem->length, columns = problem->columns, first = problem->first, blocks = problem->blocks;
    const uint64_t inside = (uint64_t)(stop > start ? stop - start : 0);
    const struct blocks in_span = blocks_of_span(problem, start, stop);
    int32_t *key = scratch->key, *place = scratch->place;
    uint8_t *seen = scratch->seen;
    int64_t count = 0;
    if (columns == 1)
        for (int64_t t = 0; t < length; t++) {
            const int64_t at = table_number(problem, in_span, indices[t]);
            key[count] = (int32_t)(indices[t] - first);
            place[count] = (int32_t)t;
            count += !seen[at];
            seen[at] = 1;
        }
    else
        for (int64_t t = 0; t < length; t++) {
            const int64_t at = table_number(problem, in_span, indices[t]), is_new = !seen[at];
            int64_t number = indices[t] * columns - first;
            seen[at] = 1;
            for (int64_t c = 0; c < columns; c++, number++) {
                key[count] = (int32_t)number;
                place[count] = (int32_t)(t * columns + c);
                count += is_new & ((uint64_t)(number - start) < inside);
            }
        }
    if (blocks < length * LINE)
        memset(seen, 0, (size_t)blocks);
    else
        for (int64_t t = 0; t < length; t++) {
            const int64_t at = table_number(problem, in_span, indices[t]);
            if (at < blocks) seen[at] = 0;
        }
    scratch->count = count;
    for (int64_t t = count; count && t < count + LANES + AHEAD; t++) key[t] = key[count - 1];
}

/* Fetches the entries of a listed row from one column to another, long before they are read. */
INLINE void fetch_listed(const struct gather_scratch *scratch, int64_t t, const void *rows, int64_t stride, int64_t column,
                         int64_t end, const int dtype) {
    if (!scratch->is_far) return;
    const char *next = row_at(rows, scratch->key[t + AHEAD], stride, dtype);
    int64_t byte = column * entry_bytes(dtype);
    const int64_t stop = end * entry_bytes(dtype);
    for (; byte + 4 * LINE <= stop; byte += 4 * LINE)
        UNROLL for (int i = 0; i < 4; i++) __builtin_prefetch(next + byte + i * LINE, 0, 3);
    for (; byte < stop; byte += LINE) __builtin_prefetch(next + byte, 0, 3);
}

/* sum[r, i] += rows[r] . row[key[i]] over some vectors of columns, from `column` on. whole: all these columns exist. */
INLINE void add_products(lanes *sum, const float *rows, const void *keys, const int32_t *key, int64_t stride,
                         int64_t column, int64_t dim, const int vectors, const int whole, const struct kind kind) {
    const int at_once = LANES / kind.rows;
    const int64_t padded = round_up_to_lanes(dim);
    lanes own[ROWS + PART_VECTORS];
    UNROLL for (int r = 0; r < kind.rows; r++) UNROLL for (int v = 0; v < vectors; v++) own[r * vectors + v] =
        load(rows + r * padded + column + v * LANES);
    FOR_ALL_LANES for (int i = 0; i < at_once; i++) {
        const void *row = row_at(keys, key[i], stride, kind.dtype);
        UNROLL for (int v = 0; v < vectors; v++) {
            lanes entry = load_entries(row, column + v * LANES, dim, kind.dtype, whole);
            UNROLL for (int r = 0; r < kind.rows; r++) sum[r * at_once + i] += own[r * vectors + v] * entry;
        }
    }
}

/* into[r][t] = rows[r] . row[key[t]], for all listed keys. Of ROWS rows half are multiplied after the others, by keys that
 * are near then. */
INLINE void products_of(const struct gather_scratch *scratch, const float *rows, const void *keys, int64_t stride,
                        int64_t dim, float *into, const int all_rows, const int dtype) {
    const struct kind kind = {dtype, all_rows == ROWS ? ROWS / 2 : all_rows};
    const int at_once = LANES / kind.rows, part = kind.rows == 1 ? PART_VECTORS : 1;
    const int64_t count = scratch->count, padded = round_up_to_lanes(dim);
    const int32_t *key = scratch->key;
    for (int64_t t = 0; t < count; t += at_once) {
        if (all_rows > 1)
            for (int i = 0; i < at_once; i++) fetch_listed(scratch, t + i, keys, stride, 0, dim, dtype);
        for (int first = 0; first < all_rows; first += kind.rows) {
            lanes sum[LANES] = {{0}}; /* (rows, keys) */
            int64_t column = 0;
            for (; column + part * LANES <= dim; column += part * LANES)
                add_products(sum, rows + first * padded, keys, key + t, stride, column, dim, part, 1, kind);
            for (; column < dim; column += LANES)
                add_products(sum, rows + first * padded, keys, key + t, stride, column, dim, 1, 0, kind);
            float apart[LANES];
            store(apart, sum_vectors(sum));
            UNROLL for (int r = 0; r < kind.rows; r++)
                memcpy(into + (first + r) * scratch->width + t, apart + r * at_once, at_once * sizeof(float));
        }
    }
}

/* into[r] = sum over the listed keys of weights[r][t] row[key[t]], for some vectors of columns; the weights that follow the
 * last one in its vector are 0. whole: all these columns exist. */
INLINE void list_sum_columns(const struct gather_scratch *scratch, const float *weights, const void *rows, int64_t stride,
                             int64_t dim, int64_t column, float *into, const int vectors, const int whole,
                             const struct kind kind) {
    const int steps = kind.rows == 1 ? 2 : 1; /* sums that do not wait for one another */
    const int64_t count = scratch->count, padded = round_up_to_lanes(dim), width = scratch->width;
    const int32_t *key = scratch->key;
    lanes sum[2][ROWS * VECTORS] = {{{0}}};
    for (int64_t t = 0; t < count; t += steps)
        UNROLL for (int s = 0; s < steps; s++) {
            const void *row = row_at(rows, key[t + s], stride, kind.dtype);
            if (kind.rows > 1)
                fetch_listed(scratch, t + s, rows, stride, column, column + vectors * LANES, kind.dtype);
            UNROLL for (int v = 0; v < vectors; v++) {
                lanes entry = load_entries(row, column + v * LANES, dim, kind.dtype, whole);
                UNROLL for (int r = 0; r < kind.rows; r++) sum[s][r * vectors + v] +=
                    broadcast(weights[r * width + t + s]) * entry;
            }
        }
    UNROLL for (int r = 0; r < kind.rows; r++) UNROLL for (int v = 0; v < vectors; v++)
        store(into + r * padded + column + v * LANES, sum[0][r * vectors + v] + sum[1][r * vectors + v]);
}

/* The same for all columns. */
INLINE void sums_of(const struct gather_scratch *scratch, const float *weights, const void *rows, int64_t stride,
                    int64_t dim, float *into, const struct kind kind) {
    const int vectors = kind.rows == 1 ? PART_VECTORS : VECTORS;
    int64_t column = 0;
    for (; column + vectors * LANES <= dim; column += vectors * LANES)
        list_sum_columns(scratch, weights, rows, stride, dim, column, into, vectors, 1, kind);
    for (; column < dim; column += LANES)
        list_sum_columns(scratch, weights, rows, stride, dim, column, into, 1, 0, kind);
}

#define OF_LIST (const struct gather_scratch *scratch, const float *left, const void *right, int64_t stride, int64_t dim, float *into)
#define PRODUCTS(rows)                                                             \
    if (dim == USUAL_DIM)                                                          \
        products_of(scratch, left, right, stride, USUAL_DIM, into, rows, DTYPE);   \
    else                                                                           \
        products_of(scratch, left, right, stride, dim, into, rows, DTYPE)
#define SUMS(rows) sums_of(scratch, left, right, stride, dim, into, (struct kind){DTYPE, rows})
TABLE_BY_DTYPE(products_of_one, OF_LIST, PRODUCTS(1))
TABLE_BY_DTYPE(products_of_some, OF_LIST, PRODUCTS(ROWS / 2))
TABLE_BY_DTYPE(products_of_all, OF_LIST, PRODUCTS(ROWS))
TABLE_BY_DTYPE(sums_of_one, OF_LIST, SUMS(1))
TABLE_BY_DTYPE(sums_of_some, OF_LIST, SUMS(ROWS / 2))
TABLE_BY_DTYPE(sums_of_all, OF_LIST, SUMS(ROWS))

/* Some rows of a piece of a list, one, ROWS / 2 or ROWS of them, and the dtype of what is multiplied. */
struct piece_rows {
    const struct row_place *places;
    int64_t key_head;
    int rows, dtype;
};

INLINE void list_products(const struct gather_scratch *scratch, const struct piece_rows *piece, const float *rows,
                          const void *keys, int64_t stride, int64_t dim, float *into) {
    (piece->rows == 1          ? products_of_one
     : piece->rows == ROWS / 2 ? products_of_some
                               : products_of_all)[piece->dtype](scratch, rows, keys, stride, dim, into);
}

INLINE void list_sums(const struct gather_scratch *scratch, const struct piece_rows *piece, const float *weights,
                      const void *rows, int64_t stride, int64_t dim, float *into) {
    (piece->rows == 1          ? sums_of_one
     : piece->rows == ROWS / 2 ? sums_of_some
                               : sums_of_all)[piece->dtype](scratch, weights, rows, stride, dim, into);
}

/* Scores from products: times the scale, with softcap, bias and span; -infinity where there is no pair, and up to the end
 * of a vector. bends: the slopes of the softcap, or null. */
APART void complete_scores(const struct gathered *problem, const struct gather_scratch *scratch, struct row_place row,
                           float *scores, float *bends) {
    const int64_t count = scratch->count;
    for (int64_t t = 0; t < count; t += LANES) {
        lanes score = load(scores + t) * problem->scale;
        if (problem->softcap > 0.0f) {
            lanes bent = tanh_lanes(score / problem->softcap);
            if (bends) store(bends + t, 1.0f - bent * bent);
            score = problem->softcap * bent;
        }
        store(scores + t, score);
    }
    if (problem->added) {
        const float *added = problem->added + row.batch * problem->added_batch + row.head * problem->added_head +
                             row.query * problem->length * problem->columns;
        for (int64_t t = 0; t < count; t++) scores[t] += added[scratch->place[t]];
    }
    if (problem->spans && problem->height > 1) {
        const int32_t *span = problem->spans + row.batch * problem->span_batch + 2 * row.query;
        for (int64_t t = 0; t < count; t++)
            scores[t] = scratch->key[t] < span[0] || scratch->key[t] >= span[1] ? -INFINITY : scores[t];
    }
    for (int64_t t = count; t < count + LANES; t++) scores[t] = -INFINITY;
}

/* The factors of dropout of a row; null without. */
INLINE const float *factors_of(const struct gathered *problem, struct row_place row) {
    if (!problem->factors) return 0;
    return problem->factors + row.batch * problem->factor_batch + row.head * problem->factor_head +
           row.query * problem->length * problem->columns;
}

/* Rows of a tensor as float32, padded with zeros: 0 in rows of padding. */
APART void widen_rows(const void *tensor, int64_t batch, int64_t head, int64_t stride, int64_t dim,
                      const struct piece_rows *piece, float *into, int dtype) {
    const int64_t padded = round_up_to_lanes(dim);
    for (int r = 0; r < piece->rows; r++)
        for (int64_t a = 0; a < padded; a += LANES) {
            const struct row_place at = piece->places[r];
            lanes own = broadcast(0.0f);
            if (at.query >= 0)
                own = load_entries(row_at(tensor, at.batch * batch + at.head * head + at.query * stride, 1, dtype), a, dim,
                                   dtype, 0);
            store(into + r * padded + a, own);
        }
}

/* The keys and the values that the rows of a piece may attend to. */
INLINE const void *key_of_piece(const struct gathered *problem, const struct piece_rows *piece) {
    return row_at(problem->key, 1, piece->places[0].batch * problem->key_batch + piece->key_head * problem->key_head,
                  piece->dtype);
}

INLINE const void *value_of_piece(const struct gathered *problem, const struct piece_rows *piece) {
    return row_at(problem->value, 1, piece->places[0].batch * problem->value_batch + piece->key_head * problem->value_head,
                  piece->dtype);
}

/* Whether each list is that of a single row: of one query of one head. */
INLINE int has_single_rows(const struct gathered *problem) {
    return problem->list_heads == problem->heads && problem->rows == 1;
}

/* The list of a query of some heads, or of some queries. */
INLINE const int32_t *indices_of(const struct gathered *problem, int64_t batch, int64_t list_head, int64_t list) {
    return problem->indices + batch * problem->index_batch + (problem->list_heads == 1 ? 0 : list_head) * problem->index_head +
           list * problem->length;
}

/* The keys that a row sees: from the first number to the one before the second. */
INLINE void span_of_row(const struct gathered *problem, int64_t batch, int64_t query, int64_t span[2]) {
    span[0] = 0, span[1] = problem->keys;
    if (!problem->spans) return;
    const int32_t *own = problem->spans + batch * problem->span_batch + 2 * query;
    span[0] = own[0], span[1] = own[1];
}

INLINE void take_list_of_row(const struct gathered *problem, struct gather_scratch *scratch, struct row_place row) {
    int64_t span[2];
    span_of_row(problem, row.batch, row.query, span);
    take_list(problem, scratch, indices_of(problem, row.batch, row.head, row.query), span[0], span[1]);
}

/* What is done with some rows of a list that is taken. */
typedef void work_on_rows(const struct gathered *, struct gather_scratch *, const struct piece_rows *);

/* The rows of a piece of a list, ROWS at a time; of what is left ROWS / 2, or one. */
INLINE void work_on_piece(const struct gathered *problem, struct gather_scratch *scratch, int64_t batch, int64_t list_head,
                          int64_t list, int64_t piece, work_on_rows *work) {
    const int of_key_heads = problem->list_heads == problem->key_heads;
    const int64_t group = problem->heads / problem->key_heads, heads = of_key_heads ? group : 1;
    const int64_t head = of_key_heads ? list_head * group : list_head, key_head = of_key_heads ? list_head : head / group;
    int64_t first = list * problem->rows + piece * problem->height, end = first + problem->height;
    if (end > (list + 1) * problem->rows) end = (list + 1) * problem->rows;
    if (end > problem->queries) end = problem->queries;
    if (first >= end) return;
    int64_t start = 0, stop = problem->keys;
    if (problem->spans) {
        start = problem->keys, stop = 0;
        for (int64_t query = first; query < end; query++) {
            int64_t span[2];
            span_of_row(problem, batch, query, span);
            start = least(span[0], start);
            stop = most(span[1], stop);
        }
    }
    take_list(problem, scratch, indices_of(problem, batch, list_head, list), start, stop);
    const int64_t queries = end - first, total = heads * queries;
    for (int64_t row = 0; row < total;) {
        struct row_place places[ROWS];
        const int64_t left = total - row, many = left == 1 ? 1 : left <= ROWS / 2 ? ROWS / 2 : ROWS;
        for (int64_t r = 0; r < many; r++) {
            const int64_t at = row + r;
            places[r] = (struct row_place){batch, head + at / queries, at < total ? first + at % queries : -1};
        }
        work(problem, scratch, &(struct piece_rows){places, key_head, (int)many, (int)problem->dtype});
        row += many;
    }
}

#endif
