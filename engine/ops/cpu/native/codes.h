/* Keys and values in few bits, as engine/kv/codec.py lays them out: codes, and apart from them a scale (and minimum) in fp16
 * per head and token. For *_isa.c files, after vector.h.
 *
 * int8: a byte per channel, times the scale.
 * int4: of rotated heads. Byte i of head_dim / 2 holds the lower 4 bits of channel i and of channel i + head_dim / 2. Keys
 * have 2 bits more: byte i of head_dim / 4 more holds those of channels i, i + head_dim / 4, and so on, lowest first. */
#ifndef RL_CODES_H
#define RL_CODES_H

#include "attention.h"
#include "vector.h"

#define RL_LARGEST_HEAD 1024
#define SMALLEST_SCALE 1e-7f /* fp16 has no smaller */

static inline int lanes_of(int64_t size, int64_t done) { return size - done < RL_WIDTH ? (int)(size - done) : RL_WIDTH; }

/* Elements of a cache of floats. */
RL_INLINE vf load_floats(const void *base, int64_t offset, int64_t type, int n) {
    if (type == RL_FP32)
        return vf_load_n((const float *)base + offset, n);
    const uint16_t *p = (const uint16_t *)base + offset;
    if (n >= RL_WIDTH)
        return type == RL_BF16 ? vf_load_bf16(p) : vf_load_fp16(p);
    return type == RL_BF16 ? vf_load_bf16_n(p, n) : vf_load_fp16_n(p, n);
}

/* -- integers in vectors ----------------------------------------------------------------------------------------------- */

/* Lane i takes lane i ^ step; step is 1, 2, 4 (or 8 with 16 lanes). */
#ifdef __AVX512F__
RL_INLINE vf vf_crossed(vf a, const int step) {
    return step == 1   ? _mm512_permute_ps(a, 0xb1)
           : step == 2 ? _mm512_permute_ps(a, 0x4e)
           : step == 4 ? _mm512_shuffle_f32x4(a, a, 0xb1)
                       : _mm512_shuffle_f32x4(a, a, 0x4e);
}
/* Of each lane's 32 bits: byte ``b`` as a signed number; the bits from ``shift`` on that are in ``mask``, as a number. */
RL_INLINE vf vf_signed_byte(vf a, const int b) {
    __m512i high = _mm512_slli_epi32(_mm512_castps_si512(a), (unsigned)(24 - 8 * b));
    return _mm512_cvtepi32_ps(_mm512_srai_epi32(high, 24));
}
RL_INLINE vf vf_bits(vf a, const int shift, const int mask) {
    __m512i low = _mm512_srli_epi32(_mm512_castps_si512(a), (unsigned)shift);
    return _mm512_castsi512_ps(_mm512_and_si512(low, _mm512_set1_epi32(mask)));
}
RL_INLINE vf vf_six_bits(vf lower, const int lower_shift, vf upper, const int upper_shift) {
    __m512i low = _mm512_castps_si512(vf_bits(lower, lower_shift, 15));
    __m512i high = _mm512_castps_si512(vf_bits(upper, upper_shift, 3));
    return _mm512_cvtepi32_ps(_mm512_or_si512(low, _mm512_slli_epi32(high, 4)));
}
/* RL_WIDTH bytes as whole numbers in 32 bits each, still in a vector of floats' clothes. */
RL_INLINE vf vf_load_bytes(const uint8_t *p) {
    return _mm512_castsi512_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
RL_INLINE vf vf_of_whole(vf a) { return _mm512_cvtepi32_ps(_mm512_castps_si512(a)); }
#else
RL_INLINE vf vf_crossed(vf a, const int step) {
    return step == 1 ? _mm256_permute_ps(a, 0xb1) : step == 2 ? _mm256_permute_ps(a, 0x4e) : _mm256_permute2f128_ps(a, a, 1);
}
RL_INLINE vf vf_signed_byte(vf a, const int b) {
    __m256i high = _mm256_slli_epi32(_mm256_castps_si256(a), 24 - 8 * b);
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(high, 24));
}
RL_INLINE vf vf_bits(vf a, const int shift, const int mask) {
    __m256i low = _mm256_srli_epi32(_mm256_castps_si256(a), shift);
    return _mm256_castsi256_ps(_mm256_and_si256(low, _mm256_set1_epi32(mask)));
}
RL_INLINE vf vf_six_bits(vf lower, const int lower_shift, vf upper, const int upper_shift) {
    __m256i low = _mm256_castps_si256(vf_bits(lower, lower_shift, 15));
    __m256i high = _mm256_castps_si256(vf_bits(upper, upper_shift, 3));
    return _mm256_cvtepi32_ps(_mm256_or_si256(low, _mm256_slli_epi32(high, 4)));
}
RL_INLINE vf vf_load_bytes(const uint8_t *p) {
    return _mm256_castsi256_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
RL_INLINE vf vf_of_whole(vf a) { return _mm256_cvtepi32_ps(_mm256_castps_si256(a)); }
#endif

RL_INLINE vf vf_load_bytes_n(const uint8_t *p, int n) {
    uint8_t lanes[RL_WIDTH] = {0};
    if (n >= RL_WIDTH)
        return vf_load_bytes(p);
    memcpy(lanes, p, (size_t)n);
    return vf_load_bytes(lanes);
}

static inline float from_fp16(uint16_t half) { return _cvtsh_ss(half); }
static inline uint16_t to_fp16(float x) { return (uint16_t)_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }

/* -- rotation ---------------------------------------------------------------------------------------------------------- */

/* +1 and -1 by bit ``step`` of the lane: what a lane's own value counts as beside its partner's. */
RL_INLINE vf own_sign(const int step) {
    float lanes[RL_WIDTH];
    for (int i = 0; i < RL_WIDTH; i++)
        lanes[i] = i & step ? -1.0f : 1.0f;
    return vf_load(lanes);
}

/* x [size] times an orthonormal Hadamard matrix, in place; sizes that are no power of two turn in blocks of the largest
 * power of two that divides them. Its own inverse. */
static void turn(float *x, int64_t size) {
    int64_t block = size & -size;
    float unit = 1.0f / sqrtf((float)block);
    for (int64_t start = 0; start < size; start += block) {
        float *part = x + start;
        if (block < RL_WIDTH) {
            for (int64_t step = 1; step < block; step *= 2)
                for (int64_t i = 0; i < block; i++)
                    if (!(i & step)) {
                        float a = part[i], b = part[i + step];
                        part[i] = a + b;
                        part[i + step] = a - b;
                    }
            for (int64_t i = 0; i < block; i++)
                part[i] *= unit;
            continue;
        }
        for (int64_t i = 0; i < block; i += RL_WIDTH) {
            vf a = vf_load(part + i);
            a = vf_fma(a, own_sign(1), vf_crossed(a, 1));
            a = vf_fma(a, own_sign(2), vf_crossed(a, 2));
            a = vf_fma(a, own_sign(4), vf_crossed(a, 4));
#ifdef __AVX512F__
            a = vf_fma(a, own_sign(8), vf_crossed(a, 8));
#endif
            vf_store(part + i, vf_mul(a, vf_set1(unit)));
        }
        for (int64_t step = RL_WIDTH; step < block; step *= 2)
            for (int64_t i = 0; i < block; i += RL_WIDTH)
                if (!(i & step)) {
                    vf a = vf_load(part + i), b = vf_load(part + i + step);
                    vf_store(part + i, vf_add(a, b));
                    vf_store(part + i + step, vf_sub(a, b));
                }
    }
}

/* -- writing ----------------------------------------------------------------------------------------------------------- */

/* codes[i] = round((x[i] - low) / scale) within [least, most]. */
static inline void round_codes(const float *x, int64_t size, float low, float scale, float least, float most, int8_t *codes) {
    for (int64_t d = 0; d < size; d += RL_WIDTH) {
        int n = lanes_of(size, d);
        vf code = vf_round(vf_div(vf_sub(vf_load_n(x + d, n), vf_set1(low)), vf_set1(scale)));
        float lanes[RL_WIDTH];
        vf_store(lanes, vf_max(vf_set1(least), vf_min(vf_set1(most), code)));
        for (int i = 0; i < n; i++)
            codes[d + i] = (int8_t)lanes[i];
    }
}

static void encode_int8(const float *x, int64_t size, int8_t *codes, uint16_t *scale) {
    vf largest = vf_zero();
    for (int64_t d = 0; d < size; d += RL_WIDTH)
        largest = vf_max(largest, vf_abs(vf_load_n(x + d, lanes_of(size, d))));
    float wanted = vf_largest(largest) / 127;
    *scale = to_fp16(wanted > SMALLEST_SCALE ? wanted : SMALLEST_SCALE);
    round_codes(x, size, 0, from_fp16(*scale), -127, 127, codes);
}

/* numbers: scale, then minimum. */
static void encode_bits(const float *x, int64_t size, int bits, uint8_t *packed, uint16_t *numbers) {
    int8_t codes[RL_LARGEST_HEAD];
    vf highest = vf_set1(x[0]), lowest = vf_set1(-x[0]), first = highest; /* of the numbers, and of their negatives */
    for (int64_t d = 0; d < size; d += RL_WIDTH) {
        int n = lanes_of(size, d);
        vf part = vf_select(vmask_range(0, n), vf_load_n(x + d, n), first);
        highest = vf_max(highest, part);
        lowest = vf_max(lowest, vf_sub(vf_zero(), part));
    }
    float least = -vf_largest(lowest), most = vf_largest(highest);
    int largest = (1 << bits) - 1;
    numbers[1] = to_fp16(least);
    float low = from_fp16(numbers[1]), wanted = (most - low) / (float)largest;
    numbers[0] = to_fp16(wanted > SMALLEST_SCALE ? wanted : SMALLEST_SCALE);
    round_codes(x, size, low, from_fp16(numbers[0]), 0, (float)largest, codes);
    int64_t half = size / 2, quarter = size / 4;
    for (int64_t i = 0; i < half; i++)
        packed[i] = (uint8_t)((codes[i] & 15) | (codes[i + half] & 15) << 4);
    if (bits == 6)
        for (int64_t i = 0; i < quarter; i++)
            packed[half + i] = (uint8_t)(codes[i] >> 4 | codes[i + quarter] >> 4 << 2 | codes[i + half] >> 4 << 4 |
                                         codes[i + half + quarter] >> 4 << 6);
}

/* -- reading ----------------------------------------------------------------------------------------------------------- */

/* Rows of RL_WIDTH keys become columns of 32 bits: words[w] holds word w of each key. ``num_words`` of them. */
RL_INLINE void transpose_words(const uint8_t *codes, const int64_t *records, int64_t key_bytes, int64_t num_words, vf *words) {
    for (int64_t w = 0; w < num_words; w += RL_WIDTH) {
        int n = lanes_of(num_words, w);
        vf rows[RL_WIDTH];
        for (int i = 0; i < RL_WIDTH; i++)
            rows[i] = vf_load_n((const float *)(codes + records[i] * key_bytes + 4 * w), n);
        vf_transpose(rows);
        for (int i = 0; i < n; i++)
            words[w + i] = rows[i];
    }
}

/* Write the codes of RL_WIDTH keys as columns of floats: columns[d * RL_SPLIT + lane]. */
static void transpose_int8(const uint8_t *codes, const int64_t *records, int64_t head_dim, float *columns) {
    vf words[RL_LARGEST_HEAD / 4];
    int64_t whole = head_dim / 4;
    transpose_words(codes, records, head_dim, whole, words);
    for (int64_t w = 0; w < whole; w++) {
        float *column = columns + 4 * w * RL_SPLIT;
        vf_store(column, vf_signed_byte(words[w], 0));
        vf_store(column + RL_SPLIT, vf_signed_byte(words[w], 1));
        vf_store(column + 2 * RL_SPLIT, vf_signed_byte(words[w], 2));
        vf_store(column + 3 * RL_SPLIT, vf_signed_byte(words[w], 3));
    }
    for (int64_t d = 4 * whole; d < head_dim; d++)
        for (int i = 0; i < RL_WIDTH; i++)
            columns[d * RL_SPLIT + i] = (float)(int8_t)codes[records[i] * head_dim + d];
}

/* Byte ``b`` of a word: channels d + b of the four quarters of the head; ``near`` holds the lower bits of the first and the
 * third quarter, ``far`` of the second and the last. */
#define SIX_BITS(b)                                                                                                    \
    do {                                                                                                               \
        float *column = columns + (d + (b)) * RL_SPLIT;                                                                \
        vf_store(column, vf_six_bits(near, 8 * (b), upper, 8 * (b)));                                                  \
        vf_store(column + quarter * RL_SPLIT, vf_six_bits(far, 8 * (b), upper, 8 * (b) + 2));                          \
        vf_store(column + 2 * quarter * RL_SPLIT, vf_six_bits(near, 8 * (b) + 4, upper, 8 * (b) + 4));                 \
        vf_store(column + 3 * quarter * RL_SPLIT, vf_six_bits(far, 8 * (b) + 4, upper, 8 * (b) + 6));                  \
    } while (0)

/* The same for keys of 6 bits. */
static void transpose_six_bits(const uint8_t *codes, const int64_t *records, int64_t head_dim, float *columns) {
    int64_t half = head_dim / 2, quarter = head_dim / 4, key_bytes = half + quarter;
    if (quarter % 4) { /* no whole words */
        for (int i = 0; i < RL_WIDTH; i++) {
            const uint8_t *lower = codes + records[i] * key_bytes, *upper = lower + half;
            for (int64_t d = 0; d < head_dim; d++) {
                int code = (lower[d % half] >> 4 * (d / half) & 15) | (upper[d % quarter] >> 2 * (d / quarter) & 3) << 4;
                columns[d * RL_SPLIT + i] = (float)code;
            }
        }
        return;
    }
    vf words[3 * RL_LARGEST_HEAD / 16];
    transpose_words(codes, records, key_bytes, key_bytes / 4, words);
    for (int64_t d = 0; d < quarter; d += 4) {
        vf near = words[d / 4], far = words[(d + quarter) / 4], upper = words[(half + d) / 4];
        SIX_BITS(0);
        SIX_BITS(1);
        SIX_BITS(2);
        SIX_BITS(3);
    }
}
#undef SIX_BITS

#endif
