/* Attention of a block of query rows over splits of the context (FlashAttention, Dao 2022; its online softmax in fp32).
 *
 * A split is RL_SPLIT tokens from a fixed position on. Each row's share of a split is computed from nothing but the row and
 * the split: scores with one chain of sums over the head's dimensions per key, weighted values with one chain over the keys.
 * Splits are folded in order. So a row's result is the same, bit for bit, alone or in a batch, in a chunk of any size, with
 * any number of threads. Keys a row may not see get the weight 0, which changes no sum.
 *
 * Each key and value is read once for all rows of a block, that is for all query heads that share it.
 */
#include "attention_tiles.h"

#define FETCH_VECTORS 2 /* vectors of keys asked for ahead of the one in hand */

/* -- one split, and folding -------------------------------------------------------------------------------------------- */

/* Where keys [first, last) of a split lie. */
static void locate_range(const rl_attention *args, const int64_t *pages, int64_t kv_head, int64_t base, int64_t first,
                         int64_t last, int64_t *offsets) {
    int64_t size = args->kv.type < RL_KV8 ? args->head_dim : 1, token = args->num_kv_heads * size;
    while (first < last) {
        int64_t page = (base + first) / args->page_size, inside = (base + first) % args->page_size;
        int64_t offset = (pages[page] * args->page_size + inside) * token + kv_head * size;
        for (; inside < args->page_size && first < last; inside++, first++, offset += token)
            offsets[first] = offset;
    }
}

/* Where the keys of a split lie that are seen; those between and around them, up to whole vectors, stand for one of them. */
static void locate_keys(const rl_attention *args, const rl_span *span, int64_t kv_head, int64_t base, Sight keys,
                        int64_t *offsets) {
    const int64_t *pages = args->pages + span->first_page;
    locate_range(args, pages, kv_head, base, 0, keys.sinks, offsets);
    locate_range(args, pages, kv_head, base, keys.first, keys.last, offsets);
    int64_t any = offsets[first_key(keys)];
    int64_t hidden = keys.sinks > 0 ? keys.sinks : keys.first & -(int64_t)RL_WIDTH;
    for (; hidden < keys.first; hidden++)
        offsets[hidden] = any;
    for (int64_t key = keys.last; key % RL_WIDTH; key++)
        offsets[key] = any;
}

/* Ask for the rows [first, last) of a split ahead of their use. Heads lie between each other, a step too wide for the
 * processor to foresee: without this each vector of keys waits for memory. */
RL_INLINE void fetch(const void *base, const int64_t *offsets, int64_t first, int64_t last, int64_t step,
                     int64_t row_bytes) {
    for (int64_t key = first; key < last; key++) {
        const char *row = (const char *)base + offsets[key] * step;
        for (int64_t at = 0; at < row_bytes; at += 64)
            _mm_prefetch(row + at, _MM_HINT_T0);
    }
}

/* One split for all rows of ``piece``: maxima and sums [num_flat], values [num_flat, head_dim]. */
static void see_split(const rl_attention *args, const rl_attention_piece *piece, int64_t split, const Scratch *s,
                      float *maxima, float *sums, float *values) {
    const rl_span *span = &args->spans[piece->span];
    int64_t base = split * RL_SPLIT, head_dim = args->head_dim, last_flat = piece->first_flat + piece->num_flat - 1;
    Sight earliest = sight_of(args, span, piece->first_flat), latest = sight_of(args, span, last_flat);
    Sight all = {latest.sinks < earliest.first ? latest.sinks : earliest.first, earliest.first, latest.last};
    Sight keys = within(all, base);
    int64_t first = first_key(keys) / RL_WIDTH, last = (keys.last + RL_WIDTH - 1) / RL_WIDTH;

    locate_keys(args, span, piece->kv_head, base, keys, s->offsets);
    int64_t type = args->kv.type, unit = type == RL_FP32 ? 4 : 2, key_bytes = head_dim * unit, value_bytes = key_bytes;
    if (type == RL_KV8)
        key_bytes = value_bytes = head_dim;
    else if (type == RL_KV4)
        value_bytes = head_dim / 2, key_bytes = value_bytes + head_dim / 4;
    int64_t key_step = type < RL_KV8 ? unit : key_bytes, value_step = type < RL_KV8 ? unit : value_bytes;
    for (int64_t v = first; v < last; v++) {
        int64_t ahead = v == first ? v * RL_WIDTH : (v + FETCH_VECTORS) * RL_WIDTH;
        int64_t until = (v + FETCH_VECTORS + 1) * RL_WIDTH, end = last * RL_WIDTH;
        fetch(args->kv.keys, s->offsets, ahead < end ? ahead : end, until < end ? until : end, key_step, key_bytes);
        fetch(args->kv.values, s->offsets, v * RL_WIDTH, (v + 1) * RL_WIDTH, value_step, value_bytes);
        const int64_t *offsets = s->offsets + v * RL_WIDTH;
        float *columns = s->keys + v * RL_WIDTH;
        switch (args->kv.type) {
        case RL_FP32: transpose_keys(args->kv.keys, offsets, RL_FP32, head_dim, columns); break;
        case RL_BF16: transpose_keys(args->kv.keys, offsets, RL_BF16, head_dim, columns); break;
        case RL_FP16: transpose_keys(args->kv.keys, offsets, RL_FP16, head_dim, columns); break;
        case RL_KV8: transpose_int8(args->kv.keys, offsets, head_dim, columns); break;
        default: transpose_six_bits(args->kv.keys, offsets, head_dim, columns); break;
        }
    }
    int is_coded = args->kv.type >= RL_KV8;
    if (is_coded)
        read_numbers(&args->kv, s, first * RL_WIDTH, last * RL_WIDTH);
    for (int64_t flat = 0; flat < piece->num_flat; flat += TILE_ROWS) {
        int rows = piece->num_flat - flat < TILE_ROWS ? (int)(piece->num_flat - flat) : TILE_ROWS;
        float *shares = s->shares + flat * RL_SPLIT, *out = values + flat * head_dim;
        score_rows(s->queries + flat * head_dim, s->keys, shares, head_dim, rows, first, last);
        for (int r = 0; r < rows; r++) {
            Sight sight = within(sight_of(args, span, piece->first_flat + flat + r), base);
            float *share = shares + r * RL_SPLIT;
            if (is_coded)
                scale_scores(share, s->query_sums[flat + r], s, first, last);
            soften(share, sight, first, last, args->softcap, &maxima[flat + r], &sums[flat + r]);
            if (is_coded)
                s->lows[flat + r] = scale_shares(share, s, first, last);
        }
        const void *from = args->kv.values;
        switch (args->kv.type) {
        case RL_FP32: value_rows_fp32(shares, from, s->offsets, keys, out, head_dim, rows); break;
        case RL_BF16: value_rows_bf16(shares, from, s->offsets, keys, out, head_dim, rows); break;
        case RL_FP16: value_rows_fp16(shares, from, s->offsets, keys, out, head_dim, rows); break;
        case RL_KV8: value_rows_int8(shares, from, s->offsets, keys, out, head_dim, rows); break;
        default: value_rows_int4(shares, from, s->offsets, keys, s->lows + flat, out, head_dim, rows); break;
        }
    }
}

static float exp_of(float x) {
    float lanes[RL_WIDTH];
    vf_store(lanes, vf_exp(vf_set1(x)));
    return lanes[0];
}

/* Add one split's share of ``rows`` rows to what came before. A row that saw nothing of it is left as it is. */
static __attribute__((noinline)) void fold(int64_t rows, int64_t head_dim, float *into_maxima, float *into_sums,
                                           float *into, const float *maxima, const float *sums, const float *values) {
    for (int64_t r = 0; r < rows; r++, into += head_dim, values += head_dim) {
        if (maxima[r] == -INFINITY)
            continue;
        float top = into_maxima[r] > maxima[r] ? into_maxima[r] : maxima[r];
        float kept = into_maxima[r] == -INFINITY ? 0.0f : exp_of(into_maxima[r] - top);
        float added = exp_of(maxima[r] - top);
        into_sums[r] = into_sums[r] * kept + sums[r] * added;
        into_maxima[r] = top;
        vf kept_of = vf_set1(kept), added_of = vf_set1(added);
        for (int64_t d = 0; d < head_dim; d += RL_WIDTH) {
            int n = head_dim - d < RL_WIDTH ? (int)(head_dim - d) : RL_WIDTH;
            vf scaled = vf_mul(vf_load_n(into + d, n), kept_of);
            vf_store_n(into + d, n, vf_fma(vf_load_n(values + d, n), added_of, scaled));
        }
    }
}

static void begin_fold(const rl_attention *args, int64_t rows, const Scratch *s) {
    for (int64_t r = 0; r < rows; r++) {
        s->folded_maxima[r] = -INFINITY;
        s->folded_sums[r] = 0;
    }
    memset(s->folded, 0, sizeof(float) * (size_t)(rows * args->head_dim));
}

static void multiply(float *x, const float *by, int64_t size) {
    for (int64_t d = 0; d < size; d += RL_WIDTH) {
        int n = lanes_of(size, d);
        vf_store_n(x + d, n, vf_mul(vf_load_n(x + d, n), vf_load_n(by + d, n)));
    }
}

/* Divide by the sums, sinks included, and write the rows out. */
static void finish(const rl_attention *args, const rl_attention_piece *piece, const Scratch *s) {
    int64_t group = args->num_heads / args->num_kv_heads, head_dim = args->head_dim;
    for (int64_t r = 0; r < piece->num_flat; r++) {
        int64_t flat = piece->first_flat + r;
        int64_t row = args->spans[piece->span].row + flat / group, head = piece->kv_head * group + flat % group;
        float sum = s->folded_sums[r], kept = 1.0f;
        if (args->sink_scores) {
            float top = s->folded_maxima[r] > args->sink_scores[head] ? s->folded_maxima[r] : args->sink_scores[head];
            kept = exp_of(s->folded_maxima[r] - top);
            sum = sum * kept + exp_of(args->sink_scores[head] - top);
        }
        vf share = vf_set1(kept / sum);
        float *out = args->out + (row * args->num_heads + head) * head_dim;
        for (int64_t d = 0; d < head_dim; d += RL_WIDTH) {
            int n = head_dim - d < RL_WIDTH ? (int)(head_dim - d) : RL_WIDTH;
            vf_store_n(out + d, n, vf_mul(vf_load_n(s->folded + r * head_dim + d, n), share));
        }
        if (args->kv.type == RL_KV4)
            turn(out, head_dim);
        if (args->kv.type >= RL_KV8 && args->kv.value_sizes)
            multiply(out, args->kv.value_sizes + piece->kv_head * head_dim, head_dim);
    }
}

/* -- pieces ------------------------------------------------------------------------------------------------------------ */

/* Scaled queries; for coded keys also as those are stored, with the sum of each. */
static void gather_queries(const rl_attention *args, const rl_attention_piece *piece, const Scratch *s) {
    float *queries = s->queries;
    int64_t group = args->num_heads / args->num_kv_heads, head_dim = args->head_dim;
    for (int64_t r = 0; r < piece->num_flat; r++) {
        int64_t flat = piece->first_flat + r;
        int64_t row = args->spans[piece->span].row + flat / group, head = piece->kv_head * group + flat % group;
        const float *q = args->q + (row * args->num_heads + head) * head_dim;
        for (int64_t d = 0; d < head_dim; d++)
            queries[r * head_dim + d] = q[d] * args->scale;
        if (args->kv.type < RL_KV8)
            continue;
        float *query = queries + r * head_dim;
        if (args->kv.key_sizes)
            multiply(query, args->kv.key_sizes + piece->kv_head * head_dim, head_dim);
        if (args->kv.type == RL_KV4)
            turn(query, head_dim);
        vf sum = vf_zero();
        for (int64_t d = 0; d < head_dim; d += RL_WIDTH)
            sum = vf_add(sum, vf_load_n(query + d, lanes_of(head_dim, d)));
        s->query_sums[r] = vf_sum(sum);
    }
}

static void see_and_fold(const rl_attention *args, const rl_attention_piece *piece, const Scratch *s) {
    begin_fold(args, piece->num_flat, s);
    for (int64_t i = 0; i < piece->num_splits; i++) {
        see_split(args, piece, rl_split_at(piece->splits, i), s, s->maxima, s->sums, s->values);
        fold(piece->num_flat, args->head_dim, s->folded_maxima, s->folded_sums, s->folded, s->maxima, s->sums, s->values);
    }
    finish(args, piece, s);
}

static void see_partially(const rl_attention *args, const rl_attention_piece *piece, rl_attention_block *block,
                          const Scratch *s) {
    int64_t rows = piece->num_flat, each = rows * (2 + args->head_dim);
    for (int64_t i = piece->first_split; i < piece->first_split + piece->num_splits; i++) {
        float *partial = block->partials + i * each;
        see_split(args, piece, rl_split_at(piece->splits, i), s, partial, partial + rows, partial + 2 * rows);
    }
    if (__atomic_sub_fetch(&block->pieces_left, 1, __ATOMIC_ACQ_REL) != 0)
        return;
    begin_fold(args, rows, s);
    for (int64_t split = 0; split < block->num_splits; split++) {
        const float *partial = block->partials + split * each;
        fold(rows, args->head_dim, s->folded_maxima, s->folded_sums, s->folded, partial, partial + rows,
             partial + 2 * rows);
    }
    finish(args, piece, s);
}

void RL_FN(rl_attention_work)(void *argument, int64_t thread) {
    rl_attention_plan *plan = argument;
    const rl_attention *args = plan->args;
    Scratch scratch = cut(plan->scratch + thread * plan->scratch_bytes, args->head_dim);
    for (;;) {
        int64_t index = __atomic_fetch_add(&plan->next_piece, 1, __ATOMIC_RELAXED);
        if (index >= plan->num_pieces)
            return;
        const rl_attention_piece *piece = &plan->pieces[index];
        gather_queries(args, piece, &scratch);
        if (piece->block < 0)
            see_and_fold(args, piece, &scratch);
        else
            see_partially(args, piece, &plan->blocks[piece->block], &scratch);
    }
}
