/* Memory that a call works in: whole cache lines, by C11's functions, which Windows has under other names. */
#ifndef REGARD_ALIGNED_MEMORY_H
#define REGARD_ALIGNED_MEMORY_H

#include "simd.h"

#include <stdlib.h>
#if defined(_WIN32)
#include <malloc.h>
#endif

/* So many bytes, 0 too, from the beginning of a cache line on; null where memory has run out. `free_aligned` frees it. */
INLINE void *aligned_memory(int64_t bytes) {
    const size_t lines = (size_t)bytes / 64 + 1;
#if defined(_WIN32)
    return _aligned_malloc(64 * lines, 64);
#else
    return aligned_alloc(64, 64 * lines);
#endif
}

INLINE void free_aligned(void *memory) {
#if defined(_WIN32)
    _aligned_free(memory);
#else
    free(memory);
#endif
}

#endif
