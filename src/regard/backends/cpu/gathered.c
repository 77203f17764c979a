/* Attention to listed keys: output and log-sum-exp, and the gradients. Both passes are here, as they have the products with
 * listed keys and the sums over them in common. */
#include "pair_gradients.h"

/* Scores become weights, e^(score - maximum); returns their sum. */
APART float exponentials(float *scores, int64_t count, float *maximum) {
    lanes largest = broadcast(-INFINITY), sum = {0};
    for (int64_t t = 0; t < count; t += LANES) largest = max_lanes(load(scores + t), largest); /* NaN is no maximum */
    *maximum = max_of_lanes(largest);
    const lanes shift = broadcast(*maximum == -INFINITY ? 0.0f : *maximum);
    for (int64_t t = 0; t < count; t += LANES) {
        lanes weight = exp_or_zero(load(scores + t) - shift);
        store(scores + t, weight);
        sum += weight;
    }
    return sum_lanes(sum);
}

/* Weights that are not divided by their sum yet, of the rows of a list that is taken. */
static void weigh_rows(const struct gathered *problem, struct gather_scratch *scratch, const struct piece_rows *piece) {
    const struct row_place *places = piece->places;
    widen_rows(problem->query, problem->query_batch, problem->query_head, problem->query_row, problem->dim, piece,
               scratch->query, piece->dtype);
    list_products(scratch, piece, scratch->query, key_of_piece(problem, piece), problem->key_row, problem->dim,
                  scratch->weights);
    for (int r = 0; r < piece->rows; r++) {
        float *weights = scratch->weights + r * scratch->width;
        if (places[r].query < 0) continue;
        complete_scores(problem, scratch, places[r], weights, 0);
        scratch->total[r] = exponentials(weights, scratch->count, scratch->maximum + r);
        const float *factors = factors_of(problem, places[r]);
        if (factors)
            for (int64_t t = 0; t < scratch->count; t++) weights[t] *= factors[scratch->place[t]];
    }
}

/* Output and log-sum-exp of rows that have weights. */
static void sum_rows(const struct gathered *problem, struct gather_scratch *scratch, const struct piece_rows *piece) {
    const struct row_place *places = piece->places;
    const int64_t dim = problem->value_dim, padded = round_up_to_lanes(dim);
    list_sums(scratch, piece, scratch->weights, value_of_piece(problem, piece), problem->value_row, dim, scratch->sums);
    for (int r = 0; r < piece->rows; r++) {
        if (places[r].query < 0) continue;
        const int64_t row = (places[r].batch * problem->heads + places[r].head) * problem->queries + places[r].query;
        const float total = scratch->total[r], share = total == 0.0f ? 0.0f : 1.0f / total;
        for (int64_t a = 0; a < dim; a += LANES)
            store_partial(problem->output + row * dim + a, load(scratch->sums + r * padded + a) * share, dim - a);
        problem->lse[row] = total == 0.0f ? -INFINITY : scratch->maximum[r] + logf(total);
    }
}

static void attend_rows(const struct gathered *problem, struct gather_scratch *scratch, const struct piece_rows *piece) {
    weigh_rows(problem, scratch, piece);
    sum_rows(problem, scratch, piece);
}

/* Fetches the query of a row, which is read after its list. */
INLINE void fetch_query(const struct gathered *problem, struct row_place row) {
    const int dtype = (int)problem->dtype;
    const int64_t first = row.batch * problem->query_batch + row.head * problem->query_head + row.query * problem->query_row;
    const char *query = row_at(problem->query, first, 1, dtype);
    for (int64_t byte = 0; byte < problem->dim * entry_bytes(dtype); byte += LINE) __builtin_prefetch(query + byte, 0, 3);
}

/* Some lists of a single row each, from number `first` on. What is done with keys comes before what is done with values:
 * half as many bytes are read again and again by one list after another, and more of them are near then. */
INLINE void attend_single_rows(const struct gathered *problem, struct gather_scratch *lists, int64_t first, int64_t end) {
    const int64_t group = problem->heads / problem->key_heads;
    struct row_place places[PIECES_AT_ONCE];
    struct piece_rows pieces[PIECES_AT_ONCE];
    for (int64_t i = 0; i < end - first; i++) {
        const int64_t query = (first + i) % problem->lists, head = (first + i) / problem->lists;
        places[i] = (struct row_place){head / problem->heads, head % problem->heads, query};
        pieces[i] = (struct piece_rows){places + i, places[i].head / group, 1, (int)problem->dtype};
        fetch_query(problem, places[i]);
        take_list_of_row(problem, lists + i, places[i]);
    }
    for (int64_t i = 0; i < end - first; i++) weigh_rows(problem, lists + i, pieces + i);
    for (int64_t i = 0; i < end - first; i++) sum_rows(problem, lists + i, pieces + i);
}

/* Takes some pieces of lists after others while any are left; any number of threads may call it at once. */
void EXPORTED(regard_gathered)(struct gathered *problem) {
    const int64_t pieces = (problem->rows + problem->height - 1) / problem->height;
    const int64_t total = problem->batches * problem->list_heads * problem->lists * pieces;
    const int single = has_single_rows(problem);
    struct gather_scratch scratch[PIECES_AT_ONCE];
    char *memory = new_gather_scratch(problem, scratch, single ? problem->at_once : 1);
    if (!memory) {
        problem->failed = 1;
        return;
    }
    int64_t unit;
    while ((unit = __atomic_fetch_add(&problem->next_unit, 1, __ATOMIC_RELAXED)) < problem->unit_count) {
        const int64_t first = unit * problem->at_once, end = least(total, first + problem->at_once);
        if (single) {
            attend_single_rows(problem, scratch, first, end);
            continue;
        }
        for (int64_t at = first; at < end; at++) {
            const int64_t list = at / pieces, head = list / problem->lists;
            work_on_piece(problem, scratch, head / problem->list_heads, head % problem->list_heads, list % problem->lists,
                          at % pieces, attend_rows);
        }
    }
    free_aligned(memory);
}

/* target[key[t]] += sum over rows of slopes[r][t] rows[r], for some vectors of columns. */
INLINE void spread_columns(const struct gather_scratch *scratch, const float *slopes, const float *rows, int64_t padded,
                           int64_t column, float *target, int64_t stride, const int vectors, const int many) {
    const int64_t count = scratch->count;
    lanes own[ROWS * VECTORS];
    UNROLL for (int r = 0; r < many; r++) UNROLL for (int v = 0; v < vectors; v++) own[r * vectors + v] =
        load(rows + r * padded + column + v * LANES);
    for (int64_t t = 0; t < count; t++) {
        float *at = target + scratch->key[t] * stride + column;
        fetch_listed(scratch, t, target, stride, column, column + vectors * LANES, FLOAT32);
        UNROLL for (int v = 0; v < vectors; v++) {
            lanes sum = load(at + v * LANES);
            UNROLL for (int r = 0; r < many; r++) sum += broadcast(slopes[r * scratch->width + t]) * own[r * vectors + v];
            store(at + v * LANES, sum);
        }
    }
}

INLINE void spread_rows(const struct gather_scratch *scratch, const float *slopes, const float *rows, int64_t dim,
                        float *target, int64_t stride, const int many) {
    const int64_t padded = round_up_to_lanes(dim);
    int64_t column = 0;
    for (; column + VECTORS * LANES <= padded; column += VECTORS * LANES)
        spread_columns(scratch, slopes, rows, padded, column, target, stride, VECTORS, many);
    for (; column < padded; column += LANES) spread_columns(scratch, slopes, rows, padded, column, target, stride, 1, many);
}

/* The same for all columns of as many rows as a piece has. */
APART void spread(const struct gather_scratch *scratch, const struct piece_rows *piece, const float *slopes,
                  const float *rows, int64_t dim, float *target, int64_t stride) {
    if (piece->rows == 1)
        spread_rows(scratch, slopes, rows, dim, target, stride, 1);
    else if (piece->rows == ROWS / 2)
        spread_rows(scratch, slopes, rows, dim, target, stride, ROWS / 2);
    else
        spread_rows(scratch, slopes, rows, dim, target, stride, ROWS);
}

/* Weights from scores, and slopes of the scores from products of values with what comes from above. */
APART void slopes_of_row(const struct gathered *problem, const struct gather_scratch *scratch, struct row_place place,
                         float *weights, float *slopes, const float *bends) {
    const int64_t row = (place.batch * problem->heads + place.head) * problem->queries + place.query;
    const lanes lse = broadcast(problem->lse[row]), delta = broadcast(problem->delta[row]);
    const float *factors = factors_of(problem, place);
    if (factors)
        for (int64_t t = 0; t < scratch->count; t++) slopes[t] *= factors[scratch->place[t]];
    for (int64_t t = 0; t < scratch->count; t += LANES) {
        lanes weight = exp_or_zero(load(weights + t) - lse);
        store(weights + t, weight);
        store(slopes + t, weight * (load(slopes + t) - delta));
    }
    if (problem->grad_added) {
        float *into = problem->grad_added + row * problem->length * problem->columns;
        for (int64_t t = 0; t < scratch->count; t++) into[scratch->place[t]] = slopes[t];
    }
    for (int64_t t = 0; t < scratch->count; t += LANES) {
        lanes slope = load(slopes + t) * problem->scale;
        store(slopes + t, problem->softcap > 0.0f ? slope * load(bends + t) : slope);
    }
    if (factors)
        for (int64_t t = 0; t < scratch->count; t++) weights[t] *= factors[scratch->place[t]];
}

static void add_gradients(const struct gathered *problem, struct gather_scratch *scratch, const struct piece_rows *piece) {
    const struct row_place *places = piece->places;
    const int64_t batch = places[0].batch, dim = problem->dim, value_dim = problem->value_dim,
                  padded = round_up_to_lanes(dim), number = batch * problem->key_heads + piece->key_head;
    const void *key = key_of_piece(problem, piece), *value = value_of_piece(problem, piece);
    widen_rows(problem->query, problem->query_batch, problem->query_head, problem->query_row, dim, piece, scratch->query,
               piece->dtype);
    widen_rows(problem->grad_output, problem->heads * problem->queries * value_dim, problem->queries * value_dim, value_dim,
               value_dim, piece, scratch->above, FLOAT32);
    list_products(scratch, piece, scratch->query, key, problem->key_row, dim, scratch->weights);
    list_products(scratch, piece, scratch->above, value, problem->value_row, value_dim, scratch->slopes);
    for (int r = 0; r < piece->rows; r++) {
        float *weights = scratch->weights + r * scratch->width, *slopes = scratch->slopes + r * scratch->width,
              *bends = scratch->bends + r * scratch->width;
        if (places[r].query < 0) {
            memset(weights, 0, (size_t)scratch->width * sizeof(float));
            memset(slopes, 0, (size_t)scratch->width * sizeof(float));
            continue;
        }
        complete_scores(problem, scratch, places[r], weights, bends);
        slopes_of_row(problem, scratch, places[r], weights, slopes, bends);
    }
    list_sums(scratch, piece, scratch->slopes, key, problem->key_row, dim, scratch->sums);
    for (int r = 0; r < piece->rows; r++) {
        if (places[r].query < 0) continue;
        const int64_t row = (batch * problem->heads + places[r].head) * problem->queries + places[r].query;
        memcpy(problem->grad_query + row * problem->grad_row, scratch->sums + r * padded, (size_t)padded * sizeof(float));
    }
    spread(scratch, piece, scratch->slopes, scratch->query, dim,
           problem->grad_key + number * problem->keys * problem->grad_row, problem->grad_row);
    spread(scratch, piece, scratch->weights, scratch->above, value_dim,
           problem->grad_value + number * problem->keys * problem->grad_value_row, problem->grad_value_row);
}

/* The gradients of a head whose lists several rows share. */
INLINE void gradients_of_lists(const struct gathered *problem, struct gather_scratch *scratch, int64_t head) {
    const int64_t pieces = (problem->rows + problem->height - 1) / problem->height;
    for (int64_t at = 0; at < problem->lists * pieces; at++)
        work_on_piece(problem, scratch, head / problem->list_heads, head % problem->list_heads, at / pieces, at % pieces,
                      add_gradients);
}

/* Takes one key head after another while any is left; any number of threads may call it at once. One thread computes the
 * gradients of a key head, in the order of the queries, so that they do not depend on the number of threads. */
void EXPORTED(regard_gathered_backward)(struct gathered *problem) {
    const int64_t heads = problem->list_heads / problem->key_heads; /* those of a key head that have lists */
    const int single = has_single_rows(problem) && problem->length < 1 << PLACE_BITS;
    struct gather_scratch of_lists;
    struct pair_gradients of_pairs = {0};
    char *memory = single ? new_pair_gradients(problem, &of_pairs) : new_gather_scratch(problem, &of_lists, 1);
    if (!memory) {
        problem->failed = 1;
        return;
    }
    int64_t unit;
    while ((unit = __atomic_fetch_add(&problem->next_unit, 1, __ATOMIC_RELAXED)) < problem->unit_count)
        for (int64_t head = unit * heads; head < (unit + 1) * heads; head++)
            if (single)
                pair_gradients_of_head(problem, &of_pairs, head / problem->heads, head % problem->heads);
            else
                gradients_of_lists(problem, &of_lists, head);
    free_aligned(memory);
}
