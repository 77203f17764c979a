/* The structure that Python and C share for the linear recurrence, which causal linear attention is.
 *
 * S_t = e^g_t S_(t-1) + k_t u_t', output_t = S_t' q_t; u_t = v_t, or by the delta rule beta_t (v_t - (e^g_t S_(t-1))' r_t), where
 * r_t, the key whose value is removed, is k_t unless there is another. With a bonus b queries read the state before their own
 * token: output_t = S_(t-1)' q_t + (q_t . (b_t * k_t)) v_t, forward, without a feature map, a total or the delta rule.
 * Tokens go in chunks of BLOCK: products within a chunk are of rows with rows, and the state is read and written once.
 */
#ifndef REGARD_RECURRENCE_H
#define REGARD_RECURRENCE_H

#include "flash.h"

/* Decay: none, a number for each head and token, or one for each of their features. */
enum { NO_DECAY, HEAD_DECAY, FEATURE_DECAY };

/* What is done with queries and keys while they are packed: nothing, or elu + 1. */
enum { IDENTITY, ELU };

/* What a step of one token does besides: rows are divided by their norms. */
enum { UNIT_NORM = ELU + 1 };

/* Query, key, value and output, and the gradients of these, are of `dtype`; all else is float32, and so are gradients of parts.
 * `struct rows` have strides in elements and contiguous last axes; the others are contiguous. A part is a range of value
 * columns: each is a recurrence of its own, and gradients of queries and keys are summed over the parts, if there are several.
 * Shapes: B batch, H query heads, K key heads, N tokens, D features, V value columns, P parts, T = ceil(N / BLOCK / segment). */
struct recurrence {
    int64_t next_unit, unit_count; /* how many parts of all key heads some thread has taken, and how many there are */
    int64_t failed;                /* whether there was no memory */
    int64_t batch, heads, group, tokens, dim, value_dim;
    int64_t parts, segment;   /* parts of the value columns; chunks from one stored state to the next */
    int64_t dtype, decay_kind, feature_map;
    int64_t normalize;        /* whether outputs are divided by q_t . (sum of decayed keys), the total of their weights */
    int64_t checked, invalid; /* forward: whether numbers are checked; whether one is not finite, a decay above 0, or a beta not in 0..2 */
    double scale;             /* of queries, before the feature map */
    struct rows query, key;   /* (B, H, N, D), (B, K, N, D) */
    struct rows value;        /* (B, K, N, V) */
    struct rows decay, beta;  /* g (B, K, N) or (B, K, N, D), at most 0; (B, K, N) or null */
    struct rows removal;      /* r (B, K, N, D), of `dtype` and without a feature map, or null for the key */
    struct rows bonus;        /* b (B, K, N, D), or null */
    int64_t bonus_step;       /* from a feature's number of the bonus to the next one's: 1, or 0 where all have one */
    const float *state;       /* (B, K, D, V), before the first token, or null for 0 */
    const float *total;       /* (B, K, D), the sum of keys that belongs to it, or null */
    void *output;             /* (B, H, N, V) */
    float *row_total;         /* (B, H, N) where normalised, or null */
    float *final_state, *final_total;     /* (B, K, D, V), (B, K, D); null where not wanted */
    float *border_state, *border_total;   /* (B, K, T, D, V), (B, K, T, D): before each segment; null where not wanted */
    struct rows grad_output;              /* (B, H, N, V) */
    const float *grad_final_state, *grad_final_total;                /* as the final ones, or null */
    void *grad_query, *grad_key;                                     /* (P, B, H, N, D), (P, B, K, N, D) */
    void *grad_value;                                                /* (B, K, N, V) */
    float *grad_decay, *grad_beta;                                   /* (P, B, K, N) or (P, B, K, N, D); (P, B, K, N) */
    void *grad_removal;                                              /* (P, B, K, N, D) */
    float *grad_state, *grad_total;                                  /* as the states, or null */
};

/* One token: outputs, and the state after it. Without memory for recent tokens the new state is written. With it the token is
 * appended to the recent ones, whose sum with the state is the new one: then reading it is all that grows with its size. Where
 * final_state is there too, the recent tokens are added to the state first, and this one is the first that is recent. A recent
 * token has its features [D], u [V], and its decay factor: nothing, [1] or [D] by decay_kind. W is the sum of these. Python fills
 * in what a layout of the tensors has in common, once, and passes the addresses with each token. */
struct recurrence_step {
    int64_t first_unit, unit_end;  /* the key heads of all sequences that are computed */
    int64_t heads, group, dim, value_dim;
    int64_t recent_capacity;       /* the most recent tokens that there is memory for */
    int64_t decay_kind, feature_map;
    int64_t normalize;             /* whether the state has a total, which outputs are divided by */
    float scale;                   /* of queries, before the feature map */
    struct rows query, key, value; /* (B, H, 1, D), (B, K, 1, D), (B, K, 1, V) */
    struct rows decay, beta;       /* (B, K, 1) or (B, K, 1, D); (B, K, 1), or null */
    struct rows removal;           /* (B, K, 1, D), without a feature map, or null for the key */
    int64_t dtype, decay_dtype, beta_dtype; /* of query, key, value and output; of the gates */
    int64_t recent_count;          /* R tokens before this one */
    int64_t invalid;               /* whether a decay is above 0, or a beta not within 0..2 */
    const float *state;            /* (B, K): a head's matrix (D, V), and after it, where normalised, its total (D) */
    float *recent;                 /* (B, K, capacity, W), or null: R is 0, and the new state is written */
    void *output;                  /* (B, H, 1, V) */
    float *final_state;            /* as the state, and perhaps the same memory where tokens are recent; null: it is not written */
};

#endif
