/* The largest entries of each row and its log-sum-exp, while the row is in the core's cache; nothing of its size is
 * written. */
#include "top_entries.h"
#include "simd.h"

#include <math.h>

/* Puts an entry that is larger than the last of the largest into its place among them. */
static void insert(float entry, int64_t column, int64_t count, float *values, int64_t *indices) {
    int64_t place = count - 1;
    for (; place > 0 && values[place - 1] < entry; place--) {
        values[place] = values[place - 1];
        indices[place] = indices[place - 1];
    }
    values[place] = entry;
    indices[place] = column;
}

INLINE int any_lane(bits found) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)found, (__m512i)found) != 0;
#else
    int any = 0;
    for (int lane = 0; lane < LANES; lane++) any |= found[lane];
    return any != 0;
#endif
}

static void find_largest(const float *entries, int64_t columns, int64_t count, float *values, int64_t *indices) {
    for (int64_t k = 0; k < count; k++) values[k] = -INFINITY, indices[k] = k;
    int64_t column = 0, end = count ? columns : 0;
    for (; column + LANES <= end; column += LANES) {
        if (!any_lane(load(entries + column) > broadcast(values[count - 1]))) continue;
        for (int64_t c = column; c < column + LANES; c++)
            if (entries[c] > values[count - 1]) insert(entries[c], c, count, values, indices);
    }
    for (; column < end; column++)
        if (entries[column] > values[count - 1]) insert(entries[column], column, count, values, indices);
}

static float log_sum_exp(const float *entries, int64_t columns) {
    lanes maximum = broadcast(-INFINITY), sum = {0};
    float each[LANES], largest = -INFINITY;
    for (int64_t a = 0; a + LANES <= columns; a += LANES) maximum = max_lanes(maximum, load(entries + a));
    store(each, maximum);
    for (int lane = 0; lane < LANES; lane++) largest = each[lane] <= largest ? largest : each[lane];
    for (int64_t a = columns / LANES * LANES; a < columns; a++) largest = entries[a] <= largest ? largest : entries[a];
    if (!(largest - largest == 0.0f)) return largest; /* infinity or NaN */
    int64_t a = 0;
    for (; a + LANES <= columns; a += LANES) sum += exp_or_zero(load(entries + a) - largest);
    float total = sum_lanes(sum);
    for (; a < columns; a++) total += expf(entries[a] - largest);
    return largest + logf(total);
}

/* Takes one row after another while any is left; any number of threads may call it at once. */
void EXPORTED(regard_top_entries)(struct top_entries *problem) {
    int64_t row;
    while ((row = __atomic_fetch_add(&problem->next_unit, 1, __ATOMIC_RELAXED)) < problem->unit_count) {
        const float *entries = problem->entries + row * problem->columns;
        find_largest(entries, problem->columns, problem->count, problem->values + row * problem->count,
                     problem->indices + row * problem->count);
        problem->lse[row] = log_sum_exp(entries, problem->columns);
    }
}
