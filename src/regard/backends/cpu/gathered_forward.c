/* Attention to listed keys: output and log-sum-exp. */
#include "listed_rows.h"

/* Scores become weights, e^(score - maximum); returns their sum. */
INLINE float exponentials(float *scores, int64_t count, float *maximum) {
    lanes largest = broadcast(-INFINITY), sum = {0};
    for (int64_t t = 0; t < count; t += LANES) largest = max_lanes(load(scores + t), largest); /* NaN is no maximum */
    *maximum = max_of_lanes(largest);
    const lanes shift = broadcast(*maximum == -INFINITY ? 0.0f : *maximum);
    for (int64_t t = 0; t < count; t += LANES) {
        lanes weight = exp_or_zero(load(scores + t) - shift);
        store(scores + t, weight);
        sum += weight;
    }
    return sum_lanes(sum);
}

INLINE void attend_rows(const struct gathered *problem, struct gather_scratch *scratch, const struct row_place *places,
                        int64_t key_head, const struct kind kind) {
    const int64_t batch = places[0].batch, dim = problem->value_dim, padded = round_up_to_lanes(dim);
    const void *key = row_at(problem->key, 1, batch * problem->key_batch + key_head * problem->key_head, kind.dtype),
               *value =
                   row_at(problem->value, 1, batch * problem->value_batch + key_head * problem->value_head, kind.dtype);
    float maximum[ROWS] = {0}, total[ROWS] = {0};
    widen_rows(problem->query, problem->query_batch, problem->query_head, problem->query_row, problem->dim, places,
               scratch->query, kind.dtype, kind.rows);
    list_products(scratch, scratch->query, key, problem->key_row, problem->dim, scratch->weights, kind);
    for (int r = 0; r < kind.rows; r++) {
        float *weights = scratch->weights + r * scratch->width;
        if (places[r].query < 0) continue;
        complete_scores(problem, scratch, places[r], weights, 0);
        total[r] = exponentials(weights, scratch->count, maximum + r);
        const float *factors = factors_of(problem, places[r]);
        if (factors)
            for (int64_t t = 0; t < scratch->count; t++) weights[t] *= factors[scratch->place[t]];
    }
    list_sums(scratch, scratch->weights, value, problem->value_row, dim, scratch->sums, kind);
    for (int r = 0; r < kind.rows; r++) {
        if (places[r].query < 0) continue;
        const int64_t row = (batch * problem->heads + places[r].head) * problem->queries + places[r].query;
        const float share = total[r] == 0.0f ? 0.0f : 1.0f / total[r];
        for (int64_t a = 0; a < dim; a += LANES)
            store_partial(problem->output + row * dim + a, load(scratch->sums + r * padded + a) * share, dim - a);
        problem->lse[row] = total[r] == 0.0f ? -INFINITY : maximum[r] + logf(total[r]);
    }
}

#define OF_ROWS (const struct gathered *problem, struct gather_scratch *scratch, const struct row_place *places, int64_t key_head)
#define BY_DIMS(dtype, rows)                                                                          \
    if (problem->dim % LANES || problem->value_dim % LANES)                                          \
        attend_rows(problem, scratch, places, key_head, (struct kind){dtype, 0, rows});              \
    else                                                                                             \
        attend_rows(problem, scratch, places, key_head, (struct kind){dtype, 1, rows});
TABLE_BY_DTYPE(attend_one, OF_ROWS, BY_DIMS(DTYPE, 1))
TABLE_BY_DTYPE(attend_some, OF_ROWS, BY_DIMS(DTYPE, ROWS))

/* Takes some pieces of lists after others while any are left; any number of threads may call it at once. */
void EXPORTED(regard_gathered)(struct gathered *problem) {
    const int64_t pieces = (problem->rows + problem->height - 1) / problem->height;
    const int64_t total = problem->batches * problem->list_heads * problem->lists * pieces;
    struct gather_scratch scratch;
    char *memory = new_gather_scratch(problem, &scratch);
    if (!memory) {
        problem->failed = 1;
        return;
    }
    int64_t unit;
    while ((unit = __atomic_fetch_add(&problem->next_unit, 1, __ATOMIC_RELAXED)) < problem->unit_count)
        for (int64_t at = unit * PIECES_AT_ONCE; at < total && at < (unit + 1) * PIECES_AT_ONCE; at++) {
            const int64_t list = at / pieces, head = list / problem->lists;
            work_on_piece(problem, &scratch, head / problem->list_heads, head % problem->list_heads, list % problem->lists,
                          at % pieces, attend_one[problem->dtype], attend_some[problem->dtype]);
        }
    free_aligned(memory);
}
