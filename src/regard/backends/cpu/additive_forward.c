/* Attention by additive scores, forward: a band of rows meets one strip of keys after another, and their scores, the
 * online softmax and the sum of values follow each other while all of it is near the processor. */
#include "tile.h"
#include "additive_scores.h"

/* The rows that a thread is at, all of one head. */
struct band {
    int64_t head, begin, count; /* begin: the first row */
    float *sums;   /* [BAND][padded value dim]: of exp(score - largest) dropout_mask value */
    float *values; /* of a strip: [terms of rows][padded value dim] */
};

/* Scores become exp(score - maximum). Returns the factor of the sums of the strips before. */
INLINE float online_softmax(float *scores, float *maximum, float *total) {
    lanes limit = broadcast(*maximum);
    for (int j = 0; j < STRIP; j += LANES) limit = max_lanes(load(scores + j), limit);
    float now = max_of_lanes(limit);
    float shift = now == -INFINITY ? 0.0f : now, rescale = exp2_lanes(broadcast((*maximum - shift) * LOG2_E))[0];
    lanes sum = {0};
    for (int j = 0; j < STRIP; j += LANES) {
        lanes weight = exp2_lanes((load(scores + j) - shift) * LOG2_E);
        store(scores + j, weight);
        sum += weight;
    }
    *maximum = now, *total = *total * rescale + sum_lanes(sum);
    return rescale;
}

/* The weights of a row with `count` keys of a strip, 0 beyond, and what scales the strips before; whether any pair
 * exists, for where none does there are no scores to compute. */
INLINE int row_weights(const struct additive_forward *work, int64_t head, int64_t row, int64_t column, int64_t count,
                       float *weights, float *rescale) {
    int64_t down = row - work->row_begin, from = column - work->column_begin;
    const float *bias = pair_numbers(&work->bias, head, down, from),
                *dropout_mask = pair_numbers(&work->dropout_mask, head, down, from);
    int64_t band = head * work->scores->rows + row;
    if (bias && !any_pair_exists(bias, count)) return 0;
    strip_scores(work->scores, head, row, column, count, weights);
    if (work->softcap != 0.0f)
        for (int j = 0; j < STRIP; j += LANES)
            store(weights + j, work->softcap * tanh_lanes(load(weights + j) / work->softcap));
    if (bias)
        for (int64_t j = 0; j < count; j++) weights[j] += bias[j];
    for (int64_t j = count; j < STRIP; j++) weights[j] = -INFINITY;
    *rescale = online_softmax(weights, work->maximum + band, work->total + band);
    if (dropout_mask)
        for (int64_t j = 0; j < count; j++) weights[j] *= dropout_mask[j];
    return 1;
}

/* All rows of a band with the columns from `from` to `from + count` - 1, which are of one strip. */
INLINE void process_strip(const struct additive_forward *work, struct band *band, int64_t column, int64_t count,
                          const int dtype) {
    const int paired = in_pairs(dtype);
    int64_t padded = padded_dim(work->value_dim), stride = work->value_row;
    int64_t key_head = band->head / (work->scores->heads / work->scores->key_heads);
    const void *given = row_at(work->value, 1, key_head * work->value_head + column * stride, dtype);
    const float *values = given;
    if (dtype != FLOAT32 || padded != work->value_dim) {
        pack_rows_as_terms(given, stride, count, work->value_dim, 1.0f, band->values, dtype, paired);
        values = band->values, stride = padded;
    }
    for (int64_t row = 0; row < band->count; row += GROUP) {
        float weights[GROUP * STRIP] ALIGNED = {0}, rescale[GROUP];
        int any = 0;
        for (int64_t r = 0; r < GROUP; r++) {
            rescale[r] = 1.0f;
            if (row + r >= band->count) continue;
            any |=
                row_weights(work, band->head, band->begin + row + r, column, count, weights + r * STRIP, rescale + r);
        }
        if (!any) continue;
        if (paired)
            for (int64_t j = 0; j < GROUP * STRIP; j += LANES)
                store_terms(weights + j / STRIP * STRIP, j % STRIP, load(weights + j), 1);
        for (int64_t a = 0; a < padded; a += PAIR)
            add_terms((struct factor){weights, STRIP, 1},
                      (struct vectors){values + a, stride, 0, term_count(count, paired)}, band->sums + row * padded + a,
                      padded, rescale, paired);
    }
}

/* What the rows have from other tiles becomes sums again, to which this tile's are added. */
INLINE void process_band(const struct additive_forward *work, struct band *band, const int dtype) {
    int64_t first = band->head * work->scores->rows + band->begin, dim = work->value_dim, padded = padded_dim(dim);
    memset(band->sums, 0, (size_t)(BAND * padded) * sizeof(float));
    for (int64_t r = 0; r < band->count && work->before; r++) {
        float total = work->total[first + r] * work->keep_probability;
        for (int64_t a = 0; a < dim; a += LANES)
            store(band->sums + r * padded + a, load_entries(work->before + (first + r) * dim, a, dim, 0, 0) * total);
    }
    for (int64_t column = work->column_begin, next; column < work->column_end; column = next) {
        next = min_int((column / STRIP + 1) * STRIP, work->column_end);
        process_strip(work, band, column, next - column, dtype);
    }
    for (int64_t r = 0; r < band->count; r++) {
        float total = work->total[first + r], share = total == 0.0f ? 0.0f : 1.0f / (total * work->keep_probability);
        work->lse[first + r] = work->maximum[first + r] + logf(total);
        for (int64_t a = 0; a < dim; a += LANES) {
            lanes output = load(band->sums + r * padded + a) * share;
            if (work->more)
                store_entries(work->before + (first + r) * dim, a, dim, FLOAT32, output);
            else
                store_entries((void *)row_at(work->output, first + r, dim, dtype), a, dim, dtype, output);
        }
    }
}

/* Takes one band of one head after another while any is left; any number of threads may call it at once. */
void EXPORTED(regard_additive_forward)(struct additive_forward *work) {
    LEAVE_UNLESS(work->scores->dtype == BFLOAT16, regard_additive_forward, work);
    int64_t padded = padded_dim(work->value_dim), rows = work->row_end - work->row_begin, unit;
    int64_t bands = (rows + work->band - 1) / work->band;
    float *room = aligned_memory(((BAND + STRIP) * padded + 16) * 4), *left = room;
    if (!room) {
        work->failed = 1;
        return;
    }
    struct band band = {.sums = take_floats(&left, BAND * padded), .values = take_floats(&left, STRIP * padded)};
    while ((unit = __atomic_fetch_add(&work->next_unit, 1, __ATOMIC_RELAXED)) < work->unit_count) {
        int64_t first = unit % bands * work->band;
        band.head = unit / bands, band.begin = work->row_begin + first, band.count = min_int(rows - first, work->band);
        BY_DTYPE(work->scores->dtype, process_band(work, &band, DTYPE));
    }
    free_aligned(room);
}
