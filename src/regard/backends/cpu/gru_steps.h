/* What both passes of the GRU decoder share: the rows of a thread, and their products with packed matrices. */
#ifndef REGARD_GRU_STEPS_H
#define REGARD_GRU_STEPS_H

#include "gru_decoder.h"
#include "panels.h"

/* The state of a thread: the rows at which it is, from `first` on, and backward their gradients. */
struct decoder_rows {
    int64_t unit, first, count, groups; /* groups: the rows in whole groups */
    struct scratch_rows hidden, input, input_gates, state_gates, queries;
    float *scores; /* [keys], whole vectors */
};

INLINE int64_t source_length(const struct gru_decoder *problem, int64_t row) {
    int64_t length = problem->lengths[row];
    return length < 0 ? 0 : min_int(length, problem->keys);
}

INLINE const float *key_of(const struct gru_decoder *problem, int64_t row, int64_t j) {
    return problem->key + row * problem->key_batch + j * problem->key_row;
}

INLINE const float *value_of(const struct gru_decoder *problem, int64_t row, int64_t j) {
    return problem->value + row * problem->value_batch + j * problem->value_row;
}

/* The features of the cell's input: the given ones, and the context where a step attends first. */
INLINE int64_t cell_input_dim(const struct gru_decoder *problem) {
    return problem->input_dim + (problem->attends_after ? 0 : problem->value_dim);
}

/* tanh of the sum of query and key; NaN where that is not finite, as a row that attends to infinity is NaN. */
INLINE lanes tangents(lanes query, lanes key) {
    lanes sum = query + key;
    return tanh_lanes(sum) + 0.0f * sum;
}

/* Runs one unit of rows after another through all steps while any is left; any number of threads may call it at once. */
INLINE void run_units(struct gru_decoder *problem,
                      void (*run)(const struct gru_decoder *problem, const struct decoder_rows *state)) {
    int64_t rows = problem->unit, gates = 3 * problem->hidden_dim, input = cell_input_dim(problem), unit;
    int64_t floats = rows * (panel_columns(problem->hidden_dim) + panel_columns(input) + 2 * panel_columns(gates) +
                             panel_columns(problem->key_dim)) + round_up_to_lanes(problem->keys);
    float *room = aligned_memory(floats * 4), *left = room;
    if (!room) {
        problem->failed = 1;
        return;
    }
    memset(room, 0, (size_t)floats * sizeof(float));
    struct decoder_rows state = {
        .hidden = take_rows(&left, rows, problem->hidden_dim), .input = take_rows(&left, rows, input),
        .input_gates = take_rows(&left, rows, gates), .state_gates = take_rows(&left, rows, gates),
        .queries = take_rows(&left, rows, problem->key_dim), .scores = left};
    while ((unit = __atomic_fetch_add(&problem->next_unit, 1, __ATOMIC_RELAXED)) < problem->unit_count) {
        state.unit = unit, state.first = unit * rows, state.count = min_int(rows, problem->rows - state.first);
        state.groups = (state.count + GROUP - 1) / GROUP * GROUP;
        run(problem, &state);
    }
    free_aligned(room);
}

#endif
