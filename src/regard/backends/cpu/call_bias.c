/* What a bias that is computed in the call adds to the scores of a tile (call_bias.h). Numbers of a table whose column is
 * the same for all pairs are a number of each row, or of each column. */
#include "call_bias.h"

void fill_call_bias(const struct flash *problem, const struct place *at, float *tile) {
    const struct call_bias *bias = problem->call_bias;
    const struct call_table *queries = &bias->query_table, *keys = &bias->key_table;
    int64_t of_queries = queries->data ? only_column(problem, queries, at) : -1,
            of_keys = keys->data ? only_column(problem, keys, at) : -1;
    float numbers[BLOCK] ALIGNED;
    memset(numbers, 0, sizeof(numbers));
    if (of_keys >= 0)
        for (int64_t j = 0; j < at->columns; j++)
            numbers[j] = table_row(keys, at->batch, at->head, at->column + j)[of_keys] * LOG2_E;
    for (int64_t r = 0; r < at->rows; r++) {
        const float *line = row_bias(problem, at->head, at->row + r, at->column);
        float own = of_queries < 0 ? 0.0f : table_row(queries, at->batch, at->head, at->row + r)[of_queries] * LOG2_E;
        for (int64_t j = 0; j < BLOCK; j += LANES) {
            lanes number = load(numbers + j) + own;
            if (line && j < at->columns) number += load_partial(line + j, at->columns - j);
            store(tile + r * BLOCK + j, number);
        }
    }
    if (bias->row_sums.data) add_sums(bias, at, tile);
    if (queries->data && of_queries < 0) add_query_table(problem, at, tile);
    if (keys->data && of_keys < 0) add_key_table(problem, at, tile);
    if (bias->vectors.queries) add_vectors(problem, at, tile, tile + BLOCK * BLOCK);
}
