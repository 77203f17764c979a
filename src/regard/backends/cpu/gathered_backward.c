/* Attention to listed keys: the gradients. One thread computes those of a key head, in the order of the queries, so that
 * they do not depend on the number of threads. */
#include "listed_rows.h"

/* target[key[t]] += sum over rows of slopes[r][t] rows[r], for some vectors of columns. */
INLINE void spread_columns(const struct gather_scratch *scratch, const float *slopes, const float *rows, int64_t padded,
                           int64_t column, float *target, int64_t stride, const int vectors, const int many) {
    const int64_t count = scratch->count;
    lanes own[ROWS * VECTORS];
    UNROLL for (int r = 0; r < many; r++) UNROLL for (int v = 0; v < vectors; v++) own[r * vectors + v] =
        load(rows + r * padded + column + v * LANES);
    for (int64_t t = 0; t < count; t++) {
        float *at = target + scratch->key[t] * stride + column;
        fetch_listed(scratch, t, target, stride, column, column + vectors * LANES, FLOAT32);
        UNROLL for (int v = 0; v < vectors; v++) {
            lanes sum = load(at + v * LANES);
            UNROLL for (int r = 0; r < many; r++) sum += broadcast(slopes[r * scratch->width + t]) * own[r * vectors + v];
            store(at + v * LANES, sum);
        }
    }
}

INLINE void spread(const struct gather_scratch *scratch, const float *slopes, const float *rows, int64_t dim, float *target,
                   int64_t stride, const int many) {
    const int64_t padded = round_up_to_lanes(dim);
    int64_t column = 0;
    for (; column + VECTORS * LANES <= padded; column += VECTORS * LANES)
        spread_columns(scratch, slopes, rows, padded, column, target, stride, VECTORS, many);
    for (; column < padded; column += LANES) spread_columns(scratch, slopes, rows, padded, column, target, stride, 1, many);
}

/* Weights from scores, and slopes of the scores from products of values with what comes from above. */
INLINE void slopes_of_row(const struct gathered *problem, const struct gather_scratch *scratch, struct row_place place,
                          float *weights, float *slopes, const float *bends) {
    const int64_t row = (place.batch * problem->heads + place.head) * problem->queries + place.query;
    const lanes lse = broadcast(problem->lse[row]), delta = broadcast(problem->delta[row]);
    const float *factors = factors_of(problem, place);
    if (factors)
        for (int64_t t = 0; t < scratch->count; t++) slopes[t] *= factors[scratch->place[t]];
    for (int64_t t = 0; t < scratch->count; t += LANES) {
        lanes weight = exp_or_zero(load(weights + t) - lse);
        store(weights + t, weight);
        store(slopes + t, weight * (load(slopes + t) - delta));
    }
    if (problem->grad_added) {
        float *into = problem->grad_added + row * problem->length * problem->columns;
        for (int64_t t = 0; t < scratch->count; t++) into[scratch->place[t]] = slopes[t];
    }
    for (int64_t t = 0; t < scratch->count; t += LANES) {
        lanes slope = load(slopes + t) * problem->scale;
        store(slopes + t, problem->softcap > 0.0f ? slope * load(bends + t) : slope);
    }
    if (factors)
        for (int64_t t = 0; t < scratch->count; t++) weights[t] *= factors[scratch->place[t]];
}

INLINE void add_gradients(const struct gathered *problem, struct gather_scratch *scratch, const struct row_place *places,
                          int64_t key_head, const struct kind kind) {
    const int64_t batch = places[0].batch, dim = problem->dim, value_dim = problem->value_dim,
                  padded = round_up_to_lanes(dim), number = batch * problem->key_heads + key_head;
    const void *key = row_at(problem->key, 1, batch * problem->key_batch + key_head * problem->key_head, kind.dtype),
               *value =
                   row_at(problem->value, 1, batch * problem->value_batch + key_head * problem->value_head, kind.dtype);
    widen_rows(problem->query, problem->query_batch, problem->query_head, problem->query_row, dim, places, scratch->query,
               kind.dtype, kind.rows);
    widen_rows(problem->grad_output, problem->heads * problem->queries * value_dim, problem->queries * value_dim, value_dim,
               value_dim, places, scratch->above, FLOAT32, kind.rows);
    list_products(scratch, scratch->query, key, problem->key_row, dim, scratch->weights, kind);
    list_products(scratch, scratch->above, value, problem->value_row, value_dim, scratch->slopes, kind);
    for (int r = 0; r < kind.rows; r++) {
        float *weights = scratch->weights + r * scratch->width, *slopes = scratch->slopes + r * scratch->width,
              *bends = scratch->bends + r * scratch->width;
        if (places[r].query < 0) {
            memset(weights, 0, (size_t)scratch->width * sizeof(float));
            memset(slopes, 0, (size_t)scratch->width * sizeof(float));
            continue;
        }
        complete_scores(problem, scratch, places[r], weights, bends);
        slopes_of_row(problem, scratch, places[r], weights, slopes, bends);
    }
    list_sums(scratch, scratch->slopes, key, problem->key_row, dim, scratch->sums, kind);
    for (int r = 0; r < kind.rows; r++) {
        if (places[r].query < 0) continue;
        const int64_t row = (batch * problem->heads + places[r].head) * problem->queries + places[r].query;
        memcpy(problem->grad_query + row * problem->grad_row, scratch->sums + r * padded, (size_t)padded * sizeof(float));
    }
    spread(scratch, scratch->slopes, scratch->query, dim, problem->grad_key + number * problem->keys * problem->grad_row,
           problem->grad_row, kind.rows);
    spread(scratch, scratch->weights, scratch->above, value_dim,
           problem->grad_value + number * problem->keys * problem->grad_value_row, problem->grad_value_row, kind.rows);
}

#define OF_ROWS (const struct gathered *problem, struct gather_scratch *scratch, const struct row_place *places, int64_t key_head)
#define BY_DIMS(dtype, rows)                                                                          \
    if (problem->dim % LANES || problem->value_dim % LANES)                                          \
        add_gradients(problem, scratch, places, key_head, (struct kind){dtype, 0, rows});            \
    else                                                                                             \
        add_gradients(problem, scratch, places, key_head, (struct kind){dtype, 1, rows});
TABLE_BY_DTYPE(gradients_of_one, OF_ROWS, BY_DIMS(DTYPE, 1))
TABLE_BY_DTYPE(gradients_of_some, OF_ROWS, BY_DIMS(DTYPE, ROWS))

/* Takes one key head after another while any is left; any number of threads may call it at once. */
void EXPORTED(regard_gathered_backward)(struct gathered *problem) {
    const int64_t pieces = (problem->rows + problem->height - 1) / problem->height;
    const int64_t heads = problem->list_heads / problem->key_heads; /* those of a key head that have lists */
    struct gather_scratch scratch;
    char *memory = new_gather_scratch(problem, &scratch);
    if (!memory) {
        problem->failed = 1;
        return;
    }
    int64_t unit;
    while ((unit = __atomic_fetch_add(&problem->next_unit, 1, __ATOMIC_RELAXED)) < problem->unit_count)
        for (int64_t head = unit * heads; head < (unit + 1) * heads; head++)
            for (int64_t at = 0; at < problem->lists * pieces; at++)
                work_on_piece(problem, &scratch, head / problem->list_heads, head % problem->list_heads, at / pieces,
                              at % pieces, gradients_of_one[problem->dtype], gradients_of_some[problem->dtype]);
    free_aligned(memory);
}
