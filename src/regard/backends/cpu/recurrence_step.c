/* One token of the linear recurrence. The state of a head is read once, some columns of it at a time. Its product with the query
 * and, by the delta rule, with the key are found together, and the recent tokens that it lacks are added to them. Where it is written,
 * it is in cache. */
#include "recurrence_chunk.h"
#include "aligned_memory.h"

#include <math.h>

/* Vectors of value columns that go at once, where there are so many: their sums stay in registers. */
enum { VECTORS = 4, MOST_VECTORS = LANES == 16 ? 8 : 4 };

/* Rows and vectors of the state that several tokens are added to at once, whose vectors are loaded once for all rows. */
enum { WRITTEN_ROWS = 4, WRITTEN_VECTORS = LANES == 16 ? 4 : 2 };

/* Products of a row with recent keys that are summed at once. */
enum { DOTS = 4 };

/* Threads that have a share of the key heads of their own. */
enum { MOST_SHARES = 64 };

static const float LARGEST_BETA = 2.0f, LEAST_NORM = 1e-12f;

/* One key head. A reader is what the state is multiplied by: the queries of the group, and the key by the delta rule. All rows
 * are of whole vectors, with zeros at their end. */
struct token {
    int64_t batch, key_head, index, padded, value_padded;
    int64_t readers;      /* in all: group, and 1 by the delta rule, which is the last */
    int64_t recent;       /* R, the tokens that the state lacks */
    float beta;
    const float *state;   /* [dim][value_dim] */
    const float *total;   /* after it where normalised, [dim] */
    float *step, *factor; /* the decay of this token, and that of all since the state was written, [padded]; 1 without decay */
    float *key, *written; /* of this token: its features, [padded], and its u, [value_padded] */
    float *decayed_keys;  /* of the recent tokens, with the decay since, [R][padded] */
    const float *keys, *past;        /* the same, or as they are stored, and their u */
    int64_t key_stride, past_stride; /* from one recent token to the next */
    float *rows, *scaled; /* of the readers, and times the factor: [readers][padded] */
    float *read;          /* what they read of the state, [readers][value_padded] */
    float *shares;        /* the products of their rows with the keys, [readers][R + 1] */
};

/* Tokens that are added to a state: the features and the u of each. */
struct additions {
    int64_t count, key_stride, written_stride;
    const float *keys, *written;
};

INLINE const void *token_row(const struct rows *rows, const struct token *token, int64_t head, int64_t dtype) {
    return head_rows(rows, token->batch, head, 0, (int)dtype);
}

/* left . right, of whole vectors on the left. */
INLINE float dot(const float *left, const float *right, int64_t dim) {
    lanes sum = {0};
    for (int64_t a = 0; a < dim; a += LANES) sum += load(left + a) * load_partial(right + a, dim - a);
    return sum_lanes(sum);
}

/* products[j] = left . (row j), of `count` rows. */
INLINE void dot_rows(const float *left, const float *rows, int64_t stride, int64_t count, int64_t dim, float *products) {
    int64_t j = 0;
    for (; j + DOTS <= count; j += DOTS) {
        lanes sum[DOTS] = {{0}};
        for (int64_t a = 0; a < dim; a += LANES) {
            lanes entry = load(left + a);
            UNROLL for (int row = 0; row < DOTS; row++) sum[row] += entry * load_partial(rows + (j + row) * stride + a, dim - a);
        }
        UNROLL for (int row = 0; row < DOTS; row++) products[j + row] = sum_lanes(sum[row]);
    }
    for (; j < count; j++) products[j] = dot(left, rows + j * stride, dim);
}

/* The features of a row times a number. */
INLINE void load_features(const struct recurrence_step *problem, const void *row, float scale, int64_t padded, float *target) {
    for (int64_t a = 0; a < padded; a += LANES) {
        int64_t count = problem->dim - a > 0 ? problem->dim - a : 0;
        lanes entry = load_entries(row, a, problem->dim, (int)problem->dtype, 0) * scale;
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
    int invalid = 0, decay_dtype = (int)problem->decay_dtype;
    if (problem->beta.data) {
        int beta_dtype = (int)problem->beta_dtype;
        token->beta = load_entries(token_row(&problem->beta, token, token->key_head, beta_dtype), 0, 1, beta_dtype, 0)[0];
        invalid = token->beta < 0.0f || token->beta > LARGEST_BETA;
    }
    if (problem->decay_kind == NO_DECAY) return invalid; /* factors of 1 are there */
    const void *decay = token_row(&problem->decay, token, token->key_head, decay_dtype);
    lanes exponent = broadcast(load_entries(decay, 0, 1, decay_dtype, 0)[0]), factor = elu_plus_one(exponent); /* e^x, as x is at most 0 */
    bits positive = {0};
    for (int64_t a = 0; a < problem->dim; a += LANES) {
        if (problem->decay_kind == FEATURE_DECAY) {
            exponent = load_entries(decay, a, problem->dim, decay_dtype, 0);
            factor = elu_plus_one(exponent);
        }
        positive |= exponent > 0.0f;
        store(token->step + a, first_lanes(factor, problem->dim - a));
        store(token->factor + a, first_lanes(factor, problem->dim - a));
    }
    return invalid || sum_lanes(zero_unless(positive, broadcast(1.0f))) > 0.0f;
}

/* The entries of a recent token. */
INLINE int64_t recent_width(const struct recurrence_step *problem) {
    return problem->dim + problem->value_dim + (problem->decay_kind == FEATURE_DECAY ? problem->dim : problem->decay_kind == HEAD_DECAY);
}

/* The floats of the state of a head, with its total. */
INLINE int64_t head_floats(const struct recurrence_step *problem) { return problem->dim * (problem->value_dim + problem->normalize); }

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
    for (int64_t j = token->recent - 1; j >= 0; j--) {
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

/* The key whose value the delta rule removes. */
INLINE void load_removed(const struct recurrence_step *problem, const struct token *token, float *target) {
    if (!problem->removal.data) {
        memcpy(target, token->key, (size_t)token->padded * sizeof(float));
        return;
    }
    const void *removed = token_row(&problem->removal, token, token->key_head, problem->dtype);
    for (int64_t a = 0; a < token->padded; a += LANES) store(target + a, load_entries(removed, a, problem->dim, (int)problem->dtype, 0));
}

/* The key of this token, the rows that read, and their products with all keys. */
INLINE void load_rows(const struct recurrence_step *problem, const struct token *token) {
    int64_t dim = problem->dim, padded = token->padded, count = token->recent;
    load_features(problem, token_row(&problem->key, token, token->key_head, problem->dtype), 1.0f, padded, token->key);
    for (int64_t r = 0; r < problem->group; r++) {
        const void *query = token_row(&problem->query, token, token->key_head * problem->group + r, problem->dtype);
        load_features(problem, query, problem->scale, padded, token->rows + r * padded);
    }
    if (problem->beta.data) load_removed(problem, token, token->rows + problem->group * padded);
    for (int64_t r = 0; r < token->readers; r++) {
        const float *row = token->rows + r * padded;
        float *shares = token->shares + r * (count + 1);
        multiply_entries(row, token->factor, padded, token->scaled + r * padded);
        dot_rows(row, token->keys, token->key_stride, count, dim, shares);
        shares[count] = dot(row, token->key, dim);
    }
}

/* What one or two readers read of some columns of the state. vectors: how many of them the columns fill; whole: entirely. */
INLINE void read_columns(const struct recurrence_step *problem, const struct token *token, int64_t first, int64_t reader, const int both,
                         const int vectors, const int whole) {
    int64_t stride = problem->value_dim, columns = stride - first;
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

/* Some rows and columns of the state of a head, written into `target`: decayed, and with tokens added. */
INLINE void write_block(const struct recurrence_step *problem, const struct token *token, const struct additions *added, int64_t first,
                        int64_t row, float *target, const int rows, const int vectors, const int whole) {
    int64_t stride = problem->value_dim, columns = stride - first, place = row * stride + first;
    lanes entry[WRITTEN_ROWS][MOST_VECTORS], written[MOST_VECTORS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < vectors; c++)
            entry[r][c] = load_entries(token->state + place + r * stride, c * LANES, columns, 0, whole) * token->factor[row + r];
    for (int64_t j = 0; j < added->count; j++) {
        const float *source = added->written + j * added->written_stride + first, *key = added->keys + j * added->key_stride + row;
        UNROLL for (int c = 0; c < vectors; c++) written[c] = load_entries(source, c * LANES, columns, 0, whole);
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int c = 0; c < vectors; c++) entry[r][c] += written[c] * key[r];
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < vectors; c++) {
            if (whole)
                store(target + place + r * stride + c * LANES, entry[r][c]);
            else
                store_entries(target + place + r * stride, c * LANES, columns, 0, entry[r][c]);
        }
}

/* Some columns of the same. */
INLINE void write_columns(const struct recurrence_step *problem, const struct token *token, const struct additions *added, int64_t first,
                          float *target, const int vectors, const int whole) {
    const int at_once = vectors < WRITTEN_VECTORS ? vectors : WRITTEN_VECTORS;
    int64_t row = 0, blocks = added->count > 1 ? problem->dim / WRITTEN_ROWS : 0;
    for (; row < blocks * WRITTEN_ROWS; row += WRITTEN_ROWS)
        UNROLL for (int c = 0; c < vectors; c += at_once)
            write_block(problem, token, added, first + c * LANES, row, target, WRITTEN_ROWS, at_once, whole);
    for (; row < problem->dim; row++) /* whole rows, one after the other */
        write_block(problem, token, added, first, row, target, 1, vectors, whole);
}

/* The total of a head, written likewise. */
INLINE void write_total(const struct recurrence_step *problem, const struct token *token, const struct additions *added, float *target) {
    for (int64_t a = 0; a < problem->dim; a += LANES) {
        int64_t count = problem->dim - a;
        lanes total = load_partial(token->total + a, count) * load(token->factor + a);
        for (int64_t j = 0; j < added->count; j++) total += load_partial(added->keys + j * added->key_stride + a, count);
        store_partial(target + a, total, count);
    }
}

/* This token, where it is added to the state at once. */
INLINE struct additions this_token(const struct token *token) {
    return (struct additions){.count = 1, .keys = token->key, .written = token->written};
}

/* Where the state of a head is written. */
INLINE float *written_state(const struct recurrence_step *problem, const struct token *token) {
    return problem->final_state + token->index * head_floats(problem);
}

/* Adds the recent tokens to the state, which may be written in place; none is recent then. */
INLINE void fold_recent(const struct recurrence_step *problem, struct token *token) {
    int64_t value_dim = problem->value_dim, column = 0;
    float *target = written_state(problem, token);
    for (int64_t a = 0; a < token->padded; a += LANES) store(token->factor + a, first_lanes(broadcast(1.0f), problem->dim - a));
    load_recent(problem, token);
    const struct additions added = {token->recent, token->key_stride, token->past_stride, token->keys, token->past};
    for (; column + VECTORS * LANES <= value_dim; column += VECTORS * LANES)
        write_columns(problem, token, &added, column, target, VECTORS, 1);
    for (; column < value_dim; column += LANES) write_columns(problem, token, &added, column, target, 1, 0);
    if (problem->normalize) write_total(problem, token, &added, target + problem->dim * value_dim);
    token->state = target, token->total = target + problem->dim * value_dim, token->recent = 0;
}

/* Some columns of everything: what is read, u, and the state. */
INLINE void step_columns(const struct recurrence_step *problem, const struct token *token, int64_t first, const int vectors, const int whole) {
    int64_t columns = token->value_padded, count = token->recent, reader = 0;
    for (; reader + 1 < token->readers; reader += 2) read_columns(problem, token, first, reader, 1, vectors, whole);
    if (reader < token->readers) read_columns(problem, token, first, reader, 0, vectors, whole);
    const void *value = token_row(&problem->value, token, token->key_head, problem->dtype);
    for (int64_t b = first; b < first + vectors * LANES; b += LANES) {
        lanes entry = load_entries(value, b, problem->value_dim, (int)problem->dtype, whole);
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
    if (problem->recent) return;
    const struct additions added = this_token(token);
    write_columns(problem, token, &added, first, written_state(problem, token), vectors, whole);
}

/* The outputs, divided by the totals of their weights where normalised. */
INLINE void store_outputs(const struct recurrence_step *problem, const struct token *token) {
    int64_t count = token->recent;
    for (int64_t r = 0; r < problem->group; r++) {
        float share = 1.0f;
        if (problem->normalize) {
            float total = dot(token->scaled + r * token->padded, token->total, problem->dim);
            for (int64_t j = 0; j <= count; j++) total += token->shares[r * (count + 1) + j];
            share = inverse_total(total);
        }
        int64_t row = token->batch * problem->heads + token->key_head * problem->group + r;
        void *output = entry_at(problem->output, row * problem->value_dim, (int)problem->dtype);
        for (int64_t b = 0; b < problem->value_dim; b += LANES)
            store_entries(output, b, problem->value_dim, (int)problem->dtype, load(token->read + r * token->value_padded + b) * share);
    }
}

/* Appends the token to the recent ones. */
INLINE void append_token(const struct recurrence_step *problem, const struct token *token) {
    int64_t dim = problem->dim, value_dim = problem->value_dim;
    float *target = recent_token(problem, token, token->recent);
    memcpy(target, token->key, (size_t)dim * sizeof(float));
    memcpy(target + dim, token->written, (size_t)value_dim * sizeof(float));
    memcpy(target + dim + value_dim, token->step, (size_t)(recent_width(problem) - dim - value_dim) * sizeof(float));
}

INLINE void process_head(struct recurrence_step *problem, struct token *token, int64_t unit) {
    int64_t key_heads = problem->heads / problem->group, value_dim = problem->value_dim, column = 0;
    token->batch = unit / key_heads, token->key_head = unit % key_heads, token->index = unit;
    token->state = problem->state + unit * head_floats(problem), token->total = token->state + problem->dim * value_dim;
    token->recent = problem->recent_count;
    if (problem->recent && problem->final_state) fold_recent(problem, token);
    if (load_gates(problem, token)) problem->invalid = 1;
    load_recent(problem, token);
    load_rows(problem, token);
    for (; column + MOST_VECTORS * LANES <= value_dim; column += MOST_VECTORS * LANES) step_columns(problem, token, column, MOST_VECTORS, 1);
    for (; column + VECTORS * LANES <= value_dim; column += VECTORS * LANES) step_columns(problem, token, column, VECTORS, 1);
    for (; column < value_dim; column += LANES) step_columns(problem, token, column, 1, 0);
    store_outputs(problem, token);
    if (problem->recent) {
        append_token(problem, token);
    } else if (problem->normalize) {
        const struct additions added = this_token(token);
        write_total(problem, token, &added, written_state(problem, token) + problem->dim * value_dim);
    }
}

/* A step on several threads. Each takes the key heads of its own share first, whose states are in its cache since the last step. */
struct step_work {
    struct recurrence_step problem;
    int64_t shares, arrived, floats;
    float *memory; /* `floats` of each thread */
    struct { ALIGNED int64_t taken; } share[MOST_SHARES]; /* key heads that some thread has taken, each in a cache line of its own */
};

/* The floats that a thread needs, in whole cache lines. */
INLINE int64_t thread_floats(const struct recurrence_step *problem) {
    int64_t padded = padded_dim(problem->dim), value_padded = padded_dim(problem->value_dim), tokens = problem->recent_count + 1;
    int64_t readers = problem->group + (problem->beta.data != 0);
    return ((2 + tokens + 2 * readers) * padded + (1 + readers) * value_padded + readers * tokens + 10 * 16) / 16 * 16;
}

/* Takes one key head after another of a share and then of the others while any is left; any number of threads may call it at once. */
static void take_heads(void *shared) {
    struct step_work *work = shared;
    struct recurrence_step *problem = &work->problem;
    int64_t padded = padded_dim(problem->dim), value_padded = padded_dim(problem->value_dim), unit;
    int64_t readers = problem->group + (problem->beta.data != 0), tokens = problem->recent_count + 1;
    int64_t heads = problem->unit_end - problem->first_unit, own = __atomic_fetch_add(&work->arrived, 1, __ATOMIC_RELAXED);
    float *memory = work->memory + own * work->floats;
    struct token token = {.padded = padded, .value_padded = value_padded, .readers = readers};
    token.step = take_floats(&memory, padded), token.factor = take_floats(&memory, padded);
    token.key = take_floats(&memory, padded), token.written = take_floats(&memory, value_padded);
    token.decayed_keys = take_floats(&memory, (tokens - 1) * padded), token.rows = take_floats(&memory, readers * padded);
    token.scaled = take_floats(&memory, readers * padded), token.read = take_floats(&memory, readers * value_padded);
    token.shares = take_floats(&memory, readers * tokens);
    for (int64_t a = 0; a < padded; a++) token.factor[a] = a < problem->dim, token.step[a] = 0.0f; /* their ends stay as they are */
    for (int64_t s = 0; s < work->shares; s++) {
        int64_t share = (own + s) % work->shares, end = problem->first_unit + heads * (share + 1) / work->shares;
        int64_t begin = problem->first_unit + heads * share / work->shares;
        while ((unit = begin + __atomic_fetch_add(&work->share[share].taken, 1, __ATOMIC_RELAXED)) < end) process_head(problem, &token, unit);
    }
}

/* Computes a token with the tensors that are passed, of the layout that `prepared` has. team: GOMP_parallel, for several threads.
 * Returns 0, 1 for a gate out of its range, or 2 where there was no memory, and nothing is changed. */
int64_t EXPORTED(regard_recurrence_step)(const struct recurrence_step *prepared, void (*team)(void (*)(void *), void *, unsigned, unsigned),
                                         int64_t threads, const void *query, const void *key, const void *value, const void *decay,
                                         const void *beta, const void *removal, const float *state, float *recent, int64_t recent_count,
                                         void *output, float *final_state) {
    struct step_work work;
    struct recurrence_step *problem = &work.problem;
    *problem = *prepared;
    problem->query.data = query, problem->key.data = key, problem->value.data = value, problem->decay.data = decay;
    problem->beta.data = beta, problem->removal.data = removal, problem->state = state, problem->recent = recent;
    problem->recent_count = recent_count, problem->output = output, problem->final_state = final_state;
    work.floats = thread_floats(problem), work.memory = aligned_memory(work.floats * (team ? threads : 1) * 4);
    if (!work.memory) return 2;
    work.shares = team ? min_int(threads, MOST_SHARES) : 1, work.arrived = 0;
    for (int64_t share = 0; share < work.shares; share++) work.share[share].taken = 0;
    if (team)
        team(take_heads, &work, (unsigned)threads, 0);
    else
        take_heads(&work);
    free_aligned(work.memory);
    return problem->invalid;
}
