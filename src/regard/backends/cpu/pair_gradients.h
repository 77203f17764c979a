/* The gradients of attention to listed keys where each query of each head has a list of its own: in the order of the keys,
 * for a tile of queries after another. */
#ifndef REGARD_PAIR_GRADIENTS_H
#define REGARD_PAIR_GRADIENTS_H

#include "pairs_by_key.h"

/* The memory of a thread. Each row of a tile has its query, what comes from above and the gradient of the query, padded,
 * log-sum-exp and delta, one after another. Of some pairs: weights, and slopes of the scores. */
struct pair_gradients {
    struct pair_scratch pairs;
    float *query, *above, *grad_query, *lse, *delta, *weights, *slopes;
};

INLINE int64_t pair_gradients(const struct gathered *problem, char *memory, struct pair_gradients *scratch) {
    const int64_t dim = round_up_to_lanes(problem->dim), value_dim = round_up_to_lanes(problem->value_dim);
    const int64_t numbers = 2 * dim + value_dim + LANES;
    int64_t bytes = pair_scratch(problem, memory, &scratch->pairs);
    scratch->pairs.row_numbers = numbers;
    MEMORY_OF(query, float, rows_of_tile(problem) * numbers);
    scratch->above = scratch->query + dim;
    scratch->grad_query = scratch->above + value_dim;
    scratch->lse = scratch->grad_query + dim;
    scratch->delta = scratch->lse + 1;
    MEMORY_OF(weights, float, PAIRS_AT_ONCE + LANES);
    MEMORY_OF(slopes, float, PAIRS_AT_ONCE + LANES);
    return bytes;
}

INLINE char *new_pair_gradients(const struct gathered *problem, struct pair_gradients *scratch) {
    const int64_t bytes = pair_gradients(problem, 0, scratch);
    char *memory = aligned_memory(bytes);
    if (!memory) return 0;
    memset(memory, 0, (size_t)bytes);
    pair_gradients(problem, memory, scratch);
    return memory;
}

/* sum[i] += rows[row[i]] . keys[key[i]] over some vectors of columns, from `column` on. whole: all these columns exist. */
INLINE void add_pair_products(lanes *sum, const float *rows, const int32_t *row, const void *keys, const int32_t *key,
                              int64_t stride, int64_t column, int64_t dim, const int vectors, const int whole,
                              const int dtype) {
    FOR_ALL_LANES for (int i = 0; i < LANES; i++) {
        const float *own = rows + row[i] + column;
        const void *other = row_at(keys, key[i], stride, dtype);
        UNROLL for (int v = 0; v < vectors; v++) sum[i] +=
            load(own + v * LANES) * load_entries(other, column + v * LANES, dim, dtype, whole);
    }
}

/* into[t] = rows[row[t]] . keys[key[t]], for whole vectors of pairs. */
INLINE void pair_products(const struct pairs *pairs, const float *rows, const void *keys, int64_t stride, int64_t dim,
                          float *into, const int dtype) {
    const int32_t *row = pairs->row, *key = pairs->key;
    const int64_t count = pairs->count;
    for (int64_t t = 0; t < count; t += LANES) {
        lanes sum[LANES] = {{0}};
        int64_t column = 0;
        for (; column + PART_VECTORS * LANES <= dim; column += PART_VECTORS * LANES)
            add_pair_products(sum, rows, row + t, keys, key + t, stride, column, dim, PART_VECTORS, 1, dtype);
        for (; column < dim; column += LANES)
            add_pair_products(sum, rows, row + t, keys, key + t, stride, column, dim, 1, 0, dtype);
        store(into + t, sum_vectors(sum));
    }
}

/* The same, with code of its own for the usual dim. */
INLINE void usual_pair_products(const struct pairs *pairs, const float *rows, const void *keys, int64_t stride, int64_t dim,
                                float *into, const int dtype) {
    if (dim == USUAL_DIM)
        pair_products(pairs, rows, keys, stride, USUAL_DIM, into, dtype);
    else
        pair_products(pairs, rows, keys, stride, dim, into, dtype);
}

INLINE lanes of_rows(const float *numbers, const int32_t *row) {
    float own[LANES];
    UNROLL for (int i = 0; i < LANES; i++) own[i] = numbers[row[i]];
    return load(own);
}

/* The place of a pair in what is (batch, head, query, length * columns), by the strides of batch and head. */
INLINE int64_t place_of(const struct gathered *problem, const struct pair_scratch *scratch, const struct tile *tile,
                        const struct pairs *pairs, int64_t t, int64_t batch, int64_t head) {
    return tile->batch * batch + tile->head * head + pairs->place[t] +
           (tile->first + pairs->row[t] / scratch->row_numbers) * problem->length * problem->columns;
}

/* What a tensor with such strides has for the pairs from `t` on. */
INLINE lanes at_places(const struct gathered *problem, const struct pair_scratch *scratch, const struct tile *tile,
                       const struct pairs *pairs, int64_t t, const float *tensor, int64_t batch, int64_t head) {
    float own[LANES] = {0};
    for (int64_t i = 0; i < LANES && t + i < pairs->count; i++)
        own[i] = tensor[place_of(problem, scratch, tile, pairs, t + i, batch, head)];
    return load(own);
}

/* Weights from products of queries and keys; slopes of the scores from those of values and what comes from above. */
INLINE void slopes_of_pairs(const struct gathered *problem, struct pair_gradients *scratch, const struct tile *tile,
                            const struct pairs *pairs) {
    const int64_t numbers = problem->length * problem->columns * problem->queries;
    const struct pair_scratch *own = &scratch->pairs;
    for (int64_t t = 0; t < pairs->count; t += LANES) {
        lanes score = load(scratch->weights + t) * problem->scale, slope = load(scratch->slopes + t);
        lanes bend = broadcast(problem->scale), kept = broadcast(1.0f);
        if (problem->softcap > 0.0f) {
            const lanes bent = tanh_lanes(score / problem->softcap);
            score = problem->softcap * bent, bend = bend * (1.0f - bent * bent);
        }
        if (problem->added)
            score += at_places(problem, own, tile, pairs, t, problem->added, problem->added_batch, problem->added_head);
        if (problem->factors)
            kept = at_places(problem, own, tile, pairs, t, problem->factors, problem->factor_batch, problem->factor_head);
        const lanes weight = exp_or_zero(score - of_rows(scratch->lse, pairs->row + t));
        slope = weight * (slope * kept - of_rows(scratch->delta, pairs->row + t));
        if (problem->grad_added)
            for (int64_t i = 0; i < LANES && t + i < pairs->count; i++)
                problem->grad_added[place_of(problem, own, tile, pairs, t + i, problem->heads * numbers, numbers)] =
                    slope[i];
        store(scratch->weights + t, weight * kept);
        store(scratch->slopes + t, slope * bend);
    }
}

/* Some vectors of columns of keys or values, from `column` on: what a tile adds to, and from. whole: all of them exist. */
struct columns {
    int64_t column, dim;
    int vectors, whole, dtype;
};

/* Of each key target[key] += slope row, and grad_rows[row] += slope key, for all its rows. */
INLINE void add_key_columns(const struct pairs *pairs, const float *slopes, const float *rows, float *grad_rows,
                            const void *keys, int64_t key_stride, float *target, int64_t stride,
                            const struct columns own) {
    const int32_t *key = pairs->key, *row = pairs->row;
    const int64_t count = pairs->count;
    for (int64_t t = 0; t < count;) {
        const int32_t number = key[t];
        const void *other = row_at(keys, number, key_stride, own.dtype);
        float *to = target + number * stride + own.column;
        lanes entry[PART_VECTORS], sum[PART_VECTORS];
        UNROLL for (int v = 0; v < own.vectors; v++) {
            entry[v] = load_entries(other, own.column + v * LANES, own.dim, own.dtype, own.whole);
            sum[v] = load(to + v * LANES);
        }
        do {
            const lanes slope = broadcast(slopes[t]);
            const float *from = rows + row[t] + own.column;
            float *gradient = grad_rows + row[t] + own.column;
            UNROLL for (int v = 0; v < own.vectors; v++) {
                sum[v] += slope * load(from + v * LANES);
                store(gradient + v * LANES, load(gradient + v * LANES) + slope * entry[v]);
            }
        } while (++t < count && key[t] == number);
        UNROLL for (int v = 0; v < own.vectors; v++) store(to + v * LANES, sum[v]);
    }
}

/* Of each value target[key] += weight row, for all its rows. */
INLINE void add_value_columns(const struct pairs *pairs, const float *weights, const float *rows, float *target,
                              int64_t stride, const struct columns own) {
    const int32_t *key = pairs->key, *row = pairs->row;
    const int64_t count = pairs->count;
    for (int64_t t = 0; t < count;) {
        const int32_t number = key[t];
        float *to = target + number * stride + own.column;
        lanes sum[PART_VECTORS];
        UNROLL for (int v = 0; v < own.vectors; v++) sum[v] = load(to + v * LANES);
        do {
            const lanes weight = broadcast(weights[t]);
            const float *from = rows + row[t] + own.column;
            UNROLL for (int v = 0; v < own.vectors; v++) sum[v] += weight * load(from + v * LANES);
        } while (++t < count && key[t] == number);
        UNROLL for (int v = 0; v < own.vectors; v++) store(to + v * LANES, sum[v]);
    }
}

INLINE void add_pair_gradients(const struct gathered *problem, struct pair_gradients *scratch, const struct tile *tile,
                               const struct pairs *pairs, const int dtype) {
    const int64_t key_head = tile->head / (problem->heads / problem->key_heads), batch = tile->batch,
                  dim = problem->dim, value_dim = problem->value_dim, part = PART_VECTORS * LANES,
                  first_key = (batch * problem->key_heads + key_head) * problem->keys;
    const void *key = row_at(problem->key, 1, batch * problem->key_batch + key_head * problem->key_head, dtype),
               *value = row_at(problem->value, 1, batch * problem->value_batch + key_head * problem->value_head, dtype);
    float *grad_key = problem->grad_key + first_key * problem->grad_row,
          *grad_value = problem->grad_value + first_key * problem->grad_value_row;
    usual_pair_products(pairs, scratch->query, key, problem->key_row, dim, scratch->weights, dtype);
    usual_pair_products(pairs, scratch->above, value, problem->value_row, value_dim, scratch->slopes, dtype);
    slopes_of_pairs(problem, scratch, tile, pairs);
    int64_t column = 0;
    for (; column + part <= dim; column += part)
        add_key_columns(pairs, scratch->slopes, scratch->query, scratch->grad_query, key, problem->key_row, grad_key,
                        problem->grad_row, (struct columns){column, dim, PART_VECTORS, 1, dtype});
    for (; column < dim; column += LANES)
        add_key_columns(pairs, scratch->slopes, scratch->query, scratch->grad_query, key, problem->key_row, grad_key,
                        problem->grad_row, (struct columns){column, dim, 1, 0, dtype});
    for (column = 0; column + part <= value_dim; column += part)
        add_value_columns(pairs, scratch->weights, scratch->above, grad_value, problem->grad_value_row,
                          (struct columns){column, value_dim, PART_VECTORS, 1, FLOAT32});
    for (; column < value_dim; column += LANES)
        add_value_columns(pairs, scratch->weights, scratch->above, grad_value, problem->grad_value_row,
                          (struct columns){column, value_dim, 1, 0, FLOAT32});
}

#define OF_PAIRS (const struct gathered *problem, void *scratch, const struct tile *tile, const struct pairs *pairs)
TABLE_BY_DTYPE(gradients_of_pairs, OF_PAIRS, add_pair_gradients(problem, scratch, tile, pairs, DTYPE))

/* Reads the rows of a tile as float32, with zeros as their gradients. */
INLINE void read_rows(const struct gathered *problem, struct pair_gradients *scratch, const struct tile *tile) {
    const int64_t value_dim = problem->value_dim, head = (tile->batch * problem->heads + tile->head) * problem->queries;
    for (int64_t row = 0; row < tile->rows; row++) {
        const struct row_place place = {tile->batch, tile->head, tile->first + row};
        const int64_t at = row * scratch->pairs.row_numbers;
        const struct piece_rows own = {&place, 0, 1, (int)problem->dtype};
        widen_rows(problem->query, problem->query_batch, problem->query_head, problem->query_row, problem->dim, &own,
                   scratch->query + at, (int)problem->dtype);
        widen_rows(problem->grad_output, problem->heads * problem->queries * value_dim, problem->queries * value_dim,
                   value_dim, value_dim, &own, scratch->above + at, FLOAT32);
        memset(scratch->grad_query + at, 0, (size_t)round_up_to_lanes(problem->dim) * sizeof(float));
        scratch->lse[at] = problem->lse[head + place.query];
        scratch->delta[at] = problem->delta[head + place.query];
    }
}

/* The gradients of a head, of which each query has a list. */
APART void pair_gradients_of_head(const struct gathered *problem, struct pair_gradients *scratch, int64_t batch,
                                  int64_t head) {
    const int64_t padded = round_up_to_lanes(problem->dim);
    struct tile tile = {batch, head, 0, rows_of_tile(problem)};
    for (; tile.first < problem->queries; tile.first += tile.rows) {
        tile.rows = least(tile.rows, problem->queries - tile.first);
        read_rows(problem, scratch, &tile);
        work_on_tile(problem, &scratch->pairs, &tile, scratch, gradients_of_pairs[problem->dtype]);
        float *gradient = problem->grad_query +
                          ((batch * problem->heads + head) * problem->queries + tile.first) * problem->grad_row;
        for (int64_t row = 0; row < tile.rows; row++, gradient += problem->grad_row)
            memcpy(gradient, scratch->grad_query + row * scratch->pairs.row_numbers, (size_t)padded * sizeof(float));
    }
}

#endif
