/* A few tokens of each of many sequences against their keys, which are runs of rows in one memory. */
#include "decode.h"
#include "paged.h"
#include "typed_rows.h"

#include <math.h>
#include <string.h>

void EXPORTED(regard_decode)(struct decode *problem);

/* The tokens of a run against its keys, for one head: output and log-sum-exp of its rows, (tokens, group_heads). */
static void compute_run(struct paged *problem, const struct paged_run *run, int64_t head, float *output, float *lse) {
    int64_t rows = run->tokens * problem->group_heads, dim = problem->dim;
    int64_t query = (head * problem->tokens + run->token) * problem->group_heads * dim;
    int32_t limits[MOST_ROWS];
    int64_t least = run->keys;
    for (int64_t row = 0; row < rows; row++) {
        int64_t limit = run->limit + row / problem->group_heads;
        limit = limit < 0 ? 0 : limit < run->keys ? limit : run->keys;
        limits[row] = (int32_t)limit;
        least = limit < least ? limit : least;
    }
    struct decode work = {
        .unit_count = 1,
        .heads = 1,
        .rows = rows,
        .columns = run->keys,
        .dim = dim,
        .value_dim = problem->value_dim,
        .dtype = problem->dtype,
        .query_dtype = problem->query_dtype,
        .parts = 1,
        .part = run->keys,
        .scale = problem->scale,
        .query = row_at(problem->query, 1, query, (int)problem->query_dtype),
        .query_row = dim,
        .key = row_at(problem->key, 1, head * problem->key_head + run->key * problem->key_row, (int)problem->dtype),
        .key_row = problem->key_row,
        .value = row_at(problem->value, 1, head * problem->value_head + run->key * problem->value_row,
                        (int)problem->dtype),
        .value_row = problem->value_row,
        .limits = least < run->keys ? limits : 0,
        .least_limit = least,
        .output = output,
        .lse = lse,
    };
    SUFFIXED(regard_decode, VARIANT)(&work);
    if (work.failed) __atomic_store_n(&problem->failed, 1, __ATOMIC_RELAXED);
}

/* The parts of a group of tokens for one head, weighted by their log-sum-exps. */
static void merge_runs(const struct paged *problem, const struct paged_run *run, int64_t head) {
    const struct paged_run *first = problem->runs + run->first_run;
    int64_t rows = run->tokens * problem->group_heads, dim = problem->value_dim, parts = head * problem->part_rows;
    int64_t place = (head * problem->tokens + run->token) * problem->group_heads;
    for (int64_t row = 0; row < rows; row++) {
        float *output = problem->output + (place + row) * dim, maximum = -INFINITY, total = 0.0f;
        for (int64_t i = 0; i < run->runs; i++)
            maximum = fmaxf(maximum, problem->part_lse[parts + first[i].row + row]);
        memset(output, 0, (size_t)dim * sizeof(float));
        for (int64_t i = 0; i < run->runs && maximum != -INFINITY; i++) {
            int64_t from = parts + first[i].row + row;
            float weight = expf(problem->part_lse[from] - maximum);
            const float *part = problem->part + from * dim;
            total += weight;
            for (int64_t a = 0; a < dim; a++) output[a] += weight * part[a];
        }
        for (int64_t a = 0; a < dim && total != 0.0f; a++) output[a] /= total;
        problem->lse[place + row] = total == 0.0f ? -INFINITY : maximum + logf(total);
    }
}

/* Takes one run of one head after another while any is left; any number of threads may call it at once. */
void EXPORTED(regard_paged)(struct paged *problem) {
    int64_t unit;
    while ((unit = __atomic_fetch_add(&problem->next_unit, 1, __ATOMIC_RELAXED)) < problem->unit_count) {
        const struct paged_run *run = problem->runs + unit / problem->heads;
        int64_t head = unit % problem->heads, part = head * problem->part_rows + run->row;
        if (run->runs == 1) {
            int64_t place = (head * problem->tokens + run->token) * problem->group_heads;
            compute_run(problem, run, head, problem->output + place * problem->value_dim, problem->lse + place);
            continue;
        }
        compute_run(problem, run, head, problem->part + part * problem->value_dim, problem->part_lse + part);
        int64_t *left = problem->left + run->group * problem->heads + head;
        if (__atomic_sub_fetch(left, 1, __ATOMIC_ACQ_REL) == 0) merge_runs(problem, run, head);
    }
}
