/* One token of the linear recurrence. The state of a head is read once, some columns of it at a time. Its product with the query
 * and, by the delta rule, with the key are found together, and the recent tokens that it lacks are added to them. Where it is written,
 * these columns are in cache. */
#include "recurrence_chunk.h"

#include <math.h>
#include <stdlib.h>

/* Vectors of value columns that go at once, where there are so many: their sums stay in registers. */
enum { VECTORS = 4, MOST_VECTORS = LANES == 16 ? 8 : 4 };

static const float LARGEST_BETA = 2.0f, LEAST_NORM = 1e-12f;

/* One key head. A reader is what the state is multiplied by: the queries of the group, and the key by the delta rule. All rows
 * are of whole vectors, with zeros at their end. */
struct token {
    int64_t batch, key_head, index, padded, value_padded;
    int64_t readers;      /* in all: group, and 1 by the delta rule, which is the last */
    float beta;
    const float *state;
    float *step, *factor; /* the decay of this token, and that of all since the state was written, [padded] */
    float *key, *written; /* of this token: its features, [padded], and its u, [value_padded] */
    float *decayed_keys;  /* of the recent tokens, with the decay since, [R][padded] */
    const float *keys, *past;        /* the same, or as they are stored, and their u */
    int64_t key_stride, past_stride; /* from one recent token to the next */
    float *rows, *scaled; /* of the readers, and times the factor: [readers][padded] */
    float *read;          /* what they read of the state, [readers][value_padded] */
    float *shares;        /* the products of their rows with the keys, [readers][R + 1] */
    float *total;         /* the last column of the state, [padded] */
};

INLINE const float *token_row(const struct rows *rows, const struct token *token, int64_t head) {
    return head_rows(rows, token->batch, head, 0, 0);
}

/* left . right, of whole vectors on the left. */
INLINE float dot(const float *left, const float *right, int64_t dim) {
    lanes sum = {0};
    for (int64_t a = 0; a < dim; a += LANES) sum += load(left + a) * load_partial(right + a, dim - a);
    return sum_lanes(sum);
}

/* The features of a row times a number. */
INLINE void load_features(const struct recurrence_step *problem, const float *row, float scale, int64_t padded, float *target) {
    for (int64_t a = 0; a < padded; a += LANES) {
        int64_t count = problem->dim - a > 0 ? problem->dim - a : 0;
        lanes entry = load_partial(row + a, count) * scale;
        store(target + a, problem->feature_map == ELU ? first_lanes(elu_plus_one(entry), count) : entry);
    }
    if (problem->feature_map == UNIT_NORM) {
        float norm = sqrtf(dot(target, target, problem->dim));
        norm = norm < LEAST_NORM ? LEAST_NORM : norm;
        for (int64_t a = 0; a < padded; a += LANES) store(target + a, load(target + a) / norm);
    }
}

/* The gates of this token; whether one is out of its range. */
INLINE int load_gates(const struct recurrence_step *problem, struct token *token) {
    const float *decay = problem->decay_kind == NO_DECAY ? 0 : token_row(&problem->decay, token, token->key_head);
    int invalid = 0;
    if (problem->beta.data) {
        token->beta = *token_row(&problem->beta, token, token->key_head);
        invalid = token->beta < 0.0f || token->beta > LARGEST_BETA;
    }
    for (int64_t a = 0; a < problem->dim; a += LANES) {
        lanes exponent = broadcast(!decay || problem->decay_kind == FEATURE_DECAY ? 0.0f : *decay);
        if (problem->decay_kind == FEATURE_DECAY) exponent = load_partial(decay + a, problem->dim - a);
        bits positive = exponent > 0.0f;
        for (int lane = 0; decay && lane < LANES; lane++) invalid |= positive[lane];
        lanes step = first_lanes(decay ? elu_plus_one(exponent) : broadcast(1.0f), problem->dim - a); /* e^x, as x is at most 0 */
        store(token->step + a, step);
        store(token->factor + a, step);
    }
    return invalid;
}

/* The entries of a recent token. */
INLINE int64_t recent_width(const struct recurrence_step *problem) {
    return problem->dim + problem->value_dim + (problem->decay_kind == FEATURE_DECAY ? problem->dim : problem->decay_kind == HEAD_DECAY);
}

INLINE float *recent_token(const struct recurrence_step *problem, const struct token *token, int64_t number) {
    return problem->recent + (token->index * problem->recent_capacity + number) * recent_width(problem);
}

/* The keys and u of the recent tokens, and the decay since the state was written. */
INLINE void load_recent(const struct recurrence_step *problem, struct token *token) {
    int64_t dim = problem->dim, padded = token->padded;
    token->keys = recent_token(problem, token, 0), token->past = token->keys + dim;
    token->key_stride = token->past_stride = recent_width(problem);
    if (problem->decay_kind == NO_DECAY) return;
    token->keys = token->decayed_keys, token->key_stride = padded;
    for (int64_t j = problem->recent_count - 1; j >= 0; j--) {
        const float *row = recent_token(problem, token, j), *step = row + dim + problem->value_dim;
        for (int64_t a = 0; a < dim; a += LANES) {
            lanes factor = load(token->factor + a);
            store(token->decayed_keys + j * padded + a, load_partial(row + a, dim - a) * factor);
            if (problem->decay_kind == FEATURE_DECAY) factor *= load_partial(step + a, dim - a);
            if (problem->decay_kind == HEAD_DECAY) factor *= *step;
            store(token->factor + a, factor);
        }
    }
}

/* The key of this token, the rows that read, and their products with all keys. */
INLINE void load_rows(const struct recurrence_step *problem, const struct token *token) {
    int64_t dim = problem->dim, padded = token->padded, count = problem->recent_count;
    load_features(problem, token_row(&problem->key, token, token->key_head), 1.0f, padded, token->key);
    for (int64_t r = 0; r < problem->group; r++) {
        const float *query = token_row(&problem->query, token, token->key_head * problem->group + r);
        load_features(problem, query, problem->scale, padded, token->rows + r * padded);
    }
    if (problem->beta.data) memcpy(token->rows + problem->group * padded, token->key, (size_t)padded * sizeof(float));
    for (int64_t r = 0; r < token->readers; r++) {
        const float *row = token->rows + r * padded;
        multiply_entries(row, token->factor, padded, token->scaled + r * padded);
        for (int64_t j = 0; j < count; j++) token->shares[r * (count + 1) + j] = dot(row, token->keys + j * token->key_stride, dim);
        token->shares[r * (count + 1) + count] = dot(row, token->key, dim);
    }
}

/* What one or two readers read of some columns of the state. vectors: how many of them the columns fill; whole: entirely. */
INLINE void read_columns(const struct recurrence_step *problem, const struct token *token, int64_t first, int64_t reader, const int both,
                         const int vectors, const int whole) {
    int64_t columns = problem->value_dim - first, stride = problem->value_dim + problem->normalize;
    const float *scaled = token->scaled + reader * token->padded, *row = token->state + first;
    lanes sum[MOST_VECTORS] = {{0}}, other[MOST_VECTORS] = {{0}};
    for (int64_t a = 0; a < problem->dim; a++, row += stride)
        UNROLL for (int c = 0; c < vectors; c++) {
            lanes entry = load_entries(row, c * LANES, columns, 0, whole);
            sum[c] += entry * scaled[a];
            if (both) other[c] += entry * scaled[token->padded + a];
        }
    float *target = token->read + reader * token->value_padded + first;
    UNROLL for (int c = 0; c < vectors; c++) {
        store(target + c * LANES, sum[c]);
        if (both) store(target + token->value_padded + c * LANES, other[c]);
    }
}

/* Some columns of the new state. */
INLINE void write_columns(const struct recurrence_step *problem, const struct token *token, int64_t first, const int vectors, const int whole) {
    int64_t columns = problem->value_dim - first, stride = problem->value_dim + problem->normalize;
    const float *row = token->state + first;
    float *target = problem->final_state + token->index * problem->dim * stride + first;
    for (int64_t a = 0; a < problem->dim; a++, row += stride, target += stride) {
        lanes entry[MOST_VECTORS];
        UNROLL for (int c = 0; c < vectors; c++) entry[c] = load_entries(row, c * LANES, columns, 0, whole) * token->factor[a];
        UNROLL for (int c = 0; c < vectors; c++) entry[c] += load(token->written + first + c * LANES) * token->key[a];
        for (int64_t j = 0; j < problem->recent_count; j++)
            UNROLL for (int c = 0; c < vectors; c++)
                entry[c] += load_entries(token->past + j * token->past_stride + first, c * LANES, columns, 0, whole) *
                            token->keys[j * token->key_stride + a];
        UNROLL for (int c = 0; c < vectors; c++) {
            if (whole)
                store(target + c * LANES, entry[c]);
            else
                store_entries(target, c * LANES, columns, 0, entry[c]);
        }
    }
}

/* Some columns of everything: what is read, u, and the state. */
INLINE void step_columns(const struct recurrence_step *problem, const struct token *token, int64_t first, const int vectors, const int whole) {
    int64_t columns = token->value_padded, count = problem->recent_count, reader = 0;
    for (; reader + 1 < token->readers; reader += 2) read_columns(problem, token, first, reader, 1, vectors, whole);
    if (reader < token->readers) read_columns(problem, token, first, reader, 0, vectors, whole);
    const float *value = token_row(&problem->value, token, token->key_head);
    for (int64_t b = first; b < first + vectors * LANES; b += LANES) {
        lanes entry = load_entries(value, b, problem->value_dim, 0, whole);
        for (int64_t r = token->readers - 1; r >= 0; r--) { /* the key of the delta rule first, as its u is read by the others */
            lanes sum = load(token->read + r * columns + b);
            for (int64_t j = 0; j < count; j++)
                sum += load_entries(token->past + j * token->past_stride, b, problem->value_dim, 0, whole) *
                       token->shares[r * (count + 1) + j];
            if (r == problem->group)
                entry = (entry - sum) * token->beta;
            else
                sum += entry * token->shares[r * (count + 1) + count];
            store(token->read + r * columns + b, sum);
        }
        store(token->written + b, entry);
    }
    if (problem->final_state) write_columns(problem, token, first, vectors, whole);
}

/* The totals of the weights: the last column of the state is read, and written; outputs are divided by them. */
INLINE void finish_outputs(const struct recurrence_step *problem, const struct token *token) {
    int64_t stride = problem->value_dim + 1, count = problem->recent_count, padded = token->padded;
    for (int64_t a = 0; problem->normalize && a < problem->dim; a++) token->total[a] = token->state[a * stride + problem->value_dim];
    for (int64_t r = 0; r < problem->group; r++) {
        float share = 1.0f;
        if (problem->normalize) {
            float total = dot(token->scaled + r * padded, token->total, problem->dim);
            for (int64_t j = 0; j <= count; j++) total += token->shares[r * (count + 1) + j];
            share = inverse_total(total);
        }
        float *output = problem->output + (token->batch * problem->heads + token->key_head * problem->group + r) * problem->value_dim;
        for (int64_t b = 0; b < problem->value_dim; b += LANES)
            store_partial(output + b, load(token->read + r * token->value_padded + b) * share, problem->value_dim - b);
    }
    if (!problem->normalize || !problem->final_state) return;
    float *target = problem->final_state + token->index * problem->dim * stride + problem->value_dim;
    for (int64_t a = 0; a < problem->dim; a++) {
        float total = token->total[a] * token->factor[a] + token->key[a];
        for (int64_t j = 0; j < count; j++) total += token->keys[j * token->key_stride + a];
        target[a * stride] = total;
    }
}

/* Appends the token to the recent ones. */
INLINE void append_token(const struct recurrence_step *problem, const struct token *token) {
    int64_t dim = problem->dim, value_dim = problem->value_dim;
    float *target = recent_token(problem, token, problem->recent_count);
    memcpy(target, token->key, (size_t)dim * sizeof(float));
    memcpy(target + dim, token->written, (size_t)value_dim * sizeof(float));
    memcpy(target + dim + value_dim, token->step, (size_t)(recent_width(problem) - dim - value_dim) * sizeof(float));
}

INLINE void process_head(struct recurrence_step *problem, struct token *token, int64_t unit) {
    int64_t key_heads = problem->heads / problem->group, dim = problem->dim, value_dim = problem->value_dim, column = 0;
    token->batch = unit / key_heads, token->key_head = unit % key_heads, token->index = unit;
    token->state = problem->state + unit * dim * (value_dim + problem->normalize);
    if (load_gates(problem, token)) problem->invalid = 1;
    load_recent(problem, token);
    load_rows(problem, token);
    for (; column + MOST_VECTORS * LANES <= value_dim; column += MOST_VECTORS * LANES) step_columns(problem, token, column, MOST_VECTORS, 1);
    for (; column + VECTORS * LANES <= value_dim; column += VECTORS * LANES) step_columns(problem, token, column, VECTORS, 1);
    for (; column < value_dim; column += LANES) step_columns(problem, token, column, 1, 0);
    finish_outputs(problem, token);
    if (!problem->final_state) append_token(problem, token);
}

/* Takes one key head after another while any is left; any number of threads may call it at once. */
void EXPORTED(regard_recurrence_step)(struct recurrence_step *problem) {
    int64_t padded = padded_dim(problem->dim), value_padded = padded_dim(problem->value_dim), unit;
    int64_t readers = problem->group + (problem->beta.data != 0), tokens = problem->recent_count + 1;
    int64_t floats = (3 + tokens + 2 * readers) * padded + (1 + readers) * value_padded + readers * tokens + 10 * 16;
    float *memory = aligned_alloc(64, (size_t)(floats * 4 + 63) / 64 * 64), *free_memory = memory;
    struct token token = {.padded = padded, .value_padded = value_padded, .readers = readers};
    if (!memory) {
        problem->failed = 1;
        return;
    }
    token.step = take_floats(&free_memory, padded), token.factor = take_floats(&free_memory, padded);
    token.total = take_floats(&free_memory, padded), token.key = take_floats(&free_memory, padded);
    token.written = take_floats(&free_memory, value_padded), token.decayed_keys = take_floats(&free_memory, (tokens - 1) * padded);
    token.rows = take_floats(&free_memory, readers * padded);
    token.scaled = take_floats(&free_memory, readers * padded), token.read = take_floats(&free_memory, readers * value_padded);
    token.shares = take_floats(&free_memory, readers * tokens);
    memset(token.step, 0, (size_t)(token.key - token.step) * sizeof(float)); /* the ends of three rows */
    while ((unit = __atomic_fetch_add(&problem->next_unit, 1, __ATOMIC_RELAXED)) < problem->unit_count) process_head(problem, &token, unit);
    free(memory);
}
