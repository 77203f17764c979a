/* The gradients of the linear recurrence: segments from the last to the first. The states before the chunks of a segment are
 * computed anew from the one that the forward pass stored; then its chunks go backwards, with the gradient of the state. */
#include "recurrence_chunk.h"

/* The state of a thread. */
struct backward {
    struct chunk chunk;
    struct carry gradient;       /* of the state after the chunk, then of that before it */
    int last;                    /* whether the gradient of the state after the chunk is 0 */
    int wanted;                  /* whether the gradient of the state before it is */
    float *matrices, *totals;    /* the states between the chunks of a segment */
    float *written_columns;      /* [value_padded][BLOCK] */
    float *state_columns;        /* [value_padded][padded], of the state or of its gradient */
    float *rows, *reading;       /* of a query head, and the same decayed from the chunk's start: [BLOCK][padded] */
    float *columns;              /* [padded][BLOCK] */
    float *weights, *grad_weights;           /* [BLOCK][BLOCK] */
    float *grad_output, *grad_written;       /* [BLOCK][value_padded] */
    float *grad_rows, *grad_key, *grad_sums; /* [BLOCK][padded]; the last, of G */
    float *grad_totals;                      /* [BLOCK], of the sums of weights */
};

INLINE struct carry carry_at(const struct backward *state, int64_t number) {
    int64_t padded = state->chunk.padded;
    return (struct carry){state->matrices + number * padded * state->chunk.value_padded, state->totals + number * padded};
}

/* target += or -= first * second, entry by entry. */
INLINE void add_entries(const float *first, const float *second, int64_t count, float sign, float *target) {
    for (int64_t a = 0; a < count; a += LANES) store(target + a, load(target + a) + load(first + a) * load(second + a) * sign);
}

/* The gradient of the output of a query head, and of its totals: output = sum / total, so that grad_sum is grad_output / total and
 * grad_total is -(grad_output . output) / total, which is counted in the first part. */
APART void pack_output_gradient(const struct recurrence *problem, struct backward *state, int64_t head) {
    const struct chunk *chunk = &state->chunk;
    int64_t first = (chunk->batch * problem->heads + head) * problem->tokens + chunk->first;
    const int dtype = (int)problem->dtype;
    const void *source = head_rows(&problem->grad_output, chunk->batch, head, chunk->first, dtype);
    pack_rows(row_at(source, 1, chunk->value_begin, dtype), problem->grad_output.row, chunk->count, chunk->value_count, 1.0f,
              state->grad_output, dtype);
    for (int64_t i = 0; problem->normalize && i < chunk->count; i++) {
        float total = problem->row_total[first + i], share = inverse_total(total);
        const void *gradient = row_at(source, i, problem->grad_output.row, dtype);
        const void *output = row_at(problem->output, first + i, problem->value_dim, dtype);
        lanes sum = {0};
        for (int64_t a = 0; !chunk->value_begin && a < problem->value_dim; a += LANES)
            sum += load_entries(gradient, a, problem->value_dim, dtype, 0) * load_entries(output, a, problem->value_dim, dtype, 0);
        state->grad_totals[i] = -sum_lanes(sum) * share;
        float *row = state->grad_output + i * chunk->value_padded;
        for (int64_t a = 0; a < chunk->value_padded; a += LANES) store(row + a, load(row + a) * share);
    }
}

/* Gradients of rows and keys from those of the pairs of one group with itself, decayed per feature. */
INLINE void group_pair_gradients(const struct backward *state, const float *rows, int64_t group) {
    const struct chunk *chunk = &state->chunk;
    int64_t padded = chunk->padded, first = group * GROUP;
    for (int64_t a = 0; a < padded; a += LANES)
        for (int64_t j = first; j < first + GROUP; j++) {
            lanes factor = broadcast(1.0f), key = load(chunk->key + j * padded + a), sum = {0};
            for (int64_t i = j; i < first + GROUP; i++) {
                if (i > j) factor *= load(chunk->step + i * padded + a);
                lanes weighted = factor * state->grad_weights[i * BLOCK + j];
                float *target = state->grad_rows + i * padded + a;
                store(target, load(target) + weighted * key);
                sum += weighted * load(rows + i * padded + a);
            }
            store(state->grad_key + j * padded + a, load(state->grad_key + j * padded + a) + sum);
        }
}

/* Gradients of rows and keys from those of their pairs, decayed per feature: keys move forward from group to group, rows move
 * back. */
APART void decayed_pair_gradients(const struct backward *state, const float *rows) {
    const struct chunk *chunk = &state->chunk;
    int64_t padded = chunk->padded, groups = (chunk->count + GROUP - 1) / GROUP, group;
    float *sums = state->columns;
    multiply_entries(chunk->key, chunk->group_end, chunk->rows * padded, chunk->moving);
    for (group = 0; group < groups; group++) {
        int64_t first = group * GROUP;
        product((struct factor){state->grad_weights + first * BLOCK, BLOCK, 1}, GROUP, chunk->moving, padded, 0, first, sums, 0);
        add_entries(sums, chunk->in_group + first * padded, GROUP * padded, 1.0f, state->grad_rows + first * padded);
        for (int64_t j = 0; j < first; j++)
            multiply_entries(chunk->moving + j * padded, chunk->group_whole + group * padded, padded, chunk->moving + j * padded);
        group_pair_gradients(state, rows, group);
    }
    multiply_entries(rows, chunk->in_group, chunk->rows * padded, chunk->moving);
    for (group = groups - 1; group >= 0; group--) {
        int64_t first = group * GROUP, after = first + GROUP;
        product((struct factor){state->grad_weights + first, 1, BLOCK}, GROUP, chunk->moving, padded, after, groups * GROUP, sums, 0);
        add_entries(sums, chunk->group_end + first * padded, GROUP * padded, 1.0f, state->grad_key + first * padded);
        for (int64_t i = after; i < groups * GROUP; i++)
            multiply_entries(chunk->moving + i * padded, chunk->group_whole + group * padded, padded, chunk->moving + i * padded);
    }
}

/* The gradients of rows that read the state, from `grad_output`: of the rows themselves, of what keys are to them, and of the state
 * before the chunk. `state_columns` holds that state. strict: rows read it before their own token is written. */
APART void reader_gradients(const struct recurrence *problem, struct backward *state, const float *rows, const float *reading,
                            const float *grad_totals, const int strict) {
    const struct chunk *chunk = &state->chunk;
    struct carry before = carry_at(state, chunk->first / BLOCK % problem->segment);
    int64_t padded = chunk->padded, columns = chunk->value_padded;
    pair_product(state->grad_output, chunk->count, columns, state->written_columns, state->grad_weights);
    mask_pairs(chunk, problem->decay_kind, strict, grad_totals, 1.0f, state->grad_weights);
    if (chunk->empty)
        memset(state->grad_rows, 0, (size_t)(chunk->rows * padded) * sizeof(float));
    else
        product((struct factor){state->grad_output, columns, 1}, chunk->rows, state->state_columns, padded, 0, columns, state->grad_rows, 0);
    for (int64_t i = 0; grad_totals && i < chunk->count; i++)
        for (int64_t a = 0; a < padded; a += LANES) {
            float *target = state->grad_rows + i * padded + a;
            store(target, load(target) + load(before.total + a) * grad_totals[i]);
            store(state->gradient.total + a, load(state->gradient.total + a) + load(reading + i * padded + a) * grad_totals[i]);
        }
    if (problem->decay_kind != NO_DECAY && !chunk->empty)
        multiply_entries(state->grad_rows, chunk->from_start, chunk->rows * padded, state->grad_rows);
    if (state->wanted)
        product((struct factor){reading, 1, padded}, padded, state->grad_output, columns, 0, chunk->count, state->gradient.matrix, 1);
    if (problem->decay_kind == FEATURE_DECAY) {
        decayed_pair_gradients(state, rows);
    } else {
        lower_product(state->grad_weights, chunk->count, chunk->key, padded, state->grad_rows, 0);
        upper_product(state->grad_weights, chunk->count, rows, padded, state->grad_key);
    }
}

/* Writes gradients of packed rows, from row `first` of the result on, through the feature map, whose derivative is 1, or e^x where
 * that is less, and times the factor that the rows were packed with. */
INLINE void store_features(const struct recurrence *problem, const struct chunk *chunk, const float *gradient, const float *rows,
                           float factor, void *result, int64_t first) {
    const int dtype = problem->parts > 1 ? FLOAT32 : (int)problem->dtype;
    for (int64_t i = 0; i < chunk->count; i++)
        for (int64_t a = 0; a < problem->dim; a += LANES) {
            lanes entry = load(gradient + i * chunk->padded + a);
            if (problem->feature_map == ELU) entry *= min_lanes(1.0f, load(rows + i * chunk->padded + a));
            entry *= factor;
            store_entries(entry_at(result, (first + i) * problem->dim, dtype), a, problem->dim, dtype, entry);
        }
}

/* One query head of the chunk. */
APART void process_head(const struct recurrence *problem, struct backward *state, int64_t head, int64_t part) {
    const struct chunk *chunk = &state->chunk;
    int64_t first = ((part * problem->batch + chunk->batch) * problem->heads + head) * problem->tokens + chunk->first;
    const int dtype = (int)problem->dtype;
    pack_features(chunk, head_rows(&problem->query, chunk->batch, head, chunk->first, dtype), problem->query.row, problem->dim, dtype,
                  (float)problem->scale, problem->feature_map, state->rows);
    pack_output_gradient(problem, state, head);
    pair_weights(problem, chunk, state->rows, 0, 1.0f, state->reading, state->columns, state->weights);
    upper_product(state->weights, chunk->count, state->grad_output, chunk->value_padded, state->grad_written);
    const float *reading = decayed_rows(problem, chunk, state->rows, state->reading);
    reader_gradients(problem, state, state->rows, reading, problem->normalize ? state->grad_totals : 0, 0);
    if (problem->decay_kind != NO_DECAY) add_entries(state->rows, state->grad_rows, chunk->rows * chunk->padded, 1.0f, state->grad_sums);
    store_features(problem, chunk, state->grad_rows, state->rows, (float)problem->scale, problem->grad_query, first);
}

/* The delta rule: from the gradient of what is written to that of values, by the transposed system; then removed keys are readers
 * too, which subtract what they read. */
APART void delta_gradients(const struct recurrence *problem, struct backward *state, int64_t first) {
    struct chunk *chunk = &state->chunk;
    int64_t columns = chunk->value_padded;
    memset(state->grad_output, 0, (size_t)(chunk->rows * columns) * sizeof(float)); /* -beta times the solution */
    for (int64_t row = (chunk->count - 1) / GROUP * GROUP; row >= 0; row -= GROUP)
        for (int64_t a = 0; a < columns; a += PAIR) {
            float negative[GROUP * PAIR] ALIGNED = {0};
            add_product((struct factor){chunk->solving + row, 1, BLOCK}, (struct vectors){state->grad_output + a, columns, row + GROUP, chunk->rows},
                        negative, PAIR, 0);
            for (int64_t j = row + GROUP - 1; j >= row; j--)
                for (int64_t b = a; b < a + PAIR; b += LANES) {
                    lanes own = load(state->grad_written + j * columns + b) - load(negative + (j - row) * PAIR + b - a);
                    for (int64_t i = j + 1; i < row + GROUP; i++)
                        own -= load(state->grad_output + i * columns + b) * chunk->solving[i * BLOCK + j];
                    store(state->grad_written + j * columns + b, own);
                    store(state->grad_output + j * columns + b, own * -chunk->beta[j]);
                }
        }
    for (int64_t i = 0; i < chunk->count; i++) {
        lanes sum = {0};
        for (int64_t a = 0; a < columns; a += LANES) {
            sum += load(state->grad_written + i * columns + a) * load(chunk->residual + i * columns + a);
            store(state->grad_written + i * columns + a, -load(state->grad_output + i * columns + a));
        }
        problem->grad_beta[first + i] = sum_lanes(sum);
    }
    const float *removed = removed_keys(problem, chunk);
    reader_gradients(problem, state, removed, decayed_rows(problem, chunk, removed, state->reading), 0, 1);
}

/* The gradient of decay: of each G, less of what it is subtracted from, summed up from the chunk's end; at the end, what decay
 * does to the state after the chunk. */
APART void decay_gradients(const struct recurrence *problem, const struct backward *state, const float *border, int64_t first) {
    const struct chunk *chunk = &state->chunk;
    const float *decay = head_rows(&problem->decay, chunk->batch, chunk->key_head, chunk->first, 0);
    int64_t padded = chunk->padded;
    if (problem->decay_kind == HEAD_DECAY) {
        float sum = 0.0f;
        for (int64_t a = 0; a < padded; a++) sum += border[a];
        for (int64_t i = chunk->count - 1; i >= 0; i--) {
            lanes own = {0};
            for (int64_t a = 0; a < padded; a += LANES) own += load(state->grad_sums + i * padded + a);
            sum += sum_lanes(own);
            problem->grad_decay[first + i] = decay[i * problem->decay.row] == -INFINITY ? 0.0f : sum;
        }
        return;
    }
    for (int64_t a = 0; a < problem->dim; a += LANES) {
        lanes sum = load(border + a);
        for (int64_t i = chunk->count - 1; i >= 0; i--) {
            sum += load(state->grad_sums + i * padded + a);
            bits forgets = load_partial(decay + i * problem->decay.row + a, problem->dim - a) == -INFINITY;
            store_partial(problem->grad_decay + (first + i) * problem->dim + a, zero_unless(~forgets, sum), problem->dim - a);
        }
    }
}

/* What the gradient of the state after the chunk gives to its keys and writes, and, in `border`, to its decay; then it is
 * decayed itself. */
APART void state_gradients(const struct recurrence *problem, struct backward *state, float *border) {
    const struct chunk *chunk = &state->chunk;
    const float *key = problem->decay_kind == NO_DECAY ? chunk->key : chunk->key_to_end;
    int64_t padded = chunk->padded, columns = chunk->value_padded;
    if (state->last) {
        memset(state->grad_written, 0, (size_t)(chunk->rows * columns) * sizeof(float));
        memset(state->grad_key, 0, (size_t)(chunk->rows * padded) * sizeof(float));
        memset(border, 0, (size_t)padded * sizeof(float));
        return;
    }
    struct carry after = carry_at(state, chunk->first / BLOCK % problem->segment + 1);
    transpose_matrix(state->gradient.matrix, padded, columns, state->state_columns, padded);
    product((struct factor){key, padded, 1}, chunk->rows, state->gradient.matrix, columns, 0, padded, state->grad_written, 0);
    product((struct factor){chunk->written, columns, 1}, chunk->rows, state->state_columns, padded, 0, columns, state->grad_key, 0);
    for (int64_t i = 0; problem->normalize && i < chunk->count; i++)
        for (int64_t a = 0; a < padded; a += LANES)
            store(state->grad_key + i * padded + a, load(state->grad_key + i * padded + a) + load(state->gradient.total + a));
    if (problem->decay_kind == NO_DECAY) return;
    multiply_entries(state->grad_key, chunk->to_end, chunk->rows * padded, state->grad_key);
    for (int64_t a = 0; a < padded; a++) {
        float *row = state->gradient.matrix + a * columns;
        lanes sum = {0};
        for (int64_t b = 0; b < columns; b += LANES) {
            sum += load(row + b) * load(after.matrix + a * columns + b);
            store(row + b, load(row + b) * chunk->whole[a]);
        }
        border[a] = sum_lanes(sum) + (problem->normalize ? state->gradient.total[a] * after.total[a] : 0.0f);
    }
    multiply_entries(state->gradient.total, chunk->whole, padded, state->gradient.total);
}

APART void process_chunk(const struct recurrence *problem, struct backward *state, int64_t part, float *border) {
    struct chunk *chunk = &state->chunk;
    struct carry before = carry_at(state, chunk->first / BLOCK % problem->segment);
    int64_t key_heads = problem->heads / problem->group, head = chunk->batch * key_heads + chunk->key_head;
    int64_t value_first = head * problem->tokens + chunk->first, first = part * problem->batch * key_heads * problem->tokens + value_first;
    int64_t padded = chunk->padded, columns = chunk->value_padded;
    pack_chunk(problem, chunk);
    if (problem->beta.data) solve_writes(problem, chunk, &before, state->reading, state->columns);
    transpose_matrix(chunk->written, chunk->rows, columns, state->written_columns, BLOCK);
    memset(state->grad_sums, 0, (size_t)(chunk->rows * padded) * sizeof(float));
    state_gradients(problem, state, border);
    if (!chunk->empty) transpose_matrix(before.matrix, padded, columns, state->state_columns, padded);
    for (int64_t query_head = chunk->key_head * problem->group; query_head < (chunk->key_head + 1) * problem->group; query_head++)
        process_head(problem, state, query_head, part);
    if (problem->beta.data) delta_gradients(problem, state, first);
    if (problem->decay_kind != NO_DECAY) {
        add_entries(chunk->key, state->grad_key, chunk->rows * padded, -1.0f, state->grad_sums);
        if (problem->beta.data) add_entries(removed_keys(problem, chunk), state->grad_rows, chunk->rows * padded, 1.0f, state->grad_sums);
        decay_gradients(problem, state, border, first);
    }
    if (problem->removal.data) store_features(problem, chunk, state->grad_rows, chunk->removal, 1.0f, problem->grad_removal, first);
    for (int64_t a = 0; problem->beta.data && !problem->removal.data && a < chunk->rows * padded; a += LANES)
        store(state->grad_key + a, load(state->grad_key + a) + load(state->grad_rows + a));
    store_features(problem, chunk, state->grad_key, chunk->key, 1.0f, problem->grad_key, first);
    const int dtype = (int)problem->dtype;
    for (int64_t i = 0; i < chunk->count; i++) {
        void *target = entry_at(problem->grad_value, (value_first + i) * problem->value_dim + chunk->value_begin, dtype);
        for (int64_t a = 0; a < chunk->value_count; a += LANES)
            store_entries(target, a, chunk->value_count, dtype, load(state->grad_written + i * columns + a));
    }
}

/* Whether nothing follows the chunk, of which there is a gradient. */
INLINE int is_last(const struct recurrence *problem, const struct chunk *chunk) {
    return chunk->first + BLOCK >= problem->tokens && !problem->grad_final_state && !problem->grad_final_total;
}

/* The states between the chunks of a segment, from the stored one; without any, there is one segment, which starts from 0. */
INLINE void replay_segment(const struct recurrence *problem, struct backward *state, int64_t begin, int64_t end) {
    struct chunk *chunk = &state->chunk;
    int64_t span = problem->segment * BLOCK, borders = (problem->tokens + span - 1) / span;
    struct carry carry = carry_at(state, 0);
    load_state(problem, chunk, problem->border_state, problem->border_total, state_index(problem, chunk, borders, begin / span), &carry);
    for (int64_t first = begin; first < end; first += BLOCK) {
        struct carry after = carry_at(state, (first - begin) / BLOCK + 1);
        begin_chunk(problem, chunk, first, problem->border_state != 0);
        if (first + BLOCK >= end && (problem->decay_kind == NO_DECAY || is_last(problem, chunk))) break;
        pack_chunk(problem, chunk);
        if (problem->beta.data) solve_writes(problem, chunk, &carry, state->reading, state->columns);
        advance_state(problem, chunk, &carry, &after);
        carry = after;
    }
}

/* One part of the value columns of one key head, from the last token to the first. */
INLINE void process_sequence(const struct recurrence *problem, struct backward *state, int64_t part, float *border) {
    struct chunk *chunk = &state->chunk;
    int64_t span = problem->segment * BLOCK, index = state_index(problem, chunk, 1, 0);
    load_state(problem, chunk, problem->grad_final_state, part ? 0 : problem->grad_final_total, index, &state->gradient);
    for (int64_t begin = (problem->tokens - 1) / span * span; problem->tokens && begin >= 0; begin -= span) {
        int64_t end = min_int(begin + span, problem->tokens);
        replay_segment(problem, state, begin, end);
        for (int64_t first = (end - 1) / BLOCK * BLOCK; first >= begin; first -= BLOCK) {
            begin_chunk(problem, chunk, first, problem->border_state != 0);
            state->last = is_last(problem, chunk), state->wanted = first > 0 || problem->grad_state;
            process_chunk(problem, state, part, border);
        }
    }
    store_state(problem, chunk, &state->gradient, index, problem->grad_state, problem->grad_total);
}

/* Takes one part of one key head after another while any is left; any number of threads may call it at once. */
void EXPORTED(regard_recurrence_backward)(struct recurrence *problem) {
    int64_t padded = padded_dim(problem->dim), value_padded = padded_dim(problem->value_dim), states = problem->segment + 1, unit;
    int64_t rows = BLOCK * padded, values = BLOCK * value_padded, matrix = padded * value_padded;
    int64_t floats = chunk_floats(padded, value_padded) + (states + 1) * (matrix + padded) + matrix + 6 * rows + 3 * values + 2 * BLOCK * BLOCK +
                     BLOCK + padded + 18 * 16;
    float *memory = aligned_memory(floats * 4), *free_memory = memory;
    struct backward state = {.chunk = {.padded = padded, .value_padded = value_padded}};
    if (!memory) {
        problem->failed = 1;
        return;
    }
    take_chunk(&state.chunk, &free_memory);
    state.gradient.matrix = take_floats(&free_memory, matrix), state.gradient.total = take_floats(&free_memory, padded);
    state.matrices = take_floats(&free_memory, states * matrix), state.totals = take_floats(&free_memory, states * padded);
    state.written_columns = take_floats(&free_memory, values), state.state_columns = take_floats(&free_memory, matrix);
    state.rows = take_floats(&free_memory, rows), state.reading = take_floats(&free_memory, rows);
    state.columns = take_floats(&free_memory, rows), state.weights = take_floats(&free_memory, BLOCK * BLOCK);
    state.grad_weights = take_floats(&free_memory, BLOCK * BLOCK), state.grad_output = take_floats(&free_memory, values);
    state.grad_written = take_floats(&free_memory, values), state.grad_rows = take_floats(&free_memory, rows);
    state.grad_key = take_floats(&free_memory, rows), state.grad_sums = take_floats(&free_memory, rows);
    state.grad_totals = take_floats(&free_memory, BLOCK);
    float *border = take_floats(&free_memory, padded);
    while ((unit = __atomic_fetch_add(&problem->next_unit, 1, __ATOMIC_RELAXED)) < problem->unit_count) {
        int64_t part = begin_unit(problem, &state.chunk, unit);
        process_sequence(problem, &state, part, border);
    }
    free_aligned(memory);
}
