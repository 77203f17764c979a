/* Which of the variants that were built can run here. Compiled for any processor of its family. */
#include <string.h>

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#ifndef HWCAP2_BF16
#define HWCAP2_BF16 (1 << 14)
#endif
#endif

#define EXPORT __attribute__((visibility("default")))

/* Of the sources that this was built from. */
EXPORT const char *regard_digest(void) { return DIGEST; }

/* Whether this processor, and the system on it, has what a variant was compiled for. */
EXPORT int regard_runs(const char *variant) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    int avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
    if (!strcmp(variant, "avx512bf16")) return avx512 && __builtin_cpu_supports("avx512bf16");
    if (!strcmp(variant, "avx512")) return avx512;
    if (!strcmp(variant, "avx2")) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); /* those have F16C, too */
#elif defined(__aarch64__) && defined(__linux__)
    if (!strcmp(variant, "neonbf16")) return (getauxval(AT_HWCAP2) & HWCAP2_BF16) != 0;
#endif
    return !strcmp(variant, BASELINE);
}
