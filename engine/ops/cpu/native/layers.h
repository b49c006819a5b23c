/* Arguments of a whole step through all layers; see layers.c. Mirrored by layers.py. */
#ifndef RL_LAYERS_H
#define RL_LAYERS_H

#include "sparse.h"

/* A packed matrix as rl_linear takes it. */
typedef struct {
    int64_t kind;
    const uint8_t *weights;
    int64_t out_features, in_features;
    const float *bias; /* or NULL */
} rl_matrix;

typedef struct {
    const float *attn_norm, *q_norm, *k_norm, *post_attn_norm, *mlp_norm, *post_mlp_norm; /* NULL where there is none */
    rl_matrix qkv, attn_out, gate_up, mlp_out;
    rl_bounds bounds;    /* of the keys of each page, where rows choose what they read */
    rl_kv kv;            /* [num_pages, page_size, copies * num_kv_heads, ...] */
    int64_t window;      /* 0 for all */
    int64_t sink_tokens; /* seen before the window */
    int64_t rotation;    /* into rl_step.rotations, or -1: none */
} rl_layer;

typedef struct {
    const rl_layer *layers;
    const float *final_norm;
    int64_t num_layers, hidden, intermediate, num_heads, num_kv_heads, head_dim;
    int64_t activation; /* enum rl_activation */
    float eps, scale, softcap;
} rl_decoder;

/* One table of cosines and sines, for positions 0, 1 ...: [positions, half]. */
typedef struct {
    const float *cos, *sin;
    int64_t half;
} rl_rotation;

typedef struct {
    float *x;                /* [rows, hidden]: the embeddings; overwritten */
    const int64_t *slots;    /* [rows] */
    const int64_t *positions; /* [rows]: into the rotations */
    const rl_span *spans;
    const int64_t *pages;
    const rl_rotation *rotations;
    const int64_t *wanted;   /* [num_wanted]: rows that go on after the last layer's attention */
    float *out;              /* [num_wanted, hidden]: normed, for the head */
    void *workspace;
    int64_t workspace_bytes;
    int64_t rows, num_spans, num_wanted, page_size;
    int64_t num_pages;    /* in ``pages`` */
    int64_t sparse_pages; /* that a decoding row reads per KV head of a layer with bounds */
    int64_t copies; /* stored heads per KV head: 1, or all query heads that share it */
} rl_step;

#endif
