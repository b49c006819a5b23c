/* What attention does with a tile of query rows and one split of keys: scores, weights, weighted values. For attention_isa.c. */
#ifndef RL_ATTENTION_TILES_H
#define RL_ATTENTION_TILES_H

#include <math.h>

#include "codes.h"

#define KEY_VECTORS (RL_SPLIT / RL_WIDTH)
#ifdef __AVX512F__
#define TILE_ROWS 6
#else
#define TILE_ROWS 3
#endif
#define TILE_VECTORS 4

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
    return load_floats(base, offset, type, n);
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

#endif
