/* Attention by additive scores, forward: a band of rows meets one strip of keys after another, and their scores, the
 * online softmax and the sum of values follow each other while all of it is near the processor. */
#include "blocks.h"
#include "scores.h"

/* The rows that a thread is at, all of one head. */
struct band {
    int64_t head, begin, count; /* begin: the first row */
    float *sums;   /* [BAND][padded value dim]: of exp(score - largest) kept value */
    float *values; /* of a strip: [STRIP][padded value dim] */
};

/* What is given for the pairs of a row from a column on. */
INLINE const float *pairs_of(const struct attended *to, const struct pairs *given, int64_t head, int64_t row,
                             int64_t column) {
    if (!given->at) return 0;
    return given->at + head / given->heads * given->batch + head % given->heads * given->head +
           (row - to->row_begin) * given->row + column - to->column_begin;
}

INLINE int any_exists(const float *added, int64_t count) {
    int any = 0;
    for (int64_t j = 0; j < count; j++) any |= added[j] != -INFINITY;
    return any;
}

INLINE float largest_of(const float *scores) {
    lanes most = every(-INFINITY);
    for (int j = 0; j < STRIP; j += LANES) most = larger(most, load(scores + j));
    float each[LANES];
    store(each, most);
    for (int half = LANES / 2; half; half /= 2)
        for (int l = 0; l < half; l++) each[l] = each[l + half] > each[l] ? each[l + half] : each[l];
    return each[0];
}

/* Scores become exp(score - largest); what stands for the strips before is to be scaled by what is returned. */
INLINE float softmax_of(float *scores, float *largest, float *total) {
    float now = largest_of(scores);
    now = now > *largest ? now : *largest;
    float shift = now == -INFINITY ? 0.0f : now, kept = power_of_two(every((*largest - shift) * LOG2_E))[0];
    lanes sum = {0};
    for (int j = 0; j < STRIP; j += LANES) {
        lanes weight = power_of_two((load(scores + j) - shift) * LOG2_E);
        store(scores + j, weight);
        sum += weight;
    }
    *largest = now, *total = *total * kept + sum_of(sum);
    return kept;
}

/* The weights of a row with `count` keys of a strip, 0 beyond, and what scales the strips before; whether any pair
 * exists, for where none does there are no scores to compute. */
INLINE int weights_of(const struct attended *to, int64_t head, int64_t row, int64_t from, int64_t count, float *weights,
                      float *scaled) {
    const float *added = pairs_of(to, &to->added, head, row, from), *kept = pairs_of(to, &to->kept, head, row, from);
    int64_t at = head * to->of->rows + row;
    if (added && !any_exists(added, count)) return 0;
    strip_of_scores(to->of, head, row, from, count, weights);
    if (to->softcap != 0.0f)
        for (int j = 0; j < STRIP; j += LANES)
            store(weights + j, to->softcap * tangent(load(weights + j) / to->softcap));
    if (added)
        for (int64_t j = 0; j < count; j++) weights[j] += added[j];
    for (int64_t j = count; j < STRIP; j++) weights[j] = -INFINITY;
    *scaled = softmax_of(weights, to->largest + at, to->total + at);
    if (kept)
        for (int64_t j = 0; j < count; j++) weights[j] *= kept[j];
    return 1;
}

/* All rows of a band with the columns from `from` to `from + count` - 1, which are of one strip. */
INLINE void strip_of_band(const struct attended *to, struct band *at, int64_t from, int64_t count) {
    int64_t padded = whole_pairs(to->value_dim), stride = to->value_row;
    const float *values = to->value + at->head / (to->of->heads / to->of->key_heads) * to->value_head + from * stride;
    if (padded != to->value_dim) {
        lay_rows(values, stride, count, to->value_dim, 1.0f, at->values, 0);
        values = at->values, stride = padded;
    }
    for (int64_t row = 0; row < at->count; row += GROUP) {
        float weights[GROUP * STRIP] ALIGNED = {0}, scaled[GROUP];
        int any = 0;
        for (int64_t r = 0; r < GROUP; r++) {
            scaled[r] = 1.0f;
            if (row + r >= at->count) continue;
            any |= weights_of(to, at->head, at->begin + row + r, from, count, weights + r * STRIP, scaled + r);
        }
        for (int64_t a = 0; any && a < padded; a += PAIR)
            product((struct factor){weights, STRIP, 1}, (struct vectors){values + a, stride, 0, count},
                    at->sums + row * padded + a, padded, scaled);
    }
}

/* What the rows have from other tiles becomes sums again, to which this tile's are added. */
INLINE void whole_band(const struct attended *to, struct band *at) {
    int64_t first = at->head * to->of->rows + at->begin, dim = to->value_dim, padded = whole_pairs(dim);
    memset(at->sums, 0, (size_t)(BAND * padded) * sizeof(float));
    for (int64_t r = 0; r < at->count; r++)
        for (int64_t a = 0; a < dim; a++)
            at->sums[r * padded + a] = to->output[(first + r) * dim + a] * to->total[first + r];
    for (int64_t from = to->column_begin, next; from < to->column_end; from = next) {
        next = smaller((from / STRIP + 1) * STRIP, to->column_end);
        strip_of_band(to, at, from, next - from);
    }
    for (int64_t r = 0; r < at->count; r++) {
        float total = to->total[first + r], share = total == 0.0f ? 0.0f : 1.0f / total;
        to->lse[first + r] = to->largest[first + r] + logf(total);
        for (int64_t a = 0; a < dim; a++) to->output[(first + r) * dim + a] = at->sums[r * padded + a] * share;
    }
}

/* Takes one band of one head after another, as long as any is left: for as many threads at once as like. */
void EXPORTED(regard_attend)(struct attended *to) {
    int64_t padded = whole_pairs(to->value_dim), rows = to->row_end - to->row_begin, unit;
    int64_t bands = (rows + to->band - 1) / to->band;
    float *room = aligned_alloc(64, (size_t)((BAND + STRIP) * padded + 16) * sizeof(float)), *left = room;
    if (!room) {
        to->failed = 1;
        return;
    }
    struct band at = {.sums = taken_off(&left, BAND * padded), .values = taken_off(&left, STRIP * padded)};
    while ((unit = __atomic_fetch_add(&to->taken, 1, __ATOMIC_RELAXED)) < to->units) {
        int64_t first = unit % bands * to->band;
        at.head = unit / bands, at.begin = to->row_begin + first, at.count = smaller(rows - first, to->band);
        whole_band(to, &at);
    }
    free(room);
}
