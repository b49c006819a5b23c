/* The operations between the products: norms, rotation and cache write, gated activation. Each row is one row's business,
 * so that results never depend on how rows are dealt out to threads. */
#include "pointwise.h"

#define PIECE_ELEMENTS 8192        /* of a row's input, per piece */
#define WORTH_THREADS_ELEMENTS 32768 /* below, waking threads costs more than it saves */

typedef void (*rows_fn)(const void *args, int64_t first, int64_t last);

typedef struct {
    rows_fn fn;
    const void *args;
    int64_t rows, step;
} Deal;

static void deal_piece(void *argument, int64_t piece) {
    const Deal *deal = argument;
    int64_t first = piece * deal->step, last = first + deal->step;
    deal->fn(deal->args, first, last < deal->rows ? last : deal->rows);
}

/* fn over all rows, each of ``size`` elements, by several threads when there is enough to do. */
static void deal_rows(rows_fn fn, const void *args, int64_t rows, int64_t size) {
    if (rows * size < WORTH_THREADS_ELEMENTS) {
        fn(args, 0, rows);
        return;
    }
    Deal deal = {fn, args, rows, PIECE_ELEMENTS / size > 0 ? PIECE_ELEMENTS / size : 1};
    rl_pool_run(deal_piece, &deal, (rows + deal.step - 1) / deal.step);
}

static void norm_rows(const void *args, int64_t first, int64_t last) { RL_PICK(rl_norm_rows)(args, first, last); }
static void rope_rows(const void *args, int64_t first, int64_t last) { RL_PICK(rl_rope_rows)(args, first, last); }
static void gate_rows(const void *args, int64_t first, int64_t last) { RL_PICK(rl_gate_rows)(args, first, last); }

/* Root mean square norm (Zhang 2019). 0, or -1 for arguments that make no sense, as for all below. */
RL_API int64_t rl_rms_norm(const rl_norm *args) {
    if (args->rows < 0 || args->size <= 0)
        return -1;
    deal_rows(norm_rows, args, args->rows, args->size);
    return 0;
}

/* Rotary embedding (RoFormer, Su 2021), in the order in which dimensions i and i + half turn as a pair. */
RL_API int64_t rl_rope_and_write_kv(const rl_rope *args) {
    if (args->rows < 0 || args->num_heads <= 0 || args->num_kv_heads <= 0 || 2 * args->half > args->head_dim ||
        args->head_dim > 1024 || args->copies <= 0 || !rl_kv_is_sound(&args->kv, args->head_dim))
        return -1;
    deal_rows(rope_rows, args, args->rows, (args->num_heads + 2 * args->num_kv_heads) * args->head_dim);
    return 0;
}

/* GLU variants (Shazeer 2020). */
RL_API int64_t rl_gated_activation(const rl_gate *args) {
    if (args->rows < 0 || args->size <= 0 || args->activation < RL_SILU || args->activation > RL_GELU_TANH)
        return -1;
    deal_rows(gate_rows, args, args->rows, 2 * args->size);
    return 0;
}
