/* Attention of a block of query rows over splits of the context (FlashAttention, Dao 2022; its online softmax in fp32).
 *
 * A split is RL_SPLIT tokens from a fixed position on. Each row's share of a split is computed from nothing but the row and
 * the split: scores with one chain of sums over the head's dimensions per key, weighted values with one chain over the keys.
 * Splits are folded in order. So a row's result is the same, bit for bit, alone or in a batch, in a chunk of any size, with
 * any number of threads. Keys a row may not see get the weight 0, which changes no sum.
 *
 * Each key and value is read once for all rows of a block, that is for all query heads that share it.
 */
#include <math.h>

#include "codes.h"

#define KEY_VECTORS (RL_SPLIT / RL_WIDTH)
#ifdef __AVX512F__
#define TILE_ROWS 6
#else
#define TILE_ROWS 3
#endif
#define TILE_VECTORS 4
#define FETCH_VECTORS 2 /* vectors of keys asked for ahead of the one in hand */

/* A thread's scratch; its size is scratch_bytes() of attention.c. */
typedef struct {
    float *queries;  /* [RL_FLAT_ROWS, head_dim], scaled */
    float *keys;     /* [head_dim, RL_SPLIT], transposed */
    float *shares;   /* [RL_FLAT_ROWS, RL_SPLIT]: scores, then weights */
    float *values;   /* [RL_FLAT_ROWS, head_dim]: one split's weighted values */
    float *folded;   /* [RL_FLAT_ROWS, head_dim]: those of the splits so far */
    float *maxima, *sums, *folded_maxima, *folded_sums; /* [RL_FLAT_ROWS] */
    float *query_sums, *lows; /* [RL_FLAT_ROWS]: of coded caches, what minima are multiplied with, and the values' minima */
    float *key_scales, *key_lows, *value_scales, *value_lows; /* [RL_SPLIT] */
    int64_t *offsets; /* [RL_SPLIT]: where each token's key lies, in elements; of coded caches, in heads */
} Scratch;

static Scratch cut(char *memory, int64_t head_dim) {
    Scratch s;
    s.offsets = (int64_t *)memory;
    s.keys = (float *)(s.offsets + RL_SPLIT);
    s.shares = s.keys + head_dim * RL_SPLIT;
    s.queries = s.shares + RL_FLAT_ROWS * RL_SPLIT;
    s.values = s.queries + RL_FLAT_ROWS * head_dim;
    s.folded = s.values + RL_FLAT_ROWS * head_dim;
    s.maxima = s.folded + RL_FLAT_ROWS * head_dim;
    s.sums = s.maxima + RL_FLAT_ROWS;
    s.folded_maxima = s.sums + RL_FLAT_ROWS;
    s.folded_sums = s.folded_maxima + RL_FLAT_ROWS;
    s.query_sums = s.folded_sums + RL_FLAT_ROWS;
    s.lows = s.query_sums + RL_FLAT_ROWS;
    s.key_scales = s.lows + RL_FLAT_ROWS;
    s.key_lows = s.key_scales + RL_SPLIT;
    s.value_scales = s.key_lows + RL_SPLIT;
    s.value_lows = s.value_scales + RL_SPLIT;
    return s;
}

/* What a row, or a block of rows, sees: positions [first, last), and [0, sinks) before those. */
typedef struct {
    int64_t sinks, first, last;
} Sight;

static Sight sight_of(const rl_attention *args, const rl_span *span, int64_t flat) {
    int64_t group = args->num_heads / args->num_kv_heads;
    int64_t position = span->context - span->count + flat / group;
    Sight sight = {0, 0, position + 1};
    if (args->window > 0 && position + 1 > args->window) {
        sight.first = position + 1 - args->window;
        sight.sinks = args->sink_tokens < sight.first ? args->sink_tokens : sight.first;
    }
    return sight;
}

/* The same, as keys of the split from ``base`` on: within [0, RL_SPLIT]; first == last == sinks when no others are seen. */
static Sight within(Sight sight, int64_t base) {
    Sight inside = {base == 0 ? sight.sinks : 0, sight.first - base, sight.last - base};
    if (inside.first < 0)
        inside.first = 0;
    if (inside.last > RL_SPLIT)
        inside.last = RL_SPLIT;
    if (inside.first >= inside.last)
        inside.first = inside.last = inside.sinks;
    return inside;
}

/* The first key that is seen; none is when this is ``last``. */
RL_INLINE int64_t first_key(Sight keys) { return keys.sinks > 0 ? 0 : keys.first; }

RL_INLINE int sees_any(Sight keys) { return keys.sinks > 0 || keys.first < keys.last; }

/* Lanes of the vector from ``key`` on that are seen. */
RL_INLINE vmask lanes_seen(Sight keys, int64_t key) {
    vmask seen = vmask_range((int)(keys.first - key), (int)(keys.last - key));
    return keys.sinks > key ? vmask_or(seen, vmask_range(0, (int)(keys.sinks - key))) : seen;
}

/* -- scores ------------------------------------------------------------------------------------------------------------ */

RL_INLINE vf load_any(const void *base, int64_t offset, int64_t type, int n) {
    if (type == RL_KV8)
        return vf_signed_byte(vf_load_bytes_n((const uint8_t *)base + offset, n), 0);
    if (type == RL_FP32)
        return vf_load_n((const float *)base + offset, n);
    const uint16_t *p = (const uint16_t *)base + offset;
    if (n >= RL_WIDTH)
        return type == RL_BF16 ? vf_load_bf16(p) : vf_load_fp16(p);
    return type == RL_BF16 ? vf_load_bf16_n(p, n) : vf_load_fp16_n(p, n);
}

/* Write RL_WIDTH keys as columns: columns[d * RL_SPLIT + lane]. */
RL_INLINE void transpose_keys(const void *keys, const int64_t *offsets, int64_t type, int64_t head_dim, float *columns) {
    vf rows[RL_WIDTH];
    int64_t d = 0;
    if (type == RL_BF16) /* two bf16 at a time: half the shuffles */
        for (; d + 2 * RL_WIDTH <= head_dim; d += 2 * RL_WIDTH) {
            for (int i = 0; i < RL_WIDTH; i++)
                rows[i] = vf_load((const float *)((const uint16_t *)keys + offsets[i] + d));
            vf_transpose(rows);
            for (int i = 0; i < RL_WIDTH; i++) {
                vf_store(columns + (d + 2 * i) * RL_SPLIT, vf_lower_bf16(rows[i]));
                vf_store(columns + (d + 2 * i + 1) * RL_SPLIT, vf_upper_bf16(rows[i]));
            }
        }
    for (; d < head_dim; d += RL_WIDTH) {
        int n = head_dim - d < RL_WIDTH ? (int)(head_dim - d) : RL_WIDTH;
        for (int i = 0; i < RL_WIDTH; i++)
            rows[i] = load_any(keys, offsets[i] + d, type, n);
        vf_transpose(rows);
        for (int i = 0; i < n; i++)
            vf_store(columns + (d + i) * RL_SPLIT, rows[i]);
    }
}

/* scores[r][v] of ``rows`` rows and ``vectors`` vectors of keys; one chain of sums over d each. */
RL_INLINE void score_tile(const float *q, const float *keys, float *scores, int64_t head_dim, const int rows,
                          const int vectors) {
    vf sum[TILE_ROWS][TILE_VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            sum[r][v] = vf_zero();
    for (int64_t d = 0; d < head_dim; d++) {
        vf key[TILE_VECTORS];
        for (int v = 0; v < vectors; v++)
            key[v] = vf_load(keys + d * RL_SPLIT + v * RL_WIDTH);
        for (int r = 0; r < rows; r++) {
            vf query = vf_set1(q[r * head_dim + d]);
            for (int v = 0; v < vectors; v++)
                sum[r][v] = vf_fma(query, key[v], sum[r][v]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            vf_store(scores + r * RL_SPLIT + v * RL_WIDTH, sum[r][v]);
}

/* One tile with its sizes known to the compiler, so that its sums stay in registers. */
#define EACH_ROWS(call, vectors)                                                                                       \
    switch (rows) {                                                                                                    \
    case 1: call(1, vectors); break;                                                                                   \
    case 2: call(2, vectors); break;                                                                                   \
    case 3: call(3, vectors); break;                                                                                   \
    case 4: call(4, vectors); break;                                                                                   \
    case 5: call(5, vectors); break;                                                                                   \
    default: call(6, vectors); break;                                                                                  \
    }
#if TILE_ROWS == 3
#undef EACH_ROWS
#define EACH_ROWS(call, vectors)                                                                                       \
    switch (rows) {                                                                                                    \
    case 1: call(1, vectors); break;                                                                                   \
    case 2: call(2, vectors); break;                                                                                   \
    default: call(3, vectors); break;                                                                                  \
    }
#endif

static void score_rows(const float *q, const float *keys, float *scores, int64_t head_dim, int rows, int64_t first,
                       int64_t last) {
    int64_t v = first;
    for (; v + TILE_VECTORS <= last; v += TILE_VECTORS) {
#define CALL(r, n) score_tile(q, keys + v * RL_WIDTH, scores + v * RL_WIDTH, head_dim, r, n)
        EACH_ROWS(CALL, TILE_VECTORS)
    }
    for (; v < last; v++) {
        EACH_ROWS(CALL, 1)
#undef CALL
    }
}

/* Scores of the vectors of keys [first, last) become weights e^(score - max); those not in ``sight`` 0. */
static void soften(float *scores, Sight sight, int64_t first, int64_t last, float softcap, float *maximum, float *sum) {
    vf hidden = vf_set1(-INFINITY), largest = hidden;
    for (int64_t v = first; v < last; v++) {
        int64_t key = v * RL_WIDTH;
        vf score = vf_load(scores + key);
        if (softcap > 0)
            score = vf_mul(vf_set1(softcap), vf_tanh(vf_div(score, vf_set1(softcap))));
        score = vf_select(lanes_seen(sight, key), score, hidden);
        vf_store(scores + key, score);
        largest = vf_max(largest, score);
    }
    *maximum = sees_any(sight) ? vf_largest(largest) : -INFINITY;
    vf total = vf_zero(), top = vf_set1(*maximum);
    for (int64_t v = first; v < last; v++) {
        int64_t key = v * RL_WIDTH;
        vf weight = vf_select(lanes_seen(sight, key), vf_exp(vf_sub(vf_load(scores + key), top)), vf_zero());
        vf_store(scores + key, weight);
        total = vf_add(total, weight);
    }
    *sum = vf_sum(total);
}

/* Scales and minima of the keys and values [first, last) of a split, those that stand for others too. */
static void read_numbers(const rl_kv *kv, const Scratch *s, int64_t first, int64_t last) {
    if (kv->type == RL_KV8)
        for (int64_t key = first; key < last; key++) {
            s->key_scales[key] = from_fp16(kv->key_numbers[s->offsets[key]]);
            s->value_scales[key] = from_fp16(kv->value_numbers[s->offsets[key]]);
            s->key_lows[key] = s->value_lows[key] = 0;
        }
    else
        for (int64_t key = first; key < last; key++) {
            const uint16_t *of_key = kv->key_numbers + 2 * s->offsets[key], *of_value = kv->value_numbers + 2 * s->offsets[key];
            s->key_scales[key] = from_fp16(of_key[0]);
            s->key_lows[key] = from_fp16(of_key[1]);
            s->value_scales[key] = from_fp16(of_value[0]);
            s->value_lows[key] = from_fp16(of_value[1]);
        }
}

/* From products with codes to scores: q . (code * scale + low) = (q . code) * scale + (sum of q) * low. */
static void scale_scores(float *scores, float query_sum, const Scratch *s, int64_t first, int64_t last) {
    for (int64_t key = first * RL_WIDTH; key < last * RL_WIDTH; key += RL_WIDTH) {
        vf low = vf_mul(vf_set1(query_sum), vf_load(s->key_lows + key));
        vf_store(scores + key, vf_fma(vf_load(scores + key), vf_load(s->key_scales + key), low));
    }
}

/* Weights become those of the values' codes; returns what the values' minima come to. */
static float scale_shares(float *shares, const Scratch *s, int64_t first, int64_t last) {
    vf low = vf_zero();
    for (int64_t key = first * RL_WIDTH; key < last * RL_WIDTH; key += RL_WIDTH) {
        vf share = vf_load(shares + key);
        low = vf_fma(share, vf_load(s->value_lows + key), low);
        vf_store(shares + key, vf_mul(share, vf_load(s->value_scales + key)));
    }
    return vf_sum(low);
}

/* -- weighted values --------------------------------------------------------------------------------------------------- */

/* out[r][d] of ``rows`` rows and ``vectors`` vectors of dimensions; one chain of sums over the keys each. */
RL_INLINE void value_tile(const float *weights, const void *values, const int64_t *offsets, int64_t d, Sight keys,
                          float *out, int64_t head_dim, const int64_t type, const int rows, const int vectors, int n) {
    vf sum[TILE_ROWS][TILE_VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            sum[r][v] = vf_zero();
    for (int64_t key = first_key(keys); key < keys.last; key++) {
        if (key == keys.sinks && key < keys.first)
            key = keys.first; /* what lies between was perhaps never written, and 0 x NaN spreads */
        if (key == keys.last)
            break;
        vf value[TILE_VECTORS];
        for (int v = 0; v < vectors; v++)
            value[v] = load_any(values, offsets[key] * (type == RL_KV8 ? head_dim : 1) + d + v * RL_WIDTH, type, n);
        for (int r = 0; r < rows; r++) {
            vf weight = vf_set1(weights[r * RL_SPLIT + key]);
            for (int v = 0; v < vectors; v++)
                sum[r][v] = vf_fma(weight, value[v], sum[r][v]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            vf_store_n(out + r * head_dim + d + v * RL_WIDTH, n, sum[r][v]);
}

RL_INLINE void value_rows(const float *weights, const void *values, const int64_t *offsets, Sight keys, float *out,
                          int64_t head_dim, const int64_t type, int rows) {
    int64_t d = 0;
#define CALL(r, vectors) value_tile(weights, values, offsets, d, keys, out, head_dim, type, r, vectors, RL_WIDTH)
    for (; d + TILE_VECTORS * RL_WIDTH <= head_dim; d += TILE_VECTORS * RL_WIDTH) {
        EACH_ROWS(CALL, TILE_VECTORS)
    }
    for (; d + RL_WIDTH <= head_dim; d += RL_WIDTH) {
        EACH_ROWS(CALL, 1)
    }
#undef CALL
#define CALL(r, vectors)                                                                                               \
    value_tile(weights, values, offsets, d, keys, out, head_dim, type, r, vectors, (int)(head_dim - d))
    if (d < head_dim) {
        EACH_ROWS(CALL, 1)
    }
#undef CALL
}

static void value_rows_fp32(const float *weights, const void *values, const int64_t *offsets, Sight keys, float *out,
                            int64_t head_dim, int rows) {
    value_rows(weights, values, offsets, keys, out, head_dim, RL_FP32, rows);
}
static void value_rows_bf16(const float *weights, const void *values, const int64_t *offsets, Sight keys, float *out,
                            int64_t head_dim, int rows) {
    value_rows(weights, values, offsets, keys, out, head_dim, RL_BF16, rows);
}
static void value_rows_fp16(const float *weights, const void *values, const int64_t *offsets, Sight keys, float *out,
                            int64_t head_dim, int rows) {
    value_rows(weights, values, offsets, keys, out, head_dim, RL_FP16, rows);
}

static void value_rows_int8(const float *weights, const void *values, const int64_t *offsets, Sight keys, float *out,
                            int64_t head_dim, int rows) {
    value_rows(weights, values, offsets, keys, out, head_dim, RL_KV8, rows);
}

/* The same of 4-bit values: a vector of bytes holds channels from d and from head_dim / 2 + d on. */
RL_INLINE void nibble_tile(const float *weights, const uint8_t *values, const int64_t *offsets, int64_t d, Sight keys,
                           const float *lows, float *out, int64_t head_dim, const int rows, const int pairs, int n) {
    int64_t half = head_dim / 2;
    vf lower[TILE_ROWS][TILE_VECTORS / 2], upper[TILE_ROWS][TILE_VECTORS / 2];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < pairs; v++)
            lower[r][v] = upper[r][v] = vf_set1(lows[r]);
    for (int64_t key = first_key(keys); key < keys.last; key++) {
        if (key == keys.sinks && key < keys.first)
            key = keys.first;
        if (key == keys.last)
            break;
        vf low[TILE_VECTORS / 2], high[TILE_VECTORS / 2];
        for (int v = 0; v < pairs; v++) {
            vf bytes = vf_load_bytes_n(values + offsets[key] * half + d + v * RL_WIDTH, n);
            low[v] = vf_of_whole(vf_bits(bytes, 0, 15));
            high[v] = vf_of_whole(vf_bits(bytes, 4, 15));
        }
        for (int r = 0; r < rows; r++) {
            vf weight = vf_set1(weights[r * RL_SPLIT + key]);
            for (int v = 0; v < pairs; v++) {
                lower[r][v] = vf_fma(weight, low[v], lower[r][v]);
                upper[r][v] = vf_fma(weight, high[v], upper[r][v]);
            }
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < pairs; v++) {
            vf_store_n(out + r * head_dim + d + v * RL_WIDTH, n, lower[r][v]);
            vf_store_n(out + r * head_dim + half + d + v * RL_WIDTH, n, upper[r][v]);
        }
}

static void value_rows_int4(const float *weights, const void *values, const int64_t *offsets, Sight keys, const float *lows,
                            float *out, int64_t head_dim, int rows) {
    int64_t half = head_dim / 2, d = 0;
#define CALL(r, pairs) nibble_tile(weights, values, offsets, d, keys, lows, out, head_dim, r, pairs, RL_WIDTH)
    for (; d + TILE_VECTORS / 2 * RL_WIDTH <= half; d += TILE_VECTORS / 2 * RL_WIDTH) {
        EACH_ROWS(CALL, TILE_VECTORS / 2)
    }
    for (; d + RL_WIDTH <= half; d += RL_WIDTH) {
        EACH_ROWS(CALL, 1)
    }
#undef CALL
#define CALL(r, pairs) nibble_tile(weights, values, offsets, d, keys, lows, out, head_dim, r, pairs, (int)(half - d))
    if (d < half) {
        EACH_ROWS(CALL, 1)
    }
#undef CALL
}

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
