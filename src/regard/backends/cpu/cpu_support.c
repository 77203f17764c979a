/* Which of the variants that were built can run here. Compiled for any processor of its family. */
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#ifndef HWCAP2_BF16
#define HWCAP2_BF16 (1 << 14)
#endif
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#define EXPORT __attribute__((visibility("default")))

/* Of the sources that this was built from. */
EXPORT const char *regard_digest(void) { return DIGEST; }

#if defined(__x86_64__)

/* Bits of the answers of CPUID, and of the registers that the system keeps for each thread (XCR0). */
enum { FMA = 1 << 12, OSXSAVE = 1 << 27, AVX = 1 << 28, F16C = 1 << 29 };                  /* 1: ecx */
enum { AVX2 = 1 << 5, AVX512F = 1 << 16, AVX512BW = 1 << 30, AVX512VL = (int)(1u << 31) }; /* 7, 0: ebx */
enum { AVX512VNNI = 1 << 11 };                                                             /* 7, 0: ecx */
enum { AVX512BF16 = 1 << 5 };                                                              /* 7, 1: eax */
enum { YMM = 0x6, ZMM = 0xE0 };

/* Those answers and that register. */
struct processor {
    unsigned basic, extended, bytes, paired, kept;
};

/* Asked here and not of the compiler: what its run-time library knows differs from one system to another. */
static struct processor this_processor(void) {
    struct processor it = {0, 0, 0, 0, 0};
    unsigned eax, ebx, ecx, edx, high;
    if (!__get_cpuid(1, &eax, &ebx, &it.basic, &edx) || !(it.basic & OSXSAVE)) return it;
    __asm__("xgetbv" : "=a"(it.kept), "=d"(high) : "c"(0));
#if defined(__APPLE__)
    it.kept |= ZMM; /* macOS keeps them from a thread's first use of them on */
#endif
    if (__get_cpuid_count(7, 0, &eax, &it.extended, &it.bytes, &edx) && eax >= 1)
        __get_cpuid_count(7, 1, &it.paired, &ebx, &ecx, &edx);
    return it;
}

static int has(unsigned answer, unsigned bits) { return (answer & bits) == bits; }

static int has_avx2(const struct processor *it) {
    return has(it->kept, YMM) && has(it->basic, AVX | FMA | F16C) && has(it->extended, AVX2);
}

static int has_avx512(const struct processor *it) {
    return has_avx2(it) && has(it->kept, ZMM) && has(it->extended, AVX512F | AVX512BW | (unsigned)AVX512VL);
}

#endif

/* Whether this processor, and the system on it, has what a variant was compiled for. */
EXPORT int regard_runs(const char *variant) {
#if defined(__x86_64__)
    const struct processor it = this_processor();
    if (!strcmp(variant, "avx512bf16")) /* every processor with the one has the other */
        return has_avx512(&it) && has(it.paired, AVX512BF16) && has(it.bytes, AVX512VNNI);
    if (!strcmp(variant, "avx512")) return has_avx512(&it);
    if (!strcmp(variant, "avx2")) return has_avx2(&it);
#elif defined(__aarch64__) && defined(__linux__)
    if (!strcmp(variant, "neonbf16")) return (getauxval(AT_HWCAP2) & HWCAP2_BF16) != 0;
#elif defined(__aarch64__) && defined(__APPLE__)
    int found = 0;
    size_t bytes = sizeof(found);
    if (!strcmp(variant, "neonbf16")) return !sysctlbyname("hw.optional.arm.FEAT_BF16", &found, &bytes, 0, 0) && found;
#endif
    return !strcmp(variant, BASELINE);
}
