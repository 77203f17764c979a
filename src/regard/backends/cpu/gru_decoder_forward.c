/* The steps of a GRU decoder with attention, forward. A thread takes some rows through all steps: they need no others. */
#include "gru_steps.h"

/* Vectors of a context that are summed at once. */
enum { CONTEXT_VECTORS = 8 };

static void compute_scores(const struct gru_decoder *problem, int64_t row, const float *query, int64_t length,
                           float *scores) {
    int64_t dim = problem->key_dim;
    for (int64_t j = 0; j < length; j++) {
        const float *key = key_of(problem, row, j);
        lanes sum = {0};
        for (int64_t a = 0; a < dim; a += LANES) {
            lanes own = load_partial(query + a, dim - a), other = load_partial(key + a, dim - a);
            if (problem->score_weight)
                sum += load_partial(problem->score_weight + a, dim - a) * tangents(own, other);
            else
                sum += own * other;
        }
        scores[j] = sum_lanes(sum) * (float)problem->scale;
    }
}

/* Scores become weights; those of no keys stay nothing. */
static void softmax(float *scores, int64_t length) {
    float largest = -INFINITY, total = 0.0f;
    for (int64_t j = 0; j < length; j++) largest = scores[j] > largest ? scores[j] : largest;
    float shift = largest == -INFINITY ? 0.0f : largest;
    for (int64_t j = 0; j < length; j += LANES) {
        lanes weight = exp_or_zero(load_partial(scores + j, length - j) - shift);
        store_partial(scores + j, weight, length - j);
    }
    for (int64_t j = 0; j < length; j++) total += scores[j];
    float share = total == 0.0f ? 0.0f : 1.0f / total;
    for (int64_t j = 0; j < length; j++) scores[j] *= share;
}

static void sum_values(const struct gru_decoder *problem, int64_t row, const float *weights, int64_t length,
                       float *context) {
    int64_t dim = problem->value_dim;
    for (int64_t a = 0; a < dim; a += CONTEXT_VECTORS * LANES) {
        lanes sum[CONTEXT_VECTORS] = {{0}};
        for (int64_t j = 0; j < length; j++) {
            const float *value = value_of(problem, row, j) + a;
            UNROLL for (int v = 0; v < CONTEXT_VECTORS; v++)
                if (a + v * LANES < dim) sum[v] += weights[j] * load_partial(value + v * LANES, dim - a - v * LANES);
        }
        UNROLL for (int v = 0; v < CONTEXT_VECTORS; v++)
            if (a + v * LANES < dim) store_partial(context + a + v * LANES, sum[v], dim - a - v * LANES);
    }
}

/* The contexts of all rows for the hidden states as they are. */
static void attend(const struct gru_decoder *problem, const struct decoder_rows *state, int64_t step) {
    int64_t dim = problem->key_dim;
    if (problem->query_weight)
        multiply_packed(state->hidden, problem->query_weight, problem->hidden_dim, dim, state->queries, state->groups, 0);
    for (int64_t r = 0; r < state->count; r++) {
        int64_t row = state->first + r, place = row * problem->steps + step, length = source_length(problem, row);
        const float *query = scratch_row(problem->query_weight ? state->queries : state->hidden, r);
        float *context = problem->contexts + place * problem->value_dim;
        compute_scores(problem, row, query, length, state->scores);
        softmax(state->scores, length);
        sum_values(problem, row, state->scores, length, context);
        if (!problem->weights) continue;
        float *weights = problem->weights + place * problem->keys;
        memset(weights, 0, (size_t)problem->keys * sizeof(float));
        memcpy(weights, state->scores, (size_t)length * sizeof(float));
        memcpy(problem->queries + place * dim, query, (size_t)dim * sizeof(float));
    }
}

/* 1 / (1 + e^-x) = (1 + tanh(x / 2)) / 2 */
INLINE lanes sigmoid(lanes x) { return 0.5f + 0.5f * tanh_lanes(0.5f * x); }

/* The hidden state of a row after its gates. */
INLINE void pass_gates(const struct gru_decoder *problem, const float *input, const float *state, float *hidden,
                       float *gates) {
    int64_t dim = problem->hidden_dim;
    lanes sums[3], shares[3];
    for (int64_t a = 0; a < dim; a += LANES) {
        int64_t count = dim - a;
        for (int gate = 0; gate < 3; gate++) {
            int64_t at = gate * dim + a;
            sums[gate] = load_partial(input + at, count) + load_partial(problem->input_bias + at, count);
            shares[gate] = load_partial(state + at, count) + load_partial(problem->state_bias + at, count);
        }
        lanes reset = sigmoid(sums[0] + shares[0]), update = sigmoid(sums[1] + shares[1]);
        lanes new = tanh_lanes(sums[2] + reset * shares[2]), before = load_partial(hidden + a, count);
        store_partial(hidden + a, new + update * (before - new), count);
        if (!gates) continue;
        lanes kept[4] = {reset, update, new, shares[2]};
        for (int gate = 0; gate < 4; gate++) store_partial(gates + gate * dim + a, kept[gate], count);
    }
}

static void run_cell(const struct gru_decoder *problem, const struct decoder_rows *state, int64_t step) {
    int64_t dim = problem->hidden_dim, gates = 3 * dim;
    for (int64_t r = 0; r < state->count; r++) {
        int64_t place = (state->first + r) * problem->steps + step;
        float *row = scratch_row(state->input, r);
        memcpy(row, problem->input + place * problem->input_dim, (size_t)problem->input_dim * sizeof(float));
        if (!problem->attends_after)
            memcpy(row + problem->input_dim, problem->contexts + place * problem->value_dim,
                   (size_t)problem->value_dim * sizeof(float));
    }
    multiply_packed(state->input, problem->input_weight, cell_input_dim(problem), gates, state->input_gates,
                    state->groups, 0);
    multiply_packed(state->hidden, problem->state_weight, dim, gates, state->state_gates, state->groups, 0);
    for (int64_t r = 0; r < state->count; r++) {
        int64_t place = (state->first + r) * problem->steps + step;
        float *hidden = scratch_row(state->hidden, r);
        pass_gates(problem, scratch_row(state->input_gates, r), scratch_row(state->state_gates, r), hidden,
                   problem->gates ? problem->gates + place * 4 * dim : 0);
        memcpy(problem->states + place * dim, hidden, (size_t)dim * sizeof(float));
    }
}

static void run_steps(const struct gru_decoder *problem, const struct decoder_rows *state) {
    int64_t dim = problem->hidden_dim;
    for (int64_t r = 0; r < state->count; r++)
        memcpy(scratch_row(state->hidden, r), problem->hidden + (state->first + r) * dim, (size_t)dim * sizeof(float));
    for (int64_t step = 0; step < problem->steps; step++) {
        if (!problem->attends_after) attend(problem, state, step);
        run_cell(problem, state, step);
        if (problem->attends_after) attend(problem, state, step);
    }
}

void EXPORTED(regard_gru_decoder)(struct gru_decoder *problem) { run_units(problem, run_steps); }
