/* Each source is compiled once for every kind of processor; what it exports ends in the name of the variant. */
#ifndef REGARD_VARIANTS_H
#define REGARD_VARIANTS_H

#define JOINED(name, variant) name##_##variant
#define SUFFIXED(name, variant) JOINED(name, variant)
#define EXPORTED_FOR(name, variant) __attribute__((visibility("default"))) SUFFIXED(name, variant)
#define EXPORTED(name) EXPORTED_FOR(name, VARIANT)

/* A variant that multiplies in pairs has code for that alone. Unless a problem is `paired`, its function returns what that
 * of the variant WITHOUT_PAIRS does, whose vectors are as wide. A variant that does all by itself knows no such name. */
#if defined(WITHOUT_PAIRS)
enum { ONLY_PAIRS = 1 };
#define LEAVE_UNLESS(paired, name, problem)                        \
    do {                                                           \
        void EXPORTED_FOR(name, WITHOUT_PAIRS)(__typeof__(problem)); \
        if (!(paired)) {                                           \
            SUFFIXED(name, WITHOUT_PAIRS)(problem);                \
            return;                                                \
        }                                                          \
    } while (0)
#else
enum { ONLY_PAIRS = 0 };
#define LEAVE_UNLESS(paired, name, problem) (void)0
#endif

/* The name of a function that several sources call, of which one has it: it is in the library once for a variant, and not
 * in one that multiplies in pairs, which calls that of the variant without. */
#if defined(WITHOUT_PAIRS)
#define SHARED(name) SUFFIXED(name, WITHOUT_PAIRS)
#else
#define SHARED(name) SUFFIXED(name, VARIANT)
#endif

#endif
