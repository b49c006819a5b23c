/* Arguments of the operations between the products; see pointwise.c. Mirrored by kernels.py. */
#ifndef RL_POINTWISE_H
#define RL_POINTWISE_H

#include "attention.h"

enum rl_activation { RL_SILU = 0, RL_GELU = 1, RL_GELU_TANH = 2 };

/* out = x / sqrt(mean(x^2) + eps) * weight, row by row; out may be x. */
typedef struct {
    const float *x;      /* [rows, size] */
    const float *weight; /* [size] */
    float *out;          /* [rows, size] */
    int64_t rows, size;
    float eps;
} rl_norm;

/* Split qkv, norm q and k per head, rotate them, write k and v to the cache. */
typedef struct {
    const float *qkv;      /* [rows, (num_heads + 2 * num_kv_heads) * head_dim] */
    const float *cos;      /* [rows, half], or with positions [positions, half]; NULL: no rotation */
    const float *sin;      /* the same shape */
    const float *q_norm;   /* [head_dim] or NULL */
    const float *k_norm;   /* [head_dim] or NULL */
    const int64_t *slots;  /* [rows]: page * page_size + offset */
    const int64_t *positions; /* [rows]: which rows of cos and sin; or NULL: each its own */
    rl_kv kv;              /* [slots, copies * num_kv_heads, ...] */
    float *q;              /* [rows, num_heads, head_dim] */
    float *k;              /* [rows, num_kv_heads, head_dim]: the keys before they are coded; or NULL */
    int64_t rows, num_heads, num_kv_heads, head_dim;
    int64_t half;          /* pairs that rotate: dimensions i and i + half */
    int64_t copies;        /* stored heads per KV head: 1, or the query heads that share it */
    float eps;
} rl_rope;

/* out = activation(gate) * up. */
typedef struct {
    const float *gate_up; /* [rows, 2 * size]: gate, then up */
    float *out;           /* [rows, size] */
    int64_t rows, size;
    int64_t activation; /* enum rl_activation */
} rl_gate;

/* Rows [first, last) of each. */
RL_DECLARE(void, rl_norm_rows, const rl_norm *args, int64_t first, int64_t last);
RL_DECLARE(void, rl_rope_rows, const rl_rope *args, int64_t first, int64_t last);
RL_DECLARE(void, rl_gate_rows, const rl_gate *args, int64_t first, int64_t last);

#endif
