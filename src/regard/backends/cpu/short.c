/* Attention over few keys: all scores of some rows are computed at once, so that the softmax needs one pass, and no
 * gradient is summed in memory by several tiles. Keys and values of a head stay in the core's cache.
 *
 * The gradients of softmax are those of Dao et al. 2022 (arXiv 2205.14135), appendix B.2. Without an output, delta(i) is the sum
 * over j of weight(i, j) grad_weight(i, j), which equals that over output times grad_output where the log-sum-exp is
 * that of these keys alone. */
#include "landmarks.h"
#include "short_rows.h"
#include "transpose.h"

/* So many rows times two vectors of columns are summed at once; as many sums as there are registers for. */
enum { MOST_AT_ONCE = AT_ONCE };

/* For at most so many rows, keys are multiplied as they are, as it would take longer to bring them into columns; for half
 * as many where the terms of a row are at most one vector. */
enum { FEW_ROWS = LANES == 16 ? 4 : 2 };

/* Backward: the weights of a block of rows, in numbers, and their gradients; both stay in the core's cache. */
enum { BLOCK_NUMBERS = 1 << 14 };

/* Calls with the constant COUNT for 1 to MOST_AT_ONCE rows, so that each number of rows has code of its own. */
#define ONE_COUNT(n, ...)      \
    case n: {                  \
        enum { COUNT = n };    \
        __VA_ARGS__;           \
        break;                 \
    }
#if defined(__AVX512F__)
#define BY_COUNT(count, ...)                                                            \
    switch (count) {                                                                    \
        ONE_COUNT(1, __VA_ARGS__) ONE_COUNT(2, __VA_ARGS__) ONE_COUNT(3, __VA_ARGS__) ONE_COUNT(4, __VA_ARGS__) \
        ONE_COUNT(5, __VA_ARGS__) ONE_COUNT(6, __VA_ARGS__) ONE_COUNT(7, __VA_ARGS__) ONE_COUNT(8, __VA_ARGS__) \
    }
#else
#define BY_COUNT(count, ...)                                                            \
    switch (count) {                                                                    \
        ONE_COUNT(1, __VA_ARGS__) ONE_COUNT(2, __VA_ARGS__) ONE_COUNT(3, __VA_ARGS__) ONE_COUNT(4, __VA_ARGS__) \
    }
#endif

/* Rows of floats: those of a tensor, or a copy. */
struct floats {
    const float *data;
    int64_t stride;
};

/* The keys of all heads, or their values, as right factors, whose products are multiplied by a number. */
struct right_factor {
    const struct rows *rows;
    int64_t dim;
    const float *factor; /* the number, for each row on the left */
    float *columns;      /* of the key head [terms][width], in floats times the number; unused for few rows */
};

/* What a thread computes at once: a part of the rows of a key head's queries in one batch. A key head below 0: none. */
struct unit {
    int64_t batch, end_batch, key_head, row_part; /* end_batch: after the last batch that the thread took with it */
    int64_t row, end_row;
    int64_t number;  /* of the unit among those of its key head */
    int64_t columns; /* no row of it attends to a key from here on */
};

/* The state of a thread. */
struct short_state {
    struct unit unit;
    int64_t width; /* the columns, whole vectors of them */
    int few_rows;                   /* whether the key head has at most FEW_ROWS */
    struct right_factor key, value; /* keys times score_scale; values backward */
    float *packed[6];                   /* copies of keys, values, queries and grad_output, where one is needed, and
                                           backward of the latter two as terms of rows */
    struct floats keys, values;
    float *weights, *grad_scores; /* [rows of a block][width] */
    float *slopes;                /* backward: [MOST_AT_ONCE][width], of the softcap */
    float *score_terms;           /* [MOST_AT_ONCE][width]: gradients of scores in pairs of neighbours */
    float *result;                /* [MOST_AT_ONCE][padded dim]: rows to be written */
    float *grad_key, *grad_value; /* [columns][padded dim] */
    int64_t block;                /* backward: rows of a block */
    struct key_span rows[LONGEST / LANES]; /* backward: of a block the rows that attend to a vector of columns */
    float score_factor; /* of scores as they are kept */
    float cap;          /* the softcap times that; 0: none */
    float scale[MOST_AT_ONCE], score_scale[MOST_AT_ONCE]; /* the same number for each row; the latter times that, or
                                                             over the softcap */
    lanes check, largest; /* largest: bounds of the magnitudes of log-sum-exps, per lane */
    int overflow;         /* whether a row has a bias that is finite, and not times the factor */
};

/* A product of `terms` columns of some rows on the left, term (row, k) at left[row * left_row + k * left_step], with as
 * many rows on the right, over whole vectors of `columns`. Terms are floats or, `paired`, pairs of bfloat16. */
struct product {
    const float *left;
    int64_t left_row, left_step;
    const float *right;
    int64_t right_row, terms, columns;
    int paired;
};

/* Two vectors of columns, or one. */
INLINE void multiply_vectors(const struct product *product, int64_t a, float *target, int64_t target_row,
                             const float *factor, int add, lanes *check, const int vectors, const int count,
                             const int paired) {
    lanes sum[MOST_AT_ONCE][2] = {{{0}}};
    const float *entry = product->left, *right = product->right + a;
    for (int64_t k = 0; k < product->terms; k++, entry += product->left_step, right += product->right_row) {
        lanes vector[2];
        UNROLL for (int v = 0; v < vectors; v++) vector[v] = load(right + v * LANES);
        UNROLL for (int r = 0; r < count; r++) {
            lanes own = broadcast_bits(entry + r * product->left_row);
            UNROLL for (int v = 0; v < vectors; v++)
                sum[r][v] = paired ? add_pairs(sum[r][v], own, vector[v]) : sum[r][v] + own * vector[v];
        }
    }
    UNROLL for (int r = 0; r < count; r++)
        UNROLL for (int v = 0; v < vectors; v++) {
            float *to = target + r * target_row + a + v * LANES;
            lanes own = sum[r][v] * factor[r];
            if (add) own += load(to);
            check_finite(check, own);
            store(to, own);
        }
}

INLINE void multiply_rows(const struct product *product, float *target, int64_t target_row, const float *factor,
                          int add, lanes *check, const int count, const int paired) {
    int64_t a = 0;
    for (; a + PAIR <= product->columns; a += PAIR)
        multiply_vectors(product, a, target, target_row, factor, add, check, 2, count, paired);
    if (a < product->columns)
        multiply_vectors(product, a, target, target_row, factor, add, check, 1, count, paired);
}

/* target = the product, each row times its factor; add: to what is there. The check takes note of what is not finite. */
static void multiply(const struct product *product, float *target, int64_t target_row, const float *factor, int add,
                     lanes *check, int64_t count) {
    lanes found = *check;
    if (PAIRS && product->paired)
        BY_COUNT(count, multiply_rows(product, target, target_row, factor, add, &found, COUNT, 1))
    else
        BY_COUNT(count, multiply_rows(product, target, target_row, factor, add, &found, COUNT, 0))
    *check = found;
}

static const float ONES[MOST_AT_ONCE] = {1, 1, 1, 1,
#if defined(__AVX512F__)
                                         1, 1, 1, 1,
#endif
};

/* The products of a row of terms with some rows of entries, 0 beyond them. */
INLINE lanes row_products(const float *own, const void *rows, int64_t stride, int64_t count, int64_t dim,
                          const int dtype) {
    const int paired = in_pairs(dtype);
    int64_t terms = term_count(dim, paired);
    if (4 * count > LANES) { /* the last row stands for those that are missing */
        lanes sum[LANES] = {{0}};
        for (int64_t a = 0; a < terms; a += LANES) {
            lanes entry = load_partial(own + a, terms - a);
            FOR_ALL_LANES for (int i = 0; i < LANES; i++) {
                const void *row = row_at(rows, i < count ? i : count - 1, stride, dtype);
                lanes other = load_terms(row, a, dim, 1.0f, dtype, 0, paired);
                sum[i] = paired ? add_pairs(sum[i], entry, other) : sum[i] + entry * other;
            }
        }
        return sum_vectors(sum);
    }
    float products[LANES] = {0};
    for (int64_t i = 0; i < count; i++) {
        lanes sum = {0};
        for (int64_t a = 0; a < terms; a += LANES) {
            lanes entry = load_partial(own + a, terms - a);
            lanes other = load_terms(row_at(rows, i, stride, dtype), a, dim, 1.0f, dtype, 0, paired);
            sum = paired ? add_pairs(sum, entry, other) : sum + entry * other;
        }
        products[i] = sum_lanes(sum);
    }
    return load(products);
}

INLINE void multiply_as_they_are(struct short_state *state, const struct floats left, const struct right_factor *right,
                                 const struct key_span span, float *target, int64_t count, const int dtype) {
    for (int64_t r = 0; r < count; r++)
        for (int64_t j = span.first; j < span.last; j += LANES) {
            const void *rows = head_rows(right->rows, state->unit.batch, state->unit.key_head, j, dtype);
            lanes products = row_products(left.data + r * left.stride, rows, right->rows->row,
                                          min_int(span.last - j, LANES), right->dim, dtype);
            products *= right->factor[r];
            check_finite(&state->check, products);
            store(target + r * state->width + j, products);
        }
}

/* The products of some rows of terms with the keys of a span, or with their values: target[row][column]. */
static void multiply_keys(struct short_state *state, const struct floats left, const struct right_factor *right,
                          const struct key_span span, float *target, int64_t count, int64_t dtype) {
    if (state->few_rows) {
        BY_DTYPE(dtype, multiply_as_they_are(state, left, right, span, target, count, DTYPE));
        return;
    }
    const int paired = in_pairs((int)dtype);
    struct product product = {left.data, left.stride, 1, right->columns + span.first, state->width,
                              term_count(right->dim, paired), round_up_to_lanes(span.last - span.first), paired};
    multiply(&product, target + span.first, state->width, paired ? right->factor : ONES, 0, &state->check, count);
}

/* Brings the keys of a head, or its values, into columns, unless few rows attend to them. */
INLINE void lay_out(const struct short_state *state, const struct right_factor *right, int64_t columns,
                    const int dtype) {
    const void *rows = head_rows(right->rows, state->unit.batch, state->unit.key_head, 0, dtype);
    if (state->few_rows) return;
    pack_columns_up_to(round_up_to_lanes(columns), rows, right->rows->row, columns, right->dim, right->factor[0],
                       right->columns, state->width, dtype, in_pairs(dtype));
}

/* Some rows of a head as floats in whole vectors: where they are, or a copy. */
INLINE struct floats as_floats(const struct rows *rows, int64_t batch, int64_t head, int64_t first, int64_t count,
                               int64_t dim, float *copy, const int dtype) {
    if (dtype == FLOAT32 && dim % LANES == 0)
        return (struct floats){head_rows(rows, batch, head, first, dtype), rows->row};
    for (int64_t i = 0; i < count; i++) {
        const void *row = head_rows(rows, batch, head, first + i, dtype);
        for (int64_t a = 0; a < dim; a += LANES)
            store(copy + i * round_up_to_lanes(dim) + a, load_entries(row, a, dim, dtype, 0));
    }
    return (struct floats){copy, round_up_to_lanes(dim)};
}

/* Some rows of a head as terms of their entries: where they are, or a copy; of floats likewise. */
INLINE struct floats as_terms(const struct rows *rows, int64_t batch, int64_t head, int64_t first, int64_t count,
                              int64_t dim, float *copy, const int dtype, const int paired) {
    if (!paired) return as_floats(rows, batch, head, first, count, dim, copy, dtype);
    if (dim % 2 == 0 && rows->row % 2 == 0) return (struct floats){head_rows(rows, batch, head, first, dtype), rows->row / 2};
    int64_t padded = round_up_to_lanes(term_count(dim, 1));
    for (int64_t i = 0; i < count; i++)
        for (int64_t a = 0; a < padded; a += LANES)
            store(copy + i * padded + a,
                  load_terms(head_rows(rows, batch, head, first + i, dtype), a, dim, 1.0f, dtype, 0, 1));
    return (struct floats){copy, padded};
}

/* Some rows of a head as terms of sums over rows, in whole vectors; of floats where they are, or a copy. */
INLINE struct floats as_terms_of_rows(const struct rows *rows, int64_t batch, int64_t head, int64_t first,
                                      int64_t count, int64_t dim, float *copy, const int dtype, const int paired) {
    if (!paired) return as_floats(rows, batch, head, first, count, dim, copy, dtype);
    int64_t padded = round_up_to_lanes(dim);
    const void *own = head_rows(rows, batch, head, first, dtype);
    for (int64_t i = 0; i < term_count(count, 1); i++)
        for (int64_t a = 0; a < padded; a += LANES)
            store(copy + i * padded + a, pair_rows(own, i, rows->row, count, a, dim, 0));
    return (struct floats){copy, padded};
}

/* Rows of floats that are written: those of a tensor, or a copy that `finish_rows` writes into it. */
struct written {
    float *data;
    int64_t stride;
    int is_copy;
};

INLINE struct written rows_to_write(const struct rows *rows, int64_t batch, int64_t head, int64_t first, int64_t dim,
                                    float *copy, const int dtype) {
    if (dtype == FLOAT32 && dim % LANES == 0)
        return (struct written){(float *)head_rows(rows, batch, head, first, dtype), rows->row, 0};
    return (struct written){copy, round_up_to_lanes(dim), 1};
}

INLINE void finish_rows(const struct written *from, const struct rows *rows, int64_t batch, int64_t head,
                        int64_t first, int64_t count, int64_t dim, const int dtype) {
    for (int64_t i = 0; from->is_copy && i < count; i++)
        for (int64_t a = 0; a < dim; a += LANES)
            store_entries((void *)head_rows(rows, batch, head, first + i, dtype), a, dim, dtype,
                          load(from->data + i * from->stride + a));
}

INLINE struct key_span row_span(const struct short_attention *problem, int64_t batch, int64_t row) {
    if (!problem->spans) return (struct key_span){0, problem->columns};
    const int32_t *span = problem->spans + batch * problem->spans_batch + 2 * row;
    return (struct key_span){span[0], span[1]};
}

/* The spans of some rows, and the smallest that has them all; its first column begins a vector. */
INLINE struct key_span group_span(const struct short_attention *problem, int64_t batch, int64_t row,
                                  struct key_span *spans, int64_t count) {
    struct key_span all = {problem->columns, 0};
    for (int64_t r = 0; r < count; r++) {
        spans[r] = row_span(problem, batch, row + r);
        if (spans[r].first >= spans[r].last) continue;
        all.first = min_int(all.first, spans[r].first), all.last = spans[r].last > all.last ? spans[r].last : all.last;
    }
    all.first = problem->landmark_size ? 0 : all.first / LANES * LANES; /* of landmarks, whole blocks */
    return all.first < all.last ? all : (struct key_span){0, 0};
}

/* Products over the softcap become scores times their factor; slopes: null, or those of the softcap. */
static void cap_score_rows(const struct short_state *state, float *scores, float *slopes, const struct key_span all,
                           int64_t count) {
    for (int64_t r = 0; r < count; r++)
        for (int64_t j = all.first; j < all.last; j += LANES) {
            float *score = scores + r * state->width + j;
            lanes tangents = tanh_lanes(load(score));
            if (slopes) store(slopes + r * state->width + j, 1.0f - tangents * tangents);
            store(score, tangents * state->cap);
        }
}

/* Gradients of scores become those of the scores before the softcap. */
static void return_through_cap(const struct short_state *state, float *grad_scores, const struct key_span all,
                               int64_t count) {
    for (int64_t r = 0; r < count; r++)
        for (int64_t j = all.first; j < all.last; j += LANES) {
            float *at = grad_scores + r * state->width + j;
            store(at, load(at) * load(state->slopes + r * state->width + j));
        }
}

/* Products become scores times their factor: with the bias, and -infinity where `keep` has no pair. */
INLINE void finish_score_rows(const struct short_attention *problem, const struct short_state *state, int64_t head,
                              int64_t row, float *scores, const struct key_span all, int64_t count, const int biased,
                              const int masked) {
    const struct unit *unit = &state->unit;
    int64_t width = state->width;
    for (int64_t r = 0; r < count; r++) {
        const float *bias = biased ? row_number(&problem->bias, unit->batch, head, row + r) : 0;
        const struct rows *keep = &problem->keep;
        const uint8_t *exist = masked ? (const uint8_t *)keep->data + unit->batch * keep->batch + head * keep->head +
                                            (row + r) * keep->row
                                      : 0;
        for (int64_t j = all.first; j < all.last; j += LANES) {
            int64_t left = problem->columns - j;
            lanes score = load(scores + r * width + j);
            if (biased) score += load_partial(bias + j, left) * state->score_factor;
            if (masked) {
                bits pair = pairs_exist(exist + j, left);
                score = (lanes)((pair & (bits)score) | (~pair & (bits)broadcast(-INFINITY)));
            }
            store(scores + r * width + j, score);
        }
    }
}

static void finish_scores(const struct short_attention *problem, const struct short_state *state, int64_t head,
                          int64_t row, float *scores, float *slopes, const struct key_span all, int64_t count) {
    if (state->cap != 0.0f) cap_score_rows(state, scores, slopes, all, count);
    if (problem->bias.data && problem->keep.data)
        finish_score_rows(problem, state, head, row, scores, all, count, 1, 1);
    else if (problem->bias.data)
        finish_score_rows(problem, state, head, row, scores, all, count, 1, 0);
    else if (problem->keep.data)
        finish_score_rows(problem, state, head, row, scores, all, count, 0, 1);
}

/* The columns that are computed at once of a row's blocks. */
INLINE int64_t columns_of_blocks(const struct short_attention *problem) {
    if (problem->landmark_size > BLOCK) return problem->landmark_size;
    return BLOCK / problem->landmark_size * problem->landmark_size;
}

/* Scores of some rows become those of landmark attention. */
static void weigh_score_rows(const struct short_attention *problem, int64_t row, float *scores, int64_t row_width,
                             const struct key_span all, const struct key_span *spans, int64_t count) {
    int64_t size = problem->landmark_size, width = columns_of_blocks(problem);
    for (int64_t r = 0; r < count; r++, scores += row_width) {
        int64_t own = block_of(row + r + problem->landmark_shift, size);
        for (int64_t j = all.first; j < all.last; j += LANES)
            store(scores + j, select_span(spans[r], j, load(scores + j), -INFINITY));
        for (int64_t j = all.first; j < all.last; j += width)
            weigh_blocks(size, own - j, min_int(all.last - j, width), scores + j);
    }
}

/* Gradients of those scores become those of the scores before. */
static void return_score_rows(const struct short_attention *problem, int64_t row, const float *weights,
                              float *grad_scores, int64_t row_width, const struct key_span all, int64_t count) {
    int64_t size = problem->landmark_size, width = columns_of_blocks(problem);
    for (int64_t r = 0; r < count; r++, weights += row_width, grad_scores += row_width) {
        int64_t own = block_of(row + r + problem->landmark_shift, size);
        for (int64_t j = all.first; j < all.last; j += width)
            return_to_landmarks(size, own - j, min_int(all.last - j, width), weights + j, grad_scores + j);
    }
}

/* Adds the gradients of some rows of scores to that of the bias. */
static void add_bias_gradient(const struct short_attention *problem, const struct unit *unit, int64_t head, int64_t row,
                              const float *grad_scores, int64_t width, const struct key_span all, int64_t count) {
    for (int64_t r = 0; r < count; r++) {
        float *target = row_number(&problem->grad_bias, unit->number, head, row + r);
        for (int64_t j = all.first; j < all.last; j += LANES) {
            int64_t left = problem->columns - j;
            store_partial(target + j, load_partial(target + j, left) + load(grad_scores + r * width + j), left);
        }
    }
}

/* Forward: the scores of some rows become terms of exp(score - maximum), 0 outside of their spans; the maximum and the
 * sum. */
INLINE void softmax_count(float *scores, int64_t width, const struct key_span all, const struct key_span *spans,
                          float *maximum, float *total, const int count, const int paired) {
    lanes largest[MOST_AT_ONCE], sum[MOST_AT_ONCE];
    UNROLL for (int r = 0; r < count; r++) largest[r] = broadcast(-INFINITY), sum[r] = broadcast(0.0f);
    for (int64_t j = all.first; j < all.last; j += LANES)
        UNROLL for (int r = 0; r < count; r++)
            largest[r] = max_lanes(largest[r], select_span(spans[r], j, load(scores + r * width + j), -INFINITY));
    for (int r = 0; r < count; r++) {
        maximum[r] = max_of_lanes(largest[r]);
        if (maximum[r] == -INFINITY) maximum[r] = 0.0f; /* no keys, or none but those of weight 0 */
    }
    for (int64_t j = all.first; j < all.last; j += LANES)
        UNROLL for (int r = 0; r < count; r++) {
            lanes weight = exp2_lanes(load(scores + r * width + j) - maximum[r]);
            weight = select_span(spans[r], j, weight, 0.0f);
            sum[r] += weight;
            store_terms(scores + r * width, j, weight, paired);
        }
    for (int r = 0; r < count; r++) total[r] = sum_lanes(sum[r]);
}

static void softmax_rows(float *scores, int64_t width, const struct key_span all, const struct key_span *spans,
                         float *maximum, float *total, int64_t count, int paired) {
    if (PAIRS && paired)
        BY_COUNT(count, softmax_count(scores, width, all, spans, maximum, total, COUNT, 1))
    else
        BY_COUNT(count, softmax_count(scores, width, all, spans, maximum, total, COUNT, 0))
}

/* The same of other normalizers, with thresholds in place of maxima. */
static void normalize_rows(const struct short_attention *problem, float *scores, int64_t width,
                           const struct key_span all, const struct key_span *spans, float *number, float *total,
                           int64_t count, int paired) {
    if (problem->normalizer == SOFTMAX) {
        softmax_rows(scores, width, all, spans, number, total, count, paired);
        return;
    }
    for (int64_t r = 0; r < count; r++) {
        struct score_row row = {scores + r * width, all, spans[r]};
        if (PAIRS && paired)
            total[r] = normalize_row(problem, &row, number + r, 1);
        else
            total[r] = normalize_row(problem, &row, number + r, 0);
    }
}

/* Takes note of how large log-sum-exps may be: of scores times log2(e) the maximum, and log2(LONGEST) more. */
INLINE void note_maximum(const struct short_attention *problem, struct short_state *state, const float *maximum,
                         int64_t count) {
    if (problem->normalizer != SOFTMAX) return; /* whose weights follow from no log-sum-exp */
    for (int64_t r = 0; r < count; r += LANES) {
        lanes bound = absolute(load_partial(maximum + r, count - r)) + (float)LOG2_LONGEST;
        state->largest = max_lanes(state->largest, LN_2 * bound);
    }
}

/* Takes note of rows without a sum that have a finite bias all the same: the smallest number, as what stands for a mask,
 * is -infinity times log2(e), and the largest is infinity. Rows are numbered among those of all heads. */
static void note_overflow(const struct short_attention *problem, struct short_state *state, int64_t number,
                          const struct key_span *spans, const float *total, int64_t count) {
    int64_t row = number % problem->rows, head = number / problem->rows % problem->heads;
    for (int64_t r = 0; problem->bias.data && r < count; r++) {
        if (total[r] > 0.0f && total[r] < INFINITY) continue;
        const float *bias = row_number(&problem->bias, state->unit.batch, head, row + r);
        for (int64_t j = spans[r].first; j < spans[r].last; j++)
            if (bias[j] - bias[j] == 0.0f && bias[j] * state->score_factor - bias[j] * state->score_factor != 0.0f) state->overflow = 1;
    }
}

/* The share of a row's keys beside a sink, by which their weights over `total` are multiplied; maximum and total become
 * those of all scores. of_sink: gets the weight of the sink. */
INLINE float join_sink(float sink, float *maximum, float *total, float *of_sink) {
    float keys = *total == 0.0f ? -INFINITY : *maximum, most = sink > keys ? sink : keys;
    *of_sink = 0.0f;
    if (most == -INFINITY) return 0.0f; /* neither a key nor the sink has any weight */
    float own = *total * exp2_lanes(broadcast(keys - most))[0], other = exp2_lanes(broadcast(sink - most))[0];
    *maximum = most, *total = own + other, *of_sink = other / *total;
    return own / *total;
}

/* What the weights of a row of softmax, exp(score - maximum), are multiplied by. */
INLINE float softmax_share(const struct short_attention *problem, int64_t head, float *maximum, float *total,
                           float *of_sink) {
    float share = *total == 0.0f ? 0.0f : 1.0f / *total;
    if (!problem->sinks) return share;
    return share * join_sink(problem->sinks[head] * (float)LOG2_E, maximum, total, of_sink);
}

/* What the weights of a row are multiplied by. */
INLINE float row_share(const struct short_attention *problem, int64_t head, float *number, float *total) {
    float of_sink;
    if (problem->normalizer == SIGMOID || problem->normalizer == STICKS) return 1.0f;
    if (problem->normalizer == SOFTMAX) return softmax_share(problem, head, number, total, &of_sink);
    return *total == 0.0f ? 0.0f : 1.0f / *total;
}

static void forward_group(const struct short_attention *problem, struct short_state *state, int64_t head, int64_t row,
                          const struct floats query, const struct written *output, int64_t count, int paired) {
    struct key_span spans[MOST_AT_ONCE], all = group_span(problem, state->unit.batch, row, spans, count);
    int64_t value_dim = round_up_to_lanes(problem->value_dim), width = state->width, columns = all.last - all.first;
    float number[MOST_AT_ONCE] = {0}, total[MOST_AT_ONCE] = {0}, share[MOST_AT_ONCE];
    int64_t first = paired ? all.first / 2 : all.first; /* whole vectors before it */
    multiply_keys(state, query, &state->key, all, state->weights, count, problem->dtype);
    finish_scores(problem, state, head, row, state->weights, 0, all, count);
    if (problem->landmark_size) weigh_score_rows(problem, row, state->weights, width, all, spans, count);
    normalize_rows(problem, state->weights, width, all, spans, number, total, count, paired);
    int64_t first_row = (state->unit.batch * problem->heads + head) * problem->rows + row;
    note_overflow(problem, state, first_row, spans, total, count);
    for (int64_t r = 0; r < count; r++) share[r] = row_share(problem, head, number + r, total + r);
    struct product values = {state->weights + first, width, 1, state->values.data + first * state->values.stride,
                             state->values.stride, term_count(columns, paired), value_dim, paired};
    multiply(&values, output->data, output->stride, share, 0, &state->check, count);
    note_maximum(problem, state, number, count);
    if (!problem->lse) return;
    float *lse = problem->lse + first_row;
    int by_sum = problem->normalizer != SPARSEMAX && problem->normalizer != ENTMAX && problem->normalizer != STICKS;
    for (int64_t r = 0; r < count; r += LANES) {
        lanes sums = load_partial(total + r, count - r), numbers = load_partial(number + r, count - r);
        if (by_sum) numbers = log_lanes(sums) + LN_2 * numbers;
        bits empty = (sums == 0.0f) & (by_sum ? -1 : 0);
        store_partial(lse + r, (lanes)((empty & (bits)broadcast(-INFINITY)) | (~empty & (bits)numbers)), count - r);
    }
}

/* How many of the rows that are left go at once: groups of about one size. */
INLINE int64_t group_rows(int64_t rows) {
    int64_t groups = (rows + MOST_AT_ONCE - 1) / MOST_AT_ONCE;
    return (rows + groups - 1) / groups;
}

/* While some rows of a head are computed: the same share of what is computed next. */
INLINE void prefetch_part(const struct short_attention *problem, const struct unit *unit, const struct unit *next,
                          int64_t head, int64_t row, int64_t count, const int backward, const int dtype) {
    int last = head + 1 == (unit->key_head + 1) * problem->group;
    if (last && next->key_head < 0) return;
    int64_t batch = last ? next->batch : unit->batch, own = last ? next->key_head * problem->group : head + 1;
    int64_t first = last ? next->row + row - unit->row : row, rows = unit->end_row - unit->row;
    prefetch_rows(&problem->query, batch, own, first, count, problem->dim, dtype);
    if (backward) prefetch_rows(&problem->grad_output, batch, own, first, count, problem->value_dim, dtype);
    if (!last) return;
    int64_t begin = (row - unit->row) * next->columns / rows, end = (row + count - unit->row) * next->columns / rows;
    prefetch_rows(&problem->key, batch, next->key_head, begin, end - begin, problem->dim, dtype);
    prefetch_rows(&problem->value, batch, next->key_head, begin, end - begin, problem->value_dim, dtype);
}

/* Some rows of all query heads of a key head. */
INLINE void forward_unit(const struct short_attention *problem, struct short_state *state, const struct unit *next,
                         const int dtype) {
    const struct unit *unit = &state->unit;
    int64_t batch = unit->batch, key_head = unit->key_head, end = (key_head + 1) * problem->group;
    const int paired = in_pairs(dtype);
    lay_out(state, &state->key, unit->columns, dtype);
    state->values = as_terms_of_rows(&problem->value, batch, key_head, 0, unit->columns, problem->value_dim,
                                     state->packed[1], dtype, paired);
    for (int64_t head = key_head * problem->group; head < end; head++)
        for (int64_t row = unit->row, count; row < unit->end_row; row += count) {
            count = group_rows(unit->end_row - row);
            struct floats query =
                as_terms(&problem->query, batch, head, row, count, problem->dim, state->packed[2], dtype, paired);
            struct written output =
                rows_to_write(&problem->output, batch, head, row, problem->value_dim, state->result, dtype);
            forward_group(problem, state, head, row, query, &output, count, paired);
            finish_rows(&output, &problem->output, batch, head, row, count, problem->value_dim, dtype);
            prefetch_part(problem, unit, next, head, row, count, 0, dtype);
        }
}

/* Backward: scores become exp(score - log-sum-exp), 0 outside of their spans; a log-sum-exp of -infinity: no part. */
INLINE void weights_count(const float *lse, float *scores, int64_t width, const struct key_span all,
                          const struct key_span *spans, const int count) {
    float own[MOST_AT_ONCE], rest[MOST_AT_ONCE];
    for (int r = 0; r < count; r++) own[r] = in_base_2(lse[r] == -INFINITY ? INFINITY : lse[r], rest + r);
    for (int64_t j = all.first; j < all.last; j += LANES)
        UNROLL for (int r = 0; r < count; r++) {
            lanes score = load(scores + r * width + j);
            lanes weight = exp2_lanes(less_log_sum(score, broadcast(own[r]), broadcast(rest[r])));
            store(scores + r * width + j, select_span(spans[r], j, weight, 0.0f));
        }
}

/* Backward: weights times each row's share, and gradients of weights, become weights and gradients of scores, 0 outside
 * of the spans. delta: output times grad_output, or null. less: gets what is subtracted from gradients of weights. */
INLINE void gradient_count(const float *share, const float *delta, const float *grad_lse, float *weights,
                           float *grad_scores, float *less, int64_t width, const struct key_span all,
                           const int count) {
    lanes sum[MOST_AT_ONCE];
    for (int r = 0; r < count; r++) sum[r] = broadcast(0.0f);
    for (int64_t j = all.first; j < all.last; j += LANES)
        UNROLL for (int r = 0; r < count; r++) {
            lanes weight = load(weights + r * width + j) * share[r];
            sum[r] += weight * load(grad_scores + r * width + j);
            store(weights + r * width + j, weight);
        }
    for (int r = 0; r < count; r++)
        less[r] = (delta ? delta[r] : sum_lanes(sum[r])) - (grad_lse ? grad_lse[r] : 0.0f);
    for (int64_t j = all.first; j < all.last; j += LANES)
        UNROLL for (int r = 0; r < count; r++) {
            float *at = grad_scores + r * width + j;
            store(at, load(weights + r * width + j) * (load(at) - less[r]));
        }
}

/* No weights and gradients outside of the span of some rows. */
INLINE void clear_outside(float *weights, float *grad_scores, int64_t width, const struct key_span all, int64_t count) {
    for (int64_t r = 0; r < count; r++)
        for (int64_t j = 0; j < width; j = j + LANES == all.first ? round_up_to_lanes(all.last) : j + LANES) {
            if (j >= all.first && j < all.last) continue;
            store(weights + r * width + j, broadcast(0.0f));
            store(grad_scores + r * width + j, broadcast(0.0f));
        }
}

/* The same from scores, of the rows from a number on among those of all heads. */
static void gradient_rows(const struct short_attention *problem, struct short_state *state, int64_t number,
                          float *weights, float *grad_scores, const struct key_span all, const struct key_span *spans,
                          const float *delta, int64_t count) {
    const float *grad_lse = problem->grad_lse ? problem->grad_lse + number : 0, *share = ONES;
    /* Of whole vectors, as parts of it are loaded. */
    float maximum[(int)LANES > (int)MOST_AT_ONCE ? (int)LANES : (int)MOST_AT_ONCE], total[MOST_AT_ONCE] = {0},
          own_share[MOST_AT_ONCE], of_sink[MOST_AT_ONCE], less[MOST_AT_ONCE];
    int64_t width = state->width, head = number / problem->rows % problem->heads;
    clear_outside(weights, grad_scores, width, all, count);
    if (problem->normalizer != SOFTMAX) {
        for (int64_t r = 0; r < count; r++) {
            struct score_row row = {weights + r * width, all, spans[r]};
            row_gradients(problem, &row, grad_scores + r * width, grad_lse ? grad_lse[r] : 0.0f,
                          !problem->lse || problem->lse[number + r] < INFINITY);
        }
        return;
    }
    if (problem->landmark_size) weigh_score_rows(problem, number % problem->rows, weights, width, all, spans, count);
    if (problem->lse) {
        BY_COUNT(count, weights_count(problem->lse + number, weights, width, all, spans, COUNT))
    } else {
        softmax_rows(weights, width, all, spans, maximum, total, count, 0);
        note_overflow(problem, state, number, spans, total, count);
        note_maximum(problem, state, maximum, count);
        for (int64_t r = 0; r < count; r++)
            own_share[r] = softmax_share(problem, head, maximum + r, total + r, of_sink + r);
        share = own_share;
    }
    BY_COUNT(count, gradient_count(share, delta, grad_lse, weights, grad_scores, less, width, all, COUNT))
    for (int64_t r = 0; problem->grad_sinks && r < count; r++)
        problem->grad_sinks[number + r] = -of_sink[r] * less[r];
    if (problem->landmark_size)
        return_score_rows(problem, number % problem->rows, weights, grad_scores, width, all, count);
}

/* A block of rows of a query head. */
struct row_block {
    int64_t head, first, rows;
    struct floats query, grad_output, query_rows, grad_output_rows; /* as left and as right factors */
    float delta[MOST_AT_ONCE]; /* of the rows at once: output times grad_output; where there is an output */
};

/* The rows of a block attend to all vectors of columns in a span. */
INLINE void note_rows(struct short_state *state, int64_t row, int64_t count, const struct key_span all) {
    for (int64_t v = all.first / LANES; v * LANES < all.last; v++) {
        state->rows[v].first = min_int(state->rows[v].first, row);
        state->rows[v].last = row + count; /* rows come in their order */
    }
}

static void backward_group(const struct short_attention *problem, struct short_state *state,
                           const struct row_block *block, int64_t row, const struct written *gradient, int64_t count,
                           int paired) {
    struct key_span spans[MOST_AT_ONCE], all = group_span(problem, state->unit.batch, block->first + row, spans, count);
    int64_t width = state->width, dim = round_up_to_lanes(problem->dim);
    float *weights = state->weights + row * width, *grad_scores = state->grad_scores + row * width;
    struct floats query = {block->query.data + row * block->query.stride, block->query.stride};
    struct floats grad_output = {block->grad_output.data + row * block->grad_output.stride, block->grad_output.stride};
    int64_t first = paired ? all.first / 2 : all.first; /* whole vectors before it */
    struct product grad_query = {(paired ? state->score_terms : grad_scores) + first, width, 1,
                                 state->keys.data + first * state->keys.stride, state->keys.stride,
                                 term_count(all.last - all.first, paired), dim, paired};
    int64_t number = (state->unit.batch * problem->heads + block->head) * problem->rows + block->first + row;
    note_rows(state, row, count, all);
    multiply_keys(state, query, &state->key, all, weights, count, problem->dtype);
    multiply_keys(state, grad_output, &state->value, all, grad_scores, count, problem->dtype);
    finish_scores(problem, state, block->head, block->first + row, weights, state->slopes, all, count);
    gradient_rows(problem, state, number, weights, grad_scores, all, spans, problem->output.data ? block->delta : 0,
                  count);
    if (problem->grad_bias.data)
        add_bias_gradient(problem, &state->unit, block->head, block->first + row, grad_scores, width, all, count);
    if (state->cap != 0.0f) return_through_cap(state, grad_scores, all, count);
    for (int64_t r = 0; paired && r < count; r++)
        for (int64_t j = all.first; j < all.last; j += LANES)
            store_terms(state->score_terms + r * width, j, load(grad_scores + r * width + j), 1);
    multiply(&grad_query, gradient->data, gradient->stride, state->scale, 0, &state->check, count);
}

/* Weights and gradients of scores of a block become pairs of a row and the next one, in place of the former. */
static void pair_block(struct short_state *state, int64_t rows) {
    int64_t width = state->width;
    for (int64_t row = 0; row < rows; row += 2)
        for (int64_t j = row * width; j < (row + 1) * width; j += LANES) {
            lanes weight = {0}, gradient = {0};
            if (row + 1 < rows) weight = load(state->weights + width + j), gradient = load(state->grad_scores + width + j);
            store(state->weights + j, round_to_pairs(load(state->weights + j), weight));
            store(state->grad_scores + j, round_to_pairs(load(state->grad_scores + j), gradient));
        }
}

/* The gradients of some keys and values from a block of rows; add: to those of other blocks. */
static void column_group(const struct short_attention *problem, struct short_state *state,
                         const struct row_block *block, int64_t column, const struct written *key,
                         const struct written *value, int add, int64_t count, int paired) {
    int64_t dim = round_up_to_lanes(problem->dim), value_dim = round_up_to_lanes(problem->value_dim), width = state->width;
    struct floats query = block->query_rows, grad_output = block->grad_output_rows;
    const struct key_span *one = state->rows + column / LANES, *other = state->rows + (column + count - 1) / LANES;
    int64_t begin = min_int(one->first, other->first), end = one->last > other->last ? one->last : other->last;
    int64_t first = paired ? begin / 2 : begin, terms = begin < end ? term_count(end, paired) - first : 0;
    int64_t step = paired ? 2 * width : width; /* from a term to the next one */
    struct product grad_value = {state->weights + first * step + column, 1, step,
                                 grad_output.data + first * grad_output.stride, grad_output.stride, terms, value_dim,
                                 paired};
    struct product grad_key = {state->grad_scores + first * step + column, 1, step, query.data + first * query.stride,
                               query.stride, terms, dim, paired};
    multiply(&grad_value, value->data + column * value->stride, value->stride, ONES, add, &state->check, count);
    multiply(&grad_key, key->data + column * key->stride, key->stride, state->scale, add, &state->check, count);
}

/* The gradients of a unit's keys or values: those of a part of the rows in float32, among the gradients of all parts. */
INLINE struct rows column_gradients(const struct rows *gradients, int64_t part, const struct unit *unit) {
    return (struct rows){(const float *)gradients->data + unit->row_part * part, gradients->batch, gradients->head,
                         gradients->row};
}

INLINE void backward_block(const struct short_attention *problem, struct short_state *state, struct row_block *block,
                           const struct unit *next, const int dtype) {
    int64_t batch = state->unit.batch, head = block->head, first = block->first, dim = problem->dim,
            value_dim = problem->value_dim;
    const int paired = in_pairs(dtype);
    const struct rows *queries = &problem->query, *grad_outputs = &problem->grad_output;
    block->query_rows = block->query =
        as_terms(queries, batch, head, first, block->rows, dim, state->packed[2], dtype, paired);
    block->grad_output_rows = block->grad_output =
        as_terms(grad_outputs, batch, head, first, block->rows, value_dim, state->packed[3], dtype, paired);
    if (paired) {
        block->query_rows = as_terms_of_rows(queries, batch, head, first, block->rows, dim, state->packed[4], dtype, 1);
        block->grad_output_rows =
            as_terms_of_rows(grad_outputs, batch, head, first, block->rows, value_dim, state->packed[5], dtype, 1);
    }
    for (int64_t v = 0; v * LANES < problem->columns; v++) state->rows[v] = (struct key_span){block->rows, 0};
    for (int64_t row = 0, count; row < block->rows; row += count) {
        count = group_rows(block->rows - row);
        for (int64_t r = 0; problem->output.data && r < count; r++)
            block->delta[r] = dot_entries(head_rows(&problem->output, batch, head, first + row + r, dtype),
                                          head_rows(grad_outputs, batch, head, first + row + r, dtype), value_dim,
                                          dtype);
        struct written query = rows_to_write(&problem->grad_query, batch, head, first + row, dim, state->result, dtype);
        backward_group(problem, state, block, row, &query, count, paired);
        finish_rows(&query, &problem->grad_query, batch, head, first + row, count, dim, dtype);
        prefetch_part(problem, &state->unit, next, head, first + row, count, 1, dtype);
    }
    if (paired) pair_block(state, block->rows);
}

INLINE void backward_unit(const struct short_attention *problem, struct short_state *state, const struct unit *next,
                          const int dtype) {
    const struct unit *unit = &state->unit;
    int64_t batch = unit->batch, key_head = unit->key_head, columns = problem->columns, dim = problem->dim,
            value_dim = problem->value_dim, end = (key_head + 1) * problem->group;
    const int paired = in_pairs(dtype), sum_dtype = problem->row_parts > 1 ? FLOAT32 : dtype;
    int begun = 0;
    lay_out(state, &state->key, unit->columns, dtype);
    lay_out(state, &state->value, unit->columns, dtype);
    state->keys = as_terms_of_rows(&problem->key, batch, key_head, 0, unit->columns, dim, state->packed[0], dtype, paired);
    struct rows of_keys = column_gradients(&problem->grad_key, problem->grad_key_part, unit),
                of_values = column_gradients(&problem->grad_value, problem->grad_value_part, unit);
    struct written key = rows_to_write(&of_keys, batch, key_head, 0, dim, state->grad_key, sum_dtype);
    struct written value = rows_to_write(&of_values, batch, key_head, 0, value_dim, state->grad_value, sum_dtype);
    for (int64_t head = key_head * problem->group; head < end; head++)
        for (int64_t first = unit->row; first < unit->end_row; first += state->block) {
            struct row_block block = {
                .head = head, .first = first, .rows = min_int(unit->end_row - first, state->block)};
            backward_block(problem, state, &block, next, dtype);
            for (int64_t column = 0, count; column < columns; column += count) {
                count = group_rows(columns - column);
                column_group(problem, state, &block, column, &key, &value, begun, count, paired);
            }
            begun = 1;
        }
    for (int64_t row = 0; !begun && row < columns; row++) { /* no query attends to the keys */
        memset(key.data + row * key.stride, 0, (size_t)dim * sizeof(float));
        memset(value.data + row * value.stride, 0, (size_t)value_dim * sizeof(float));
    }
    finish_rows(&key, &of_keys, batch, key_head, 0, columns, dim, sum_dtype);
    finish_rows(&value, &of_values, batch, key_head, 0, columns, value_dim, sum_dtype);
}

/* Takes memory for a number of matrices, of which each begins in a cache line. */
INLINE float *take_state(const struct short_attention *problem, struct short_state *state, const int backward) {
    int64_t columns = problem->columns, width = round_up_to_lanes(columns), dim = round_up_to_lanes(problem->dim),
            value_dim = round_up_to_lanes(problem->value_dim), at_once = MOST_AT_ONCE;
    const int paired = in_pairs((int)problem->dtype);
    int64_t block = BLOCK_NUMBERS / (width ? width : 1) / at_once * at_once;
    block = block < at_once ? at_once : block;
    block = backward ? min_int(block, (problem->rows + at_once - 1) / at_once * at_once) : at_once;
    int64_t sizes[] = {dim * width, backward ? value_dim * width : 0, columns * dim, columns * value_dim, block * dim,
                       backward ? block * value_dim : 0, block * width, backward ? block * width : 0,
                       at_once * (dim > value_dim ? dim : value_dim), backward ? columns * dim : 0,
                       backward ? columns * value_dim : 0, backward ? block * dim : 0, backward ? block * value_dim : 0,
                       backward ? at_once * width : 0, backward && problem->softcap != 0.0 ? at_once * width : 0};
    float **targets[] = {&state->key.columns, &state->value.columns, state->packed, state->packed + 1,
                         state->packed + 2, state->packed + 3, &state->weights, &state->grad_scores, &state->result,
                         &state->grad_key, &state->grad_value, state->packed + 4, state->packed + 5,
                         &state->score_terms, &state->slopes};
    int64_t numbers = 0;
    enum { MATRICES = sizeof(sizes) / sizeof(sizes[0]) };
    for (int i = 0; i < MATRICES; i++) numbers += (sizes[i] + 15) / 16 * 16;
    float *memory = aligned_memory((numbers + 16) * 4), *rest = memory;
    if (!memory) return 0;
    for (int i = 0; i < MATRICES; i++) *targets[i] = take_floats(&rest, sizes[i]);
    state->width = width, state->block = block;
    int64_t least_terms = min_int(term_count(problem->dim, paired), term_count(problem->value_dim, paired));
    state->few_rows = problem->group * problem->rows <= (least_terms > LANES ? FEW_ROWS : FEW_ROWS / 2);
    state->key.rows = &problem->key, state->key.dim = problem->dim, state->key.factor = state->score_scale;
    state->value.rows = &problem->value, state->value.dim = problem->value_dim, state->value.factor = ONES;
    state->check = state->largest = broadcast(0.0f), state->overflow = 0;
    state->score_factor = kept_factor(problem->normalizer);
    state->cap = (float)(problem->softcap * state->score_factor);
    double kept = problem->softcap == 0.0 ? problem->scale * state->score_factor : problem->scale / problem->softcap;
    for (int r = 0; r < MOST_AT_ONCE; r++)
        state->scale[r] = (float)problem->scale, state->score_scale[r] = (float)kept;
    return memory;
}

/* The columns before the first one from which on no row of a unit attends to any. */
INLINE int64_t attended_columns(const struct short_attention *problem, const struct unit *unit) {
    int64_t columns = 0;
    for (int64_t row = unit->row; row < unit->end_row && columns < problem->columns; row++) {
        struct key_span span = row_span(problem, unit->batch, row);
        if (span.first < span.last && span.last > columns) columns = span.last;
    }
    return columns;
}

/* The next unit of work. The last rows are taken first: with a causal mask, these are the most work. */
INLINE struct unit take_unit(struct short_attention *problem) {
    int64_t taken = __atomic_fetch_add(&problem->next_unit, 1, __ATOMIC_RELAXED), parts = problem->row_parts;
    if (taken >= problem->unit_count) return (struct unit){.key_head = -1};
    int64_t key_heads = problem->heads / problem->group, part = parts - 1 - taken % parts, of_heads = taken / parts;
    int64_t batches = of_heads / key_heads, batch = batches * problem->unit_batches;
    struct unit unit = {batch, min_int(batch + problem->unit_batches, problem->batches), of_heads % key_heads, part,
                        part * problem->rows / parts, (part + 1) * problem->rows / parts, batches * parts + part, 0};
    unit.columns = attended_columns(problem, &unit);
    return unit;
}

/* The next batch of a unit, or another unit. */
INLINE struct unit unit_after(struct short_attention *problem, struct unit unit) {
    if (unit.batch + 1 == unit.end_batch) return take_unit(problem);
    unit.batch++;
    unit.columns = attended_columns(problem, &unit);
    return unit;
}

#define UNIT (const struct short_attention *problem, struct short_state *state, const struct unit *next)
TABLE_BY_DTYPE(process_forward, UNIT, forward_unit(problem, state, next, DTYPE))
TABLE_BY_DTYPE(process_backward, UNIT, backward_unit(problem, state, next, DTYPE))

INLINE void process(struct short_attention *problem, const int backward) {
    struct short_state state;
    float *memory = take_state(problem, &state, backward);
    if (!memory) {
        problem->failed = 1;
        return;
    }
    struct unit next;
    for (state.unit = take_unit(problem); state.unit.key_head >= 0; state.unit = next) {
        next = unit_after(problem, state.unit);
        (backward ? process_backward : process_forward)[problem->dtype](problem, &state, &next);
    }
    if (sum_lanes(state.check) != 0.0f) __atomic_store_n(&problem->nonfinite, 1, __ATOMIC_RELAXED);
    if (!(max_of_lanes(state.largest) < COARSE)) __atomic_store_n(&problem->coarse, 1, __ATOMIC_RELAXED);
    if (state.overflow) __atomic_store_n(&problem->overflow, 1, __ATOMIC_RELAXED);
    free_aligned(memory);
}

/* Takes one unit after another while any is left; any number of threads may call these at once. */
void EXPORTED(regard_short)(struct short_attention *problem) {
    LEAVE_UNLESS(problem->dtype == BFLOAT16, regard_short, problem);
    process(problem, 0);
}

void EXPORTED(regard_short_backward)(struct short_attention *problem) {
    LEAVE_UNLESS(problem->dtype == BFLOAT16, regard_short_backward, problem);
    process(problem, 1);
}
