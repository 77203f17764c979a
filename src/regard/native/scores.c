/* Preparation of queries and keys, and the scores of a tile. */
#include "rows.h"
#include "scores.h"
#include "transpose.h"

#include <math.h>

/* The largest |entry|, and infinity where one is NaN. The bits of numbers without their signs are in the same order. */
INLINE float bound_of(const float *entries, int64_t count) {
    bits largest = {0};
    for (int64_t a = 0; a < count; a += LANES) {
        bits size = (bits)magnitude(load_some(entries + a, count - a));
        bits more = size > largest;
        largest = (more & size) | (~more & largest);
    }
    int32_t sizes[LANES];
    memcpy(sizes, &largest, sizeof(sizes));
    for (int half = LANES / 2; half; half /= 2)
        for (int lane = 0; lane < half; lane++)
            if (sizes[lane + half] > sizes[lane]) sizes[lane] = sizes[lane + half];
    float bound;
    memcpy(&bound, sizes, sizeof(bound));
    return bound == bound ? bound : INFINITY;
}

/* Queries too are taken a strip at a time here: those of all heads first, then the keys'. */
struct strip {
    const float *rows; /* as they were given, so many apart */
    int64_t stride, count, number;
    int of_keys;
};

INLINE int64_t query_strips(const struct additive *of) { return (of->rows + STRIP - 1) / STRIP; }

INLINE struct strip strip_at(const struct additive *of, int64_t unit) {
    int64_t queries = of->heads * query_strips(of), number = unit < queries ? unit : unit - queries;
    int of_keys = unit >= queries;
    int64_t strips = of_keys ? strips_of(of) : query_strips(of), rows = of_keys ? of->columns : of->rows;
    int64_t head = number / strips, first = number % strips * STRIP;
    int64_t count = rows - first < STRIP ? rows - first : STRIP;
    int64_t stride = of_keys ? of->key_row : of->query_row;
    const float *at = of_keys ? of->key + head * of->key_head : of->query + head * of->query_head;
    return (struct strip){at + first * stride, stride, count, of_keys ? number : head * rows + first, of_keys};
}

/* Bounds of the entries: takes one strip after another, as long as any is left: for as many threads at once as like. */
void EXPORTED(regard_bounds)(struct additive *of) {
    for (int64_t unit; (unit = __atomic_fetch_add(&of->taken, 1, __ATOMIC_RELAXED)) < of->units;) {
        struct strip strip = strip_at(of, unit);
        float largest = 0.0f;
        for (int64_t i = 0; i < strip.count; i++) {
            float bound = bound_of(strip.rows + i * strip.stride, of->features);
            if (bound > largest) largest = bound;
            if (!strip.of_keys) of->query_bound[strip.number + i] = bound;
        }
        if (strip.of_keys) of->key_bound[strip.number] = largest;
    }
}

INLINE lanes prepared(lanes x, int64_t form) {
    if (form == TANGENTS) return tangent(x);
    return exponential(2.0f * -at_most(HELD, -at_most(HELD, x)));
}

INLINE void prepare_queries(const struct additive *of, const struct strip strip) {
    for (int64_t i = 0; i < strip.count; i++)
        for (int64_t a = 0; a < of->padded; a += LANES)
            store(of->prepared_query + (strip.number + i) * of->padded + a,
                  prepared(entries(strip.rows + i * strip.stride, a, of->features, 0, 0), of->form));
}

INLINE void prepare_keys(const struct additive *of, const struct strip strip) {
    float *to = of->prepared_key + strip.number * of->padded * STRIP;
    for (int64_t a = 0; a < of->padded; a += LANES)
        for (int64_t j = 0; j < STRIP; j += LANES) {
            lanes block[LANES];
            for (int64_t l = 0; l < LANES; l++) {
                lanes given = every(0.0f);
                if (j + l < strip.count) given = entries(strip.rows + (j + l) * strip.stride, a, of->features, 0, 0);
                block[l] = prepared(given, of->form);
            }
            transpose(block);
            for (int l = 0; l < LANES; l++) store(to + (a + l) * STRIP + j, block[l]);
        }
}

/* The preparation itself, shared out likewise. */
void EXPORTED(regard_prepare)(struct additive *of) {
    for (int64_t unit; (unit = __atomic_fetch_add(&of->taken, 1, __ATOMIC_RELAXED)) < of->units;) {
        struct strip strip = strip_at(of, unit);
        if (strip.of_keys)
            prepare_keys(of, strip);
        else
            prepare_queries(of, strip);
    }
}

void EXPORTED(regard_scores)(const struct additive *of, const struct tile *tile) {
    int64_t rows = tile->row_end - tile->row_begin;
    for (int64_t begin = tile->begin, end; begin < tile->end; begin = end) {
        int64_t head = begin / rows; /* from here to the end of this head, or of this call */
        end = (head + 1) * rows < tile->end ? (head + 1) * rows : tile->end;
        for (int64_t from = tile->column_begin, next; from < tile->column_end; from = next) {
            next = (from / STRIP + 1) * STRIP < tile->column_end ? (from / STRIP + 1) * STRIP : tile->column_end;
            for (int64_t at = begin; at < end; at++) {
                float *to = tile->pairs + head * tile->pairs_head + at % rows * tile->pairs_row;
                strip_of_scores(of, head, tile->row_begin + at % rows, from, next - from, to + from - tile->column_begin);
            }
        }
    }
}
