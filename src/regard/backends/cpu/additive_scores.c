/* Preparation of queries and keys, and the scores of a tile. */
#include "additive_scores.h"
#include "transpose.h"

/* The largest |entry|, and infinity where one is NaN. The bits of numbers without their signs are in the same order. */
INLINE float row_bound(const void *entries, int64_t count, const int dtype) {
    bits maximum = {0};
    for (int64_t a = 0; a < count; a += LANES) {
        bits size = (bits)absolute(load_entries(entries, a, count, dtype, 0));
        bits more = size > maximum;
        maximum = (more & size) | (~more & maximum);
    }
    int32_t sizes[LANES];
    memcpy(sizes, &maximum, sizeof(sizes));
    for (int half = LANES / 2; half; half /= 2)
        for (int lane = 0; lane < half; lane++)
            if (sizes[lane + half] > sizes[lane]) sizes[lane] = sizes[lane + half];
    float bound;
    memcpy(&bound, sizes, sizeof(bound));
    return bound == bound ? bound : INFINITY;
}

/* Queries too are taken a strip at a time here: those of all heads first, then the keys'. */
struct strip {
    const void *rows; /* as they were given, so many apart */
    int64_t stride, count, number;
    int is_key;
};

INLINE int64_t query_strip_count(const struct additive *problem) { return (problem->rows + STRIP - 1) / STRIP; }

INLINE struct strip strip_of_unit(const struct additive *problem, int64_t unit) {
    int64_t queries = problem->heads * query_strip_count(problem), number = unit < queries ? unit : unit - queries;
    int is_key = unit >= queries;
    int64_t strips = is_key ? key_strip_count(problem) : query_strip_count(problem),
            rows = is_key ? problem->columns : problem->rows;
    int64_t head = number / strips, first = number % strips * STRIP;
    int64_t count = rows - first < STRIP ? rows - first : STRIP;
    return (struct strip){is_key ? given_key(problem, head, first) : given_query(problem, head, first),
                          is_key ? problem->key_row : problem->query_row, count, is_key ? number : head * rows + first,
                          is_key};
}

INLINE void find_bounds(const struct additive *problem, const struct strip strip, const int dtype) {
    float maximum = 0.0f;
    for (int64_t i = 0; i < strip.count; i++) {
        float bound = row_bound(row_at(strip.rows, i, strip.stride, dtype), problem->features, dtype);
        if (bound > maximum) maximum = bound;
        if (!strip.is_key) problem->query_bound[strip.number + i] = bound;
    }
    if (strip.is_key) problem->key_bound[strip.number] = maximum;
}

/* The weight of features is padded with 0, and summed. */
void EXPORTED(regard_additive_weight)(struct additive *problem, const float *given, float *padded_weight) {
    double total = 0.0;
    float bound = row_bound(given, problem->features, FLOAT32);
    memset(padded_weight, 0, (size_t)(problem->padded + 16) * sizeof(float));
    for (int64_t a = 0; a < problem->features; a++) padded_weight[a] = given[a], total += given[a];
    problem->weight = padded_weight, problem->weight_sum = (float)total, problem->weight_bound = bound;
}

/* How tanh(x + y) follows from the bounds of x and y. */
void EXPORTED(regard_additive_form)(struct additive *problem) {
    float bound = 0.0f;
    for (int64_t i = 0; i < problem->heads * problem->rows; i++)
        if (problem->query_bound[i] > bound) bound = problem->query_bound[i];
    for (int64_t i = 0; i < problem->key_heads * key_strip_count(problem); i++)
        if (problem->key_bound[i] > bound) bound = problem->key_bound[i];
    problem->form = bound <= 1.0f ? TANGENTS : EXPONENTIALS;
}

/* Bounds of the entries: takes one strip after another, as long as any is left: for as many threads at once as like. */
void EXPORTED(regard_additive_bounds)(struct additive *problem) {
    for (int64_t unit; (unit = __atomic_fetch_add(&problem->next_unit, 1, __ATOMIC_RELAXED)) < problem->unit_count;)
        BY_DTYPE(problem->dtype, find_bounds(problem, strip_of_unit(problem, unit), DTYPE));
}

INLINE lanes prepared(lanes x, int64_t form) {
    if (form == TANGENTS) return tanh_lanes(x);
    return exp_lanes(2.0f * -min_lanes(EXPONENT_CAP, -min_lanes(EXPONENT_CAP, x)));
}

INLINE void prepare_queries(const struct additive *problem, const struct strip strip, const int dtype) {
    for (int64_t i = 0; i < strip.count; i++)
        for (int64_t a = 0; a < problem->padded; a += LANES)
            store(problem->prepared_query + (strip.number + i) * problem->padded + a,
                  prepared(load_entries(row_at(strip.rows, i, strip.stride, dtype), a, problem->features, dtype, 0),
                           problem->form));
}

INLINE void prepare_keys(const struct additive *problem, const struct strip strip, const int dtype) {
    float *target = problem->prepared_key + strip.number * problem->padded * STRIP;
    for (int64_t a = 0; a < problem->padded; a += LANES)
        for (int64_t j = 0; j < STRIP; j += LANES) {
            lanes block[LANES] = {{0}};
            for (int64_t l = 0; l < LANES && j < strip.count; l++) {
                lanes values = broadcast(0.0f);
                if (j + l < strip.count)
                    values = load_entries(row_at(strip.rows, j + l, strip.stride, dtype), a, problem->features, dtype, 0);
                block[l] = prepared(values, problem->form);
            }
            transpose(block);
            for (int l = 0; l < LANES; l++) store(target + (a + l) * STRIP + j, block[l]);
        }
}

/* The preparation itself, shared out likewise. */
void EXPORTED(regard_additive_prepare)(struct additive *problem) {
    for (int64_t unit; (unit = __atomic_fetch_add(&problem->next_unit, 1, __ATOMIC_RELAXED)) < problem->unit_count;) {
        struct strip strip = strip_of_unit(problem, unit);
        if (strip.is_key)
            BY_DTYPE(problem->dtype, prepare_keys(problem, strip, DTYPE));
        else
            BY_DTYPE(problem->dtype, prepare_queries(problem, strip, DTYPE));
    }
}

void strip_scores(const struct additive *problem, int64_t head, int64_t row, int64_t column, int64_t count, float *target) {
    int64_t strip = column / STRIP, first = strip * STRIP, key_head = head / (problem->heads / problem->key_heads);
    int64_t query_at = head * problem->rows + row, key_at = key_head * key_strip_count(problem) + strip;
    enum method method = choose_method(problem, query_at, key_at);
    if (method == PER_PAIR) {
        const void *query = given_query(problem, head, row), *keys = given_key(problem, key_head, column);
        BY_DTYPE(problem->dtype, direct_scores(problem, query, keys, count, target, DTYPE));
        return;
    }
    float part[STRIP], *whole_strip = count == STRIP ? target : part;
    const float *query = problem->prepared_query + query_at * problem->padded;
    const float *key = problem->prepared_key + key_at * problem->padded * STRIP;
    if (method == BY_TANGENTS)
        row_scores(problem, query, key, whole_strip, column - first + count, BY_TANGENTS);
    else if (method == BY_EXPONENTIALS)
        row_scores(problem, query, key, whole_strip, column - first + count, BY_EXPONENTIALS);
    else
        row_scores(problem, query, key, whole_strip, column - first + count, BY_CAPPED_EXPONENTIALS);
    if (whole_strip == part) memcpy(target, part + column - first, (size_t)count * sizeof(float));
}

void EXPORTED(regard_additive_scores)(const struct additive *problem, const struct tile *tile) {
    int64_t rows = tile->row_end - tile->row_begin;
    for (int64_t begin = tile->begin, end; begin < tile->end; begin = end) {
        int64_t head = begin / rows; /* from here to the end of this head, or of this call */
        end = (head + 1) * rows < tile->end ? (head + 1) * rows : tile->end;
        for (int64_t column = tile->column_begin, next; column < tile->column_end; column = next) {
            next = (column / STRIP + 1) * STRIP < tile->column_end ? (column / STRIP + 1) * STRIP : tile->column_end;
            for (int64_t index = begin; index < end; index++) {
                float *target = tile->pairs + head * tile->pairs_head + index % rows * tile->pairs_row;
                strip_scores(problem, head, tile->row_begin + index % rows, column, next - column,
                             target + column - tile->column_begin);
            }
        }
    }
}
