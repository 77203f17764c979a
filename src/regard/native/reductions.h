/* What the Python side and the C side agree on for reductions of the weights: sums and largest, while all that is in
 * memory of the weights themselves is what one core works on. Units of work are the strips of the heads: some blocks of
 * rows that lie side by side. What is written for rows lies in one strip alone; what is written for columns is summed up
 * strip by strip, so that it does not depend on which thread took which. */
#ifndef REGARD_REDUCTIONS_H
#define REGARD_REDUCTIONS_H

#include <stdint.h>

/* Sums or the largest over cells, of which each row and each column is in one at the most. The cells of rows grow from
 * row to row. A strip's first row of cells may have begun in the strip before: then it is written apart. */
struct map {
    const int32_t *rows;   /* the cell of each row, or -1 */
    const int64_t *first;  /* pieces of a block of columns: first[block] to first[block + 1] */
    const int32_t *pieces; /* of each: its first column in the block, that after its last one, and their cell */
    int64_t height, width; /* how many cells there are */
    double *sums;          /* (batch, heads, height, width), to be added to, or null: then it is the largest */
    float *largest;
    const int32_t *begun; /* (strips): the cell of rows that is written apart, or -1 */
    double *begun_sums;   /* (batch, heads, strips, width) */
    float *begun_largest;
};

/* The largest weights of each row: (batch, heads, rows, most), from the largest on, and their columns; 0 and any beyond. */
struct top {
    int64_t most;
    float *weights;
    int64_t *columns;
};

/* How far the weights of each row reach, of |query position - key position|. */
struct reach {
    int64_t bins;
    const float *edges;                /* (bins + 1): a bin has the distances from one edge on to below the next */
    const float *queries, *keys;       /* (rows) and (columns + BLOCK): where they are */
    const float *of_rows, *of_columns; /* (blocks, 2): the least and the largest of these in each block */
    double *mass, *moments; /* (batch, heads, rows), to be added to: sums of weights, and of weights times distances */
    double *histogram;      /* (batch, heads, strips, bins), to be added to: sums of weights */
};

struct reductions {
    int64_t strips, maps, tops;
    const int64_t *strip;  /* the first block of rows of each strip, and the end of the last one */
    const uint64_t *cuts;  /* for each block of rows a bit for each row: another cell of some map, or block, comes next */
    double *terms;         /* (batch, heads, rows), to be added to: weight times its logarithm to the base 2; or null */
    double *column_sums;   /* (batch, heads, strips, columns), to be added to; or null */
    const struct map *map; /* (maps) */
    const struct top *top; /* (tops) */
    const struct reach *reach; /* or null */
};

#endif
