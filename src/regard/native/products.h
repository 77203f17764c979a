/* Products of blocks in registers: the one loop in which all the multiplying is done. */
#ifndef REGARD_PRODUCTS_H
#define REGARD_PRODUCTS_H

#include "lanes.h"

/* Rows go GROUP by GROUP; AT_ONCE of them and two vectors of columns are as many sums as there are registers for. */
enum { GROUP = 8, AT_ONCE = LANES == 4 ? 4 : LANES == 8 ? 4 : 8, PAIR = 2 * LANES };

/* The left factor: its entry (row, k) is at[row * stride + k * step]. */
struct factor {
    const float *at;
    int64_t stride, step;
};

/* The right factor: its entry (k, column) is at[k * stride + column]; the k in [from, to) are added up. */
struct vectors {
    const float *at;
    int64_t stride, from, to;
};

INLINE void multiply(const struct factor left, const struct vectors right, lanes (*sum)[2]) {
    const float *entry = left.at + right.from * left.step, *vector = right.at + right.from * right.stride;
    for (int64_t k = right.from; k < right.to; k++, entry += left.step, vector += right.stride) {
        lanes first = load(vector), second = load(vector + LANES);
        UNROLLED for (int r = 0; r < AT_ONCE; r++) {
            lanes own = every(entry[r * left.stride]);
            sum[r][0] += own * first;
            sum[r][1] += own * second;
        }
    }
}

/* into = kept * into + left . right for GROUP rows and two vectors of columns; kept: one for each row, or null for 0. The
 * product is summed up apart before it is added: a sum over many blocks is rounded once for each of them. */
INLINE void product(const struct factor left, const struct vectors right, float *into, int64_t stride,
                    const float *kept) {
    UNROLLED for (int part = 0; part < GROUP; part += AT_ONCE) {
        lanes sum[AT_ONCE][2] = {{{0}}};
        float *to = into + part * stride;
        multiply((struct factor){left.at + part * left.stride, left.stride, left.step}, right, sum);
        if (kept)
            UNROLLED for (int r = 0; r < AT_ONCE; r++) {
                sum[r][0] += load(to + r * stride) * kept[part + r];
                sum[r][1] += load(to + r * stride + LANES) * kept[part + r];
            }
        UNROLLED for (int r = 0; r < AT_ONCE; r++) {
            store(to + r * stride, sum[r][0]);
            store(to + r * stride + LANES, sum[r][1]);
        }
    }
}

#endif
