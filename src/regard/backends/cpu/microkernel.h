/* The microkernel: products of small blocks in registers, the loop that does all multiplications.
 *
 * The factors are made of terms of 32 bits: a float each, or, `paired`, two bfloat16, whose products are summed in
 * float32 by one instruction (add_pairs). */
#ifndef REGARD_MICROKERNEL_H
#define REGARD_MICROKERNEL_H

#include "simd.h"

/* Rows are in groups; AT_ONCE rows times two vectors of columns are as many sums as there are registers for. */
enum { GROUP = 8, AT_ONCE = LANES == 4 ? 4 : LANES == 8 ? 4 : 8, PAIR = 2 * LANES };

/* The left factor: its term (row, k) is data[row * stride + k * step]. */
struct factor {
    const float *data;
    int64_t stride, step;
};

/* The right factor: its term (k, column) is data[k * stride + column]; the k in [begin, end) are summed. */
struct vectors {
    const float *data;
    int64_t stride, begin, end;
};

INLINE void accumulate(const struct factor left, const struct vectors right, lanes (*sum)[2], const int paired) {
    enum { HALF = AT_ONCE / 2 }; /* addresses of rows are in two halves, so that there are registers for them */
    const float *entry = left.data + right.begin * left.step, *vector = right.data + right.begin * right.stride;
    const float *other = entry + HALF * left.stride;
    for (int64_t k = right.begin; k < right.end; k++) {
        lanes first = load(vector), second = load(vector + LANES);
        UNROLL for (int r = 0; r < AT_ONCE; r++) {
            lanes own = broadcast_bits(r < HALF ? entry + r * left.stride : other + (r - HALF) * left.stride);
            sum[r][0] = paired ? add_pairs(sum[r][0], own, first) : sum[r][0] + own * first;
            sum[r][1] = paired ? add_pairs(sum[r][1], own, second) : sum[r][1] + own * second;
        }
        entry += left.step, other += left.step, vector += right.stride;
    }
}

/* into = rescale * into + left . right for GROUP rows and two vectors of columns; rescale: one per row, null for 0. The
 * product is summed up apart before it is added: a sum over many blocks is rounded once for each of them. */
INLINE void add_terms(const struct factor left, const struct vectors right, float *into, int64_t stride,
                      const float *rescale, const int paired) {
    UNROLL for (int part = 0; part < GROUP; part += AT_ONCE) {
        lanes sum[AT_ONCE][2] = {{{0}}};
        float *target = into + part * stride;
        accumulate((struct factor){left.data + part * left.stride, left.stride, left.step}, right, sum,
                   paired);
        if (rescale)
            UNROLL for (int r = 0; r < AT_ONCE; r++) {
                sum[r][0] += load(target + r * stride) * rescale[part + r];
                sum[r][1] += load(target + r * stride + LANES) * rescale[part + r];
            }
        UNROLL for (int r = 0; r < AT_ONCE; r++) {
            store(target + r * stride, sum[r][0]);
            store(target + r * stride + LANES, sum[r][1]);
        }
    }
}

/* The same of floats. */
INLINE void add_product(const struct factor left, const struct vectors right, float *into, int64_t stride,
                        const float *rescale) {
    add_terms(left, right, into, stride, rescale, 0);
}

#endif
