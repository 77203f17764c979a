/* The structure that Python and C share for the steps of a GRU decoder that attends to a source.
 *
 * A step that attends first (Bahdanau): context = attend(h), h' = gru([input; context], h); one that attends after
 * (Luong): h' = gru(input, h), context = attend(h'). attend(h) = sum over j < length of weight[j] value[j], where weight
 * is the softmax of score_weight . tanh(q + key[j]), or without a score weight of scale q . key[j], and q is h times
 * the query weight, or h itself without one. */
#ifndef REGARD_GRU_DECODER_H
#define REGARD_GRU_DECODER_H

#include "variants.h"

#include <stdint.h>

/* Everything is float32 and contiguous, but for the strides of keys and values, which are in elements. The rows are
 * sentences; the gates are those of reset, update and new state. Matrices are packed in panels (panels.h): forward the
 * terms are what is multiplied by a matrix, backward the other way about. */
struct gru_decoder {
    int64_t next_unit, unit_count; /* units of rows: how many some thread has taken, and all */
    int64_t failed;                /* whether there was no memory */
    int64_t unit;                  /* rows of a unit, a multiple of GROUP */
    int64_t rows, steps, input_dim, hidden_dim, keys, key_dim, value_dim;
    int64_t attends_after; /* whether a step attends with the state after it */
    const int64_t *lengths; /* (rows): of each source */
    const float *input;     /* (rows, steps, input_dim) */
    const float *hidden;    /* (rows, hidden_dim): before the first step */
    const float *key;       /* (rows, keys, key_dim) */
    int64_t key_batch, key_row;
    const float *value; /* (rows, keys, value_dim) */
    int64_t value_batch, value_row;
    const float *input_weight; /* packed: input_dim, and value_dim where a step attends first, by 3 hidden_dim */
    const float *state_weight; /* packed: hidden_dim by 3 hidden_dim */
    const float *query_weight; /* packed: hidden_dim by key_dim; or null */
    const float *input_bias, *state_bias; /* (3 hidden_dim) */
    const float *score_weight;            /* (key_dim); null for dot products */
    double scale;
    float *states;   /* (rows, steps, hidden_dim): after each step */
    float *contexts; /* (rows, steps, value_dim) */
    float *weights;  /* (rows, steps, keys), or null as the next two in inference */
    float *queries;  /* (rows, steps, key_dim) */
    float *gates;    /* (rows, steps, 4 hidden_dim): reset, update, new, and the state's share of new before its reset */
    /* Backward, of steps that attend first. Gradients of keys, values and score weight are added to what is there. */
    const float *grad_states, *grad_contexts;
    float *grad_input, *grad_hidden; /* as `input` and `hidden` */
    float *grad_key, *grad_value;    /* (rows, keys, key_dim) and (rows, keys, value_dim) */
    float *grad_queries;             /* (rows, steps, key_dim) */
    float *grad_input_gates;         /* (rows, steps, 3 hidden_dim): of the products with the input weight */
    float *grad_state_gates;         /* likewise, with the state weight */
    float *grad_score_weight;        /* (units, key_dim) */
};

#endif
