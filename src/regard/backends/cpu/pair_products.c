/* Whether products of pairs of bfloat16 are faster here than products of floats: they start in every cycle on some
 * processors (AMD Zen 5), in every second one on others (Intel Sapphire Rapids), where entries are better widened. */
#include "simd.h"
#include "variants.h"

#include <time.h>

/* As many sums as hide the latency of a product, added up so often, measured so many times. */
enum { HALF_SUMS = 8, STEPS = 1000, ROUNDS = 8 };

/* Keeps the compiler from knowing what a variable is, and so from computing sums beforehand or once for all. */
#define UNKNOWN(variable) __asm__ volatile("" : "+m"(variable))

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Seconds that STEPS products of each sum take, in pairs or of floats. */
INLINE double product_seconds(const int paired) {
    lanes sum[2][HALF_SUMS] = {{{0}}}, factor = {0}, total = {0};
    UNKNOWN(sum);
    UNKNOWN(factor);
    double began = seconds();
    for (int step = 0; step < STEPS; step++)
        UNROLL for (int half = 0; half < 2; half++)
            UNROLL for (int i = 0; i < HALF_SUMS; i++)
                sum[half][i] = paired ? add_pairs(sum[half][i], factor, factor) : sum[half][i] + factor * factor;
    for (int i = 0; i < HALF_SUMS; i++) total += sum[0][i] + sum[1][i];
    UNKNOWN(total);
    return seconds() - began;
}

/* How many times as many products of bfloat16 are computed in a second as of float32; 0 where the variant has no
 * instruction for them. */
double EXPORTED(regard_pair_speed)(void) {
    double paired = 1.0, single = 1.0;
    if (!PAIRS) return 0.0;
    for (int round = 0; round < ROUNDS; round++) {
        double one = product_seconds(1), other = product_seconds(0);
        paired = one < paired ? one : paired, single = other < single ? other : single;
    }
    return 2.0 * single / paired;
}
