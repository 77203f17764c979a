/* One chunk of a linear recurrence: its packed tokens, what decay does between them, and products over pairs of them. */
#ifndef REGARD_RECURRENCE_CHUNK_H
#define REGARD_RECURRENCE_CHUNK_H

#include "recurrence.h"
#include "tile.h"

#include <float.h>
#include <math.h>

/* 1 / total, 0 for a row without weights: of a total below the smallest normal number, 1 / total may be infinite. */
static inline float inverse_total(float total) { return fabsf(total) < FLT_MIN ? 0.0f : 1.0f / total; }

static const float ONES[GROUP] = {1, 1, 1, 1, 1, 1, 1, 1};

/* A chunk of one key head. Decay factors are there where there is decay; G is the sum of g within the chunk. */
struct chunk {
    int64_t batch, key_head, first, count; /* its first token, and how many it has */
    int64_t rows;                          /* the rows that are laid out, 0 beyond the count: whole pairs of vectors */
    int empty;                             /* whether the state before it is 0 */
    int64_t padded, value_padded;          /* features and value columns with padding */
    int64_t value_begin, value_count;      /* the value columns of this part */
    float *key, *key_columns;              /* [BLOCK][padded] and [padded][BLOCK] */
    float *removal;                        /* the delta rule: keys whose values are removed, where they are others, [BLOCK][padded] */
    float *key_to_end;                     /* keys times to_end, [BLOCK][padded]: what they add to the state */
    float *written;                        /* u, [BLOCK][value_padded] */
    float *from_start, *to_end;            /* e^G_i and e^(G_end - G_i), [BLOCK][padded] */
    float *whole;                          /* e^G_end, [padded] */
    float *pair_decay;                     /* decay per head: e^(G_i - G_j), [BLOCK][BLOCK], in vectors up to the diagonal */
    float *step;                           /* decay per feature: e^g_i, [BLOCK][padded] */
    float *in_group, *group_end;           /* from the start of a token's group, and to its end, [BLOCK][padded] */
    float *group_whole;                    /* over whole groups, [BLOCK / GROUP][padded] */
    float *moving;                         /* rows or columns on their way between groups, [BLOCK][padded] */
    float *beta;                           /* [BLOCK] */
    float *solving;                        /* delta rule: less the decayed products of keys, [BLOCK][BLOCK] */
    float *residual;                       /* delta rule: u = beta residual, [BLOCK][value_padded] */
};

/* The state of the recurrence: matrix [padded][value_padded], and the sum of keys [padded]. */
struct carry {
    float *matrix, *total;
};

INLINE int64_t chunk_floats(int64_t padded, int64_t value_padded) {
    return BLOCK * (10 * padded + 2 * value_padded + 2 * BLOCK + 1) + (1 + BLOCK / GROUP) * padded + 17 * 16;
}

INLINE void take_chunk(struct chunk *chunk, float **memory) {
    int64_t rows = BLOCK * chunk->padded, values = BLOCK * chunk->value_padded;
    chunk->key = take_floats(memory, rows), chunk->key_columns = take_floats(memory, rows), chunk->removal = take_floats(memory, rows);
    chunk->key_to_end = take_floats(memory, rows), chunk->written = take_floats(memory, values);
    chunk->from_start = take_floats(memory, rows), chunk->to_end = take_floats(memory, rows);
    chunk->whole = take_floats(memory, chunk->padded), chunk->pair_decay = take_floats(memory, BLOCK * BLOCK);
    chunk->step = take_floats(memory, rows), chunk->in_group = take_floats(memory, rows);
    chunk->group_end = take_floats(memory, rows), chunk->group_whole = take_floats(memory, BLOCK / GROUP * chunk->padded);
    chunk->moving = take_floats(memory, rows), chunk->beta = take_floats(memory, BLOCK);
    chunk->solving = take_floats(memory, BLOCK * BLOCK), chunk->residual = take_floats(memory, values);
}

/* Where an entry of a result is. */
INLINE void *entry_at(void *entries, int64_t number, int dtype) { return (char *)entries + number * entry_bytes(dtype); }

INLINE bits lane_numbers(void) {
    bits numbers;
    for (int lane = 0; lane < LANES; lane++) numbers[lane] = lane;
    return numbers;
}

/* The first `count` lanes of a vector, and 0 in the others. */
INLINE lanes first_lanes(lanes values, int64_t count) {
    return zero_unless(lane_numbers() < (int32_t)(count < LANES ? count : LANES), values);
}

/* elu(x) + 1: x + 1, or e^x for x <= 0, which is 0 from -87 on down. */
INLINE lanes elu_plus_one(lanes x) {
    lanes power = exp_lanes(max_lanes(broadcast(-87.0f), min_lanes(0.0f, x)));
    bits positive = x > 0.0f, none = x < -87.0f;
    return (lanes)((positive & (bits)(x + 1.0f)) | (~positive & ~none & (bits)power));
}

/* Packs rows of queries or keys, times a factor, through the feature map, as target[rows][padded]: 0 beyond their number and dim. */
APART void pack_features(const struct chunk *chunk, const void *rows, int64_t stride, int64_t dim, int dtype, float factor,
                         int64_t feature_map, float *target) {
    int64_t padded = chunk->padded, count = chunk->count;
    for (int64_t i = 0; i < count; i++)
        for (int64_t a = 0; a < padded; a += LANES) {
            lanes entry = load_entries(row_at(rows, i, stride, dtype), a, dim, dtype, 0) * factor;
            if (feature_map == ELU) entry = first_lanes(elu_plus_one(entry), dim - a > 0 ? dim - a : 0);
            store(target + i * padded + a, entry);
        }
    memset(target + count * padded, 0, (size_t)((chunk->rows - count) * padded) * sizeof(float));
}

/* target[columns][stride] = source[rows][columns], of whole vectors. */
APART void transpose_matrix(const float *source, int64_t rows, int64_t columns, float *target, int64_t stride) {
    for (int64_t i = 0; i < rows; i += LANES)
        for (int64_t a = 0; a < columns; a += LANES) {
            lanes block[LANES];
            for (int l = 0; l < LANES; l++) block[l] = load(source + (i + l) * columns + a);
            transpose(block);
            for (int l = 0; l < LANES; l++) store(target + (a + l) * stride + i, block[l]);
        }
}

/* target = first * second, entry by entry; all of whole vectors. */
INLINE void multiply_entries(const float *first, const float *second, int64_t count, float *target) {
    for (int64_t a = 0; a < count; a += LANES) store(target + a, load(first + a) * load(second + a));
}

/* into[rows][columns] = left . right (+ into where `added`), summed over [begin, end). */
APART void product(const struct factor left, int64_t rows, const float *right, int64_t columns, int64_t begin, int64_t end,
                   float *into, const int added) {
    for (int64_t a = 0; a < columns; a += PAIR)
        for (int64_t row = 0; row < rows; row += GROUP)
            add_product((struct factor){left.data + row * left.stride, left.stride, left.step},
                        (struct vectors){right + a, columns, begin, end}, into + row * columns + a, columns, added ? ONES : 0);
}

/* into[row] += sum over j up to the row's group of pairs[row][j] right[j]; `before`: up to the group before. */
APART void lower_product(const float *pairs, int64_t rows, const float *right, int64_t columns, float *into, const int before) {
    for (int64_t a = 0; a < columns; a += PAIR)
        for (int64_t row = 0; row < rows; row += GROUP)
            add_product((struct factor){pairs + row * BLOCK, BLOCK, 1},
                        (struct vectors){right + a, columns, 0, before ? row : row + GROUP}, into + row * columns + a, columns, ONES);
}

/* into[j] += sum over rows from j's group on of pairs[row][j] right[row]. */
APART void upper_product(const float *pairs, int64_t rows, const float *right, int64_t columns, float *into) {
    for (int64_t a = 0; a < columns; a += PAIR)
        for (int64_t j = 0; j < rows; j += GROUP)
            add_product((struct factor){pairs + j, 1, BLOCK}, (struct vectors){right + a, columns, j, rows},
                        into + j * columns + a, columns, ONES);
}

/* pairs[row][j] = left[row] . column j, up to the row's group at least. */
APART void pair_product(const float *left, int64_t rows, int64_t dim, const float *columns, float *pairs) {
    for (int64_t j = 0; j < rows; j += PAIR)
        for (int64_t row = j / GROUP * GROUP; row < rows; row += GROUP)
            add_product((struct factor){left + row * dim, dim, 1}, (struct vectors){columns + j, BLOCK, 0, dim},
                        pairs + row * BLOCK + j, BLOCK, 0);
}

/* Pairs of a row with itself (not where `strict`) and with those before it, plus a number of the row where there is one, times
 * a factor, and times the decay between them where it is per head; 0 in the others. */
INLINE void mask_pairs(const struct chunk *chunk, int64_t decay_kind, const int strict, const float *added, float factor, float *pairs) {
    for (int64_t row = 0; row < chunk->count; row++) {
        int64_t kept = row + 1 - strict;
        float more = added ? added[row] : 0.0f;
        for (int64_t j = 0; j < chunk->rows; j += LANES) {
            lanes entry = {0};
            if (j < kept) {
                entry = (load(pairs + row * BLOCK + j) + more) * factor;
                if (decay_kind == HEAD_DECAY) entry *= load(chunk->pair_decay + row * BLOCK + j);
                if (j + LANES > kept) entry = first_lanes(entry, kept - j);
            }
            store(pairs + row * BLOCK + j, entry);
        }
    }
    memset(pairs + chunk->count * BLOCK, 0, (size_t)((chunk->rows - chunk->count) * BLOCK) * sizeof(float));
}

/* The decay of one number for each token, in base 2; sums are in double, and their differences have no large errors. */
INLINE void prepare_head_decay(const struct recurrence *problem, const struct chunk *chunk) {
    const float *decay = head_rows(&problem->decay, chunk->batch, chunk->key_head, chunk->first, 0);
    float high[BLOCK] ALIGNED, low[BLOCK] ALIGNED, start[BLOCK] ALIGNED, end[BLOCK] ALIGNED;
    double sum[BLOCK], all = 0;
    for (int64_t i = 0; i < chunk->rows; i++) {
        double own = i < chunk->count ? 1.4426950408889634 * decay[i * problem->decay.row] : 0.0;
        all += own < -200.0 ? -200.0 : own; /* 2^-200 is 0, and infinity would have no differences */
        sum[i] = all, high[i] = (float)all, low[i] = (float)(all - high[i]);
    }
    for (int64_t i = 0; i < chunk->rows; i++) end[i] = (float)(all - sum[i]);
    for (int64_t i = 0; i < chunk->rows; i += LANES) {
        store(start + i, exp2_lanes(load(high + i)));
        store(end + i, exp2_lanes(load(end + i)));
    }
    for (int64_t i = 0; i < chunk->rows; i++) {
        for (int64_t j = 0; j <= i; j += LANES)
            store(chunk->pair_decay + i * BLOCK + j, exp2_lanes(min_lanes(0.0f, (high[i] - load(high + j)) + (low[i] - load(low + j)))));
        for (int64_t a = 0; a < chunk->padded; a += LANES) {
            store(chunk->from_start + i * chunk->padded + a, broadcast(start[i]));
            store(chunk->to_end + i * chunk->padded + a, broadcast(end[i]));
        }
    }
    for (int64_t a = 0; a < chunk->padded; a += LANES) store(chunk->whole + a, broadcast(start[chunk->rows - 1]));
}

/* The decay of each feature. No exponent is ever positive, and none is a difference: from a token to a later one it is
 * to the end of its group, over whole groups, and from the start of the later one's group. */
INLINE void prepare_feature_decay(const struct recurrence *problem, const struct chunk *chunk) {
    const float *decay = head_rows(&problem->decay, chunk->batch, chunk->key_head, chunk->first, 0);
    int64_t padded = chunk->padded, groups = chunk->rows / GROUP;
    for (int64_t a = 0; a < padded; a += LANES) {
        lanes group_sums[BLOCK / GROUP], before = {0}, after = {0};
        for (int64_t group = 0; group < groups; group++) {
            lanes sum = {0}, running = broadcast(1.0f);
            for (int64_t i = group * GROUP; i < (group + 1) * GROUP; i++) {
                lanes own = {0};
                if (i < chunk->count && a < problem->dim)
                    own = load_partial(decay + i * problem->decay.row + a, problem->dim - a) * LOG2_E;
                sum += own;
                lanes power = exp2_lanes(own);
                running *= power;
                store(chunk->step + i * padded + a, power);
                store(chunk->in_group + i * padded + a, running);
            }
            running = broadcast(1.0f);
            for (int64_t i = (group + 1) * GROUP - 1; i >= group * GROUP; i--) {
                store(chunk->group_end + i * padded + a, running);
                running *= load(chunk->step + i * padded + a);
            }
            group_sums[group] = sum;
            store(chunk->group_whole + group * padded + a, exp2_lanes(sum));
        }
        for (int64_t group = 0; group < groups; group++) {
            lanes factor = exp2_lanes(before);
            for (int64_t i = group * GROUP; i < (group + 1) * GROUP; i++)
                store(chunk->from_start + i * padded + a, load(chunk->in_group + i * padded + a) * factor);
            before += group_sums[group];
        }
        for (int64_t group = groups - 1; group >= 0; group--) {
            lanes factor = exp2_lanes(after);
            for (int64_t i = group * GROUP; i < (group + 1) * GROUP; i++)
                store(chunk->to_end + i * padded + a, load(chunk->group_end + i * padded + a) * factor);
            after += group_sums[group];
        }
        store(chunk->whole + a, exp2_lanes(before));
    }
}

/* Keys and values of the chunk, and its decay. */
APART void pack_chunk(const struct recurrence *problem, const struct chunk *shared) {
    const struct chunk copy = *shared, *chunk = &copy; /* in registers: what is stored elsewhere cannot change it */
    const int dtype = (int)problem->dtype;
    const void *key = head_rows(&problem->key, chunk->batch, chunk->key_head, chunk->first, dtype);
    const void *value = head_rows(&problem->value, chunk->batch, chunk->key_head, chunk->first, dtype);
    pack_features(chunk, key, problem->key.row, problem->dim, dtype, 1.0f, problem->feature_map, chunk->key);
    transpose_matrix(chunk->key, chunk->rows, chunk->padded, chunk->key_columns, BLOCK);
    if (problem->removal.data)
        pack_features(chunk, head_rows(&problem->removal, chunk->batch, chunk->key_head, chunk->first, dtype), problem->removal.row,
                      problem->dim, dtype, 1.0f, IDENTITY, chunk->removal);
    pack_rows(row_at(value, 1, chunk->value_begin, dtype), problem->value.row, chunk->count, chunk->value_count, 1.0f, chunk->written, dtype);
    if (problem->decay_kind == HEAD_DECAY) prepare_head_decay(problem, chunk);
    if (problem->decay_kind == FEATURE_DECAY) prepare_feature_decay(problem, chunk);
    if (problem->decay_kind != NO_DECAY) multiply_entries(chunk->key, chunk->to_end, chunk->rows * chunk->padded, chunk->key_to_end);
    for (int64_t i = 0; problem->beta.data && i < chunk->rows; i++)
        chunk->beta[i] = i < chunk->count ? *(const float *)head_rows(&problem->beta, chunk->batch, chunk->key_head, chunk->first + i, 0) : 0.0f;
}

/* The keys whose values the delta rule removes. */
INLINE const float *removed_keys(const struct recurrence *problem, const struct chunk *chunk) {
    return problem->removal.data ? chunk->removal : chunk->key;
}

/* What rows read of the state: themselves times the decay from the chunk's start; `decayed` is memory for it. */
INLINE const float *decayed_rows(const struct recurrence *problem, const struct chunk *chunk, const float *rows, float *decayed) {
    if (problem->decay_kind == NO_DECAY) return rows;
    multiply_entries(rows, chunk->from_start, chunk->rows * chunk->padded, decayed);
    return decayed;
}

/* Pairs of one group of rows with the keys of the same group, decayed per feature: key by key, step by step. */
INLINE void group_pairs(const struct chunk *chunk, const float *rows, int64_t group, float *pairs) {
    int64_t padded = chunk->padded, first = group * GROUP;
    for (int64_t j = first; j < first + GROUP; j++)
        for (int64_t i = first; i < first + GROUP; i++) {
            if (i < j) continue;
            lanes sum = {0};
            for (int64_t a = 0; a < padded; a += LANES) {
                lanes key = load((i == j ? chunk->key : chunk->moving) + j * padded + a);
                if (i > j) key *= load(chunk->step + i * padded + a);
                if (i + 1 < first + GROUP) store(chunk->moving + j * padded + a, key);
                sum += key * load(rows + i * padded + a);
            }
            pairs[i * BLOCK + j] = sum_lanes(sum);
        }
}

/* Products of rows with the keys before them, each feature decayed: keys move, as columns, from group to group. */
APART void decayed_pairs(const struct chunk *shared, const float *rows, float *row_memory, float *columns, float *pairs) {
    const struct chunk copy = *shared, *chunk = &copy; /* in registers: what is stored elsewhere cannot change it */
    int64_t padded = chunk->padded;
    multiply_entries(rows, chunk->in_group, chunk->rows * padded, row_memory);
    multiply_entries(chunk->key, chunk->group_end, chunk->rows * padded, chunk->moving);
    transpose_matrix(chunk->moving, chunk->rows, padded, columns, BLOCK);
    for (int64_t group = 0; group * GROUP < chunk->count; group++) {
        int64_t first = group * GROUP;
        for (int64_t j = 0; j < first; j += PAIR)
            add_product((struct factor){row_memory + first * padded, padded, 1}, (struct vectors){columns + j, BLOCK, 0, padded},
                        pairs + first * BLOCK + j, BLOCK, 0);
        group_pairs(chunk, rows, group, pairs);
        for (int64_t a = 0; a < padded; a++) {
            lanes factor = broadcast(chunk->group_whole[group * padded + a]);
            int64_t j = 0;
            for (; j + LANES <= first; j += LANES) store(columns + a * BLOCK + j, load(columns + a * BLOCK + j) * factor);
            for (; j < first; j++) columns[a * BLOCK + j] *= factor[0];
        }
    }
}

/* The weights of pairs: products of rows with the keys up to their own (before it where `strict`), decayed, times a factor;
 * 0 where there is no pair. The two memories are [BLOCK][padded] each. */
INLINE void pair_weights(const struct recurrence *problem, const struct chunk *chunk, const float *rows, const int strict, float factor,
                         float *row_memory, float *column_memory, float *pairs) {
    if (problem->decay_kind == FEATURE_DECAY)
        decayed_pairs(chunk, rows, row_memory, column_memory, pairs);
    else
        pair_product(rows, chunk->count, chunk->padded, chunk->key_columns, pairs);
    mask_pairs(chunk, problem->decay_kind, strict, 0, factor, pairs);
}

/* The delta rule: from values to what is written, u, by the triangular system (1 + beta T) u = beta (v - e^G r S), T the decayed
 * products of removed keys with the keys before them. The two memories are [BLOCK][padded] each. */
APART void solve_writes(const struct recurrence *problem, const struct chunk *shared, const struct carry *carry, float *row_memory,
                        float *column_memory) {
    const struct chunk copy = *shared, *chunk = &copy; /* in registers: what is stored elsewhere cannot change it */
    int64_t columns = chunk->value_padded, rows = (chunk->count + GROUP - 1) / GROUP * GROUP;
    const float *removed = removed_keys(problem, chunk);
    pair_weights(problem, chunk, removed, 1, -1.0f, row_memory, column_memory, chunk->solving);
    if (chunk->empty) {
        memcpy(chunk->residual, chunk->written, (size_t)(chunk->rows * columns) * sizeof(float));
    } else {
        const float *reading = decayed_rows(problem, chunk, removed, row_memory);
        product((struct factor){reading, chunk->padded, 1}, chunk->rows, carry->matrix, columns, 0, chunk->padded, chunk->residual, 0);
        for (int64_t a = 0; a < chunk->rows * columns; a += LANES)
            store(chunk->residual + a, load(chunk->written + a) - load(chunk->residual + a));
    }
    for (int64_t row = 0; row < rows; row += GROUP) {
        for (int64_t a = 0; a < columns; a += PAIR)
            add_product((struct factor){chunk->solving + row * BLOCK, BLOCK, 1}, (struct vectors){chunk->written + a, columns, 0, row},
                        chunk->residual + row * columns + a, columns, ONES);
        for (int64_t i = row; i < row + GROUP; i++)
            for (int64_t a = 0; a < columns; a += LANES) {
                lanes own = load(chunk->residual + i * columns + a);
                for (int64_t j = row; j < i; j++) own += load(chunk->written + j * columns + a) * chunk->solving[i * BLOCK + j];
                store(chunk->residual + i * columns + a, own);
                store(chunk->written + i * columns + a, own * chunk->beta[i]);
            }
    }
}

/* The state after the chunk from that before it; source and target may be the same. */
APART void advance_state(const struct recurrence *problem, const struct chunk *chunk, const struct carry *source, struct carry *target) {
    int64_t padded = chunk->padded, columns = chunk->value_padded;
    const float *key = problem->decay_kind == NO_DECAY ? chunk->key : chunk->key_to_end;
    if (source->matrix != target->matrix) memcpy(target->matrix, source->matrix, (size_t)(padded * columns) * sizeof(float));
    for (int64_t a = 0; a < columns; a += PAIR)
        for (int64_t row = 0; row < padded; row += GROUP)
            add_product((struct factor){key + row, 1, padded}, (struct vectors){chunk->written + a, columns, 0, chunk->count},
                        target->matrix + row * columns + a, columns, problem->decay_kind == NO_DECAY ? ONES : chunk->whole + row);
    if (!problem->normalize) return;
    for (int64_t a = 0; a < padded; a += LANES) {
        lanes sum = {0};
        for (int64_t i = 0; i < chunk->count; i++) sum += load(key + i * padded + a);
        lanes before = load(source->total + a);
        store(target->total + a, (problem->decay_kind == NO_DECAY ? before : before * load(chunk->whole + a)) + sum);
    }
}

/* Where the state of a part of a key head is, in an array of states; `matrices` of them for each key head. */
INLINE int64_t state_index(const struct recurrence *problem, const struct chunk *chunk, int64_t matrices, int64_t number) {
    return (chunk->batch * (problem->heads / problem->group) + chunk->key_head) * matrices + number;
}

/* Copies a part's columns of a state out of an array of states; 0 where there is none. */
INLINE void load_state(const struct recurrence *problem, const struct chunk *chunk, const float *matrix, const float *total,
                       int64_t index, struct carry *carry) {
    memset(carry->matrix, 0, (size_t)(chunk->padded * chunk->value_padded) * sizeof(float));
    memset(carry->total, 0, (size_t)chunk->padded * sizeof(float));
    for (int64_t a = 0; matrix && a < problem->dim; a++)
        memcpy(carry->matrix + a * chunk->value_padded,
               matrix + (index * problem->dim + a) * problem->value_dim + chunk->value_begin, (size_t)chunk->value_count * sizeof(float));
    if (total) memcpy(carry->total, total + index * problem->dim, (size_t)problem->dim * sizeof(float));
}

/* Copies a state into an array of states; the sum of keys is that of the first part. */
INLINE void store_state(const struct recurrence *problem, const struct chunk *chunk, const struct carry *carry, int64_t index,
                        float *matrix, float *total) {
    for (int64_t a = 0; matrix && a < problem->dim; a++)
        memcpy(matrix + (index * problem->dim + a) * problem->value_dim + chunk->value_begin,
               carry->matrix + a * chunk->value_padded, (size_t)chunk->value_count * sizeof(float));
    if (total && !chunk->value_begin) memcpy(total + index * problem->dim, carry->total, (size_t)problem->dim * sizeof(float));
}

/* The chunk from a token on; `given`: whether there is a state before the first token. */
INLINE void begin_chunk(const struct recurrence *problem, struct chunk *chunk, int64_t first, int given) {
    chunk->first = first, chunk->count = min_int(problem->tokens - first, BLOCK);
    chunk->rows = min_int(padded_dim(chunk->count), BLOCK), chunk->empty = !first && !given;
}

/* The key head and the value columns of a unit of work; the number of its part. */
INLINE int64_t begin_unit(const struct recurrence *problem, struct chunk *chunk, int64_t unit) {
    int64_t part = unit % problem->parts, key_heads = problem->heads / problem->group;
    int64_t pairs = (problem->value_dim + PAIR - 1) / PAIR;
    chunk->key_head = unit / problem->parts % key_heads, chunk->batch = unit / problem->parts / key_heads;
    chunk->value_begin = min_int(pairs * part / problem->parts * PAIR, problem->value_dim);
    chunk->value_count = min_int(pairs * (part + 1) / problem->parts * PAIR, problem->value_dim) - chunk->value_begin;
    chunk->value_padded = padded_dim(chunk->value_count);
    return part;
}

#endif
