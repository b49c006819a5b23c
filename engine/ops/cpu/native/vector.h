/* One vector of floats, 16 with AVX-512 and 8 with AVX2, so that a kernel is written once and compiled for both.
 *
 * For *_isa.c files. Every operation is one instruction or a fixed sequence of them: the order of sums never depends on
 * the compiler. Names ending in _n take only the first n lanes and touch no memory beyond them. */
#ifndef RL_VECTOR_H
#define RL_VECTOR_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define RL_INLINE static inline __attribute__((always_inline))

#ifdef __AVX512F__

#define RL_WIDTH 16

typedef __m512 vf;
typedef __mmask16 vmask; /* one bit per lane */

RL_INLINE vf vf_zero(void) { return _mm512_setzero_ps(); }
RL_INLINE vf vf_set1(float a) { return _mm512_set1_ps(a); }
RL_INLINE vf vf_load(const float *p) { return _mm512_loadu_ps(p); }
RL_INLINE void vf_store(float *p, vf a) { _mm512_storeu_ps(p, a); }
RL_INLINE vf vf_add(vf a, vf b) { return _mm512_add_ps(a, b); }
RL_INLINE vf vf_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
RL_INLINE vf vf_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
RL_INLINE vf vf_div(vf a, vf b) { return _mm512_div_ps(a, b); }
RL_INLINE vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }   /* a * b + c */
RL_INLINE vf vf_fnma(vf a, vf b, vf c) { return _mm512_fnmadd_ps(a, b, c); } /* c - a * b */
RL_INLINE vf vf_min(vf a, vf b) { return _mm512_min_ps(a, b); }              /* b where either is NaN */
RL_INLINE vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }
RL_INLINE vf vf_abs(vf a) { return _mm512_abs_ps(a); }
RL_INLINE vf vf_round(vf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
RL_INLINE vf vf_scale2(vf a, vf n) { return _mm512_scalef_ps(a, n); } /* a * 2^n, n whole */
RL_INLINE vf vf_select(vmask m, vf yes, vf no) { return _mm512_mask_blend_ps(m, no, yes); }
RL_INLINE vmask vf_is_negative(vf a) { return _mm512_cmp_ps_mask(a, _mm512_setzero_ps(), _CMP_LT_OQ); }

/* Lanes [first, last) of a vector; any integers. */
RL_INLINE vmask vmask_range(int first, int last) {
    uint32_t below = last >= 16 ? 0xffffu : last <= 0 ? 0u : (1u << last) - 1u;
    uint32_t skipped = first >= 16 ? 0xffffu : first <= 0 ? 0u : (1u << first) - 1u;
    return (vmask)(below & ~skipped);
}
RL_INLINE vmask vmask_or(vmask a, vmask b) { return a | b; }
RL_INLINE vf vf_load_n(const float *p, int n) { return _mm512_maskz_loadu_ps(vmask_range(0, n), p); }
RL_INLINE void vf_store_n(float *p, int n, vf a) { _mm512_mask_storeu_ps(p, vmask_range(0, n), a); }

RL_INLINE float vf_sum(vf a) {
    __m256 b = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    c = _mm_add_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}
RL_INLINE float vf_largest(vf a) { return _mm512_reduce_max_ps(a); }

RL_INLINE vf vf_load_bf16(const uint16_t *p) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
RL_INLINE vf vf_load_fp16(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }

/* To the nearest bf16, ties to even; NaN stays NaN. */
RL_INLINE void vf_store_bf16(uint16_t *p, vf a) {
    __m512i bits = _mm512_castps_si512(a);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    rounded = _mm512_mask_set1_epi32(rounded, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), 0x7fc00000);
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}
RL_INLINE void vf_store_fp16(uint16_t *p, vf a) {
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

/* rows[16] become columns. */
RL_INLINE void vf_transpose(vf rows[RL_WIDTH]) {
    __m512 t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        rows[i] = _mm512_shuffle_ps(t[i], t[i + 2], 0x44);
        rows[i + 1] = _mm512_shuffle_ps(t[i], t[i + 2], 0xee);
        rows[i + 2] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        rows[i + 3] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_f32x4(rows[i], rows[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_f32x4(rows[i], rows[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_f32x4(rows[i + 8], rows[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_f32x4(rows[i + 8], rows[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        rows[i] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
        rows[i + 8] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
        rows[i + 4] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0x88);
        rows[i + 12] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0xdd);
    }
}
/* Each lane holds two bf16: the lower and the upper one as floats. */
RL_INLINE vf vf_lower_bf16(vf pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(pairs), 16)); }
RL_INLINE vf vf_upper_bf16(vf pairs) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(pairs), _mm512_set1_epi32((int)0xffff0000u)));
}

#else /* AVX2 */

#define RL_WIDTH 8

typedef __m256 vf;
typedef __m256 vmask; /* all bits of a lane set or clear */

RL_INLINE vf vf_zero(void) { return _mm256_setzero_ps(); }
RL_INLINE vf vf_set1(float a) { return _mm256_set1_ps(a); }
RL_INLINE vf vf_load(const float *p) { return _mm256_loadu_ps(p); }
RL_INLINE void vf_store(float *p, vf a) { _mm256_storeu_ps(p, a); }
RL_INLINE vf vf_add(vf a, vf b) { return _mm256_add_ps(a, b); }
RL_INLINE vf vf_sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
RL_INLINE vf vf_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
RL_INLINE vf vf_div(vf a, vf b) { return _mm256_div_ps(a, b); }
RL_INLINE vf vf_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }   /* a * b + c */
RL_INLINE vf vf_fnma(vf a, vf b, vf c) { return _mm256_fnmadd_ps(a, b, c); } /* c - a * b */
RL_INLINE vf vf_min(vf a, vf b) { return _mm256_min_ps(a, b); }              /* b where either is NaN */
RL_INLINE vf vf_max(vf a, vf b) { return _mm256_max_ps(a, b); }
RL_INLINE vf vf_abs(vf a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
RL_INLINE vf vf_round(vf a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
RL_INLINE vf vf_scale2(vf a, vf n) { /* a * 2^n, n whole, in two steps so that n may reach 128 */
    __m256i whole = _mm256_cvtps_epi32(n);
    __m256i half = _mm256_srai_epi32(whole, 1);
    __m256i bias = _mm256_set1_epi32(127);
    __m256 first = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
    __m256i rest = _mm256_sub_epi32(whole, half);
    __m256 second = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23));
    return _mm256_mul_ps(_mm256_mul_ps(a, first), second);
}
RL_INLINE vf vf_select(vmask m, vf yes, vf no) { return _mm256_blendv_ps(no, yes, m); }
RL_INLINE vmask vf_is_negative(vf a) { return _mm256_cmp_ps(a, _mm256_setzero_ps(), _CMP_LT_OQ); }

/* Lanes [first, last) of a vector; any integers. */
RL_INLINE vmask vmask_range(int first, int last) {
    __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    __m256i below = _mm256_cmpgt_epi32(_mm256_set1_epi32(last), lane);
    __m256i skipped = _mm256_cmpgt_epi32(_mm256_set1_epi32(first), lane);
    return _mm256_castsi256_ps(_mm256_andnot_si256(skipped, below));
}
RL_INLINE vmask vmask_or(vmask a, vmask b) { return _mm256_or_ps(a, b); }
RL_INLINE vf vf_load_n(const float *p, int n) {
    return _mm256_maskload_ps(p, _mm256_castps_si256(vmask_range(0, n)));
}
RL_INLINE void vf_store_n(float *p, int n, vf a) {
    _mm256_maskstore_ps(p, _mm256_castps_si256(vmask_range(0, n)), a);
}

RL_INLINE float vf_sum(vf a) {
    __m128 c = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    c = _mm_add_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}
RL_INLINE float vf_largest(vf a) {
    __m128 c = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    c = _mm_max_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_max_ss(c, _mm_movehdup_ps(c)));
}

RL_INLINE vf vf_load_bf16(const uint16_t *p) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
RL_INLINE vf vf_load_fp16(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }

/* To the nearest bf16, ties to even; NaN stays NaN. */
RL_INLINE void vf_store_bf16(uint16_t *p, vf a) {
    __m256i bits = _mm256_castps_si256(a);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), is_nan);
    rounded = _mm256_srli_epi32(rounded, 16);
    __m256i narrow = _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded, rounded), 0xd8);
    _mm_storeu_si128((__m128i *)p, _mm256_castsi256_si128(narrow));
}
RL_INLINE void vf_store_fp16(uint16_t *p, vf a) {
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

/* rows[8] become columns. */
RL_INLINE void vf_transpose(vf rows[RL_WIDTH]) {
    __m256 t[8];
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        rows[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        rows[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
        rows[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        rows[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm256_permute2f128_ps(rows[i], rows[i + 4], 0x20);
        t[i + 4] = _mm256_permute2f128_ps(rows[i], rows[i + 4], 0x31);
    }
    for (int i = 0; i < 8; i++) rows[i] = t[i];
}
/* Each lane holds two bf16: the lower and the upper one as floats. */
RL_INLINE vf vf_lower_bf16(vf pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(pairs), 16)); }
RL_INLINE vf vf_upper_bf16(vf pairs) {
    return _mm256_castsi256_ps(_mm256_and_si256(_mm256_castps_si256(pairs), _mm256_set1_epi32((int)0xffff0000u)));
}

#endif

RL_INLINE vf vf_load_bf16_n(const uint16_t *p, int n) {
    uint16_t lanes[RL_WIDTH] = {0};
    memcpy(lanes, p, (size_t)n * sizeof *p);
    return vf_load_bf16(lanes);
}
RL_INLINE vf vf_load_fp16_n(const uint16_t *p, int n) {
    uint16_t lanes[RL_WIDTH] = {0};
    memcpy(lanes, p, (size_t)n * sizeof *p);
    return vf_load_fp16(lanes);
}
RL_INLINE void vf_store_bf16_n(uint16_t *p, int n, vf a) {
    uint16_t lanes[RL_WIDTH];
    vf_store_bf16(lanes, a);
    memcpy(p, lanes, (size_t)n * sizeof *p);
}
RL_INLINE void vf_store_fp16_n(uint16_t *p, int n, vf a) {
    uint16_t lanes[RL_WIDTH];
    vf_store_fp16(lanes, a);
    memcpy(p, lanes, (size_t)n * sizeof *p);
}

/* e^x: 2^n times a polynomial in the rest (Cephes' expf), within 2 units in the last place; below -87 about 1e-38. */
RL_INLINE vf vf_exp(vf x) {
    x = vf_min(vf_set1(88.3762626647949f), vf_max(vf_set1(-87.3365447505531f), x));
    vf n = vf_round(vf_mul(x, vf_set1(1.44269504088896341f)));
    vf r = vf_fnma(n, vf_set1(0.693359375f), x);
    r = vf_fnma(n, vf_set1(-2.12194440e-4f), r);
    vf p = vf_set1(1.9875691500e-4f);
    p = vf_fma(p, r, vf_set1(1.3981999507e-3f));
    p = vf_fma(p, r, vf_set1(8.3334519073e-3f));
    p = vf_fma(p, r, vf_set1(4.1665795894e-2f));
    p = vf_fma(p, r, vf_set1(1.6666665459e-1f));
    p = vf_fma(p, r, vf_set1(5.0000001201e-1f));
    p = vf_add(vf_fma(p, vf_mul(r, r), r), vf_set1(1.0f));
    return vf_scale2(p, n);
}

/* 1 / (1 + e^-x) */
RL_INLINE vf vf_sigmoid(vf x) {
    vf one = vf_set1(1.0f);
    return vf_div(one, vf_add(one, vf_exp(vf_sub(vf_zero(), x))));
}

/* tanh x = 2 / (1 + e^-2x) - 1; absolute error about 1e-7. */
RL_INLINE vf vf_tanh(vf x) { return vf_fma(vf_set1(2.0f), vf_sigmoid(vf_add(x, x)), vf_set1(-1.0f)); }

#endif
