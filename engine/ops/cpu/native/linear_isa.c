/* The inner loops of the integer products, compiled once per instruction set.
 *
 * Sums of a group are exact integers, and every output adds its groups in order, in fp32, with the same three operations: so a result is
 * the same alone and in a batch, with one thread and with many, on AVX2, AVX-512 and VNNI.
 */
#include "linear.h"
#include "simd.h"

#include <math.h>

#define ALWAYS_INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
#ifdef __AVX512F__
#define MOST_ROWS 8 /* 8 integer and 8 float sums, and the weights, fit 32 registers */
#else
#define MOST_ROWS 4
#endif

/* 32 activations, or what rounding to 8 bits left of them. */
typedef struct {
    __m256 part[4];
} activations;

ALWAYS_INLINE activations load_group(const float *x, int64_t left) {
    float padded[RL_GROUP];
    if (left < RL_GROUP) {
        memset(padded, 0, sizeof padded);
        memcpy(padded, x, (size_t)left * sizeof(float));
        x = padded;
    }
    activations v;
    UNROLL for (int i = 0; i < 4; i++) v.part[i] = _mm256_loadu_ps(x + 8 * i);
    return v;
}

ALWAYS_INLINE float largest_of(activations v) {
    __m256 sign = _mm256_set1_ps(-0.0f), largest = _mm256_setzero_ps();
    UNROLL for (int i = 0; i < 4; i++) largest = _mm256_max_ps(largest, _mm256_andnot_ps(sign, v.part[i]));
    __m128 most = _mm_max_ps(_mm256_castps256_ps128(largest), _mm256_extractf128_ps(largest, 1));
    most = _mm_max_ps(most, _mm_movehl_ps(most, most));
    return _mm_cvtss_f32(_mm_max_ss(most, _mm_movehdup_ps(most)));
}

/* The sums of the first and of the second 16 of 32 integers, in the lower two lanes. */
ALWAYS_INLINE __m128i sums_of_halves(const __m256i *q) {
    __m256i sums = _mm256_hadd_epi32(_mm256_add_epi32(q[0], q[1]), _mm256_add_epi32(q[2], q[3]));
    sums = _mm256_hadd_epi32(sums, sums);
    return _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
}

/* Round a group to 8 bits and write it to ``row``; returns what that left over. */
ALWAYS_INLINE activations quantize_group(activations v, int64_t group, int64_t num_groups, uint8_t *row) {
    float scale = largest_of(v) / 127.0f;
    float inverse = scale > 1e-37f ? 1.0f / scale : 0.0f;
    __m256i q[4];
    UNROLL for (int i = 0; i < 4; i++) {
        q[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v.part[i], _mm256_set1_ps(inverse)));
        v.part[i] = _mm256_fnmadd_ps(_mm256_cvtepi32_ps(q[i]), _mm256_set1_ps(scale), v.part[i]);
    }
    /* packs work within 128-bit lanes: put the lanes in order after each */
    __m256i low = _mm256_permute4x64_epi64(_mm256_packs_epi32(q[0], q[1]), 0xd8);
    __m256i high = _mm256_permute4x64_epi64(_mm256_packs_epi32(q[2], q[3]), 0xd8);
    __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(low, high), 0xd8);
    _mm256_storeu_si256((__m256i *)(row + group * RL_GROUP), bytes);
    __m128i of_halves = sums_of_halves(q);
    int32_t sum = _mm_cvtsi128_si32(of_halves) + _mm_extract_epi32(of_halves, 1);
    ((float *)(row + rl_scales_at(num_groups)))[group] = scale;
    ((float *)(row + rl_sums_at(num_groups)))[group] = scale * (float)sum;
    ((int32_t *)(row + rl_offsets_at(num_groups)))[group] = -128 * sum;
    __m128i less = _mm_sub_epi32(_mm_setzero_si128(), _mm_slli_epi32(of_halves, 5)); /* -32 times */
    _mm_storel_epi64((__m128i *)(row + rl_halves_at(num_groups) + 8 * group), less);
#ifndef __AVX512VNNI__
    int16_t *wide = (int16_t *)(row + rl_wide_at(num_groups)) + group * RL_GROUP;
    low = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(low, 0xd8), 0xd8);
    high = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(high, 0xd8), 0xd8);
    _mm256_storeu_si256((__m256i *)wide, low);
    _mm256_storeu_si256((__m256i *)(wide + 16), high);
#endif
    return v;
}

void RL_FN(rl_quantize_row)(const float *x, int64_t in_features, uint8_t *row) {
    int64_t num_groups = rl_num_groups(in_features);
    for (int64_t group = 0; group < num_groups; group++)
        quantize_group(load_group(x + group * RL_GROUP, in_features - group * RL_GROUP), group, num_groups, row);
}

void RL_FN(rl_quantize_row_twice)(const float *x, int64_t in_features, uint8_t *row) {
    int64_t num_groups = rl_num_groups(in_features), row_bytes = rl_activation_row_bytes(num_groups);
    for (int64_t group = 0; group < num_groups; group++) {
        activations v = load_group(x + group * RL_GROUP, in_features - group * RL_GROUP);
        v = quantize_group(v, group, num_groups, row);
        quantize_group(v, group, num_groups, row + row_bytes);
    }
}

/* Add bias and residual to LANES outputs of one row and store them; the last outputs may be fewer. */
ALWAYS_INLINE void finish(const rl_product *p, vf sum, int64_t row, int64_t column) {
    int64_t at = row * p->out_stride + column;
    int64_t left = p->out_features - column;
    if (left >= LANES) {
        if (p->bias)
            sum = vf_add(sum, vf_load(p->bias + column));
        if (p->residual)
            sum = vf_add(sum, vf_load(p->residual + at));
        vf_store(p->out + at, sum);
        return;
    }
    float parts[LANES];
    vf_store(parts, sum);
    for (int64_t i = 0; i < left; i++) {
        float value = parts[i];
        if (p->bias)
            value += p->bias[column + i];
        if (p->residual)
            value += p->residual[at + i];
        p->out[at + i] = value;
    }
}

/* The same for R rows of activations, two of which make one row of the result where they are halves. */
ALWAYS_INLINE void finish_rows(const int R, const rl_product *p, const vf *total, int64_t row, int64_t column) {
    if (p->halves) {
        UNROLL for (int r = 0; r + 1 < R; r += 2) finish(p, vf_add(total[r], total[r + 1]), (row + r) / 2, column);
        return;
    }
    UNROLL for (int r = 0; r < R; r++) finish(p, total[r], row + r, column);
}

/* The integer sums of one int4 group for R rows. line: the group's first line at this half; q: the rows' values. */
ALWAYS_INLINE void int4_group(const int R, const uint8_t *line, const uint8_t *const *q, vi *sums) {
    const vi mask = vi_all8(15);
    UNROLL for (int r = 0; r < R; r++) sums[r] = vi_zero();
    UNROLL for (int j = 0; j < 4; j++) {
        vi both = vi_load(line + 64 * j);
        vi low = vi_and(both, mask), high = vi_and(vi_shift_right16(both, 4), mask);
        UNROLL for (int r = 0; r < R; r++) {
#ifdef __AVX512VNNI__
            sums[r] = _mm512_dpbusd_epi32(sums[r], low, vi_all_of(q[r] + 4 * j));
            sums[r] = _mm512_dpbusd_epi32(sums[r], high, vi_all_of(q[r] + 16 + 4 * j));
#else
            /* 15 * 127 * 2 in each of 8 sums fits 16 bits */
            sums[r] = vi_add16(sums[r], vi_maddubs(low, vi_all_of(q[r] + 4 * j)));
            sums[r] = vi_add16(sums[r], vi_maddubs(high, vi_all_of(q[r] + 16 + 4 * j)));
#endif
        }
    }
#ifndef __AVX512VNNI__
    const vi ones = vi_all16(1);
    UNROLL for (int r = 0; r < R; r++) sums[r] = vi_madd(sums[r], ones);
#endif
}

/* Values of 5 or 6 bits in line j of a group: half 0 holds the inputs 4j+b, half 1 16+4j+b. */
ALWAYS_INLINE vi wide_values(const int bits, const uint8_t *line, const int j, const int half) {
    vi both = vi_load(line + 64 * j);
    vi low = vi_and(half ? vi_shift_right16(both, 4) : both, vi_all8(15));
    vi upper = vi_load(line + 256 + (bits == 6 ? 64 * half : 0));
    const int at = bits == 6 ? 2 * j : 4 * half + j; /* of the upper bits in their byte; they go to bit 4 */
    upper = at <= 4 ? vi_shift_left16(upper, 4 - at) : vi_shift_right16(upper, at - 4);
    return vi_or(low, vi_and(upper, vi_all8(bits == 6 ? 48 : 16)));
}

/* Add half a group's products for R rows. q: the rows' values of the group. */
ALWAYS_INLINE void add_half(const int bits, const int R, const uint8_t *line, const uint8_t *const *q, const int half,
                            vi *sums) {
#ifdef __AVX512VNNI__
    UNROLL for (int j = 0; j < 4; j++) {
        vi values = wide_values(bits, line, j, half);
        UNROLL for (int r = 0; r < R; r++) sums[r] =
            _mm512_dpbusd_epi32(sums[r], values, vi_all_of(q[r] + 16 * half + 4 * j));
    }
#else
    const vi ones = vi_all16(1);
    const int together = bits == 6 ? 2 : 4; /* 31 * 127 * 2 in each of 4 sums fits 16 bits, 63 * 127 * 2 in each of 2 */
    UNROLL for (int start = 0; start < 4; start += together) {
        vi narrow[MOST_ROWS];
        UNROLL for (int r = 0; r < R; r++) narrow[r] = vi_zero();
        UNROLL for (int j = start; j < start + together; j++) {
            vi values = wide_values(bits, line, j, half);
            UNROLL for (int r = 0; r < R; r++) narrow[r] =
                vi_add16(narrow[r], vi_maddubs(values, vi_all_of(q[r] + 16 * half + 4 * j)));
        }
        UNROLL for (int r = 0; r < R; r++) sums[r] = vi_add32(sums[r], vi_madd(narrow[r], ones));
    }
#endif
}

/* Values of 4 or 5 bits with a scale and a minimum per group. */
ALWAYS_INLINE void minimum_block(const int kind, const int R, const rl_product *p, int64_t block, int64_t row) {
    const int64_t num_groups = p->num_groups, together = rl_header_groups(kind);
    const int has_factors = kind == RL_Q4_K || kind == RL_Q5_K, bits = rl_bits(kind);
    const uint8_t *rows[MOST_ROWS];
    UNROLL for (int r = 0; r < R; r++) rows[r] = p->rows + (row + r) * p->row_bytes;
    const int64_t scales_at = rl_scales_at(num_groups), sums_at = rl_sums_at(num_groups);
    for (int half = 0; half < RL_BLOCK_ROWS / LANES; half++) {
        const uint8_t *line = p->weights + block * p->block_bytes, *header = line;
        vf scale = vf_zero(), minimum = vf_zero(), of_scales = vf_zero(), of_minimums = vf_zero(), total[MOST_ROWS];
        UNROLL for (int r = 0; r < R; r++) total[r] = vf_zero();
        for (int64_t group = 0; group < num_groups; group++, line += rl_group_bytes(kind)) {
            if (group % together == 0) {
                header = line;
                scale = of_scales = vf_from_half(line + half * LANES * 2);
                minimum = of_minimums = vf_from_half(line + 32 + half * LANES * 2);
                line += rl_header_bytes(kind);
            }
            if (has_factors) {
                const uint8_t *factors = header + 64 + 32 * (group % together) + half * LANES;
                scale = vf_mul(of_scales, vf_from_bytes(factors));
                minimum = vf_mul(of_minimums, vf_from_bytes(factors + 16));
            }
            const uint8_t *q[MOST_ROWS];
            UNROLL for (int r = 0; r < R; r++) q[r] = rows[r] + group * RL_GROUP;
            vi sums[MOST_ROWS];
            if (R <= 2)
                _mm_prefetch((const char *)line + 4096, _MM_HINT_T0);
            if (bits == 4) {
                int4_group(R, line + half * LANES * 4, q, sums);
            } else {
                UNROLL for (int r = 0; r < R; r++) sums[r] = vi_zero();
                add_half(bits, R, line + half * LANES * 4, q, 0, sums);
                add_half(bits, R, line + half * LANES * 4, q, 1, sums);
            }
            UNROLL for (int r = 0; r < R; r++) {
                vf both = vf_mul(scale, vf_all(*(const float *)(rows[r] + scales_at + 4 * group)));
                vf sum = vf_all(*(const float *)(rows[r] + sums_at + 4 * group));
                total[r] = vf_fma(vf_from_int(sums[r]), both, total[r]);
                total[r] = has_factors ? vf_fnma(minimum, sum, total[r]) : vf_fma(minimum, sum, total[r]);
            }
        }
        finish_rows(R, p, total, row, block * RL_BLOCK_ROWS + half * LANES);
    }
}

/* Values of 6 bits, 32 in the middle, with a scale per half group. */
ALWAYS_INLINE void q6_block(const int kind, const int R, const rl_product *p, int64_t block, int64_t row) {
    const int64_t num_groups = p->num_groups, together = rl_header_groups(kind);
    const uint8_t *rows[MOST_ROWS];
    UNROLL for (int r = 0; r < R; r++) rows[r] = p->rows + (row + r) * p->row_bytes;
    const int64_t scales_at = rl_scales_at(num_groups), halves_at = rl_halves_at(num_groups);
    for (int half = 0; half < RL_BLOCK_ROWS / LANES; half++) {
        const uint8_t *line = p->weights + block * p->block_bytes, *header = line;
        vf scale = vf_zero(), total[MOST_ROWS];
        UNROLL for (int r = 0; r < R; r++) total[r] = vf_zero();
        for (int64_t group = 0; group < num_groups; group++, line += rl_group_bytes(kind)) {
            if (group % together == 0) {
                header = line;
                scale = vf_from_half(line + half * LANES * 2);
                line += rl_header_bytes(kind);
            }
            const uint8_t *q[MOST_ROWS];
            UNROLL for (int r = 0; r < R; r++) q[r] = rows[r] + group * RL_GROUP;
            if (R <= 2)
                _mm_prefetch((const char *)line + 4096, _MM_HINT_T0);
            UNROLL for (int part = 0; part < 2; part++) {
                const uint8_t *factors = header + 64 + 32 * (group % together) + 16 * part + half * LANES;
                vf of_part = vf_mul(scale, vf_from_signed_bytes(factors));
                vi sums[MOST_ROWS];
                UNROLL for (int r = 0; r < R; r++) sums[r] = vi_all_of(rows[r] + halves_at + 8 * group + 4 * part);
                add_half(6, R, line + half * LANES * 4, q, part, sums);
                UNROLL for (int r = 0; r < R; r++) {
                    vf both = vf_mul(of_part, vf_all(*(const float *)(rows[r] + scales_at + 4 * group)));
                    total[r] = vf_fma(vf_from_int(sums[r]), both, total[r]);
                }
            }
        }
        finish_rows(R, p, total, row, block * RL_BLOCK_ROWS + half * LANES);
    }
}

ALWAYS_INLINE void int8_block(const int kind, const int R, const rl_product *p, int64_t block, int64_t row) {
    (void)kind;
    const int64_t num_groups = p->num_groups;
    const uint8_t *rows[MOST_ROWS];
    UNROLL for (int r = 0; r < R; r++) rows[r] = p->rows + (row + r) * p->row_bytes;
    const int64_t scales_at = rl_scales_at(num_groups);
    for (int half = 0; half < RL_BLOCK_ROWS / LANES; half++) {
        const uint8_t *line = p->weights + block * p->block_bytes + half * LANES * 4;
        const uint8_t *scales = p->weights + block * p->block_bytes + num_groups * RL_INT8_GROUP_BYTES + half * LANES * 2;
        vf total[MOST_ROWS];
        UNROLL for (int r = 0; r < R; r++) total[r] = vf_zero();
        for (int64_t group = 0; group < num_groups; group++, line += RL_INT8_GROUP_BYTES) {
            vi sums[MOST_ROWS];
#ifdef __AVX512VNNI__
            /* The instruction wants one side without sign: (w + 128) * q, less 128 * q. */
            const vi flip = vi_all8(-128);
            const int64_t offsets_at = rl_offsets_at(num_groups);
            UNROLL for (int r = 0; r < R; r++) sums[r] = vi_all_of(rows[r] + offsets_at + 4 * group);
            UNROLL for (int j = 0; j < 8; j++) {
                vi w = vi_xor(vi_load(line + 64 * j), flip);
                UNROLL for (int r = 0; r < R; r++) sums[r] =
                    _mm512_dpbusd_epi32(sums[r], w, vi_all_of(rows[r] + group * RL_GROUP + 4 * j));
            }
#else
            const int64_t wide_at = rl_wide_at(num_groups);
            UNROLL for (int r = 0; r < R; r++) sums[r] = vi_zero();
            UNROLL for (int j = 0; j < 8; j++) {
                vi w = vi_load(line + 64 * j);
                vi even = vi_shift_right_signed16(vi_shift_left16(w, 8), 8), odd = vi_shift_right_signed16(w, 8);
                UNROLL for (int r = 0; r < R; r++) {
                    const uint8_t *q = rows[r] + wide_at + group * RL_GROUP * 2 + 8 * j;
                    sums[r] = vi_add32(sums[r], vi_madd(even, vi_all_of(q)));
                    sums[r] = vi_add32(sums[r], vi_madd(odd, vi_all_of(q + 4)));
                }
            }
#endif
            vf scale = vf_from_half(scales + group * RL_BLOCK_ROWS * 2);
            UNROLL for (int r = 0; r < R; r++) {
                vf both = vf_mul(scale, vf_all(*(const float *)(rows[r] + scales_at + 4 * group)));
                total[r] = vf_fma(vf_from_int(sums[r]), both, total[r]);
            }
        }
        finish_rows(R, p, total, row, block * RL_BLOCK_ROWS + half * LANES);
    }
}

typedef void (*block_fn)(const rl_product *, int64_t block, int64_t row);

/* name[n] multiplies n rows, up to 4; name[5] MOST_ROWS. */
#define ROWS(name, body, kind, R)                                                                                      \
    static void name##_##R(const rl_product *p, int64_t block, int64_t row) { body(kind, R, p, block, row); }
#if MOST_ROWS == 8
#define KIND(name, body, kind)                                                                                         \
    ROWS(name, body, kind, 1)                                                                                          \
    ROWS(name, body, kind, 2)                                                                                          \
    ROWS(name, body, kind, 3)                                                                                          \
    ROWS(name, body, kind, 4)                                                                                          \
    ROWS(name, body, kind, 8)                                                                                          \
    static const block_fn name[] = {0, name##_1, name##_2, name##_3, name##_4, name##_8};
#else
#define KIND(name, body, kind)                                                                                         \
    ROWS(name, body, kind, 1)                                                                                          \
    ROWS(name, body, kind, 2)                                                                                          \
    ROWS(name, body, kind, 3)                                                                                          \
    ROWS(name, body, kind, 4)                                                                                          \
    static const block_fn name[] = {0, name##_1, name##_2, name##_3, name##_4, name##_4};
#endif
KIND(int4, minimum_block, RL_INT4)
KIND(int4_g64, minimum_block, RL_INT4_G64)
KIND(int4_g128, minimum_block, RL_INT4_G128)
KIND(int5, minimum_block, RL_INT5)
KIND(q4_k, minimum_block, RL_Q4_K)
KIND(q5_k, minimum_block, RL_Q5_K)
KIND(q6_k, q6_block, RL_Q6_K)
KIND(int8, int8_block, RL_INT8)

static const block_fn *functions_of(int64_t kind) {
    switch (kind) {
    case RL_INT4: return int4;
    case RL_INT4_G64: return int4_g64;
    case RL_INT4_G128: return int4_g128;
    case RL_INT5: return int5;
    case RL_Q4_K: return q4_k;
    case RL_Q5_K: return q5_k;
    case RL_Q6_K: return q6_k;
    default: return int8;
    }
}

void RL_FN(rl_product_tile)(const rl_product *p, int64_t first, int64_t last, int64_t row, int64_t end) {
    const block_fn *functions = functions_of(p->kind);
    for (int64_t block = first; block < last; block++) {
        int64_t r = row;
        for (; r + MOST_ROWS <= end; r += MOST_ROWS)
            functions[5](p, block, r);
        while (r < end) {
            int64_t count = end - r < 4 ? end - r : 4;
            functions[count](p, block, r);
            r += count;
        }
    }
}

float RL_FN(rl_largest)(const float *x, int64_t count) {
    vf largest = vf_all(-INFINITY);
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) largest = vf_max(largest, vf_load(x + i));
    float parts[LANES], most = -INFINITY;
    vf_store(parts, largest);
    for (int lane = 0; lane < LANES; lane++) most = parts[lane] > most ? parts[lane] : most;
    for (; i < count; i++) most = x[i] > most ? x[i] : most;
    return most;
}

void RL_FN(rl_product_likely)(const rl_product *p, int64_t first, int64_t last, const float *limits) {
    for (int64_t block = first; block < last; block++) {
        int64_t column = block * RL_BLOCK_ROWS, left = p->out_features - column;
        int64_t count = left < RL_BLOCK_ROWS ? left : RL_BLOCK_ROWS;
        for (int64_t row = 0; row < p->num_rows; row++)
            if (RL_FN(rl_largest)(p->residual + row * p->out_stride + column, count) >= limits[row])
                RL_FN(rl_product_tile)(p, block, block + 1, row, row + 1);
    }
}
