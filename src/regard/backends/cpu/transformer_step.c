/* A step of a Transformer's decoder. A thread takes some rows through all layers: they need no others. */
#include "transformer_step.h"
#include "byte_panels.h"

/* The rows at which a thread is, from `first` on. */
struct step_rows {
    int64_t first, count, groups; /* groups: the rows in whole groups */
    struct scratch_rows x, normed, projected, context, branch, hidden;
    struct byte_rows bytes;
    float *scores;                     /* [keys of a row], whole vectors */
    const float **key, **value; /* [keys of a row] */
};

INLINE lanes silu(lanes x) {
    lanes complement;
    return x * sigmoid_lanes(x * LOG2_E, &complement);
}

INLINE lanes activated(lanes x, int64_t activation) {
    return activation == SILU ? silu(x) : max_lanes((lanes){0}, x);
}

/* Adds the bias to the columns of a panel, and applies an activation; below 0 there is none. */
static void finish_panel(const struct packed_matrix *matrix, int64_t first, const struct scratch_rows into, int64_t rows,
                         int64_t activation) {
    for (int64_t column = first; column < min_int(first + PANEL_COLUMNS, matrix->columns); column += LANES) {
        lanes bias = matrix->bias ? load_partial(matrix->bias + column, matrix->columns - column) : (lanes){0};
        float *target = into.data + column;
        for (int64_t row = 0; row < rows; row++, target += into.stride) {
            lanes sum = load(target) + bias;
            store(target, activation < 0 ? sum : activated(sum, activation));
        }
    }
}

APART void multiply(const struct step_rows *state, const struct scratch_rows rows, const struct packed_matrix *matrix,
                    const struct scratch_rows into, int64_t activation) {
    struct left_factor left = left_factor(rows, state->bytes, matrix, state->groups);
    for (int64_t first = 0; first < panel_columns(matrix->columns); first += PANEL_COLUMNS) {
        multiply_columns(&left, matrix, first, into.data + first, into.stride, state->groups);
        if (matrix->bias || activation >= 0) finish_panel(matrix, first, into, state->groups, activation);
    }
}

static void normalize_row(const struct step_norm *norm, const float *x, int64_t dim, float *into) {
    lanes sum = {0}, squares = {0};
    for (int64_t a = 0; a < dim; a += LANES) sum += load_partial(x + a, dim - a);
    float mean = sum_lanes(sum) / (float)dim;
    for (int64_t a = 0; a < dim; a += LANES) {
        lanes off = load_partial(x + a, dim - a) - mean;
        if (dim - a < LANES) /* what is beyond the row is not off the mean */
            for (int64_t lane = dim - a; lane < LANES; lane++) off[lane] = 0.0f;
        squares += off * off;
    }
    float scale = (float)(1.0 / sqrt(sum_lanes(squares) / (double)dim + norm->epsilon));
    for (int64_t a = 0; a < dim; a += LANES) {
        lanes value = (load_partial(x + a, dim - a) - mean) * scale * load_partial(norm->gain + a, dim - a);
        if (norm->shift) value += load_partial(norm->shift + a, dim - a);
        store_partial(into + a, value, dim - a);
    }
}

static void normalize(const struct transformer_step *problem, const struct step_norm *norm, const struct scratch_rows x,
                      const struct scratch_rows into, int64_t rows) {
    for (int64_t r = 0; r < rows; r++) normalize_row(norm, scratch_row(x, r), problem->dim, scratch_row(into, r));
}

/* The input of a sublayer: x, or x after the norm. */
static struct scratch_rows before_sublayer(const struct transformer_step *problem, const struct step_rows *state,
                                           const struct step_norm *norm) {
    if (!problem->norm_first) return state->x;
    normalize(problem, norm, state->x, state->normed, state->count);
    return state->normed;
}

/* Adds the output of a sublayer to x. */
static void after_sublayer(const struct transformer_step *problem, const struct step_rows *state,
                           const struct step_norm *norm) {
    for (int64_t r = 0; r < state->count; r++) {
        float *x = scratch_row(state->x, r), *branch = scratch_row(state->branch, r);
        for (int64_t a = 0; a < problem->dim; a += LANES) store(x + a, load(x + a) + load(branch + a));
    }
    if (!problem->norm_first) normalize(problem, norm, state->x, state->x, state->count);
}

/* The softmax of so many scores, which are in whole vectors. */
static void softmax(float *scores, int64_t count) {
    if (!count) return;
    int64_t end = round_up_to_lanes(count);
    for (int64_t j = count; j < end; j++) scores[j] = -INFINITY;
    lanes maximum = load(scores), sum = {0};
    for (int64_t j = LANES; j < end; j += LANES) maximum = max_lanes(maximum, load(scores + j));
    float largest = max_of_lanes(maximum), shift = largest == -INFINITY ? 0.0f : largest;
    for (int64_t j = 0; j < end; j += LANES) {
        lanes weight = exp_or_zero(load(scores + j) - shift);
        sum += weight;
        store(scores + j, weight);
    }
    float total = sum_lanes(sum), share = total == 0.0f ? 0.0f : 1.0f / total;
    for (int64_t j = 0; j < end; j += LANES) store(scores + j, load(scores + j) * share);
}

/* Scores of a query with so many keys, each `offset` behind where its row begins. */
static void score_keys(const float *query, const float *const *key, int64_t offset, int64_t count, int64_t dim,
                       float scale, float *scores) {
    for (int64_t first = 0; first < count; first += LANES) {
        lanes sums[LANES];
        FOR_ALL_LANES for (int l = 0; l < LANES; l++) {
            sums[l] = (lanes){0};
            if (first + l >= count) continue;
            const float *own = key[first + l] + offset;
            for (int64_t a = 0; a < dim; a += LANES)
                sums[l] += load_partial(query + a, dim - a) * load_partial(own + a, dim - a);
        }
        store(scores + first, sum_vectors(sums) * scale);
    }
}

/* Vectors of a context that are summed at once. */
enum { CONTEXT_VECTORS = 4 };

static void sum_values(const float *weights, const float *const *value, int64_t offset, int64_t count, int64_t dim,
                       float *context) {
    for (int64_t a = 0; a < dim; a += CONTEXT_VECTORS * LANES) {
        lanes sum[CONTEXT_VECTORS] = {{0}};
        for (int64_t j = 0; j < count; j++) {
            const float *own = value[j] + offset + a;
            UNROLL for (int v = 0; v < CONTEXT_VECTORS; v++)
                if (a + v * LANES < dim) sum[v] += weights[j] * load_partial(own + v * LANES, dim - a - v * LANES);
        }
        UNROLL for (int v = 0; v < CONTEXT_VECTORS; v++)
            if (a + v * LANES < dim) store_partial(context + a + v * LANES, sum[v], dim - a - v * LANES);
    }
}

/* How far the keys and values of two neighbouring heads are apart. */
struct head_strides {
    int64_t key, value;
};

/* The context of a row whose keys and values are known; weights: (heads, columns), or null. */
static void attend(const struct transformer_step *problem, const struct step_rows *state, int64_t row,
                   const float *query, int64_t count, const struct head_strides strides, float *weights,
                   int64_t columns) {
    int64_t dim = problem->head_dim, queries = problem->heads / problem->key_heads;
    float scale = (float)(1.0 / sqrt((double)dim));
    for (int64_t head = 0; head < problem->heads; head++) {
        int64_t own = head / queries;
        score_keys(query + head * dim, state->key, own * strides.key, count, dim, scale, state->scores);
        softmax(state->scores, count);
        sum_values(state->scores, state->value, own * strides.value, count, dim,
                   scratch_row(state->context, row) + head * dim);
        if (!weights) continue;
        memcpy(weights + head * columns, state->scores, (size_t)count * sizeof(float));
        memset(weights + head * columns + count, 0, (size_t)(columns - count) * sizeof(float));
    }
}

/* Where the weights of a row in a layer are. */
INLINE float *weights_of(const struct transformer_step *problem, float *weights, int64_t row, int64_t layer,
                         int64_t columns) {
    return weights ? weights + (row * problem->layer_count + layer) * problem->heads * columns : 0;
}

/* Writes the keys and values of each row, and attends to those of all its tokens. */
static void attend_to_target(const struct transformer_step *problem, const struct step_rows *state, int64_t layer) {
    int64_t before = problem->before, width = problem->key_heads * problem->head_dim,
            queries = problem->heads * problem->head_dim;
    float *own = problem->own + layer * 2 * problem->rows * width;
    for (int64_t r = 0; r < state->count; r++) {
        int64_t row = state->first + r;
        const float *projected = scratch_row(state->projected, r);
        const int32_t *table = problem->table + row * before;
        float *key = own + row * width, *value = key + problem->rows * width;
        memcpy(key, projected + queries, (size_t)width * sizeof(float));
        memcpy(value, projected + queries + width, (size_t)width * sizeof(float));
        for (int64_t j = 0; j < before; j++) {
            int64_t rows = problem->past_rows[j];
            state->key[j] = problem->past[j] + (layer * 2 * rows + table[j]) * width;
            state->value[j] = state->key[j] + rows * width;
        }
        state->key[before] = key, state->value[before] = value;
        attend(problem, state, r, projected, before + 1, (struct head_strides){problem->head_dim, problem->head_dim},
               weights_of(problem, problem->self_weights, row, layer, before + 1), before + 1);
    }
}

/* Takes the state of each row one token on, and keeps it; what is above 0 of it is the output. */
static void advance_states(const struct transformer_step *problem, const struct step_rows *state, int64_t layer) {
    int64_t dim = problem->dim, last = problem->before - 1;
    for (int64_t r = 0; r < state->count; r++) {
        int64_t row = state->first + r;
        const float *written = scratch_row(state->projected, r), *gates = written + dim, *earlier = 0;
        float *kept = problem->own + (layer * problem->rows + row) * dim, *branch = scratch_row(state->branch, r);
        if (last >= 0)
            earlier = problem->past[last] +
                      (layer * problem->past_rows[last] + problem->table[row * problem->before + last]) * dim;
        for (int64_t a = 0; a < dim; a += LANES) {
            lanes complement, share = sigmoid_lanes(load_partial(gates + a, dim - a) * LOG2_E, &complement);
            lanes now = complement * load_partial(written + a, dim - a);
            if (earlier) now += share * load_partial(earlier + a, dim - a);
            store_partial(kept + a, now, dim - a);
            store_partial(branch + a, max_lanes((lanes){0}, now), dim - a);
        }
    }
}

static void read_target(const struct transformer_step *problem, const struct step_rows *state, int64_t number) {
    const struct step_layer *layer = problem->layers + number;
    multiply(state, before_sublayer(problem, state, &layer->own_norm), &layer->own, state->projected, -1);
    if (problem->recurrent) {
        advance_states(problem, state, number);
    } else {
        attend_to_target(problem, state, number);
        multiply(state, state->context, &layer->own_output, state->branch, -1);
    }
    after_sublayer(problem, state, &layer->own_norm);
}

static void attend_to_source(const struct transformer_step *problem, const struct step_rows *state, int64_t layer) {
    const struct step_source *source = problem->sources + layer;
    for (int64_t r = 0; r < state->count; r++) {
        int64_t row = state->first + r, sentence = row / problem->shared;
        int64_t length = min_int(problem->lengths[sentence], problem->keys);
        for (int64_t j = 0; j < length; j++) {
            state->key[j] = source->key + sentence * source->key_batch + j * source->key_row;
            state->value[j] = source->value + sentence * source->value_batch + j * source->value_row;
        }
        attend(problem, state, r, scratch_row(state->projected, r), length,
               (struct head_strides){source->key_head, source->value_head},
               weights_of(problem, problem->weights, row, layer, problem->keys), problem->keys);
    }
}

static void run_layer(const struct transformer_step *problem, const struct step_rows *state, int64_t number) {
    const struct step_layer *layer = problem->layers + number;
    read_target(problem, state, number);

    multiply(state, before_sublayer(problem, state, &layer->norm), &layer->query, state->projected, -1);
    attend_to_source(problem, state, number);
    multiply(state, state->context, &layer->output, state->branch, -1);
    after_sublayer(problem, state, &layer->norm);

    multiply(state, before_sublayer(problem, state, &layer->feed_forward_norm), &layer->up, state->hidden,
             problem->activation);
    multiply(state, state->hidden, &layer->down, state->branch, -1);
    after_sublayer(problem, state, &layer->feed_forward_norm);
}

static void run_rows(const struct transformer_step *problem, const struct step_rows *state) {
    int64_t dim = problem->dim;
    size_t bytes = (size_t)dim * sizeof(float);
    for (int64_t r = 0; r < state->count; r++)
        memcpy(scratch_row(state->x, r), problem->input + (state->first + r) * dim, bytes);
    for (int64_t layer = 0; layer < problem->layer_count; layer++) run_layer(problem, state, layer);
    for (int64_t r = 0; r < state->count; r++) {
        float *features = problem->features + (state->first + r) * dim;
        if (problem->last_norm.gain)
            normalize_row(&problem->last_norm, scratch_row(state->x, r), dim, features);
        else
            memcpy(features, scratch_row(state->x, r), bytes);
    }
}

/* Runs one unit of rows after another while any is left; any number of threads may call it at once. */
void EXPORTED(regard_transformer_step)(struct transformer_step *problem) {
    int64_t rows = problem->unit, dim = panel_columns(problem->dim), inner = problem->heads * problem->head_dim,
            projected = inner + 2 * (problem->recurrent ? problem->dim : problem->key_heads * problem->head_dim), unit,
            keys = round_up_to_lanes(problem->keys > problem->before ? problem->keys : problem->before + 1),
            most = dim + inner + problem->hidden_dim; /* terms of a matrix, and more */
    int64_t floats = rows * (3 * dim + panel_columns(projected) + panel_columns(inner) +
                             panel_columns(problem->hidden_dim)) + byte_rows_floats(rows, most) + 5 * (keys + 16);
    float *room = aligned_memory(floats * 4), *left = room;
    if (!room) {
        problem->failed = 1;
        return;
    }
    memset(room, 0, (size_t)floats * sizeof(float));
    struct step_rows state = {
        .x = take_rows(&left, rows, dim), .normed = take_rows(&left, rows, dim), .branch = take_rows(&left, rows, dim),
        .projected = take_rows(&left, rows, projected), .context = take_rows(&left, rows, inner),
        .hidden = take_rows(&left, rows, problem->hidden_dim), .bytes = take_byte_rows(&left, rows, most), .scores = take_floats(&left, keys),
        .key = (const float **)take_floats(&left, 2 * keys), .value = (const float **)take_floats(&left, 2 * keys)};
    while ((unit = __atomic_fetch_add(&problem->next_unit, 1, __ATOMIC_RELAXED)) < problem->unit_count) {
        state.first = unit * rows, state.count = min_int(rows, problem->rows - state.first);
        state.groups = (state.count + GROUP - 1) / GROUP * GROUP;
        run_rows(problem, &state);
    }
    free_aligned(room);
}
