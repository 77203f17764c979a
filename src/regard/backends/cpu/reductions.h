/* Structures that Python and C share for reductions of the weights: sums, maxima and the largest weights, while only
 * the weights of one tile are in memory. A unit of work is one strip of one head: consecutive blocks of rows. Results
 * for rows lie in one strip alone. Results for columns are summed strip by strip, so that they do not depend on which
 * thread took which strip. */
#ifndef REGARD_REDUCTIONS_H
#define REGARD_REDUCTIONS_H

#include <stdint.h>

/* The table of sums: what the weight of a pair contributes to the sum of its row, column or cell. TERM(name) stands for
 * a function term_name of weight and exponent in reduce_tile.h, POSITION_TERM(name) for one that reads positions too. A
 * new sum is one more name here and in TERMS of reductions.py, that function, and a dataclass there whose `term` it
 * is. */
#define TERMS(TERM, POSITION_TERM) TERM(weight) TERM(weight_log2_weight) POSITION_TERM(weight_distance)

#define TERM_NUMBER(name) TERM_##name,
enum term { TERMS(TERM_NUMBER, TERM_NUMBER) TERM_COUNT };

/* Sums or maxima over cells: a row and a column belong to one cell at most, and the cells of rows never decrease. The
 * first cell of a strip may continue one of the strip before: its part is then written to `continued_`. */
struct cell_map {
    const int32_t *row_cells;     /* the cell of each row, or -1 */
    const int64_t *first_pieces;  /* pieces of a block of columns: first_pieces[block] to first_pieces[block + 1] */
    const int32_t *pieces; /* of each: its first column in the block, the one after its last one, and their cell */
    int64_t height, width;        /* how many cells there are */
    int64_t term;                 /* of the sums */
    double *sums; /* (batch, heads, height, width), added to; null where maxima of the weights are wanted */
    float *maxima;
    const int32_t *continued;     /* (strips): the cell of rows that continues, or -1 */
    double *continued_sums;       /* (batch, heads, strips, width) */
    float *continued_maxima;
};

/* The k largest weights of each row, (batch, heads, rows, k), in descending order, and their columns; 0 and any
 * beyond. */
struct topk {
    int64_t k;
    float *weights;
    int64_t *columns;
};

/* The weights summed by |query position - key position|. */
struct distances {
    const float *row_ranges, *column_ranges;   /* (blocks, 2): the smallest and largest position of each block */
    int64_t bins;
    const float *edges;                        /* (bins + 1): a bin holds distances from one edge to below the next */
    double *histogram;                         /* (batch, heads, strips, bins), added to */
};

struct reductions {
    int64_t strips, map_count, topk_count;
    const int64_t *strip_blocks;     /* the first block of rows of each strip, and the end of the last one */
    const uint64_t *cuts; /* per block of rows a bit per row: another cell, or block, begins after that row */
    double *row_sums[TERM_COUNT];    /* by term: (batch, heads, rows), added to, or null */
    double *column_sums[TERM_COUNT]; /* by term: (batch, heads, strips, columns), added to, or null */
    const struct cell_map *maps;
    const struct topk *topks;
    const float *query_positions; /* (rows + BLOCK), or null where neither a sum nor `distances` reads positions */
    const float *key_positions;   /* (columns + BLOCK), or null */
    const struct distances *distances; /* or null */
};

#endif
