/* The structures that Python and C share for a step of a Transformer's decoder: the next token of each row of a search.
 *
 * In each layer: attention to the tokens so far, attention to the source, and a feed-forward network, each in a residual
 * connection with a norm. Keys and values stay where their token's step has written them: rows that a search moves,
 * repeats or drops are followed back by a table. In the place of attention to the tokens so far a layer may have a
 * recurrent unit, whose state is kept likewise:
 *
 *     c_t = f_t c_(t-1) + (1 - f_t) z_t, its output max(0, c_t), f_t the sigmoid of gates. */
#ifndef REGARD_TRANSFORMER_STEP_H
#define REGARD_TRANSFORMER_STEP_H

#include "packed_matrix.h"
#include "variants.h"

#include <stdint.h>

/* Activations of the feed-forward network. */
enum { RECTIFIED, SILU };

/* gain (x - mean) / sqrt(variance + epsilon) + shift; a null gain: no norm at all, a null shift: 0. */
struct step_norm {
    const float *gain, *shift;
    double epsilon;
};

struct step_layer {
    struct packed_matrix own; /* queries, keys and values of the target's tokens, side by side; recurrent: z and gates */
    struct packed_matrix own_output; /* not of recurrent layers */
    struct packed_matrix query, output, up, down;
    struct step_norm own_norm, norm, feed_forward_norm;
};

/* Keys and values of the source for one layer; the strides are in elements, features are neighbours. */
struct step_source {
    const float *key, *value;
    int64_t key_batch, key_head, key_row, value_batch, value_head, value_row;
};

/* Everything is float32 and contiguous but for the strides of a source. What a step keeps of the target are keys and
 * values, (layers, 2, rows of that step, key_heads * head_dim), or states, (layers, 1, rows of that step, dim). */
struct transformer_step {
    int64_t next_unit, unit_count; /* units of rows: how many some thread has taken, and all */
    int64_t failed;                /* whether there was no memory */
    int64_t unit;                  /* rows of a unit, a multiple of GROUP */
    int64_t rows, dim, hidden_dim, layer_count, heads, key_heads, head_dim;
    int64_t norm_first; /* whether a residual connection is x + f(norm(x)), else norm(x + f(x)) */
    int64_t activation;
    int64_t recurrent; /* whether the layers have a recurrent unit in the place of attention to the target */
    int64_t before; /* earlier steps that are given: all of them, and to recurrent layers the last, if there was one */
    int64_t keys;   /* of the source */
    int64_t shared; /* as many rows after each other have the same source */
    const struct step_layer *layers;
    const struct step_source *sources;
    const int64_t *lengths;       /* of each source */
    const float *const *past;     /* (before): what each earlier step has kept */
    const int64_t *past_rows;     /* (before): of how many rows */
    const int32_t *table;         /* (rows, before): the row of each earlier step that each row continues */
    struct step_norm last_norm;
    const float *input; /* (rows, dim) */
    float *own;         /* what this step keeps */
    float *features;    /* (rows, dim): of the last layer, after its norm */
    float *weights;      /* (rows, layers, heads, keys), or null */
    float *self_weights; /* (rows, layers, heads, before + 1), or null, as recurrent layers have none */
};

#endif
