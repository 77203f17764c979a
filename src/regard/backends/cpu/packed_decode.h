/* The structure that Python and C share for attention of a few rows to keys and values that are stored as codes.
 *
 * A code is an unsigned number of 8 or 4 bits, or a float of 8 bits, and what is stored is scale * code + offset, with an
 * offset of 0 for floats. A word of 32 bits holds the codes of 4, or 8, neighbours along the axis that is summed over: dims of a key, tokens of values. The code of neighbour
 * k begins at bit 8 * (k % 4) + 4 * (k / 4), so that the low halves of the four bytes are neighbours 0 to 3, and the high
 * ones 4 to 7. Parameters are words too: the scale in the upper half, the offset in the lower one, both bfloat16.
 */
#ifndef REGARD_PACKED_DECODE_H
#define REGARD_PACKED_DECODE_H

#include "variants.h"

#include <stdint.h>

/* What a code is: a whole number of so many bits, or a float with so many bits of exponent and of mantissa. */
enum { INT4 = 4, INT8 = 8, E4M3 = 43, E5M2 = 52 };

static inline int64_t code_bits(int64_t code) { return code == INT4 ? 4 : 8; }

/* How many codes there are, and where one is in a table of functions by code. */
enum { CODES = 4 };

static inline int row_of(int64_t code) { return code == INT8 ? 0 : code == INT4 ? 1 : code == E4M3 ? 2 : 3; }

/* Tokens of a block: those that stand together in memory, and whose scores are computed at once. */
enum { TOKENS = 64 };

/* Blocks are pages: those of a sequence may stand anywhere in memory, if `pages` of packed_decode says where.
 *
 * Keys: codes (batch, heads, blocks, words of dim, TOKENS); parameters (batch, heads, blocks, TOKENS), one for each token,
 * or (batch, heads, blocks, dim) `by_channel`. Values: codes (batch, heads, blocks, words of TOKENS, dim); parameters
 * (batch, heads, blocks, TOKENS). Strides are in words, of batch and head; all else is contiguous. */
struct packed_rows {
    int64_t code, dim; /* code: one of those above */
    const int32_t *codes;
    int64_t code_batch, code_head;
    const int32_t *parameters;
    int64_t parameter_batch, parameter_head;
};

struct packed_decode {
    int64_t next_unit, unit_count; /* how many of the parts of all heads some thread has taken, and how many there are */
    int64_t failed;                /* whether there was no memory */
    int64_t heads, rows, first, columns; /* of the columns those before `first`, all in the first block, are not read */
    int64_t parts, part; /* the keys are cut in so many parts, each of `part` keys, whole blocks, the last of the rest */
    int64_t by_channel;  /* whether keys have parameters for each dim of a block */
    int64_t in_bytes;    /* whether queries and weights may be rounded to 16 bits, and multiplied as whole numbers */
    float scale;         /* of the query */
    struct packed_rows key, value;
    const int64_t *pages; /* the number of each block in memory, in the order of the tokens; null: one after another */
    const float *query; /* (batch, heads, rows, dim), contiguous */
    const float *bias;  /* (batch, heads, rows, columns - first), or null; strides of batch, head and row */
    int64_t bias_batch, bias_head, bias_row;
    const int32_t *limits; /* (rows): each attends to the keys before its limit; null where all attend to all */
    float *output;         /* (batch, heads, parts, rows, value dim), contiguous */
    float *lse;            /* (batch, heads, parts, rows), contiguous */
};

/* Numbers (units, tokens, dim), contiguous, that become codes from the token `first` on; a unit is a head of a batch. */
struct code_writing {
    int64_t next_unit, unit_count; /* as above */
    int64_t tokens, first;         /* multiples of TOKENS `by_channel` */
    int64_t of_keys, by_channel, code, dim;
    const float *numbers;
    int32_t *codes, *parameters; /* as above, contiguous */
    int64_t unit_codes, unit_parameters;
};

#endif
