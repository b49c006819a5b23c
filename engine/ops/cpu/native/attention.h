/* Arguments of attention; see attention.c. Mirrored by kernels.py. */
#ifndef RL_ATTENTION_H
#define RL_ATTENTION_H

#include "rl.h"

/* Codes: int8 keys and values; int4, values of 4 bits and keys of 6 (codes.h). */
enum rl_kv_type { RL_FP32 = 0, RL_BF16 = 1, RL_FP16 = 2, RL_KV8 = 3, RL_KV4 = 4 };

/* Where a cache keeps a head's key and value of each slot: [slots, num_kv_heads, ...]. */
typedef struct {
    void *keys, *values;                    /* head_dim floats, or codes */
    uint16_t *key_numbers, *value_numbers;  /* fp16 of codes: a scale, with int4 a minimum after it; else NULL */
    const float *key_sizes, *value_sizes;   /* [num_kv_heads, head_dim]: codes are of x / size; or NULL: of x */
    int64_t type;                           /* enum rl_kv_type */
} rl_kv;

/* One request's rows: [row, row + count) of the batch are its tokens at positions [context - count, context). The pages
 * of its keys are pages[first_page ...]: page i holds positions [i * page_size, (i + 1) * page_size). kv_head: the only KV
 * head that is meant, or -1: all. is_decode: its one row continues a reply. */
typedef struct {
    int64_t row, count, context, first_page, kv_head, is_decode;
} rl_span;

typedef struct {
    const float *q;     /* [N, num_heads, head_dim] */
    rl_kv kv;
    float *out;         /* [N, num_heads * head_dim] */
    const rl_span *spans;
    const int64_t *pages;
    const float *sink_scores; /* [num_heads] or NULL: a score per head that takes its share and gives nothing */
    void *workspace;    /* at least rl_attention_workspace() bytes */
    int64_t workspace_bytes;
    int64_t num_spans, num_heads, num_kv_heads, head_dim, page_size;
    int64_t window;   /* tokens a query sees, itself included; 0 for all */
    int64_t sink_tokens; /* first tokens that are seen although they lie before the window; at most RL_SPLIT */
    float scale;      /* of the scores */
    float softcap;    /* cap * tanh(score / cap); 0 for none */
} rl_attention;

/* Whether the kernels know such a cache. */
int rl_kv_is_sound(const rl_kv *kv, int64_t head_dim);

/* The splits that a block of rows sees: ``first``, first + 1 ... , and before those split 0 when only its sinks are seen. */
typedef struct {
    int64_t first, count; /* count includes the sinks' split */
    int has_sinks_apart;
} rl_splits;

static inline int64_t rl_split_at(rl_splits splits, int64_t index) {
    if (!splits.has_sinks_apart)
        return splits.first + index;
    return index == 0 ? 0 : splits.first + index - 1;
}

/* A block of query rows of one KV head, and which of its splits are to be seen: [first_split, first_split + num_splits),
 * counted as in ``splits``. Rows are counted flat: flat = row of the span * group + query head of the group. */
typedef struct {
    int64_t span, kv_head, first_flat, num_flat;
    rl_splits splits;
    int64_t first_split, num_splits;
    int64_t block; /* into rl_attention_plan.blocks, or -1: this piece sees all splits and writes the result itself */
} rl_attention_piece;

/* A block whose splits are seen by several pieces: the last to finish folds the partial results together. */
typedef struct {
    int64_t num_splits;
    float *partials; /* per split: num_flat maxima, num_flat sums, num_flat * head_dim weighted values */
    int64_t pieces_left;
} rl_attention_block;

typedef struct {
    const rl_attention *args;
    const rl_attention_piece *pieces;
    rl_attention_block *blocks;
    int64_t num_pieces;
    int64_t next_piece;
    char *scratch; /* one part per thread */
    int64_t scratch_bytes;
} rl_attention_plan;

#define RL_SPLIT 128    /* tokens of context whose scores are summed before anything is folded; fixes the order of sums */
#define RL_FLAT_ROWS 48 /* rows of a block at most */

/* Take pieces until none is left, with the scratch of ``thread``. */
RL_DECLARE(void, rl_attention_work, void *plan, int64_t thread);

#endif
