/* Norms, rotation, cache write and gated activation of some rows; see pointwise.h. */
#include <math.h>

#include "codes.h"
#include "pointwise.h"

RL_INLINE int lanes_left(int64_t size, int64_t done) {
    return size - done < RL_WIDTH ? (int)(size - done) : RL_WIDTH;
}

/* Sum of squares: four chains over whole vectors, then the rest. */
static float sum_of_squares(const float *x, int64_t size) {
    vf sum[4] = {vf_zero(), vf_zero(), vf_zero(), vf_zero()};
    int64_t d = 0;
    for (; d + 4 * RL_WIDTH <= size; d += 4 * RL_WIDTH)
        for (int i = 0; i < 4; i++) {
            vf part = vf_load(x + d + i * RL_WIDTH);
            sum[i] = vf_fma(part, part, sum[i]);
        }
    for (int i = 0; d < size; d += RL_WIDTH, i++) {
        vf part = vf_load_n(x + d, lanes_left(size, d));
        sum[i] = vf_fma(part, part, sum[i]);
    }
    return vf_sum(vf_add(vf_add(sum[0], sum[1]), vf_add(sum[2], sum[3])));
}

static void norm(const float *x, const float *weight, float *out, int64_t size, float eps) {
    vf inverse = vf_set1(1.0f / sqrtf(sum_of_squares(x, size) / (float)size + eps));
    for (int64_t d = 0; d < size; d += RL_WIDTH) {
        int n = lanes_left(size, d);
        vf_store_n(out + d, n, vf_mul(vf_mul(vf_load_n(x + d, n), inverse), vf_load_n(weight + d, n)));
    }
}

void RL_FN(rl_norm_rows)(const rl_norm *args, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row++)
        norm(args->x + row * args->size, args->weight, args->out + row * args->size, args->size, args->eps);
}

/* -- rotation and cache write ------------------------------------------------------------------------------------------ */

/* Dimensions i and i + half of x turn by the angle whose cosine and sine are given; out may be x. */
static void rotate(const float *x, const float *cos, const float *sin, float *out, int64_t half) {
    for (int64_t i = 0; i < half; i += RL_WIDTH) {
        int n = lanes_left(half, i);
        vf c = vf_load_n(cos + i, n), s = vf_load_n(sin + i, n);
        vf a = vf_load_n(x + i, n), b = vf_load_n(x + half + i, n);
        vf_store_n(out + i, n, vf_sub(vf_mul(a, c), vf_mul(b, s)));
        vf_store_n(out + half + i, n, vf_fma(b, c, vf_mul(a, s)));
    }
}

static void store_kv(void *base, int64_t offset, int64_t type, const float *x, int64_t size) {
    for (int64_t d = 0; d < size; d += RL_WIDTH) {
        int n = lanes_left(size, d);
        vf value = vf_load_n(x + d, n);
        uint16_t *half = (uint16_t *)base + offset + d;
        if (type == RL_FP32)
            vf_store_n((float *)base + offset + d, n, value);
        else if (type == RL_BF16 && n == RL_WIDTH)
            vf_store_bf16(half, value);
        else if (type == RL_BF16)
            vf_store_bf16_n(half, n, value);
        else if (n == RL_WIDTH)
            vf_store_fp16(half, value);
        else
            vf_store_fp16_n(half, n, value);
    }
}

/* A head's key or value to ``copies`` stored heads from ``head`` on. */
static void store_floats(const rl_rope *args, void *base, int64_t slot, int64_t head, const float *x) {
    int64_t stored = args->num_kv_heads * args->copies;
    for (int64_t copy = 0; copy < args->copies; copy++)
        store_kv(base, (slot * stored + head * args->copies + copy) * args->head_dim, args->kv.type, x, args->head_dim);
}

/* The same in codes. x is left as it is. */
static void store_codes(const rl_rope *args, int is_key, int64_t slot, int64_t head, const float *x) {
    const rl_kv *kv = &args->kv;
    int64_t head_dim = args->head_dim, first = slot * args->num_kv_heads * args->copies + head * args->copies;
    const float *sizes = is_key ? kv->key_sizes : kv->value_sizes;
    int64_t code_bytes = kv->type == RL_KV8 ? head_dim : is_key ? head_dim / 2 + head_dim / 4 : head_dim / 2;
    int64_t num_numbers = kv->type == RL_KV8 ? 1 : 2;
    uint8_t *codes = (uint8_t *)(is_key ? kv->keys : kv->values) + first * code_bytes;
    uint16_t *numbers = (is_key ? kv->key_numbers : kv->value_numbers) + first * num_numbers;
    float part[RL_LARGEST_HEAD];
    for (int64_t d = 0; d < head_dim; d++)
        part[d] = sizes ? x[d] / sizes[head * args->copies * head_dim + d] : x[d];
    if (kv->type == RL_KV8)
        encode_int8(part, head_dim, (int8_t *)codes, numbers);
    else {
        turn(part, head_dim);
        encode_bits(part, head_dim, is_key ? 6 : 4, codes, numbers);
    }
    for (int64_t copy = 1; copy < args->copies; copy++) {
        memcpy(codes + copy * code_bytes, codes, (size_t)code_bytes);
        memcpy(numbers + copy * num_numbers, numbers, sizeof *numbers * (size_t)num_numbers);
    }
}

/* One head of q or k: norm and rotation where asked; the result is in ``out``. */
static void prepare_head(const rl_rope *args, const float *x, const float *weight, int64_t row, float *out) {
    int64_t head_dim = args->head_dim, half = args->half;
    if (weight)
        norm(x, weight, out, head_dim, args->eps);
    else if (x != out)
        memcpy(out, x, sizeof(float) * (size_t)head_dim);
    if (args->cos) {
        int64_t turn = args->positions ? args->positions[row] : row;
        rotate(out, args->cos + turn * half, args->sin + turn * half, out, half);
    }
}

#define HEAD_PART 1024 /* largest head_dim whose key is prepared on the stack */

void RL_FN(rl_rope_rows)(const rl_rope *args, int64_t first, int64_t last) {
    int64_t head_dim = args->head_dim, num_heads = args->num_heads, num_kv_heads = args->num_kv_heads;
    float key[HEAD_PART];
    for (int64_t row = first; row < last; row++) {
        const float *qkv = args->qkv + row * (num_heads + 2 * num_kv_heads) * head_dim;
        for (int64_t head = 0; head < num_heads; head++)
            prepare_head(args, qkv + head * head_dim, args->q_norm, row,
                         args->q + (row * num_heads + head) * head_dim);
        const float *k = qkv + num_heads * head_dim, *v = k + num_kv_heads * head_dim;
        int64_t slot = args->slots[row];
        for (int64_t head = 0; head < num_kv_heads; head++) {
            prepare_head(args, k + head * head_dim, args->k_norm, row, key);
            if (args->k)
                memcpy(args->k + (row * num_kv_heads + head) * head_dim, key, sizeof(float) * (size_t)head_dim);
            if (args->kv.type >= RL_KV8) {
                store_codes(args, 1, slot, head, key);
                store_codes(args, 0, slot, head, v + head * head_dim);
                continue;
            }
            store_floats(args, args->kv.keys, slot, head, key);
            store_floats(args, args->kv.values, slot, head, v + head * head_dim);
        }
    }
}

/* -- gated activation -------------------------------------------------------------------------------------------------- */

/* 1 + erf(x / sqrt 2), by formula 7.1.26 of Abramowitz and Stegun (error 1.5e-7), without cancellation on the left side. */
RL_INLINE vf twice_normal_share(vf x) {
    vf z = vf_mul(vf_abs(x), vf_set1(0.70710678118654752f)), one = vf_set1(1.0f);
    vf t = vf_div(one, vf_fma(vf_set1(0.3275911f), z, one));
    vf p = vf_set1(1.061405429f);
    p = vf_fma(p, t, vf_set1(-1.453152027f));
    p = vf_fma(p, t, vf_set1(1.421413741f));
    p = vf_fma(p, t, vf_set1(-0.284496736f));
    p = vf_fma(p, t, vf_set1(0.254829592f));
    vf outside = vf_mul(vf_mul(p, t), vf_exp(vf_sub(vf_zero(), vf_mul(z, z))));
    return vf_select(vf_is_negative(x), outside, vf_sub(vf_set1(2.0f), outside));
}

RL_INLINE vf activate(vf x, const int64_t activation) {
    if (activation == RL_SILU)
        return vf_mul(x, vf_sigmoid(x));
    if (activation == RL_GELU)
        return vf_mul(vf_mul(x, vf_set1(0.5f)), twice_normal_share(x));
    /* (1 + tanh u) / 2 = sigmoid(2 u) */
    vf cubic = vf_fma(vf_mul(vf_mul(x, x), x), vf_set1(0.044715f), x);
    return vf_mul(x, vf_sigmoid(vf_mul(cubic, vf_set1(1.5957691216057308f))));
}

RL_INLINE void gate_row(const float *gate, const float *up, float *out, int64_t size, const int64_t activation) {
    int64_t d = 0;
    for (; d + RL_WIDTH <= size; d += RL_WIDTH)
        vf_store(out + d, vf_mul(activate(vf_load(gate + d), activation), vf_load(up + d)));
    if (d < size) {
        int n = (int)(size - d);
        vf_store_n(out + d, n, vf_mul(activate(vf_load_n(gate + d, n), activation), vf_load_n(up + d, n)));
    }
}

void RL_FN(rl_gate_rows)(const rl_gate *args, int64_t first, int64_t last) {
    int64_t size = args->size;
    for (int64_t row = first; row < last; row++) {
        const float *gate = args->gate_up + row * 2 * size, *up = gate + size;
        float *out = args->out + row * size;
        switch (args->activation) {
        case RL_SILU: gate_row(gate, up, out, size, RL_SILU); break;
        case RL_GELU: gate_row(gate, up, out, size, RL_GELU); break;
        default: gate_row(gate, up, out, size, RL_GELU_TANH); break;
        }
    }
}
