/* The same few vector operations on AVX2 and AVX-512: vi holds integers, vf holds LANES floats. Included by *_isa.c files only. */
#ifndef RL_SIMD_H
#define RL_SIMD_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#ifdef __AVX512F__
#define LANES 16
typedef __m512i vi;
typedef __m512 vf;
static inline vi vi_load(const void *p) { return _mm512_loadu_si512(p); }
static inline vi vi_zero(void) { return _mm512_setzero_si512(); }
static inline vi vi_all32(int32_t x) { return _mm512_set1_epi32(x); }
static inline vi vi_all16(int16_t x) { return _mm512_set1_epi16(x); }
static inline vi vi_all8(int8_t x) { return _mm512_set1_epi8(x); }
static inline vi vi_and(vi a, vi b) { return _mm512_and_si512(a, b); }
static inline vi vi_xor(vi a, vi b) { return _mm512_xor_si512(a, b); }
static inline vi vi_add16(vi a, vi b) { return _mm512_add_epi16(a, b); }
static inline vi vi_add32(vi a, vi b) { return _mm512_add_epi32(a, b); }
static inline vi vi_maddubs(vi a, vi b) { return _mm512_maddubs_epi16(a, b); }
static inline vi vi_madd(vi a, vi b) { return _mm512_madd_epi16(a, b); }
#define vi_shift_right16(a, n) _mm512_srli_epi16(a, n)
#define vi_shift_right_signed16(a, n) _mm512_srai_epi16(a, n)
#define vi_shift_left16(a, n) _mm512_slli_epi16(a, n)
static inline vf vf_from_int(vi a) { return _mm512_cvtepi32_ps(a); }
/* Bytes at p, without and with sign. */
static inline vf vf_from_bytes(const uint8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
static inline vf vf_from_signed_bytes(const uint8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
static inline vi vi_or(vi a, vi b) { return _mm512_or_si512(a, b); }
static inline vf vf_from_half(const void *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
static inline vf vf_load(const float *p) { return _mm512_loadu_ps(p); }
static inline void vf_store(float *p, vf a) { _mm512_storeu_ps(p, a); }
static inline vf vf_zero(void) { return _mm512_setzero_ps(); }
static inline vf vf_all(float x) { return _mm512_set1_ps(x); }
static inline vf vf_add(vf a, vf b) { return _mm512_add_ps(a, b); }
static inline vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }
static inline vf vf_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
static inline vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
static inline vf vf_fnma(vf a, vf b, vf c) { return _mm512_fnmadd_ps(a, b, c); }
#else
#define LANES 8
typedef __m256i vi;
typedef __m256 vf;
static inline vi vi_load(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
static inline vi vi_zero(void) { return _mm256_setzero_si256(); }
static inline vi vi_all32(int32_t x) { return _mm256_set1_epi32(x); }
static inline vi vi_all16(int16_t x) { return _mm256_set1_epi16(x); }
static inline vi vi_all8(int8_t x) { return _mm256_set1_epi8(x); }
static inline vi vi_and(vi a, vi b) { return _mm256_and_si256(a, b); }
static inline vi vi_xor(vi a, vi b) { return _mm256_xor_si256(a, b); }
static inline vi vi_add16(vi a, vi b) { return _mm256_add_epi16(a, b); }
static inline vi vi_add32(vi a, vi b) { return _mm256_add_epi32(a, b); }
static inline vi vi_maddubs(vi a, vi b) { return _mm256_maddubs_epi16(a, b); }
static inline vi vi_madd(vi a, vi b) { return _mm256_madd_epi16(a, b); }
#define vi_shift_right16(a, n) _mm256_srli_epi16(a, n)
#define vi_shift_right_signed16(a, n) _mm256_srai_epi16(a, n)
#define vi_shift_left16(a, n) _mm256_slli_epi16(a, n)
static inline vf vf_from_int(vi a) { return _mm256_cvtepi32_ps(a); }
static inline vf vf_from_bytes(const uint8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
static inline vf vf_from_signed_bytes(const uint8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
static inline vi vi_or(vi a, vi b) { return _mm256_or_si256(a, b); }
static inline vf vf_from_half(const void *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
static inline vf vf_load(const float *p) { return _mm256_loadu_ps(p); }
static inline void vf_store(float *p, vf a) { _mm256_storeu_ps(p, a); }
static inline vf vf_zero(void) { return _mm256_setzero_ps(); }
static inline vf vf_all(float x) { return _mm256_set1_ps(x); }
static inline vf vf_add(vf a, vf b) { return _mm256_add_ps(a, b); }
static inline vf vf_max(vf a, vf b) { return _mm256_max_ps(a, b); }
static inline vf vf_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
static inline vf vf_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
static inline vf vf_fnma(vf a, vf b, vf c) { return _mm256_fnmadd_ps(a, b, c); }
#endif

/* Four bytes at p in every lane. */
static inline vi vi_all_of(const void *p) {
    int32_t x;
    memcpy(&x, p, 4);
    return vi_all32(x);
}

#endif
