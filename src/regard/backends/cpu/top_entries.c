/* The largest entries of each row and its log-sum-exp, while the row is in the core's cache; nothing of its size is
 * written. */
#include "top_entries.h"
#include "largest.h"

/* Takes one row after another while any is left; any number of threads may call it at once. */
void EXPORTED(regard_top_entries)(struct top_entries *problem) {
    int64_t row;
    while ((row = __atomic_fetch_add(&problem->next_unit, 1, __ATOMIC_RELAXED)) < problem->unit_count) {
        struct largest found = no_entries(problem->count, problem->values + row * problem->count,
                                          problem->indices + row * problem->count);
        add_entries(&found, problem->entries + row * problem->columns, problem->columns, 0);
        problem->lse[row] = log_of_sum(&found);
    }
}
