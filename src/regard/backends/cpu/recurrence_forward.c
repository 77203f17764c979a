/* The linear recurrence, forward: one chunk of tokens after another, with the state between them in cache. */
#include "recurrence_chunk.h"

/* The state of a thread. */
struct forward {
    struct chunk chunk;
    struct carry carry;
    float *query, *reading; /* rows of a query head, and the same decayed from the chunk's start: [BLOCK][padded] */
    float *columns;         /* [padded][BLOCK] */
    float *weights;         /* [BLOCK][BLOCK] */
    float *output;          /* [BLOCK][value_padded] */
};

/* The sums of weights of the rows: of pairs within the chunk, and of what was before it, which `reading`, if there is one, reads. */
INLINE void row_totals(const struct forward *state, const float *reading, float *totals) {
    int64_t padded = state->chunk.padded;
    for (int64_t i = 0; i < state->chunk.count; i++) {
        lanes sum = {0};
        for (int64_t j = 0; j <= i; j += LANES) sum += load(state->weights + i * BLOCK + j);
        for (int64_t a = 0; reading && a < padded; a += LANES) sum += load(reading + i * padded + a) * load(state->carry.total + a);
        totals[i] = sum_lanes(sum);
    }
}

/* q . (b * k) of a token, the weight of its own value beside what the state before it gives. */
INLINE float own_weight(const struct recurrence *problem, const struct chunk *chunk, int64_t head, int64_t token) {
    const int dtype = (int)problem->dtype;
    const void *query = head_rows(&problem->query, chunk->batch, head, token, dtype);
    const void *key = head_rows(&problem->key, chunk->batch, chunk->key_head, token, dtype);
    const float *bonus = head_rows(&problem->bonus, chunk->batch, chunk->key_head, token, FLOAT32);
    lanes sum = {0};
    for (int64_t a = 0; a < problem->dim; a += LANES) {
        lanes product = load_entries(query, a, problem->dim, dtype, 0) * load_entries(key, a, problem->dim, dtype, 0);
        sum += product * (problem->bonus_step ? load_partial(bonus + a, problem->dim - a) : broadcast(*bonus));
    }
    return sum_lanes(sum) * (float)problem->scale;
}

/* Stores the output of a token of a query head: what the state before it gives, or nothing where that is 0, and its own value. */
INLINE void store_with_own(const struct recurrence *problem, const struct chunk *chunk, int64_t head, int64_t token, const float *earlier) {
    const int dtype = (int)problem->dtype;
    const void *value = head_rows(&problem->value, chunk->batch, chunk->key_head, token, dtype);
    float weight = own_weight(problem, chunk, head, token);
    int64_t row = (chunk->batch * problem->heads + head) * problem->tokens + token;
    void *target = entry_at(problem->output, row * problem->value_dim + chunk->value_begin, dtype);
    for (int64_t a = 0; a < chunk->value_count; a += LANES) {
        lanes own = load_entries(value, chunk->value_begin + a, chunk->value_begin + chunk->value_count, dtype, 0) * weight;
        store_entries(target, a, chunk->value_count, dtype, earlier ? own + load(earlier + a) : own);
    }
}

/* The outputs of one query head for the tokens after those of the chunk, each of which reads the state before it, and its own. */
INLINE void process_ahead(const struct recurrence *problem, struct forward *state, int64_t head) {
    struct chunk *chunk = &state->chunk, ahead = *chunk;
    int64_t columns = chunk->value_padded;
    const int dtype = (int)problem->dtype;
    ahead.count = min_int(problem->tokens - chunk->first - 1, BLOCK);
    pack_features(&ahead, head_rows(&problem->query, chunk->batch, head, chunk->first + 1, dtype), problem->query.row, problem->dim, dtype,
                  (float)problem->scale, problem->feature_map, state->query);
    pair_weights(problem, chunk, state->query, 0, 1.0f, state->reading, state->columns, state->weights);
    memset(state->output, 0, (size_t)(chunk->rows * columns) * sizeof(float));
    if (!chunk->empty)
        product((struct factor){decayed_rows(problem, chunk, state->query, state->reading), chunk->padded, 1}, chunk->count,
                state->carry.matrix, columns, 0, chunk->padded, state->output, 0);
    lower_product(state->weights, chunk->count, chunk->written, columns, state->output, 0);
    if (!chunk->first) store_with_own(problem, chunk, head, 0, 0);
    for (int64_t i = 0; i < ahead.count; i++)
        store_with_own(problem, chunk, head, chunk->first + i + 1, state->output + i * columns);
}

/* The outputs of one query head in the chunk. */
INLINE void process_head(const struct recurrence *problem, struct forward *state, int64_t head) {
    struct chunk *chunk = &state->chunk;
    int64_t columns = chunk->value_padded, first = (chunk->batch * problem->heads + head) * problem->tokens + chunk->first;
    float totals[BLOCK];
    const int dtype = (int)problem->dtype;
    pack_features(chunk, head_rows(&problem->query, chunk->batch, head, chunk->first, dtype), problem->query.row, problem->dim, dtype,
                  (float)problem->scale, problem->feature_map, state->query);
    pair_weights(problem, chunk, state->query, 0, 1.0f, state->reading, state->columns, state->weights);
    const float *reading = chunk->empty ? 0 : decayed_rows(problem, chunk, state->query, state->reading);
    if (reading)
        product((struct factor){reading, chunk->padded, 1}, chunk->count, state->carry.matrix, columns, 0, chunk->padded, state->output, 0);
    else
        memset(state->output, 0, (size_t)(chunk->rows * columns) * sizeof(float));
    lower_product(state->weights, chunk->count, chunk->written, columns, state->output, 0);
    if (problem->normalize) row_totals(state, reading, totals);
    for (int64_t i = 0; i < chunk->count; i++) {
        float share = !problem->normalize ? 1.0f : inverse_total(totals[i]);
        void *target = entry_at(problem->output, (first + i) * problem->value_dim + chunk->value_begin, dtype);
        for (int64_t a = 0; a < chunk->value_count; a += LANES)
            store_entries(target, a, chunk->value_count, dtype, load(state->output + i * columns + a) * share);
        if (problem->row_total && !chunk->value_begin) problem->row_total[first + i] = totals[i];
    }
}

/* Whether rows of tokens of the chunk have finite numbers alone. */
INLINE int finite_rows(const struct rows *tensor, const struct chunk *chunk, int64_t head, int64_t dim, const int dtype) {
    const void *rows = head_rows(tensor, chunk->batch, head, chunk->first, dtype);
    lanes check = {0};
    for (int64_t i = 0; i < chunk->count; i++)
        for (int64_t a = 0; a < dim; a += LANES) check_finite(&check, load_entries(row_at(rows, i, tensor->row, dtype), a, dim, dtype, 0));
    return sum_lanes(check) == 0.0f;
}

/* Whether all that the chunk reads is finite, its decay at most 0, and its beta in 0..2; of several parts the first one looks. */
APART int valid_chunk(const struct recurrence *problem, const struct chunk *chunk) {
    const int dtype = (int)problem->dtype;
    if (chunk->value_begin) return 1;
    for (int64_t head = chunk->key_head * problem->group; head < (chunk->key_head + 1) * problem->group; head++)
        if (!finite_rows(&problem->query, chunk, head, problem->dim, dtype)) return 0;
    if (!finite_rows(&problem->key, chunk, chunk->key_head, problem->dim, dtype)) return 0;
    if (!finite_rows(&problem->value, chunk, chunk->key_head, problem->value_dim, dtype)) return 0;
    if (problem->removal.data && !finite_rows(&problem->removal, chunk, chunk->key_head, problem->dim, dtype)) return 0;
    for (int64_t i = 0; problem->beta.data && i < chunk->count; i++) {
        float beta = *(const float *)head_rows(&problem->beta, chunk->batch, chunk->key_head, chunk->first + i, FLOAT32);
        if (!(beta >= 0.0f && beta <= 2.0f)) return 0;
    }
    int64_t width = problem->decay_kind == FEATURE_DECAY ? problem->dim : problem->decay_kind == HEAD_DECAY;
    bits valid = (bits)(broadcast(0.0f) == 0.0f);
    for (int64_t i = 0; i < chunk->count; i++)
        for (int64_t a = 0; a < width; a += LANES)
            valid &= load_partial((const float *)head_rows(&problem->decay, chunk->batch, chunk->key_head, chunk->first + i, FLOAT32) + a, width - a) <= 0.0f;
    return sum_lanes(zero_unless(valid, broadcast(1.0f))) == (float)LANES;
}

/* One part of the value columns of one key head, from the first token to the last. */
INLINE void process_sequence(struct recurrence *problem, struct forward *state) {
    struct chunk *chunk = &state->chunk;
    int64_t span = problem->segment * BLOCK, borders = (problem->tokens + span - 1) / span;
    load_state(problem, chunk, problem->state, problem->total, state_index(problem, chunk, 1, 0), &state->carry);
    for (int64_t first = 0; first < problem->tokens; first += BLOCK) {
        begin_chunk(problem, chunk, first, problem->state || problem->total);
        if (problem->checked && !valid_chunk(problem, chunk)) {
            __atomic_store_n(&problem->invalid, 1, __ATOMIC_RELAXED);
            return;
        }
        if (chunk->first % span == 0)
            store_state(problem, chunk, &state->carry, state_index(problem, chunk, borders, chunk->first / span), problem->border_state,
                        problem->border_total);
        pack_chunk(problem, chunk);
        if (problem->beta.data) solve_writes(problem, chunk, &state->carry, state->reading, state->columns);
        for (int64_t head = chunk->key_head * problem->group; head < (chunk->key_head + 1) * problem->group; head++)
            problem->bonus.data ? process_ahead(problem, state, head) : process_head(problem, state, head);
        if (first + BLOCK < problem->tokens || problem->final_state) advance_state(problem, chunk, &state->carry, &state->carry);
    }
    store_state(problem, chunk, &state->carry, state_index(problem, chunk, 1, 0), problem->final_state, problem->final_total);
}

/* Takes one part of one key head after another while any is left; any number of threads may call it at once. */
void EXPORTED(regard_recurrence)(struct recurrence *problem) {
    int64_t padded = padded_dim(problem->dim), value_padded = padded_dim(problem->value_dim), unit;
    int64_t floats = chunk_floats(padded, value_padded) + padded * value_padded + padded + BLOCK * (3 * padded + value_padded + BLOCK) + 8 * 16;
    float *memory = aligned_memory(floats * 4), *free_memory = memory;
    struct forward state = {.chunk = {.padded = padded, .value_padded = value_padded}};
    if (!memory) {
        problem->failed = 1;
        return;
    }
    take_chunk(&state.chunk, &free_memory);
    state.carry.matrix = take_floats(&free_memory, padded * value_padded), state.carry.total = take_floats(&free_memory, padded);
    state.query = take_floats(&free_memory, BLOCK * padded), state.reading = take_floats(&free_memory, BLOCK * padded);
    state.columns = take_floats(&free_memory, BLOCK * padded), state.weights = take_floats(&free_memory, BLOCK * BLOCK);
    state.output = take_floats(&free_memory, BLOCK * value_padded);
    while ((unit = __atomic_fetch_add(&problem->next_unit, 1, __ATOMIC_RELAXED)) < problem->unit_count) {
        begin_unit(problem, &state.chunk, unit);
        process_sequence(problem, &state);
    }
    free_aligned(memory);
}
