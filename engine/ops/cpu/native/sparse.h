/* Which pages a decoding row reads: those whose keys could matter most; see sparse.c. */
#ifndef RL_SPARSE_H
#define RL_SPARSE_H

#include "attention.h"

/* The least and the largest value of each channel of each page's keys, fp32 [num_pages, num_kv_heads, head_dim] each; NULL
 * where a layer's rows read all they see. */
typedef struct {
    float *least, *largest;
} rl_bounds;

/* Keys that were written to ``slots``. */
typedef struct {
    rl_bounds bounds;
    const rl_kv *kv;
    const float *keys; /* [rows, num_kv_heads / copies, head_dim] as computed, for coded caches; others are read where they lie */
    const int64_t *slots;
    int64_t rows, num_kv_heads, copies, head_dim, page_size;
} rl_noted_keys;

/* Pages for the spans that choose; the others keep all of theirs. */
typedef struct {
    rl_bounds bounds;
    const float *q; /* [N, num_heads, head_dim] */
    const rl_span *spans;
    int64_t *pages;  /* [num_pages] of all spans; what is chosen is added from there on, ``count`` per span and KV head */
    rl_span *chosen; /* [num_spans * num_kv_heads]: the result */
    int64_t num_spans, num_pages, num_heads, num_kv_heads, head_dim, page_size;
    int64_t count;   /* pages per KV head */
} rl_choice;

/* Whether a span chooses: it decodes, and sees more pages than it may read. */
static inline int rl_span_chooses(const rl_span *span, int64_t page_size, int64_t count) {
    return span->is_decode && span->context > count * page_size;
}

/* Widen the bounds of the pages that were written to; a page begins anew when its first slot is written. 0. */
RL_API int64_t rl_note_keys(const rl_noted_keys *args);

/* Fills ``chosen``; returns how many spans that makes. */
RL_API int64_t rl_choose_pages(const rl_choice *args);

RL_DECLARE(void, rl_note_keys_of, const rl_noted_keys *args, int64_t kv_head);
RL_DECLARE(void, rl_choose_pages_of, const rl_choice *args, rl_span *span, int64_t kv_head, int64_t *pages);

#endif
