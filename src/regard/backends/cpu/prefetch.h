/* Fetching memory before it is read, where the processor does not foresee what is read next. */
#ifndef REGARD_PREFETCH_H
#define REGARD_PREFETCH_H

#include "simd.h"

/* Bytes of a cache line and of a page. Finding where a page is in memory takes as long as reading from it: it is begun
 * so many bytes before. */
enum { LINE = 64, PAGE = 4096, PAGE_AHEAD = 32768 };

/* Fetches a line into the second cache. So few lines can be on their way to the first one, 24 on Zen 4, that memory would
 * be read at half its rate. */
INLINE void fetch_line(const void *line) { __builtin_prefetch(line, 0, 2); }

/* Begins to find the page that is PAGE_AHEAD bytes after some bytes, if these are the first ones of their page. */
INLINE void find_page_ahead(const void *bytes, int64_t count) {
    if ((int64_t)((uintptr_t)bytes % PAGE) < count)
        __builtin_prefetch((const char *)((uintptr_t)bytes + PAGE_AHEAD), 0, 3);
}

#endif
