/* Memory that a call works in: whole cache lines, by C11's functions, which Windows has under other names. */
#ifndef REGARD_ROOMS_H
#define REGARD_ROOMS_H

#include "simd.h"

#include <stdlib.h>
#if defined(_WIN32)
#include <malloc.h>
#endif

/* Room for so many bytes, none among them, from the beginning of a cache line on; 0 where memory has run out. `end_room`
 * gives it back. */
INLINE void *new_room(int64_t bytes) {
    const size_t lines = (size_t)bytes / 64 + 1;
#if defined(_WIN32)
    return _aligned_malloc(64 * lines, 64);
#else
    return aligned_alloc(64, 64 * lines);
#endif
}

INLINE void end_room(void *room) {
#if defined(_WIN32)
    _aligned_free(room);
#else
    free(room);
#endif
}

#endif
