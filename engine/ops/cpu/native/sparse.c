/* Sparse attention (Quest, Tang 2024), as engine/kv/sparse.py describes it: pages are ranked by how much a query could want
 * any of their keys, and each KV head of a decoding row reads the first, the last and the best of the others. */
#include "sparse.h"

static void note_head(void *args, int64_t kv_head) { RL_PICK(rl_note_keys_of)(args, kv_head); }

RL_API int64_t rl_note_keys(const rl_noted_keys *args) {
    if (args->rows < 8)
        for (int64_t head = 0; head < args->num_kv_heads; head++)
            note_head((void *)args, head);
    else
        rl_pool_run(note_head, (void *)args, args->num_kv_heads);
    return 0;
}

/* Piece i chooses for the i-th of ``chosen``. */
static void choose_piece(void *argument, int64_t piece) {
    const rl_choice *args = argument;
    rl_span *span = &args->chosen[piece];
    if (span->kv_head >= 0)
        RL_PICK(rl_choose_pages_of)(args, span, span->kv_head, args->pages + args->num_pages + piece * args->count);
}

RL_API int64_t rl_choose_pages(const rl_choice *args) {
    int64_t total = 0;
    for (int64_t i = 0; i < args->num_spans; i++) {
        rl_span span = args->spans[i];
        if (!rl_span_chooses(&span, args->page_size, args->count)) {
            args->chosen[total++] = span;
            continue;
        }
        for (int64_t head = 0; head < args->num_kv_heads; head++) {
            span.kv_head = head;
            args->chosen[total++] = span;
        }
    }
    rl_pool_run(choose_piece, (void *)args, total);
    return total;
}
