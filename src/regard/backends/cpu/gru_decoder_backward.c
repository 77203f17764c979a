/* The gradients of the steps of a GRU decoder that attends before each: from the last step back to the first. */
#include "gru_steps.h"

/* The gradients of the gates of a row, and what of the state's gradient goes past them to the state before. */
INLINE void pass_gates_back(const struct gru_decoder *problem, int64_t place, const float *before, float *hidden,
                            float *input_gates, float *state_gates) {
    int64_t dim = problem->hidden_dim;
    const float *gates = problem->gates + place * 4 * dim, *grad_states = problem->grad_states + place * dim;
    for (int64_t a = 0; a < dim; a += LANES) {
        int64_t count = dim - a;
        lanes reset = load_partial(gates + a, count), update = load_partial(gates + dim + a, count),
              new = load_partial(gates + 2 * dim + a, count), share = load_partial(gates + 3 * dim + a, count);
        lanes grad = load(hidden + a) + load_partial(grad_states + a, count);
        lanes for_new = grad * (1.0f - update) * (1.0f - new * new);
        lanes for_update = grad * (load_partial(before + a, count) - new) * update * (1.0f - update);
        lanes for_reset = for_new * share * reset * (1.0f - reset);
        lanes of_input[3] = {for_reset, for_update, for_new}, of_state[3] = {for_reset, for_update, for_new * reset};
        for (int gate = 0; gate < 3; gate++) {
            store_partial(input_gates + gate * dim + a, of_input[gate], count);
            store_partial(state_gates + gate * dim + a, of_state[gate], count);
        }
        store_partial(hidden + a, grad * update, count);
    }
}

/* The gradients by scores, from that of a context; those of the values are added. */
static void softmax_back(const struct gru_decoder *problem, int64_t row, int64_t place, int64_t length,
                         const float *grad, float *scores) {
    int64_t dim = problem->value_dim;
    const float *weights = problem->weights + place * problem->keys;
    float mean = 0.0f;
    for (int64_t j = 0; j < length; j++) {
        const float *value = value_of(problem, row, j);
        float *grad_value = problem->grad_value + (row * problem->keys + j) * dim;
        lanes sum = {0};
        for (int64_t a = 0; a < dim; a += LANES) {
            lanes own = load_partial(grad + a, dim - a);
            sum += own * load_partial(value + a, dim - a);
            store_partial(grad_value + a, load_partial(grad_value + a, dim - a) + weights[j] * own, dim - a);
        }
        scores[j] = sum_lanes(sum);
        mean += weights[j] * scores[j];
    }
    for (int64_t j = 0; j < length; j++) scores[j] = (float)problem->scale * weights[j] * (scores[j] - mean);
}

/* The gradients by query and keys, and by the score weight, from those by scores: some features of all keys at a time. */
static void scores_back(const struct gru_decoder *problem, int64_t row, const float *query, int64_t length,
                        const float *scores, float *grad_query, float *grad_weight) {
    int64_t dim = problem->key_dim;
    for (int64_t a = 0; a < dim; a += LANES) {
        lanes own = load_partial(query + a, dim - a), for_query = {0}, for_weight = {0}, weight = {0};
        if (problem->score_weight) weight = load_partial(problem->score_weight + a, dim - a);
        for (int64_t j = 0; j < length; j++) {
            lanes key = load_partial(key_of(problem, row, j) + a, dim - a), slope = scores[j] * own;
            if (problem->score_weight) {
                lanes tangent = tangents(own, key);
                slope = scores[j] * weight * (1.0f - tangent * tangent);
                for_weight += scores[j] * tangent;
                for_query += slope;
            } else {
                for_query += scores[j] * key;
            }
            float *grad_key = problem->grad_key + (row * problem->keys + j) * dim + a;
            store_partial(grad_key, load_partial(grad_key, dim - a) + slope, dim - a);
        }
        store_partial(grad_query + a, for_query, dim - a);
        if (problem->score_weight)
            store_partial(grad_weight + a, load_partial(grad_weight + a, dim - a) + for_weight, dim - a);
    }
}

/* The gradient of the cell: of its input and of the state before, from that of the state after. */
static void cell_back(const struct gru_decoder *problem, const struct decoder_rows *state, int64_t step) {
    int64_t dim = problem->hidden_dim, gates = 3 * dim;
    for (int64_t r = 0; r < state->count; r++) {
        int64_t row = state->first + r, place = row * problem->steps + step;
        const float *before = step ? problem->states + (place - 1) * dim : problem->hidden + row * dim;
        float *of_input = scratch_row(state->input_gates, r), *of_state = scratch_row(state->state_gates, r);
        pass_gates_back(problem, place, before, scratch_row(state->hidden, r), of_input, of_state);
        memcpy(problem->grad_input_gates + place * gates, of_input, (size_t)gates * sizeof(float));
        memcpy(problem->grad_state_gates + place * gates, of_state, (size_t)gates * sizeof(float));
    }
    multiply_packed(state->input_gates, problem->input_weight, gates, cell_input_dim(problem), state->input,
                    state->groups, 0);
    multiply_packed(state->state_gates, problem->state_weight, gates, dim, state->hidden, state->groups, 1);
}

/* The gradient of the context goes on to the source, and by the query to the state before. */
static void attend_back(const struct gru_decoder *problem, const struct decoder_rows *state, int64_t step) {
    int64_t dim = problem->key_dim, values = problem->value_dim, inputs = problem->input_dim;
    for (int64_t r = 0; r < state->count; r++) {
        int64_t row = state->first + r, place = row * problem->steps + step, length = source_length(problem, row);
        float *input = scratch_row(state->input, r), *context = input + inputs, *query = scratch_row(state->queries, r);
        memcpy(problem->grad_input + place * inputs, input, (size_t)inputs * sizeof(float));
        for (int64_t a = 0; a < values; a++) context[a] += problem->grad_contexts[place * values + a];
        softmax_back(problem, row, place, length, context, state->scores);
        scores_back(problem, row, problem->queries + place * dim, length, state->scores, query,
                    problem->grad_score_weight + state->unit * dim);
        memcpy(problem->grad_queries + place * dim, query, (size_t)dim * sizeof(float));
        if (!problem->query_weight)
            for (int64_t a = 0; a < dim; a++) scratch_row(state->hidden, r)[a] += query[a];
    }
    if (problem->query_weight)
        multiply_packed(state->queries, problem->query_weight, dim, problem->hidden_dim, state->hidden, state->groups, 1);
}

static void run_steps_back(const struct gru_decoder *problem, const struct decoder_rows *state) {
    int64_t dim = problem->hidden_dim;
    memset(state->hidden.data, 0, (size_t)(problem->unit * state->hidden.stride) * sizeof(float));
    for (int64_t step = problem->steps - 1; step >= 0; step--) {
        cell_back(problem, state, step);
        attend_back(problem, state, step);
    }
    for (int64_t r = 0; r < state->count; r++)
        memcpy(problem->grad_hidden + (state->first + r) * dim, scratch_row(state->hidden, r),
               (size_t)dim * sizeof(float));
}

void EXPORTED(regard_gru_decoder_backward)(struct gru_decoder *problem) { run_units(problem, run_steps_back); }
