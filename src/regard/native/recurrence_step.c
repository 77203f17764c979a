/* One token of the linear recurrence: the state of a head is read and written once, some columns of it at a time. */
#include "recurrence.h"
#include "bf16_rows.h"

#include <math.h>
#include <stdlib.h>

/* Vectors of value columns that go at once, where there are so many: their sums stay in registers. */
enum { VECTORS = 4, MOST_VECTORS = LANES == 16 ? 8 : 4 };

/* The rows of one key head, its decay factors, and its number. */
struct token {
    const float *key, *value;
    float *factors;
    float beta;
    int64_t batch, key_head, index;
};

/* Stores a vector of a row of so many columns; whole: they reach beyond it. */
INLINE void store_columns(float *row, int64_t column, int64_t columns, lanes values, const int whole) {
    if (whole)
        store(row + column, values);
    else
        store_entries(row, column, columns, 0, values);
}

INLINE const float *token_row(const struct rows *rows, int64_t batch, int64_t head) {
    return row_at(rows->data, 1, batch * rows->batch + head * rows->head, 0);
}

/* Some columns of a key head: what is written, the new state, and the outputs of its queries. vectors: how many of them the columns
 * fill; whole: entirely. */
INLINE void step_columns(const struct recurrence *problem, const struct token *token, int64_t first, const int vectors, const int whole) {
    int64_t columns = problem->value_dim - first, place = token->index * problem->dim * problem->value_dim + first;
    const float *state = problem->state ? problem->state + place : 0;
    float *target = problem->final_state + place;
    lanes written[MOST_VECTORS], read[MOST_VECTORS] = {{0}};
    UNROLL for (int c = 0; c < vectors; c++) written[c] = load_entries(token->value + first, c * LANES, columns, 0, whole);
    if (problem->beta.data) {
        for (int64_t a = 0; state && a < problem->dim; a++) {
            float factor = token->factors[a] * token->key[a];
            UNROLL for (int c = 0; c < vectors; c++)
                read[c] += load_entries(state + a * problem->value_dim, c * LANES, columns, 0, whole) * factor;
        }
        UNROLL for (int c = 0; c < vectors; c++) written[c] = (written[c] - read[c]) * token->beta;
    }
    for (int64_t row = 0; row < problem->group; row++) {
        int64_t head = token->key_head * problem->group + row;
        const float *query = token_row(&problem->query, token->batch, head);
        lanes sum[MOST_VECTORS] = {{0}};
        for (int64_t a = 0; a < problem->dim; a++)
            UNROLL for (int c = 0; c < vectors; c++) {
                float *kept = target + a * problem->value_dim;
                lanes entry = {0};
                if (row == 0) {
                    if (state) entry = load_entries(state + a * problem->value_dim, c * LANES, columns, 0, whole) * token->factors[a];
                    entry += written[c] * token->key[a];
                    store_columns(kept, c * LANES, columns, entry, whole);
                } else {
                    entry = load_entries(kept, c * LANES, columns, 0, whole);
                }
                sum[c] += entry * query[a];
            }
        float *output = problem->output + (token->batch * problem->heads + head) * problem->value_dim + first;
        UNROLL for (int c = 0; c < vectors; c++) store_columns(output, c * LANES, columns, sum[c], whole);
    }
}

INLINE void process_head(const struct recurrence *problem, int64_t unit, float *factors) {
    int64_t key_heads = problem->heads / problem->group, column = 0;
    struct token token = {.factors = factors, .batch = unit / key_heads, .key_head = unit % key_heads, .index = unit};
    const float *decay = problem->decay_kind == NO_DECAY ? 0 : token_row(&problem->decay, token.batch, token.key_head);
    token.key = token_row(&problem->key, token.batch, token.key_head);
    token.value = token_row(&problem->value, token.batch, token.key_head);
    if (problem->beta.data) token.beta = *token_row(&problem->beta, token.batch, token.key_head);
    for (int64_t a = 0; a < problem->dim; a++)
        factors[a] = !decay ? 1.0f : problem->decay_kind == HEAD_DECAY && a ? factors[0] : expf(decay[a]);
    for (; column + MOST_VECTORS * LANES <= problem->value_dim; column += MOST_VECTORS * LANES)
        step_columns(problem, &token, column, MOST_VECTORS, 1);
    for (; column + VECTORS * LANES <= problem->value_dim; column += VECTORS * LANES) step_columns(problem, &token, column, VECTORS, 1);
    for (; column < problem->value_dim; column += LANES) step_columns(problem, &token, column, 1, 0);
}

/* Takes one key head after another while any is left; any number of threads may call it at once. */
void EXPORTED(regard_recurrence_step)(struct recurrence *problem) {
    float *factors = malloc((size_t)(problem->dim + 1) * sizeof(float));
    int64_t unit;
    if (!factors) {
        problem->failed = 1;
        return;
    }
    while ((unit = __atomic_fetch_add(&problem->next_unit, 1, __ATOMIC_RELAXED)) < problem->unit_count)
        process_head(problem, unit, factors);
    free(factors);
}
