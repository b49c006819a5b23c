/* Attention for all spans of a step in one call: decoded tokens, drafts to verify and prompt chunks alike.
 *
 * The work is cut into pieces (a block of query rows, a KV head, some splits of the context) that threads take one by one.
 * How it is cut changes no result; see attention_isa.c. */
#include "attention.h"

#define PIECE_SPLITS 2               /* splits per piece where a context is cut */
#define MOST_PARTIAL_FLOATS (1 << 23) /* blocks whose partial results are larger are not cut */
#define WORK_WORTH_THREADS 100000    /* multiply-adds below which waking threads costs more than it saves */

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Splits that some row of a block sees. */
static rl_splits see_splits(const rl_attention *args, const rl_span *span, int64_t first_flat, int64_t num_flat) {
    int64_t group = args->num_heads / args->num_kv_heads;
    int64_t start = span->context - span->count;
    int64_t earliest = start + first_flat / group, latest = start + (first_flat + num_flat - 1) / group;
    int64_t seen_from = args->window > 0 && earliest + 1 > args->window ? earliest + 1 - args->window : 0;
    rl_splits splits = {seen_from / RL_SPLIT, latest / RL_SPLIT + 1 - seen_from / RL_SPLIT, 0};
    splits.has_sinks_apart = args->sink_tokens > 0 && splits.first > 0;
    splits.count += splits.has_sinks_apart;
    return splits;
}

typedef struct {
    int64_t num_pieces, num_blocks, num_partial_floats, work;
} Size;

/* Fill pieces and blocks, or only count what they need when they are NULL. */
static Size lay_out(const rl_attention *args, rl_attention_piece *pieces, rl_attention_block *blocks, float *partials) {
    Size size = {0, 0, 0, 0};
    int64_t group = args->num_heads / args->num_kv_heads;
    for (int64_t s = 0; s < args->num_spans; s++) {
        const rl_span *span = &args->spans[s];
        int64_t flat_rows = span->count * group;
        /* The last block first: it sees the most. */
        for (int64_t b = (flat_rows - 1) / RL_FLAT_ROWS; b >= 0; b--) {
            int64_t first_flat = b * RL_FLAT_ROWS, num_flat = least(RL_FLAT_ROWS, flat_rows - first_flat);
            rl_splits splits = see_splits(args, span, first_flat, num_flat);
            int64_t floats = splits.count * num_flat * (2 + args->head_dim);
            int is_cut = flat_rows <= RL_FLAT_ROWS && splits.count > PIECE_SPLITS &&
                         size.num_partial_floats + floats * args->num_kv_heads <= MOST_PARTIAL_FLOATS;
            int64_t step = is_cut ? PIECE_SPLITS : splits.count;
            int64_t each = (splits.count + step - 1) / step;
            int64_t first_head = span->kv_head < 0 ? 0 : span->kv_head;
            int64_t last_head = span->kv_head < 0 ? args->num_kv_heads : span->kv_head + 1;
            for (int64_t head = first_head; head < last_head; head++) {
                for (int64_t i = 0; pieces && i < each; i++) {
                    rl_attention_piece piece = {s, head, first_flat, num_flat, splits, i * step,
                                                least(step, splits.count - i * step), is_cut ? size.num_blocks : -1};
                    pieces[size.num_pieces + i] = piece;
                }
                size.num_pieces += each;
                size.work += 2 * num_flat * splits.count * RL_SPLIT * args->head_dim;
                if (!is_cut)
                    continue;
                if (blocks) {
                    rl_attention_block block = {splits.count, partials + size.num_partial_floats, each};
                    blocks[size.num_blocks] = block;
                }
                size.num_blocks++;
                size.num_partial_floats += floats;
            }
        }
    }
    return size;
}

static int64_t up_to_line(int64_t bytes) { return (bytes + 63) & -64; }

static int64_t scratch_bytes(int64_t head_dim) {
    return up_to_line((int64_t)sizeof(float) * (3 * RL_FLAT_ROWS * head_dim + head_dim * RL_SPLIT +
                                                RL_FLAT_ROWS * RL_SPLIT + 6 * RL_FLAT_ROWS + 4 * RL_SPLIT) +
                      (int64_t)sizeof(int64_t) * RL_SPLIT);
}

static int64_t workspace_for(const rl_attention *args, Size size) {
    return 64 + up_to_line(size.num_pieces * (int64_t)sizeof(rl_attention_piece)) +
           up_to_line(size.num_blocks * (int64_t)sizeof(rl_attention_block)) +
           up_to_line(size.num_partial_floats * (int64_t)sizeof(float)) + rl_pool_threads() * scratch_bytes(args->head_dim);
}

int rl_kv_is_sound(const rl_kv *kv, int64_t head_dim) {
    if (kv->type < RL_FP32 || kv->type > RL_KV4)
        return 0;
    if (kv->type < RL_KV8)
        return 1;
    return kv->key_numbers && kv->value_numbers && head_dim <= 1024 && (kv->type != RL_KV4 || head_dim % 4 == 0);
}

static int is_sound(const rl_attention *args) {
    return args->num_kv_heads > 0 && args->num_heads % args->num_kv_heads == 0 && args->head_dim > 0 &&
           args->page_size > 0 && args->sink_tokens >= 0 && args->sink_tokens <= RL_SPLIT && rl_kv_is_sound(&args->kv, args->head_dim);
}

/* Bytes of workspace that rl_paged_attention needs for these arguments and the present number of threads. */
RL_API int64_t rl_attention_workspace(const rl_attention *args) {
    return is_sound(args) ? workspace_for(args, lay_out(args, NULL, NULL, NULL)) : -1;
}

static void work(void *plan, int64_t thread) { RL_PICK(rl_attention_work)(plan, thread); }

/* Causal attention of every span to its own pages. 0, or -1 for arguments that make no sense or too small a workspace. */
RL_API int64_t rl_paged_attention(const rl_attention *args) {
    if (!is_sound(args))
        return -1;
    Size size = lay_out(args, NULL, NULL, NULL);
    if (args->workspace_bytes < workspace_for(args, size))
        return -1;
    char *memory = (char *)(((uintptr_t)args->workspace + 63) & ~(uintptr_t)63);
    rl_attention_piece *pieces = (rl_attention_piece *)memory;
    memory += up_to_line(size.num_pieces * (int64_t)sizeof(rl_attention_piece));
    rl_attention_block *blocks = (rl_attention_block *)memory;
    memory += up_to_line(size.num_blocks * (int64_t)sizeof(rl_attention_block));
    float *partials = (float *)memory;
    memory += up_to_line(size.num_partial_floats * (int64_t)sizeof(float));
    lay_out(args, pieces, blocks, partials);
    rl_attention_plan plan = {args, pieces, blocks, size.num_pieces, 0, memory, scratch_bytes(args->head_dim)};
    int64_t threads = size.work < WORK_WORTH_THREADS ? 1 : least(rl_pool_threads(), size.num_pieces);
    rl_pool_run(work, &plan, threads);
    return 0;
}
